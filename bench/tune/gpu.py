"""The candidates of tuning on GPUs: every algorithm in every shape, timed in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import ExitStack
from typing import Any

import kccl

from ..gpu.clock import GpuClock, InGraph
from ..gpu.device import Gpu
from ..gpu.kernels import NAMES, SOURCE
from ..gpu.side import check_gpus
from ..harness.collective import Collective
from ..harness.measure import Contender
from ..harness.problem import Comm, Problem
from .candidates import Candidates, Refusals, floats_only
from .choice import Candidate

Shapes = Sequence[tuple[int, int]]
"""Pairs (blocks, threads), as in the tuning tables: a call has at most `blocks` blocks. Its blocks
have `threads` threads while it needs fewer blocks, and more in longer calls."""


class GpuTuner:
    """See tune.Tuner. Until close(), this rank's device is current in this thread."""

    def __init__(
        self, comm: Comm, *, shapes: Shapes, clock: tuple[Any, GpuClock] | None = None
    ) -> None:
        """Makes the object. Collective.

        Args:
            comm: The communicator.
            shapes: The shapes to try.
            clock: This rank's Gpu and GpuClock; None creates them.
        """
        self._comm = comm
        self._shapes = shapes
        self._refusals = Refusals(comm.rank)
        self._ends = ExitStack()
        self._gpu: Any
        self._gpu, self._clock = clock or self._make()

    def only(self, collective: Collective) -> Candidate | None:
        """See Tuner. A call without data has only one shape."""
        names = self._comm.algorithms(collective.name)
        return Candidate(names[0]) if not collective.has_data and len(names) == 1 else None

    def candidates(self, collective: Collective, problem: Problem) -> Candidates:
        """See Tuner. All candidates use the same arrays. Candidates whose bounds give the call the
        same shape, as those of a small call, share one contender.
        """
        gpu, found = self._gpu, []
        mine = gpu.buffers(problem)
        for name in self._comm.algorithms(collective.name):
            of_shape: dict[tuple[int, int], Contender] = {}
            for blocks, threads in self._shapes:
                with self._refusals.of(name, problem):
                    plan = {"algorithm": name, "blocks": blocks, "threads": threads}
                    op = collective.prepare(self._comm, mine, problem, stream=gpu.stream, **plan)
                    if op.shape not in of_shape:
                        graph = InGraph(self._clock, mine, op, gpu.capture)
                        of_shape[op.shape] = Contender(
                            *("kccl", name, "graph", "prepared", mine, graph.run, graph.time)
                        )
                    found.append((Candidate(name, blocks, threads), of_shape[op.shape]))
        return found

    def floats_only(self, collective: Collective) -> Set[str]:
        """See Tuner."""
        return floats_only(self._comm, collective, self._gpu.buffers)

    def close(self) -> None:
        """See Tuner."""
        self._ends.close()

    def _make(self) -> tuple[Gpu, GpuClock]:
        check_gpus(self._comm.world_size)
        gpu = Gpu(self._comm)
        self._ends.enter_context(gpu.device.current())
        module = kccl.compile(SOURCE, NAMES, target=self._comm.backend, arch=gpu.device.arch)
        clock = GpuClock(gpu, module)
        clock.use_streams()
        return gpu, clock
