"""Programs in which all blocks of a kernel take part: barriers, exchanges, collectives of grids."""

from sim_machine import BARRIER, BROADCAST, COPY, GATHER, LL16, SCATTER

from .program import NARROW, REFUSED, Program

_THREE_BLOCKS = {**NARROW, "num_channels": 3}
# Each thread of a block's first warp waits for a counter of its own.
_COUNTERS = {**NARROW, "warp_size": 64, "model": "gfx942"}
_SIX_BLOCKS = {**NARROW, "num_channels": 6, "exchange_bytes": 4096}


def _grid(script):
    script.begin(threads=script.machine.warp_size, blocks=3)
    results = [script.all_reduce(actor, LL16, 20) for actor in range(3)]
    for _ in range(6):
        script.grid_sync()
        results = [script.all_reduce(a, LL16, 20, source=results[(a + 1) % 3]) for a in range(3)]


def _grids_of_many_sizes(script):
    for blocks in (3, 2, 3):
        script.begin(threads=script.machine.warp_size, blocks=blocks)
        results = [script.all_reduce(actor, LL16, 8) for actor in range(blocks)]
        script.grid_sync(4)
        for actor in range(blocks):
            script.all_reduce(actor, LL16, 8, source=results[(actor + 1) % blocks])


def _exchanges(script):
    """After an exchange every block reduces what another block of its rank has reduced."""
    script.begin(threads=2 * script.machine.warp_size, blocks=3)
    for number, nbytes in enumerate((8, 0, 100, 100, 8, 20)):
        results = [script.all_reduce(actor, LL16, 70) for actor in range(3)]
        script.exchange(nbytes, reaches_all=number % 2 == 0)
        for actor in range(3):
            script.all_reduce(actor, LL16, 70, source=results[(actor + 1) % 3])


def _exchanges_in_a_row(script):
    script.begin(threads=2 * script.machine.warp_size, blocks=3)
    for nbytes in (8, 100, 300, 20):
        script.exchange(nbytes, 5, orders=False)


def _reduced_exchanges(script):
    """Fewer sums than threads and more, of few ranks' slices."""
    script.begin(threads=2 * script.machine.warp_size, blocks=3)
    for count in (8, 40, 80, 3):
        script.exchange_reduced(count, 3, orders=False)


def _parts_of_exchanges(script):
    """Each block collects one slice, and learns of most blocks indirectly; then all but one."""
    script.begin(threads=script.machine.warp_size, blocks=6)
    for count in (8, 70, 3):
        script.exchange_reduced(count, 7, orders=False, share=1)
    for nbytes in (8, 100, 300, 20):
        script.exchange(nbytes, 5, orders=False, share=1)
    script.begin(threads=2 * script.machine.warp_size, blocks=1)
    for count in (8, 70, 3):
        script.exchange_reduced(count, 7, orders=False, share=1)


def _parts_opened_anew(script):
    """Each call opens a GridExchange for a single exchange."""
    script.begin(threads=script.machine.warp_size, blocks=6)
    for _ in range(6):
        for count in (8, 70, 20):
            script.exchange_reduced(count, orders=False, share=1)


def _exchanges_seldom_long(script):
    """The last words of the board are unused for more than a period."""
    script.begin(threads=script.machine.warp_size, blocks=2)
    for _ in range(4):
        script.exchange(200, 1, orders=False)
        script.exchange(3, 15, orders=False)


def _exchanges_of_many_sizes(script):
    for blocks in (3, 2, 3):
        script.begin(threads=script.machine.warp_size, blocks=blocks)
        script.exchange(20, 3)


def _grid_calls(script):
    """Every block reads at once what the blocks of all ranks have made. Some have nothing to do."""
    script.begin(threads=2 * script.machine.warp_size, blocks=3, coop="Grid")
    for number, count in enumerate((150, 2, 37, 192)):
        script.read_at_once(0, script.all_reduce(0, LL16, count))
        script.read_at_once(0, script.reduce_scatter(0, SCATTER, count))
        script.read_at_once(0, script.all_gather(0, GATHER, 4 * count + 1 - number))
        script.share_out(40, lambda: script.barrier(0), across=True)
        script.read_at_once(0, script.broadcast(0, 4 * count + 1 - number, root=number % 2))
        script.share_out(40, script.grid_sync)


def _barrier_of_grids(script):
    """Each block reads what blocks of the peer have written, and what its own rank's have."""
    script.begin(threads=2 * script.machine.warp_size, blocks=3, coop="Grid")
    for number in range(6):
        script.share_out(36, lambda: script.barrier(0), across=number % 2 == 0)


def _kept_barrier(script):
    """Blocks write for each other between two syncs of one barrier."""
    script.begin(threads=2 * script.machine.warp_size, blocks=3, coop="OpenGrid")
    for number in range(20):
        script.share_out((8, 36, 600)[number % 3], lambda: script.grid_sync(0))


