"""Programs at the edges: lengths about whole turns of the threads, results that other threads read
at once, sums whose rounding depends on the order of the ranks, seldom used words, and failures.
"""

from sim_failures import KINDS_OF_USERS
from sim_machine import (
    BARRIER,
    BROADCAST,
    BROADCAST_PUSH,
    COPY,
    GATHER,
    GATHER_PUSH,
    LL16,
    LOCAL_EXCHANGE,
    PUSH,
    SCATTER,
    SCATTER_PUSH,
    SENTINEL,
    TWO_SHOT_SENTINEL,
)

from .program import NARROW, OPENED_TWICE, REFUSED, TIMED_OUT, Program


def _add(script, kernel, count, number):
    """A call of `count` elements; of bytes, where the kernel counts these. Returns its result."""
    if kernel in (SCATTER, SCATTER_PUSH):
        return script.reduce_scatter(0, kernel, count, in_place=number % 2 == 0)
    if kernel in (GATHER, GATHER_PUSH):
        return script.all_gather(0, kernel, count, in_place=number % 2 == 0)
    if kernel in (BROADCAST, BROADCAST_PUSH):
        return script.broadcast(0, count, number % script.world_size, kernel=kernel)
    return script.all_reduce(0, kernel, count, in_place=number % 2 == 0)


def _read_at_once(kernel, per_turn, turns=(1, 2)):
    """Lengths about whole turns of the threads. Other threads read each result at once.

    per_turn: Elements that a thread takes in one turn; bytes, where the kernel counts these.
    """

    def make(script):
        script.begin(threads=script.machine.warp_size)
        whole = per_turn * script.machine.warp_size
        for turn in turns:
            for number, more in enumerate((-1, 0, 1, per_turn)):
                script.read_at_once(0, _add(script, kernel, whole * turn + more, number))
        script.begin(threads=2 * script.machine.warp_size)
        for number, count in enumerate((2 * whole + 1, 2 * per_turn, 2 * whole + per_turn, 3)):
            script.read_at_once(0, _add(script, kernel, count, number))

    return make


def _inputs_overwritten(script):
    """Other threads write a call's input as soon as it has returned."""
    script.begin(threads=2 * script.machine.warp_size)
    for number, count in enumerate((150, 2, 37, 260)):
        source = script.array(script.inputs(count))
        script.all_reduce(0, (LL16, SENTINEL)[number % 2], count, source=source)
        script.overwrite(0, source)


