"""publish and collect inside persistent kernels: shapes, launches, and what a launch ends with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..harness.collective import Array, Problem
from ..harness.data import count_wrong
from .chained import Chained
from .contenders import Form, InKernel, Notebook, Shape
from .data import period

SOURCE = Path(__file__).with_name("exchange.cuh")
WORD_BYTES = 8
"""Of a word, which is a packet's payload."""

# Packets that the blocks of one rank publish, up to so many -> threads of a block. A thread
# collects one or two of each rank's, or with more packets than the table has, more.
_THREADS = {32: 32, 288: 288}
_MOST_THREADS = 544
# Each thread publishes a word and collects a sum.
_WARP, _SUMS_WORDS = 32, 128
# What a slice's place on the board is a multiple of (publish.cuh).
_LINE_BYTES = 64
# Added to all words, and in another multiple by each launch, so that none is like the one before.
_APART = 0x9E3779B97F4A7C15


def exchange_shape(problem: Problem, most_blocks: int) -> Shape:
    """All blocks; as many whole words a block as the rank's bytes take, at least one."""
    each = max(1, -(-problem.nbytes // (WORD_BYTES * most_blocks)))
    packets = most_blocks * each
    threads = next((count for most, count in _THREADS.items() if packets <= most), _MOST_THREADS)
    return Shape(most_blocks, threads, each)


def sums_shape(problem: Problem, most_blocks: int) -> Shape | None:
    """All slices are alike, a word a thread.

    None where it is not so many whole words.
    """
    words, rest = divmod(problem.nbytes, WORD_BYTES)
    if rest != 0 or words == 0:
        return None
    least = min(words, _SUMS_WORDS)
    blocks = next(n for n in range(min(most_blocks, words // least), 0, -1) if words % n == 0)
    each = words // blocks
    return Shape(blocks, -(-each // _WARP) * _WARP, each)


def exchange_bytes(shape: Shape, world_size: int) -> int:
    """Of the DeviceComm, for slices of so many words of the blocks of so many ranks."""
    lines = -(-shape.each * WORD_BYTES // _LINE_BYTES)
    return world_size * shape.blocks * lines * _LINE_BYTES


def end(slices: Array, first: int, calls: int) -> Array:
    """What the last of so many calls collects, when the first one's is `slices` and `first`."""
    # Call k takes what call k - 1 has collected of the block k further on, and adds one.
    moved = sum(range(1, calls))
    added = np.uint64((first + calls - 1) % 2**64)
    found: Array = np.roll(slices, -moved, axis=0) + added
    return found


class Exchanging(InKernel):
    """All blocks' last slices are compared by bits, in every block, at the end of each launch."""

    def __init__(
        self,
        notebook: Notebook,
        kernels: Sequence[Any],
        shape: Shape,
        form: Form,
        device_comm: Any,
    ) -> None:
        """Collective.

        Args:
            notebook, kernels, shape: See InKernel.
            form: Says between which blocks.
            device_comm: With room for the exchange.
        """
        super().__init__(notebook, kernels, shape)
        place = notebook.place
        rank, world_size = place.comm.rank, place.comm.world_size
        # Within a GPU each rank has data of its own.
        seed, ranks = ((1 + rank), 1) if form.is_within else (0, world_size)
        self._slices = np.random.default_rng(seed).integers(
            2**64, size=(ranks * shape.blocks, shape.each), dtype=np.uint64
        )
        place_of_rank = 0 if form.is_within else rank * shape.blocks
        mine = self._slices[place_of_rank : place_of_rank + shape.blocks]
        self._in = place.numbers(mine.ravel().view(np.int64))
        self._out = place.numbers(np.zeros(shape.blocks * self._slices.size, np.int64))
        self._device_comm = device_comm
        self._launches = 0

    def run(self) -> None:
        """See InKernel."""
        self._launch("kMean", 0, 1)

    def launch(self, kernel: Any, warmup: int, calls: int) -> int:
        """See InKernel."""
        place, shape = self.notebook.place, self.shape
        self._launches += 1
        first = self._launches * _APART % 2**64
        place.launch(
            kernel,
            *(self._device_comm, self._in, self._out, np.uint32(shape.each), np.uint64(first)),
            *map(np.uint32, (warmup, calls)),
            *self._noted(),
            grid=shape.blocks,
            block=shape.threads,
            shared_bytes=WORD_BYTES * (2 * self._slices.size + shape.each),
        )
        place.wait()
        found = place.read(self._out, shape.blocks * self._slices.size, np.int64)
        wanted = end(self._slices, first, warmup + calls).ravel().view(np.int64)
        return count_wrong(found, np.tile(wanted, shape.blocks))


class ExchangedSums(Chained):
    """An all_reduce: the slice that each block has at the end is compared by bits."""

    def __init__(
        self,
        notebook: Notebook,
        kernels: Sequence[Any],
        shape: Shape,
        problem: Problem,
        device_comm: Any,
    ) -> None:
        """Collective.

        Args:
            notebook, kernels, shape: See InKernel; `each` is in words.
            problem: What is reduced.
            device_comm: With room for the exchange.
        """
        super().__init__(notebook, kernels, shape, problem, device_comm)
        self._out = notebook.place.numbers(np.zeros(shape.blocks * shape.each, np.int64))

    def run(self) -> None:
        """See InKernel."""
        slices = self._slices(self._kernels["kMean"], 0, 1, period(self._problem.world_size))
        assert self._problem.np_dtype is not None
        self.buffers.load(np.roll(slices, 1, axis=0).ravel().view(self._problem.np_dtype))

    def _checked(self, kernel: Any, warmup: int, calls: int, length: int) -> int:
        """See Chained."""
        problem, rank, key = self._problem, self._rank, (warmup + calls, length)
        self.buffers.load(self._chain.start(problem, rank))
        slices = self._slices(kernel, warmup, calls, length)
        if key not in self._ends:
            end = self._chain.end(problem, rank, *key).view(np.int64)
            # In each call a block takes the slice of the next.
            self._ends[key] = np.roll(end.reshape(slices.shape), -key[0], axis=0)
        return count_wrong(slices, self._ends[key])

    def _slices(self, kernel: Any, warmup: int, calls: int, length: int) -> Array:
        """[block][word]: what each block has at the end of a launch."""
        problem, shape, place = self._problem, self.shape, self.notebook.place
        place.launch(
            kernel,
            *(self._device_comm, self.buffers.x, self._out),
            np.uint32(problem.count // shape.blocks),
            self._chain.factor(problem, self._rank, length),
            *map(np.uint32, (warmup, calls, length)),
            *self._noted(),
            grid=shape.blocks,
            block=shape.threads,
            shared_bytes=WORD_BYTES * 2 * shape.each,
        )
        place.wait()
        found = place.read(self._out, shape.blocks * shape.each, np.int64)
        return found.reshape(shape.blocks, shape.each)
