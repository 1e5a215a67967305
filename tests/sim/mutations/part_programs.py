"""Programs that show planted bugs of calls whose parts have lengths of their own."""

from sim_machine import LL16
from sim_parts import MOVES, REDUCES

from kccl.base import abi

from .program import NARROW, Program

# Bytes from each rank to each. A slot of packets takes 240 bytes of a part, the staging 256.
_LENGTHS = (
    ((5, 0, 600), (0, 7, 100), (600, 100, 240)),
    ((0, 1, 2), (1, 0, 1300), (2, 1300, 3)),
    ((16, 16, 16), (16, 16, 16), (16, 16, 16)),
    ((0, 0, 0), (0, 0, 900), (0, 900, 0)),
)
_ROWS = ((3, 3, 3), (700, 700, 700), (0, 0, 0))
_COUNTS = ((5, 0, 300), (0, 64, 1), (200, 130, 0))


def _moves(script):
    """After each a call by packets, which order nothing, so that the next uses the same staging."""
    script.begin(threads=2 * script.machine.warp_size)
    for number, lengths in enumerate(_LENGTHS):
        script.all_to_all_parts(0, lengths, in_place=number % 2 == 0)
        script.all_to_all_parts(0, _ROWS, repeats=True, in_place=number % 2 == 1)
        script.all_reduce(0, LL16, 2)


def _sums(script):
    script.begin(threads=2 * script.machine.warp_size)
    for number, counts in enumerate(_COUNTS):
        for again in range(2):
            script.reduce_scatter_parts(0, counts, in_place=(number + again) % 2 == 0)
        script.all_reduce(0, LL16, 2)


def _differing(script):
    """Rank 1 expects a byte less of rank 2 than it sends."""
    script.begin(threads=2 * script.machine.warp_size)
    lengths = [[4, 4, 4], [4, 4, 4], [4, 5, 4]]
    script.all_to_all_parts(0, lengths, expected=[[4] * 3] * 3)


PROGRAMS = {
    MOVES: Program(_moves, 3, (MOVES, LL16), NARROW),
    REDUCES: Program(_sums, 3, (REDUCES, LL16), NARROW),
    "parts that differ": Program(
        _differing,
        3,
        (MOVES,),
        right="failed_call",
        statuses=(abi.lib.kKcclCallsDiffer, abi.lib.kKcclAborted),
    ),
}
