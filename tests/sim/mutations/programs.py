"""Programs that show planted bugs. Each has a few thousand steps, and passes without a bug."""

from sim_machine import (
    BARRIER,
    BROADCAST,
    BROADCAST_PUSH,
    GATHER,
    GATHER_PULL,
    GATHER_PUSH,
    LL16,
    PULL,
    PUSH,
    SCATTER,
    SCATTER_PULL,
    SCATTER_PUSH,
    SENTINEL,
    TWO_SHOT_SENTINEL,
)

from . import (
    dependent_programs,
    edge_programs,
    expert_programs,
    grid_programs,
    message_programs,
    move_programs,
    part_programs,
    posting_programs,
)
from .program import NARROW, Program


def _reductions(kernel, counts=(2, 37, 75, 3, 64, 1, 37, 0, 75, 64, 5, 75)):
    def make(script):
        script.begin(threads=2 * script.machine.warp_size)
        for count in counts:
            script.all_reduce(0, kernel, count)

    return make


def _seldom_long(kernel, period, long_ones):
    """Only these of `period` calls use the words behind the first."""

    def make(script):
        script.begin(threads=64)
        for number in range(4 * period):
            script.all_reduce(0, kernel, 60 if number % period in long_ones else 2)

    return make


def _launches(kernel):
    """Each call is a launch of the library's kernel, with one round or several."""

    def make(script):
        script.begin(threads=64, style="calls")
        for count in (150, 3, 500, 37, 300, 64, 2, 700):
            script.all_reduce(0, kernel, count)

    return make


def _by_warps(script):
    script.begin(threads=2 * script.machine.warp_size, coop="Warp")
    for count in (2, 37, 75, 64, 3):
        for actor in range(2):
            script.all_reduce(actor, LL16, count)


def _barriers(script):
    script.begin(threads=2 * script.machine.warp_size)
    script.window(512)
    for number in range(18):
        script.barrier_ring(0, 160 if number % 6 == 0 else 16, pulls=number % 2 == 1)


def _pulls(script):
    """Kernels that pull run on CPUs. On a GPU they also need the barriers."""
    script.begin(threads=2 * script.machine.warp_size)
    for count in (100, 3, 100):
        script.all_reduce(0, PULL, count)
        script.barrier(0)


def _scatters(kernel, counts, *, pulls=False):
    """Alternately in place and not. Kernels that pull also need barriers on a GPU."""

    def make(script):
        script.begin(threads=2 * script.machine.warp_size)
        for number, count in enumerate(counts):
            script.reduce_scatter(0, kernel, count, in_place=number % 2 == 0)
            if pulls:
                script.barrier(0)

    return make


def _gathers(kernel, sizes, *, pulls=False):
    def make(script):
        script.begin(threads=2 * script.machine.warp_size)
        for number, size in enumerate(sizes):
            script.all_gather(0, kernel, size, in_place=number % 2 == 0)
            if pulls:
                script.barrier(0)

    return make


def _after_packets(add, between=()):
    """Calls that push, by add(script, number), and reductions by the kernels `between`. Each is
    followed by a call by packets, which order nothing, so that the next uses the same staging.
    """

    def make(script):
        script.begin(threads=2 * script.machine.warp_size)
        for number in range(8):
            add(script, number)
            script.all_reduce(0, LL16, 2)
            for kernel in between:
                script.all_reduce(0, kernel, 75)
                script.all_reduce(0, LL16, 2)

    return make


# The parts of the staging have room for 256 bytes.
def _push_scatter(script, number):
    script.reduce_scatter(0, SCATTER_PUSH, (37, 64, 2, 150)[number % 4], in_place=number % 2 == 0)


def _push_gather(script, number):
    script.all_gather(0, GATHER_PUSH, (150, 256, 8, 600)[number % 4], in_place=number % 2 == 0)


