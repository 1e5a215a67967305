"""Launches publish and collect inside persistent kernels, and computes the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..harness.data import count_wrong
from ..harness.forms import Form
from ..harness.problem import Array, Problem
from .chained import Chained
from .contenders import InKernel, Notebook, Shape
from .data import period

WORD_BYTES = 8
"""Bytes of a word, as many as a packet's payload."""

# The most packets that all blocks of a rank publish -> threads of a block. A thread then collects
# one or two packets of each rank. With more packets, blocks have _MOST_THREADS threads, which
# collect more.
_THREADS = {32: 32, 288: 288}
_MOST_THREADS = 544
# _SUMS_WORDS is the least number of words in a slice of ExchangedSums, unless the message is
# shorter. Each thread has one word.
_WARP, _SUMS_WORDS = 32, 128
# Bytes of payload in a cache line of packets. Each slice begins on a new line (kLinePackets of
# grid_exchange.cuh).
_LINE_BYTES = 64
# Each launch adds another multiple of this to all words, so that its data differ from earlier ones.
_APART = 0x9E3779B97F4A7C15


def exchange_shape(problem: Problem, most_blocks: int) -> Shape:
    """Returns the shape of an exchange: all blocks, each with the whole words that its part of the
    rank's bytes needs, at least one.
    """
    each = max(1, -(-problem.nbytes // (WORD_BYTES * most_blocks)))
    packets = most_blocks * each
    threads = next((count for most, count in _THREADS.items() if packets <= most), _MOST_THREADS)
    return Shape(most_blocks, threads, each)


def sums_shape(problem: Problem, most_blocks: int) -> Shape | None:
    """Returns the shape of ExchangedSums: slices of equal length, one word per thread.

    None if the message is not a number of whole words.
    """
    words, rest = divmod(problem.nbytes, WORD_BYTES)
    if rest != 0 or words == 0:
        return None
    least = min(words, _SUMS_WORDS)
    blocks = next(n for n in range(min(most_blocks, words // least), 0, -1) if words % n == 0)
    each = words // blocks
    return Shape(blocks, -(-each // _WARP) * _WARP, each)


def exchange_bytes(shape: Shape, world_size: int) -> int:
    """Returns the `exchange_bytes` that a DeviceComm needs for slices of this shape."""
    lines = -(-shape.each * WORD_BYTES // _LINE_BYTES)
    return world_size * shape.blocks * lines * _LINE_BYTES


def end(slices: Array, first: int, calls: int) -> Array:
    """Returns what the last of `calls` calls collects, if the first one publishes `slices` plus
    `first`.
    """
    # In call k a block publishes the slice that it collected in call k - 1 from the block k
    # positions further, plus one. So all calls move the slices by 1 + 2 + ... + (calls - 1) blocks.
    moved = sum(range(1, calls))
    added = np.uint64((first + calls - 1) % 2**64)
    found: Array = np.roll(slices, -moved, axis=0) + added
    return found


class Exchanging(InKernel):
    """Launches an exchange, and compares by bits the slices that each block collected last."""

    def __init__(
        self,
        notebook: Notebook,
        kernels: Sequence[Any],
        shape: Shape,
        form: Form,
        device_comm: Any,
    ) -> None:
        """Makes the object. Collective.

        Args:
            notebook, kernels, shape: See InKernel.
            form: The form, which is within a GPU or among all ranks.
            device_comm: A DeviceComm with the exchange_bytes that the shape needs.
        """
        super().__init__(notebook, kernels, shape)
        runner = notebook.runner
        rank, world_size = runner.comm.rank, runner.comm.world_size
        # Within a GPU each rank exchanges only with itself, so its data have their own seed.
        seed, ranks = ((1 + rank), 1) if form.is_within else (0, world_size)
        self._slices = np.random.default_rng(seed).integers(
            2**64, size=(ranks * shape.blocks, shape.each), dtype=np.uint64
        )
        first = 0 if form.is_within else rank * shape.blocks
        mine = self._slices[first : first + shape.blocks]
        self._in = runner.numbers(mine.ravel().view(np.int64))
        self._out = runner.numbers(np.zeros(shape.blocks * self._slices.size, np.int64))
        self._device_comm = device_comm
        self._launches = 0

    def run(self) -> None:
        """See InKernel."""
        self._launch("kMean", 0, 1)

    def launch(self, kernel: Any, warmup: int, calls: int) -> int:
        """See InKernel."""
        runner, shape = self.notebook.runner, self.shape
        self._launches += 1
        first = self._launches * _APART % 2**64
        runner.launch(
            kernel,
            *(self._device_comm, self._in, self._out, np.uint32(shape.each), np.uint64(first)),
            *map(np.uint32, (warmup, calls)),
            *self._noted(),
            grid=shape.blocks,
            block=shape.threads,
            shared_bytes=WORD_BYTES * (2 * self._slices.size + shape.each),
        )
        runner.wait()
        found = runner.read(self._out, shape.blocks * self._slices.size, np.int64)
        wanted = end(self._slices, first, warmup + calls).ravel().view(np.int64)
        return count_wrong(found, np.tile(wanted, shape.blocks))


class ExchangedSums(Chained):
    """Launches an all_reduce by exchange, and compares by bits each block's slice at the end."""

    def __init__(
        self,
        notebook: Notebook,
        kernels: Sequence[Any],
        shape: Shape,
        problem: Problem,
        device_comm: Any,
    ) -> None:
        """Makes the object. Collective.

        Args:
            notebook, kernels, shape: See InKernel; `each` is in words.
            problem: The size and element type.
            device_comm: A DeviceComm with the exchange_bytes that the shape needs.
        """
        super().__init__(notebook, kernels, shape, problem, device_comm)
        self._out = notebook.runner.numbers(np.zeros(shape.blocks * shape.each, np.int64))

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
            # In each call a block takes the slice of the next block. So the slices have moved by as
            # many blocks as there were calls.
            self._ends[key] = np.roll(end.reshape(slices.shape), -key[0], axis=0)
        return count_wrong(slices, self._ends[key])

    def _slices(self, kernel: Any, warmup: int, calls: int, length: int) -> Array:
        """Launches a kernel. Returns the slice of each block at the end, [block][word]."""
        problem, shape, runner = self._problem, self.shape, self.notebook.runner
        runner.launch(
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
        runner.wait()
        found = runner.read(self._out, shape.blocks * shape.each, np.int64)
        return found.reshape(shape.blocks, shape.each)