def _kinds_in_turn(script):
    """Calls that wait for credits, or not, and that have epochs in their words, or not."""
    script.begin(threads=2 * script.machine.warp_size)
    kinds = (BARRIER, SENTINEL, BROADCAST, TWO_SHOT_SENTINEL, LL16, BARRIER, BROADCAST, SENTINEL)
    for number in range(60):
        kind = kinds[(number + number // 8) % len(kinds)]
        if kind == BARRIER:
            script.barrier(0)
        else:
            _add(script, kind, (37, 8, 64)[number % 3], number)


def _blocks_that_share(kernel):
    """Launches of the library's kernel, whose blocks share the message: in one round or more."""

    def make(script):
        script.begin(threads=script.machine.warp_size, blocks=3, style="calls")
        for count in (150, 4, 500, 37, 12):
            script.all_reduce(0, kernel, count)

    return make


def _pushes_seldom(script):
    """Half a period or more lies between two calls that say by flags what they have written."""
    script.begin(threads=64)
    for number in range(40):
        if number % 11 < 2:
            script.all_reduce(0, PUSH, 75)
        else:
            script.all_reduce(0, LL16, 2)


def _sentinels_by_warps(script):
    script.begin(threads=2 * script.machine.warp_size, coop="Warp")
    for count in (2, 37, 60, 64, 3, 50):
        for actor in range(2):
            script.all_reduce(actor, SENTINEL, count)


def _sentinels_opened_anew(script):
    """Each call opens the channel: only its own fences order it."""
    script.begin(threads=2 * script.machine.warp_size, at_a_time=1)
    for count in (2, 37, 64, 3, 64, 1, 37, 2, 64, 50, 64):
        script.all_reduce(0, SENTINEL, count)


def _last_words(kernel, most, period, long_ones):
    """Only these of `period` calls use the last words of a slot."""

    def make(script):
        script.begin(threads=64)
        for number in range(3 * period):
            script.all_reduce(0, kernel, most if number % period in long_ones else 2)

    return make


_CALLS = (LL16, BROADCAST, LL16, BARRIER, LL16, BROADCAST, BARRIER, LL16)


def _fails(*, calls=_CALLS, **how):
    """A call fails; its coop and all others go on with calls, which must fail too.

    how: As Failures.go_on() takes it.
    """

    def make(script):
        script.go_on(calls, **how)

    return make


# Kernels that enter a call without a vote of the block.
_ENTERED = (SENTINEL, BARRIER, TWO_SHOT_SENTINEL, BARRIER, LL16)
_ENTERED += (SENTINEL, BARRIER, TWO_SHOT_SENTINEL, SENTINEL, BARRIER, TWO_SHOT_SENTINEL)
_OF_GRIDS = (LL16, "grid_sync", "grid_exchange", LL16, "grid_sync", "grid_exchange", "grid_sync")
_OF_EXCHANGES = (LL16, "grid_exchange", LL16, "grid_exchange", LL16, "grid_sync")
# Each kind comes before a failure, and after it. Only the calls of users' kernels can be too long.
_OF_ALL_KINDS = (
    *(SCATTER, "signal", GATHER, PUSH, SENTINEL, "wait", LL16, "put", LOCAL_EXCHANGE),
    *(kind for kind in KINDS_OF_USERS if kind not in ("grid_sync", "grid_exchange")),
    *(SCATTER, SENTINEL, GATHER, PUSH, LOCAL_EXCHANGE, LL16, BARRIER),
)
_MAY_FAIL = {**NARROW, "ends_when_stuck": False, "num_channels": 3}
_ROOMY = {**NARROW, "packet_bytes": 1024, "staging_bytes": 8192}
PROGRAMS = {
    **{
        f"{name} read at once": Program(
            _read_at_once(kernel, per_turn), 3, (kernel, COPY), _ROOMY, is_exact=False
        )
        for name, kernel, per_turn in (
            ("packets", LL16, 2),
            ("sentinels", SENTINEL, 4),
            ("two shots", TWO_SHOT_SENTINEL, 12),
            ("pushes", PUSH, 24),
            ("scatters", SCATTER, 2),
            ("scatter pushes", SCATTER_PUSH, 8),
            ("gathers", GATHER, 8),
            ("gather pushes", GATHER_PUSH, 32),
            ("broadcasts", BROADCAST, 8),
            ("broadcast pushes", BROADCAST_PUSH, 64),
        )
    },
    "kinds in turn": Program(
        _kinds_in_turn, 3, (LL16, SENTINEL, TWO_SHOT_SENTINEL, BROADCAST, BARRIER), NARROW
    ),
    **{
        f"{name} of blocks": Program(
            _blocks_that_share(kernel), 2, (kernel,), {**NARROW, "blocks_per_channel": 3}
        )
        for name, kernel in (("launches", LL16), ("sentinel launches", SENTINEL))
    },
    "pushes seldom": Program(_pushes_seldom, 2, (LL16, PUSH), NARROW),
    "sentinels opened anew": Program(_sentinels_opened_anew, 3, (SENTINEL,), NARROW),
    "sentinels by warps": Program(
        _sentinels_by_warps, 2, (SENTINEL,), {**NARROW, "num_channels": 2}
    ),
    "inputs overwritten": Program(_inputs_overwritten, 2, (LL16, SENTINEL, COPY), _ROOMY),
    "last words": Program(_last_words(LL16, 64, 16, (1, 2)), 2, (LL16,), NARROW),
    "last words of sentinels": Program(
        _last_words(SENTINEL, 64, 8, (1, 2)), 2, (SENTINEL,), NARROW
    ),
    **{
        name: Program(_fails(**how), 3, (), _MAY_FAIL, right="failed_call", statuses=statuses)
        for name, statuses, how in (
            (
                "refused on an open channel",
                REFUSED,
                {"refused": [(1, 0, 2)], "threads": 64, "at_a_time": 8},
            ),
            (
                "refused by all ranks",
                REFUSED,
                {"refused": [(None, 0, 4)], "threads": 64, "at_a_time": 3},
            ),
            (
                "refused while warps open",
                REFUSED,
                {"refused": [(2, 1, 1)], "threads": 96, "coop": "Warp"},
            ),
            (
                "refused while blocks open",
                REFUSED,
                {"refused": [(0, 1, 2)], "threads": 64, "blocks": 3},
            ),
            (
                "refused while sentinels open",
                REFUSED,
                {
                    "refused": [(0, 1, 4)],
                    "calls": _ENTERED,
                    **{"threads": 128, "blocks": 3},
                },
            ),
            (
                "refused while channels are open",
                REFUSED,
                {"refused": [(0, 2, 2)], "threads": 64, "blocks": 3, "at_a_time": 2},
            ),
            *(
                (
                    f"no signal for {who}",
                    TIMED_OUT,
                    {
                        "failing": [(None, actor, 0) for actor in range(num_actors)],
                        "calls": ("wait",),
                        **{"threads": 64, "coop": coop},
                    },
                )
                for who, coop, num_actors in (("threads", "Thread", 64), ("a block", "Block", 1))
            ),
            (
                "refused beside grids",
                REFUSED,
                {"refused": [(1, 1, 3)], "calls": _OF_GRIDS, "threads": 64, "blocks": 3},
            ),
            (
                "refused beside exchanges",
                REFUSED,
                {"refused": [(1, 1, 2)], "calls": _OF_EXCHANGES, "threads": 64, "blocks": 3},
            ),
            (
                "refused while exchanges open",
                REFUSED,
                {
                    "refused": [(1, 1, 1)],
                    "calls": ("grid_exchange",) * 3,
                    **{"threads": 64, "blocks": 3},
                },
            ),
            (
                "refused beside open grids",
                REFUSED,
                {
                    "refused": [(1, 1, 3)],
                    "calls": _OF_GRIDS,
                    **{"threads": 64, "blocks": 3, "at_a_time": 7},
                },
            ),
            (
                "timed out beside open grids",
                TIMED_OUT,
                {
                    "absent": [(1, 1, 1)],
                    "calls": _OF_GRIDS,
                    **{"threads": 64, "blocks": 3, "at_a_time": 7},
                },
            ),
            *(
                (
                    f"second {what}",
                    OPENED_TWICE,
                    {
                        "second": [(1, block, index) for block in range(3)],
                        "calls": _OF_GRIDS,
                        **{"threads": 64, "blocks": 3, "at_a_time": 7},
                    },
                )
                for what, index in (("barrier", 4), ("exchange", 5))
            ),
            *(
                (
                    f"{word} among all kinds{', each opened' * (not at_a_time)}",
                    statuses,
                    {
                        which: [(1, 1, 3 if which == "absent" else 2), (2, 0, 6)],
                        "calls": _OF_ALL_KINDS,
                        **{"threads": 64, "blocks": 2, "at_a_time": at_a_time},
                    },
                )
                for word, which, statuses in (
                    ("refused", "refused", REFUSED),
                    ("timed out", "absent", TIMED_OUT),
                )
                for at_a_time in (0, len(_OF_ALL_KINDS))
            ),
        )
    },
}