def _push_broadcast(script, number):
    nbytes = (600, 1024, 37, 2400)[number % 4]
    script.broadcast(0, nbytes, number // 4, kernel=BROADCAST_PUSH)


def _push_gathers_by_warps(script):
    script.begin(threads=2 * script.machine.warp_size, coop="Warp")
    for size in (1000, 8, 1000, 1500, 1000):
        for actor in range(2):
            script.all_gather(actor, GATHER_PUSH, size)


def _signals(script):
    script.begin(threads=2 * script.machine.warp_size)
    script.window(512)
    for number in range(5):
        script.signal_ring(0, 400, anyone=number % 2 == 1)


def _broadcasts(script):
    script.begin(threads=2 * script.machine.warp_size)
    for number in range(12):
        script.broadcast(0, (120, 8, 37, 128)[number % 4], root=number // 6)


def _broadcast_seldom(script):
    """More than half a period lies between two runs of broadcasts."""
    script.begin(threads=64)
    for number in range(40):
        if number % 11 < 3:
            script.broadcast(0, 128, root=number // 11 % script.world_size)
        else:
            script.all_reduce(0, LL16, 2)


def _stream(script):
    for warps in (3, 1):
        script.stage(2000, threads=warps * script.machine.warp_size, in_flight=4)


def _stream_left(script):
    for warps in (3, 1):
        script.stage(2000, threads=warps * script.machine.warp_size, in_flight=4, num_left=2)


def _one_is_absent(script):
    script.begin(threads=script.machine.warp_size)
    script.all_reduce(0, LL16, 2)
    script.all_reduce(0, LL16, 150, absent=[2])


def _one_is_absent_to_many(script):
    """The threads of several warps time out together."""
    script.begin(threads=128)
    script.all_reduce(0, LL16, 2)
    script.all_reduce(0, LL16, 250, absent=[2])


PROGRAMS = {
    **grid_programs.PROGRAMS,
    **edge_programs.PROGRAMS,
    **dependent_programs.PROGRAMS,
    **move_programs.PROGRAMS,
    **part_programs.PROGRAMS,
    **message_programs.PROGRAMS,
    **expert_programs.PROGRAMS,
    **posting_programs.PROGRAMS,
    "reductions": Program(_reductions(LL16), 3, (LL16,), NARROW),
    # The staging has room for 256 elements.
    "pushes": Program(_reductions(PUSH, (2, 250, 37, 256, 0, 500, 1, 75)), 3, (PUSH,), NARROW),
    "sentinels": Program(_reductions(SENTINEL), 3, (SENTINEL,), NARROW),
    "launches": Program(_launches(LL16), 3, (LL16,), NARROW),
    "sentinel launches": Program(_launches(SENTINEL), 3, (SENTINEL,), NARROW),
    "two shots": Program(_reductions(TWO_SHOT_SENTINEL), 3, (TWO_SHOT_SENTINEL,), NARROW),
    "seldom long": Program(_seldom_long(LL16, 16, (1, 2)), 2, (LL16,), NARROW),
    "sentinels seldom long": Program(_seldom_long(SENTINEL, 8, (1,)), 2, (SENTINEL,), NARROW),
    "by warps": Program(_by_warps, 3, (LL16,), {"num_channels": 2}),
    "barriers": Program(_barriers, 3, (BARRIER, "put", "get"), NARROW),
    "pulls": Program(_pulls, 3, (PULL, BARRIER)),
    "scatters": Program(_scatters(SCATTER, (2, 37, 150, 3, 75, 64)), 3, (SCATTER,), NARROW),
    "gathers": Program(_gathers(GATHER, (8, 150, 600, 3, 301, 256)), 3, (GATHER,), NARROW),
    "scatter pulls": Program(
        _scatters(SCATTER_PULL, (100, 3, 75, 100), pulls=True), 3, (SCATTER_PULL, BARRIER)
    ),
    "gather pulls": Program(
        _gathers(GATHER_PULL, (400, 3, 1500, 400), pulls=True), 3, (GATHER_PULL, BARRIER)
    ),
    "scatter pushes": Program(_after_packets(_push_scatter), 3, (SCATTER_PUSH, LL16), NARROW),
    "gather pushes": Program(_after_packets(_push_gather), 3, (GATHER_PUSH, LL16), NARROW),
    "gather pushes and others": Program(
        _after_packets(_push_gather, (PUSH,)), 3, (GATHER_PUSH, PUSH, LL16), NARROW
    ),
    "gather pushes by warps": Program(
        _push_gathers_by_warps, 3, (GATHER_PUSH,), {"num_channels": 2}
    ),
    "broadcast pushes": Program(_after_packets(_push_broadcast), 3, (BROADCAST_PUSH, LL16), NARROW),
    "broadcast pushes of two": Program(
        _after_packets(_push_broadcast), 2, (BROADCAST_PUSH, LL16), NARROW
    ),
    "signals": Program(_signals, 3, ("put", "get", "signal", "wait")),
    "broadcasts": Program(_broadcasts, 3, (BROADCAST,), NARROW),
    "broadcast seldom": Program(_broadcast_seldom, 3, (BROADCAST, LL16), NARROW),
    "stream": Program(_stream, 2, (LL16,)),
    "stream left": Program(_stream_left, 2, (LL16,)),
    "one is absent": Program(
        _one_is_absent, 4, (LL16,), {"ends_when_stuck": False}, right="failed_call"
    ),
    "one is absent to many": Program(
        _one_is_absent_to_many,
        4,
        (LL16,),
        {"ends_when_stuck": False, "packet_bytes": 1024},
        right="failed_call",
    ),
}