def _kept_barrier_of_one(script):
    """A sync of one block orders what its threads have written. The barrier is opened twice."""
    for _ in range(2):
        script.begin(threads=2 * script.machine.warp_size, coop="OpenGrid")
        for number in range(3):
            script.share_out((8, 36, 600)[number], lambda: script.grid_sync(0))


def _kept_barrier_and_others(script):
    """In between come other syncs, and collectives that end with one."""
    script.begin(threads=2 * script.machine.warp_size, blocks=3, coop="OpenGrid")
    for number in range(4):
        script.share_out(36, lambda: script.grid_sync(0))
        script.share_out(36, lambda times=1 + number % 2: script.grid_sync(times))
        script.read_at_once(0, script.all_reduce(0, LL16, 150))
        script.share_out(36, lambda: script.grid_sync(0))
        script.share_out(36, lambda: script.barrier(0), across=True)


def _reopened_barriers(script):
    """Barriers are opened back to back, by grids of more and of fewer blocks. Some have more blocks
    than the one before has threads.
    """
    for blocks in (2, 1, 70, 3, 70):
        script.begin(threads=script.machine.warp_size, blocks=blocks, coop="Grid")
        for times in (3,) if blocks == 70 else (1, 3, 1):
            script.share_out(8, lambda times=times: script.grid_sync(times))


def _reopened_by_few(script):
    """Two blocks open a barrier for each of many syncs, between grids of 16 blocks. Nothing but the
    barrier itself keeps a block's threads together from one sync to the next.
    """
    for blocks in (16, 2, 16, 2, 16):
        script.begin(threads=script.machine.warp_size, blocks=blocks, coop="Grid")
        for _ in range(1 if blocks == 16 else 16):
            script.share_out(8, lambda: script.grid_sync(1))


def _many_counters(script):
    """More blocks than counters, as many, and fewer; blocks write for each other in between."""
    for blocks in (20, 3, 9, 8, 17):
        script.begin(threads=script.machine.warp_size, blocks=blocks, coop="OpenGrid")
        for _ in range(3):
            script.share_out(2 * blocks, lambda: script.grid_sync(0))


def _exchanges_of_a_large_grid(script):
    """More blocks than the grid before has threads. Most blocks learn of most others indirectly."""
    for blocks in (2, 70, 1, 70):
        script.begin(threads=script.machine.warp_size, blocks=blocks)
        script.exchange(8, 3, orders=False, reaches_all=False, share=1)


def _more_slices_than_threads(script):
    """A block that collects one slice meets the blocks of more than two slices a thread."""
    script.begin(threads=script.machine.warp_size, blocks=40)
    script.exchange_reduced(2, 5, orders=False, share=1)


def _last_words_of_a_board(script):
    """The last words of each slot of the board are unused for a whole period."""
    script.begin(threads=script.machine.warp_size, blocks=2)
    for _ in range(3):
        script.exchange(512, 4, orders=False)
        script.exchange(3, 12, orders=False)


def _last_word_of_a_board(script):
    """As before, but each thread has one packet, so that a run is short."""
    script.begin(threads=script.machine.warp_size, blocks=2)
    for _ in range(6):
        script.exchange(64, 4, orders=False)
        script.exchange(3, 12, orders=False)


