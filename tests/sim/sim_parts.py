"""The calls of a sim_programs.Script whose parts have lengths of their own, and their rows of the
matrix.
"""

import _support  # noqa: F401  # so that oracle is found
import numpy as np
import oracle
from sim_rows import num_bytes

MOVES, REDUCES = "all_to_all_parts", "reduce_scatter_parts"
# The staging is short, so a part takes more rounds through it than in packets.
_MOST_ROUNDS = 32


class Parts:
    """One of Script's base classes, with these calls."""

    def all_to_all_parts(
        self, actor, lengths, *, repeats=False, in_place=False, shifts=(0, 0), expected=None
    ):
        """A call that moves lengths[a][b] bytes from rank a to rank b.

        Args:
            repeats: All parts of a rank are the same, as in all_gather.
            in_place: The result is the input, and lengths are equal both ways; if it repeats, the
                input is this rank's part of the result.
            expected: What ranks believe that they get, if it is not what they get.
        """
        ranks = self.ranks
        data = self.random_bytes(max(map(sum, lengths)))
        sent = [np.split(data[a], np.cumsum(lengths[a]))[:-1] for a in ranks]
        if repeats:
            sent = [[data[a][: lengths[a][0]]] * len(ranks) for a in ranks]
        for rank in ranks:
            x = sent[rank][0] if repeats else np.concatenate(sent[rank])
            want = np.concatenate([sent[a][rank] for a in ranks])
            receives = [lengths[a][rank] for a in ranks]
            begin = sum(receives[:rank]) if repeats else 0
            what = f"result of {MOVES}"
            if in_place:
                before = np.full_like(want, 0x3C)
                before[begin : begin + x.size] = x
                result = self.place_over(rank, want, before, shift=shifts[0], what=what)
                source = result + begin
            else:
                source = self.place(rank, x, is_written=False, shift=shifts[0])
                result = self.place(rank, want, is_written=True, shift=shifts[1], what=what)
            self._call_parts(
                *(actor, rank, MOVES, source, result),
                count=max(map(max, lengths)),
                sends=lengths[rank],
                receives=receives if expected is None else expected[rank],
                repeats=int(repeats),
            )

    def reduce_scatter_parts(self, actor, counts, *, in_place=False, shifts=(0, 0)):
        """A call in which rank p gets the reduction of counts[p] elements."""
        inputs = self.inputs(sum(counts))
        whole = oracle.all_reduce(inputs, self.op)
        size = whole.itemsize
        for rank, x in enumerate(inputs):
            begin = sum(counts[:rank])
            own = slice(begin, begin + counts[rank])
            what = f"result of {REDUCES}"
            if in_place:
                after = x.copy()
                after[own] = whole[own]
                source = self.place_over(rank, after, x, shift=shifts[0], what=what)
                result = source + begin * size
            else:
                source = self.place(rank, x, is_written=False, shift=shifts[0])
                result = self.place(rank, whole[own], is_written=True, shift=shifts[1], what=what)
            self._call_parts(
                *(actor, rank, REDUCES, source, result),
                count=max(counts) * size,
                sends=[count * size for count in counts],
                receives=[counts[rank] * size] * len(counts),
            )

    def _call_parts(self, actor, rank, kernel, source, result, **parts):
        where = {"input": self.address(rank, source), "output": self.address(rank, result)}
        self.call(actor, rank, kernel, **where, **parts)


def _bytes_of(script, size):
    return min(num_bytes(size), _MOST_ROUNDS * script.machine.staging_bytes // script.world_size)


def _move(script, actors, size, rng):
    """Some parts are empty, and the longest has the row's length."""
    most, world_size = _bytes_of(script, size), script.world_size
    lengths = rng.choice([0, most // 3, most - most // 5, most], (world_size, world_size))
    repeats, in_place = bool(rng.integers(2)), bool(rng.integers(2))
    if repeats:
        lengths[:] = lengths[:, :1]
    elif in_place:
        lengths = np.triu(lengths) + np.triu(lengths, 1).T
    shifts = tuple(rng.choice([0, 0, 3], 2).tolist())
    for actor in actors:
        script.all_to_all_parts(
            actor, lengths.tolist(), repeats=repeats, in_place=in_place, shifts=shifts
        )


def _reduce(script, actors, size, rng):
    itemsize = script.inputs(1)[0].itemsize
    most = _bytes_of(script, size) // itemsize
    counts = rng.choice([0, most // 3, most], script.world_size).tolist()
    in_place = bool(rng.integers(2))
    shifts = tuple(rng.choice([0, 0, 4], 2).tolist())
    for actor in actors:
        script.reduce_scatter_parts(actor, counts, in_place=in_place, shifts=shifts)


ROWS = {MOVES: _move, REDUCES: _reduce}
