"""Where a step runs: on a GPU as a CUDA graph, or on the CPU, for tests."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ...harness.clock import uncollected

Step = Callable[[], None]

# So many cycles the GPU waits before the first step, so that the host can enqueue some steps.
_HOLD_CYCLES = 1_000_000
# Calls before a capture: the first ones compile.
_WARM_UP = 3


class Device(ABC):
    """Captures and times steps.

    Attributes:
        name: As torch.device takes it.
    """

    name: str

    @abstractmethod
    def work(self) -> AbstractContextManager[object]:
        """Returns a context in which all work is enqueued."""

    @abstractmethod
    def captured(self, step: Step, begin: Step) -> Step:
        """Returns a function that repeats the work of a step, on tensors at the same places.

        Args:
            step: Enqueues the work.
            begin: Called before each call of `step` that is not captured.
        """

    @abstractmethod
    def timed(self, step: Step, count: int, meet: Step) -> list[float]:
        """Runs a step so often. Returns the time before the first and after each, in seconds.

        Args:
            step: Enqueues the work.
            count: How often the work is repeated.
            meet: Called just before the first step: all ranks start together.
        """


class Gpu(Device):
    """A GPU with a stream of its own, because NCCL's graphs are slow on PyTorch's default stream.

    It must be torch's current GPU.
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
        # Other threads of this process may use the GPU meanwhile. Garbage collection may free
        # device memory, which a capture forbids.
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