def _exchange_lengths(script):
    """A packet more than the threads take at once, and one less."""
    script.begin(threads=script.machine.warp_size, blocks=2)
    warp = script.machine.warp_size
    for packets in (warp // 4, warp // 4 + 1, warp // 2 + 1, warp, warp + 1, 2 * warp + 1):
        script.exchange(8 * packets, 2, orders=False)
        script.exchange(8 * packets - 3, 2, orders=False, reaches_all=False)
        script.exchange_reduced(2 * packets, 2, orders=False)
        script.exchange(8 * packets, 5, orders=False, other=8 * packets - 16 + packets % 2)
    script.begin(threads=warp, blocks=3)
    for packets in ((warp + 1) // 3, (2 * warp + 2) // 3):
        script.exchange(8 * packets, 2, orders=False, reaches_all=False)


def _exchanges_of_both_reaches(script):
    """They take turns, two slots apart. The last words of each are seldom used."""
    script.begin(threads=script.machine.warp_size, blocks=3)
    script.exchange(300, 2, orders=False, reaches_all=False)
    for number in range(36):
        nbytes = 300 if number % 16 in (1, 2, 3, 4) else 3
        script.exchange(nbytes, orders=False, reaches_all=number % 2 == 0)


def _longest_exchange(script):
    """It fits; one byte more does not."""
    script.begin(threads=script.machine.warp_size, blocks=2)
    script.exchange(512, 2)
    script.exchange(513)


def _longest_message(kernel, add, per_element):
    """The longest message of a block fits; one element more does not.

    add(script, count) -> the result of a call. per_element: bytes.
    """

    def make(script):
        script.begin(threads=script.machine.warp_size, coop="Grid")
        most = script.machine.packet_bytes // per_element
        script.read_at_once(0, add(script, most))
        add(script, most + 1)

    return Program(
        make,
        3,
        (kernel, "grid_sync", COPY),
        {"ends_when_stuck": False},
        right="failed_call",
        statuses=REFUSED,
    )


PROGRAMS = {
    "grid": Program(_grid, 2, (LL16, "grid_sync"), {**NARROW, "num_channels": 3}),
    "grids of many sizes": Program(
        _grids_of_many_sizes, 2, (LL16, "grid_sync"), {**NARROW, "num_channels": 3}
    ),
    "exchanges": Program(_exchanges, 2, (LL16, "grid_exchange"), {**NARROW, "num_channels": 3}),
    "exchanges in a row": Program(
        _exchanges_in_a_row, 2, ("grid_exchange",), {**NARROW, "num_channels": 3}
    ),
    "reduced exchanges": Program(
        _reduced_exchanges, 2, ("grid_exchange",), {**NARROW, "num_channels": 3}
    ),
    "parts of exchanges": Program(_parts_of_exchanges, 2, ("grid_exchange",), _SIX_BLOCKS),
    "parts of exchanges opened anew": Program(
        _parts_opened_anew, 2, ("grid_exchange",), _SIX_BLOCKS
    ),
    "exchanges seldom long": Program(
        _exchanges_seldom_long, 2, ("grid_exchange",), {**NARROW, "num_channels": 2}
    ),
    "exchanges of many sizes": Program(
        _exchanges_of_many_sizes, 2, ("grid_exchange",), {"num_channels": 3}
    ),
    "exchanges of a large grid": Program(
        _exchanges_of_a_large_grid,
        1,
        ("grid_exchange",),
        {**NARROW, "num_channels": 70, "exchange_bytes": 70 * 64},
    ),
    "more slices than threads": Program(
        _more_slices_than_threads,
        2,
        ("grid_exchange",),
        {**NARROW, "num_channels": 40, "exchange_bytes": 80 * 64},
    ),
    "last words of a board": Program(
        _last_words_of_a_board, 2, ("grid_exchange",), {**NARROW, "num_channels": 2}
    ),
    "last word of a board": Program(
        _last_word_of_a_board,
        2,
        ("grid_exchange",),
        {**NARROW, "num_channels": 2, "exchange_bytes": 256},
    ),
    "lengths of exchanges": Program(
        _exchange_lengths,
        3,
        ("grid_exchange",),
        {**NARROW, "num_channels": 3, "exchange_bytes": 6144},
        is_exact=False,
    ),
    "exchanges of both reaches": Program(
        _exchanges_of_both_reaches, 2, ("grid_exchange",), _THREE_BLOCKS
    ),
    "longest exchange": Program(
        _longest_exchange,
        2,
        ("grid_exchange",),
        {"num_channels": 2, "ends_when_stuck": False},
        right="failed_call",
        statuses=REFUSED,
    ),
    "longest all_reduce": _longest_message(LL16, lambda s, n: s.all_reduce(0, LL16, n), 4),
    "longest reduce_scatter": _longest_message(
        SCATTER, lambda s, n: s.reduce_scatter(0, SCATTER, n), 4
    ),
    "longest all_gather": _longest_message(GATHER, lambda s, n: s.all_gather(0, GATHER, n), 1),
    "longest broadcast": _longest_message(BROADCAST, lambda s, n: s.broadcast(0, n, root=1), 1),
    "collectives of grids": Program(
        _grid_calls,
        2,
        (LL16, SCATTER, GATHER, BROADCAST, BARRIER, "grid_sync", COPY),
        _THREE_BLOCKS,
        is_exact=False,
    ),
    "barriers of grids": Program(_barrier_of_grids, 2, (BARRIER, "grid_sync", COPY), _THREE_BLOCKS),
    "kept barrier": Program(_kept_barrier, 1, (BARRIER, "grid_sync", COPY), _THREE_BLOCKS),
    "kept barrier of one block": Program(
        _kept_barrier_of_one, 1, (BARRIER, "grid_sync", COPY), NARROW
    ),
    "kept barrier and others": Program(
        _kept_barrier_and_others, 2, (LL16, BARRIER, "grid_sync", COPY), _THREE_BLOCKS
    ),
    "barriers reopened by few": Program(
        _reopened_by_few, 1, (BARRIER, "grid_sync", COPY), {**_COUNTERS, "num_channels": 16}
    ),
    "many counters": Program(
        _many_counters,
        1,
        (BARRIER, "grid_sync", COPY),
        {**_COUNTERS, "num_channels": 20},
    ),
    "reopened barriers": Program(
        _reopened_barriers, 1, (BARRIER, "grid_sync", COPY), {**NARROW, "num_channels": 70}
    ),
}
