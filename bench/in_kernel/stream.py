"""Runs kernels beside a stream of reads from memory, and checks that the stream outlasts them.

The stream is a kernel of its own (beside.cuh).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import kccl

from ..gpu.device import Gpu
from ..gpu.kernels import LINES_BYTES, NAMES, SOURCE, BlockPingPong
from ..harness.problem import Array, Comm
from .side import GpuRunner

STAGE_BYTES, MOST_WARPS, MOST_IN_FLIGHT = 8192, 4, 12
"""Bytes of a copy, the most warps of a block, and the most copies in flight: kStreamBytes,
kStreamWarps and kStreamStages of beside.cuh."""
STREAM = "in_kernel::stream"
"""The kernel of the stream."""
SETTLE_S = 0.002
"""How long a stream runs before anything is timed beside it."""
_TOLD = 1  # kTold of beside.cuh
_PART_BYTES = 8 << 20  # that a block of the stream reads again and again
_LIMIT_NS = 5_000_000_000


class Stream:
    """A kernel that reads memory until it is told to end."""

    def __init__(self, gpu: Gpu, module: Any, blocks: int, shared: int) -> None:
        """Allocates what the stream reads.

        Args:
            gpu: The GPU.
            module: The compiled module that has the kernel STREAM.
            blocks: Number of blocks.
            shared: Bytes of shared memory of a block.
        """
        self.blocks = blocks
        self._gpu, self._shared = gpu, shared
        self._kernel, self._warp_size = module.kernel(STREAM), module.warp_size
        self._warps = 1
        self._stream, self._beside = kccl.gpu.make_stream(), kccl.gpu.make_stream()
        self._data = kccl.gpu.Memory(gpu.device, blocks * _PART_BYTES, gpu.stream)
        self._progress = kccl.gpu.Memory(gpu.device, 16 * MOST_WARPS * blocks, self._beside)
        self._ends = kccl.gpu.Memory(gpu.device, 8 * MOST_WARPS * blocks, self._beside)
        self._stop = kccl.gpu.Memory(gpu.device, 4, self._beside)

    @contextmanager
    def running(self, in_flight: int) -> Iterator[None]:
        """Lets the stream run on all its multiprocessors while the context lasts.

        Args:
            in_flight: The copies in flight of a multiprocessor, at most MOST_IN_FLIGHT. With fewer
                than MOST_WARPS, as many warps make them.

        Raises:
            RuntimeError: It did not run on them all, or has ended too early.
        """
        for memory in (self._progress, self._ends, self._stop):
            memory.clear()
        self._warps = min(in_flight, MOST_WARPS)
        self._kernel(
            *(self._gpu.comm, self._data.address),
            *(np.uint64(_PART_BYTES // STAGE_BYTES), np.uint32(in_flight), self._stop.address),
            *(np.uint64(_LIMIT_NS), self._progress.address, self._ends.address),
            grid=self.blocks,
            block=self._warp_size * self._warps,
            shared_bytes=self._shared,
            stream=self._stream,
        )
        begin = time.monotonic()
        while not self.sample()[:, 0].all():
            if time.monotonic() - begin > _LIMIT_NS / 1e9:
                raise RuntimeError("some warps of the stream have not begun")
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            kccl.gpu.write(self._stop.address, np.uint32(1).tobytes(), self._beside)
            kccl.gpu.synchronize_stream(self._stream)
        fault = fault_of(self._read(self._ends, np.uint32).reshape(-1, 2), self.blocks)
        if fault:
            raise RuntimeError(fault)

    def sample(self) -> Array:
        """Returns, for each warp, its copies so far, and its time in nanoseconds."""
        return self._read(self._progress, np.uint64).reshape(-1, 2)

    def _read(self, memory: Any, dtype: Any) -> Array:
        nbytes = memory.nbytes // MOST_WARPS * self._warps
        return np.frombuffer(kccl.gpu.read(memory.address, nbytes, self._beside), dtype)


def fault_of(ends: Array, blocks: int) -> str:
    """Returns why nothing was beside the whole stream, "" if it was.

    Args:
        ends: For each warp of the stream, why it has ended, and its multiprocessor.
        blocks: Number of blocks.
    """
    units = len(set(ends[:, 1].tolist()))
    if units != blocks:
        return f"{blocks} blocks of the stream ran on {units} multiprocessors, not on one each"
    early = int((ends[:, 0] != _TOLD).sum())
    return f"{early} warps of the stream ended before they were told to" if early else ""


def gbps(before: Array, after: Array) -> float:
    """Returns the gigabytes a second of a stream between two samples, of all warps together."""
    copies, ns = (after - before).astype(np.float64).T
    return float((copies * STAGE_BYTES / ns).sum())


class Beside(GpuRunner):
    """Runs kernels beside a stream, and notes the stream's bandwidth during each.

    Attributes:
        beside: The stream that runs now, if any.
        bandwidths: The gigabytes a second of `beside` during each launch since it was set.
    """

    def __init__(self, gpu: Gpu, blocks: int, shared: int) -> None:
        """Makes the object.

        Args:
            gpu: The GPU.
            blocks: Number of blocks of the calls.
            shared: Bytes of shared memory of each block of them.
        """
        super().__init__(gpu)
        self.most_blocks = blocks
        self.shared = shared
        self.beside: Stream | None = None
        self.bandwidths: list[float] = []
        self._before: Array | None = None

    def launch(self, kernel: Any, *args: Any, grid: int, block: int, shared_bytes: int = 0) -> None:
        """See Runner."""
        if self.beside is not None:
            self._before = self.beside.sample()
        more = max(shared_bytes, self.shared)
        super().launch(kernel, *args, grid=grid, block=block, shared_bytes=more)

    def wait(self) -> None:
        """See Runner."""
        super().wait()
        if self.beside is not None and self._before is not None:
            self.bandwidths.append(gbps(self._before, self.beside.sample()))
            self._before = None


class Word:
    """Times a word between two blocks of the GPU."""

    def __init__(self, runner: Beside, comm: Comm, rounds: int) -> None:
        """Compiles the kernel.

        Args:
            runner: Runs it.
            comm: The communicator.
            rounds: Number of round trips.
        """
        module = kccl.compile(SOURCE, NAMES, target=comm.backend)
        padded = _Padded(module, runner.shared)
        self._runner, self._rounds = runner, rounds
        words = runner.numbers(np.zeros(2 * LINES_BYTES // 4, np.int32))
        self._ping_pong = BlockPingPong(comm, padded, words)
        self._elapsed_ns = runner.numbers(np.zeros(2, np.int64))

    def time(self, stream: int) -> float:
        """Returns the one-way latency in microseconds, measured on this stream."""
        runner = self._runner
        before = runner.beside.sample() if runner.beside else None
        self._ping_pong.enqueue(self._elapsed_ns, rounds=self._rounds, stream=stream)
        runner.wait()
        if runner.beside and before is not None:
            runner.bandwidths.append(gbps(before, runner.beside.sample()))
        ns = runner.read(self._elapsed_ns, 2, np.int64)
        return self._ping_pong.one_way_us(ns, rounds=self._rounds)


class _Padded:
    """A module whose kernels are launched with so many bytes of shared memory."""

    def __init__(self, module: Any, shared: int) -> None:
        self.warp_size = module.warp_size
        self._module, self._shared = module, shared

    def kernel(self, name: str) -> Any:
        return partial(self._module.kernel(name), shared_bytes=self._shared)
