"""Captures and times steps on a GPU, as CUDA graphs, or on the CPU, for tests."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ...harness.clock import uncollected

Step = Callable[[], None]

# The cycles that the GPU waits before the first step, so that the host can enqueue some steps.
_HOLD_CYCLES = 1_000_000
# The number of calls before a capture. The first ones compile.
_WARM_UP = 3


class Device(ABC):
    """Captures and times steps.

    Attributes:
        name: The argument of torch.device.
    """

    name: str

    @abstractmethod
    def work(self) -> AbstractContextManager[object]:
        """Returns a context in which all work is enqueued."""

    @abstractmethod
    def captured(self, step: Step, begin: Step) -> Step:
        """Returns a function that repeats the work of a step, on the same tensors.

        Args:
            step: Enqueues the work.
            begin: Called before each warm-up call of `step`.
        """

    @abstractmethod
    def timed(self, step: Step, count: int, meet: Step) -> list[float]:
        """Runs a step `count` times. Returns the seconds before the first and after each step.

        Args:
            step: Enqueues the work.
            count: How often the step is run.
            meet: Called just before the first step, so that all ranks start together.
        """


class Gpu(Device):
    """A GPU, which must be torch's current one. It uses its own stream, because NCCL's graphs are
    slow on PyTorch's default stream.
    """

    name = "cuda"

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def work(self) -> AbstractContextManager[object]:
        work: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return work

    def captured(self, step: Step, begin: Step) -> Step:
        for _ in range(_WARM_UP):
            begin()
            step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local, because other threads may use the GPU during the capture. Garbage collection
        # is disabled, because it may free device memory, which a capture forbids.
        with (
            uncollected(),
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            step()
        replay: Step = graph.replay
        return replay

    def timed(self, step: Step, count: int, meet: Step) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda._sleep(_HOLD_CYCLES)
        meet()
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        events[-1].synchronize()
        return [events[0].elapsed_time(event) * 1e-3 for event in events]


class Cpu(Device):
    """The CPU, without graphs."""

    name = "cpu"

    def work(self) -> AbstractContextManager[object]:
        return nullcontext()

    def captured(self, step: Step, begin: Step) -> Step:
        return step

    def timed(self, step: Step, count: int, meet: Step) -> list[float]:
        meet()
        times = [time.monotonic()]
        for _ in range(count):
            step()
            times.append(time.monotonic())
        return times
