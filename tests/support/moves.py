"""Which data goes where in a collective, as one description: tests/support/collectives has one for
each, and right results, calls on the simulator and calls under sanitizers derive from it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import oracle
import sim_rows


@dataclass(frozen=True)
class Moves:
    """The description.

    Attributes:
        parts: (rank, world_size, peer) -> for each chunk of the rank's result the ranks, in order,
            whose chunk is reduced or copied, and the number of that chunk in their x. No part: the
            rank has no result.
        has_chunks: Whether x has a chunk for each rank.
        reduces: Whether it reduces, and so counts elements; else it moves bytes.
        takes: As KernelSpec.takes. `peer` above is a root, or 1 or 0 for exclusive.
        is_in_place: Whether x and the result are always one array.
        only_root_has_x: Whether the others pass no x.
    """

    parts: Callable[[int, int, int], list[tuple[range, int]]]
    has_chunks: bool = False
    reduces: bool = False
    takes: str = ""
    is_in_place: bool = False
    only_root_has_x: bool = False

    def num_peers(self, world_size):
        """How many values `peer` may have."""
        return {"": 1, "root": world_size, "exclusive": 2}[self.takes]

    def want(self, inputs, rank, *, op="sum", root=0):
        """A rank's right result, with one dimension; None if it has none. `root` is taken modulo
        num_peers.
        """
        world_size = len(inputs)
        parts = self.parts(rank, world_size, root % self.num_peers(world_size))
        if not parts:
            return None
        count = inputs[0].size // (world_size if self.has_chunks else 1)
        chunks = []
        for ranks, chunk in parts:
            sources = [inputs[p].reshape(-1)[chunk * count :][:count] for p in ranks]
            chunks.append(oracle.all_reduce(sources, op) if self.reduces else sources[0])
        return np.concatenate(chunks)

    def on_simulator(self, script, actor, kernel, count, root=0, *, in_place=False, shifts=(0, 0)):
        """A call of all ranks, as tests/support/collectives/__init__.py has it. Chunks of `count`
        elements if it reduces, else bytes. In place: where NCCL has the smaller array.
        """
        world_size = script.world_size
        num_inputs = count * (world_size if self.has_chunks else 1)
        inputs = script.inputs(num_inputs) if self.reduces else script.random_bytes(num_inputs)
        peer = root % self.num_peers(world_size)
        offsets, wants = [], []
        for rank, x in enumerate(inputs):
            want = self.want(inputs, rank, op=script.op, root=peer)
            what = f"result of {kernel}, {count} a rank, peer {peer}"
            source, result = self._place(script, rank, x, want, peer, in_place, shifts, what)
            fields = {}
            if source is not None:
                fields["input"] = script.address(rank, source)
            if result is not None:
                fields["output"] = script.address(rank, result)
            script.call(actor, rank, kernel, count=count, peer=peer, **fields)
            offsets.append(result)
            wants.append(want)
        return script.arrays(offsets, wants)

    def _place(self, script, rank, x, want, peer, in_place, shifts, what):
        """Where a rank's x and its result lie; None for what it has not."""
        has_x = not self.only_root_has_x or rank == peer
        if want is None:
            return script.place(rank, x, is_written=False, shift=shifts[0], what=what), None
        if not has_x:
            return None, script.place(rank, want, is_written=True, shift=shifts[1], what=what)
        if not in_place:
            source = script.place(rank, x, is_written=False, shift=shifts[0])
            result = script.place(rank, want, is_written=True, shift=shifts[1], what=what)
            return source, result
        if want.size == x.size:
            both = script.place_over(rank, want, x, shift=shifts[0], what=what)
            return both, both
        larger, smaller = (want, x) if want.size > x.size else (x, want)
        own = slice(rank * smaller.size, (rank + 1) * smaller.size)
        before, after = larger.copy(), larger.copy()
        if larger is want:
            before[:] = 0x3C
            before[own] = x
        else:
            after[own] = want
        whole = script.place_over(rank, after, before, shift=shifts[0], what=what)
        inner = whole + rank * smaller.nbytes
        return (inner, whole) if larger is want else (whole, inner)

    def row(self, collective, script, actors, size, rng):
        """Adds one call for each actor to a program of the simulator's matrix."""
        in_place = bool(rng.integers(2))
        shift = 4 if self.reduces else 3
        shifts = tuple(rng.choice([0, 0, shift], 2).tolist())
        root = int(rng.integers(script.world_size))
        nbytes = sim_rows.num_bytes(size)
        num_parts = script.world_size
        kernel = sim_rows.any_of(collective, script, rng, nbytes, num_parts)
        count = sim_rows.num_elements(script, size) if self.reduces else nbytes
        for actor in actors:
            call = getattr(script, collective)
            call(actor, kernel, count, root, in_place=in_place, shifts=shifts)


def table_of(name, moves, most_ranks):
    """The description in C++, for csrc/sanitize/collective.h."""
    rows = []
    for world_size in range(2, most_ranks + 1):
        for peer in range(moves.num_peers(world_size)):
            for rank in range(world_size):
                for number, (ranks, chunk) in enumerate(moves.parts(rank, world_size, peer)):
                    where = world_size, peer, rank, number
                    rows.append((*where, ranks[0], len(ranks), chunk))
    flags = moves.has_chunks, moves.reduces, moves.is_in_place, moves.only_root_has_x
    waits_for_all = moves.takes != "root"
    words = ", ".join(str(flag).lower() for flag in (*flags, waits_for_all))
    takes = f"Takes::k{(moves.takes or 'nothing').capitalize()}"
    lines = [f"constexpr Part kPartsOf_{name}[] = {{"]
    lines += [f"    {{{', '.join(map(str, row))}}}," for row in rows]
    lines += ["};", f"constexpr Moves kMovesOf_{name} = {{kPartsOf_{name}, {words}, {takes}}};"]
    return "\n".join(lines)
