"""Launches and checks chains of calls of collectives with data inside persistent kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..collectives import load
from ..harness.data import count_wrong
from ..harness.problem import Array, Problem
from .contenders import MOST_NOTED, InKernel, Notebook, Shape
from .data import SHIFTS, period, short_period


class Chained(InKernel):
    """A collective with data. A launch is a chain of calls, whose result is compared by bits.

    The data that a chain sends may stay the same for a whole period. Then a stale word is not
    noticed. So each repeat begins with an untimed launch whose data change every few calls.
    """

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
            notebook, kernels, shape: See InKernel.
            problem: The collective, size and element type.
            device_comm: A DeviceComm with one channel for each block.
        """
        super().__init__(notebook, kernels, shape)
        self.buffers = notebook.runner.buffers(problem)
        self._problem = problem
        self._device_comm = device_comm
        chain = load(problem.collective).chain
        assert chain is not None, f"{problem.collective} has no chain"
        self._chain = chain
        self._rank = notebook.runner.comm.rank
        # (calls, period) -> the expected result.
        self._ends: dict[tuple[int, int], Array] = {}

    def run(self) -> None:
        """See InKernel. Uses the data that the collective's check has loaded."""
        self._enqueue(self._kernels["kMean"], 0, 1, period(self._problem.world_size), shifts=0)

    def time(self, iterations: int, warmup: int) -> tuple[Array, Array]:
        """See InKernel. The untimed launch comes first."""
        calls = min(iterations, MOST_NOTED) | 1
        length = short_period(self._problem.world_size)
        self._wrong += self._checked(self._kernels["kMean"], 0, calls, length)
        return super().time(iterations, warmup)

    def launch(self, kernel: Any, warmup: int, calls: int) -> int:
        """See InKernel."""
        return self._checked(kernel, warmup, calls, period(self._problem.world_size))

    def _checked(self, kernel: Any, warmup: int, calls: int, length: int) -> int:
        """Does what launch() does, with periods of `length` calls."""
        problem, rank, key = self._problem, self._rank, (warmup + calls, length)
        self.buffers.load(self._chain.start(problem, rank))
        self._enqueue(kernel, warmup, calls, length, shifts=SHIFTS)
        if key not in self._ends:
            self._ends[key] = self._chain.end(problem, rank, *key)
        result = self.buffers.result()[self._chain.part(problem, rank)]
        return count_wrong(result, self._ends[key])

    def _enqueue(self, kernel: Any, warmup: int, calls: int, length: int, *, shifts: int) -> None:
        problem, shape, runner = self._problem, self.shape, self.notebook.runner
        runner.launch(
            kernel,
            self._device_comm,
            self.buffers.x,
            self.buffers.out,
            problem.count // problem.num_chunks,
            shape.each,
            self._chain.factor(problem, self._rank, length),
            np.uint64(shifts),
            *map(np.uint32, (warmup, calls, length)),
            *self._noted(),
            grid=shape.blocks,
            block=shape.threads,
        )
        runner.wait()
