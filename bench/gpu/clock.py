"""How calls on a GPU's stream are timed: the same code for kccl and for every peer.

Ranks meet on the device, by kccl's barrier, right before the clock starts; while it runs, the host
does nothing in mode "graph" and nothing but calls in mode "eager".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

import kccl

from ..harness.clock import uncollected
from ..harness.collective import Array, Call, Collective
from ..harness.measure import Contender
from .device import Capture, DeviceBuffers, Gpu

CALLS_IN_GRAPH = 200
_FEWEST_CALLS = 4
# Beyond, a graph has fewer calls, so that it stays short.
_BYTES_IN_GRAPH = 64 << 20
_CHECKED_CALLS = 3
LONGEST_DELAY_NS = 5000
# From the 16th stream on that a context runs something on, every kernel of it starts later on an
# H200, for good (LOG.md). NCCL's windows and NVSHMEM need as many, other programs have them anyway.
_STREAMS_USED = 16
# While a stream waits so long, the host enqueues what is timed.
_LEAD_NS = 100_000
# A stream takes some thousand launches before one has to wait.
_LONGEST_BLOCK = 200


def delays_ns(steps: int, world_size: int, seed: int) -> Array:
    """The skewed run's schedule, int32 [world_size, steps]: by how much each rank is late when.

    At every step one random rank is 0 to 5 us late and the others are not. The same on every rank.
    """
    rng = np.random.default_rng((seed, world_size))
    delays = np.zeros((world_size, steps), np.int32)
    late = rng.integers(0, world_size, steps)
    delays[late, np.arange(steps)] = rng.integers(0, LONGEST_DELAY_NS, steps, endpoint=True)
    return delays


def calls_in_graph(nbytes: int) -> int:
    """How many calls one timed graph has."""
    return int(np.clip(_BYTES_IN_GRAPH // max(nbytes, 1), _FEWEST_CALLS, CALLS_IN_GRAPH))


def single_calls_us(stamps_ns: Array, cost_us: float) -> Array:
    """Microseconds of each call between two stamps, without what a stamp itself costs."""
    return np.maximum(np.diff(stamps_ns) / 1e3 - cost_us, 0)


class GpuClock:
    """One rank's clock: pauses of known length, the meeting of the ranks, timed intervals."""

    def __init__(self, gpu: Gpu, module: Any, *, seed: int = 0) -> None:
        """Collective.

        Args:
            gpu: The rank's GPU.
            module: gpu_kernels.SOURCE compiled for it.
            seed: Of the delays, the same on all ranks.
        """
        comm = gpu.comm
        self.gpu = gpu
        self._kernel = module.kernel("pause_step")
        self._barrier = comm.barrier.prepare(stream=gpu.stream)
        schedule = delays_ns(CALLS_IN_GRAPH, comm.world_size, seed)
        self._none = gpu.numbers(np.zeros(CALLS_IN_GRAPH + 1, np.int32))
        self._mine = gpu.numbers(schedule[comm.rank])
        self._everyones = gpu.numbers(schedule.sum(axis=0, dtype=np.int32))
        self._lead = gpu.numbers(np.full(1, _LEAD_NS, np.int32))
        self._stamps = gpu.numbers(np.zeros(CALLS_IN_GRAPH + 1, np.int64))
        self._pauses: dict[int, tuple[Call, float]] = {}
        # Loaded before any capture.
        self._pause(self._none, 0)
        gpu.wait()

    def use_streams(self) -> None:
        """Lets many streams run something, so that all rows are of a context in the same state."""
        streams = [kccl.gpu.make_stream() for _ in range(_STREAMS_USED)]
        for stream in streams:
            self._pause(self._none, 0, stream)
        for stream in streams:
            kccl.gpu.call("cuStreamSynchronize", stream)
            kccl.gpu.call("cuStreamDestroy", stream)

    def intervals_us(self, calls: Call, count: int, *, leads: bool) -> Array:
        """Microseconds from the ranks' meeting to the end of `calls()`, `count` times. Collective.

        Args:
            calls: Enqueues what is timed.
            count: Number of intervals.
            leads: Hold the stream until the host has enqueued it all: the host has no share.
        """
        gpu = self.gpu
        events = gpu.events(2 * count)
        for begin, end in zip(events[::2], events[1::2], strict=True):
            if leads:
                self._pause(self._lead, 0)
            self._barrier()
            gpu.record(begin)
            calls()
            gpu.record(end)
            if not leads:
                gpu.wait()
        gpu.wait()
        pairs = zip(events[::2], events[1::2], strict=True)
        return np.array([gpu.between_us(*pair) for pair in pairs])

    def stamped(self, call: Call, steps: int) -> None:
        """Enqueues `steps` calls with a stamp before each and one behind the last."""
        for step in range(steps):
            self._pause(self._none, step)
            call()
        self._pause(self._none, steps)

    def stamps_ns(self, replay: Call, steps: int) -> Array:
        """The stamps of a graph of stamped(). Collective."""
        self.intervals_us(replay, 1, leads=True)
        return self.gpu.read(self._stamps.address, steps + 1, np.int64)

    def skewed(self, call: Call, steps: int) -> None:
        """Enqueues `steps` calls, each behind this rank's delay."""
        for step in range(steps):
            self._pause(self._mine, step)
            call()

    def pauses(self, steps: int) -> tuple[Call, float]:
        """A graph of the delays of all ranks, one behind the other; what a stamp costs, us."""
        if steps not in self._pauses:
            capture = self.gpu.capture
            alone = capture(partial(self._delays_alone, steps))
            stamped = capture(partial(self.stamped, _nothing, steps))
            cost_us = float(np.median(np.diff(self.stamps_ns(stamped, steps)))) / 1e3
            self._pauses[steps] = alone, cost_us
        return self._pauses[steps]

    def _delays_alone(self, steps: int) -> None:
        for step in range(steps):
            self._pause(self._everyones, step)

    def _pause(self, delays: Any, step: int, stream: int | None = None) -> None:
        gpu, number = self.gpu, np.uint32(step)
        stream = gpu.stream if stream is None else stream
        self._kernel(gpu.comm, delays, self._stamps, number, block=32, stream=stream)


def repeat(call: Call, count: int) -> None:
    """Makes a call so many times."""
    for _ in range(count):
        call()


def _nothing() -> None:
    pass


class InGraph:
    """One library's call in CUDA graphs. A graph is captured when it is first needed."""

    def __init__(
        self, clock: GpuClock, buffers: DeviceBuffers, enqueue: Call, capture: Capture
    ) -> None:
        self._clock = clock
        self._buffers = buffers
        self._enqueue = enqueue
        self._capture = capture
        self._calls = calls_in_graph(buffers.problem.nbytes)

    def run(self) -> None:
        """Some calls in one graph, each on the input as it was loaded; waits for their end."""
        self._checked()
        self._clock.gpu.wait()

    def time(self, iterations: int, warmup: int) -> tuple[Array, Array]:
        """A Clock of the harness: means of whole graphs, and single calls between stamps."""
        clock, calls = self._clock, self._calls
        clock.intervals_us(self._plain, -(-warmup // calls), leads=True)
        mean_us = clock.intervals_us(self._plain, -(-iterations // calls), leads=True) / calls
        _, cost_us = clock.pauses(calls)
        return mean_us, single_calls_us(clock.stamps_ns(self._stamped, calls), cost_us)

    def skewed_us(self, iterations: int) -> float:
        """Microseconds a call from the last rank's arrival, when one random rank is late."""
        clock, calls = self._clock, self._calls
        # The difference of two means over hundreds of steps: few replays suffice.
        replays = -(-iterations // (4 * calls))
        alone, _ = clock.pauses(calls)
        with_calls_us = np.median(clock.intervals_us(self._skewed, replays, leads=True))
        alone_us = np.median(clock.intervals_us(alone, replays, leads=True))
        return float(with_calls_us - alone_us) / calls

    @cached_property
    def _checked(self) -> Call:
        def body() -> None:
            for _ in range(_CHECKED_CALLS):
                self._buffers.restore()
                self._enqueue()

        return self._capture(body)

    @cached_property
    def _plain(self) -> Call:
        return self._capture(partial(repeat, self._enqueue, self._calls))

    @cached_property
    def _stamped(self) -> Call:
        return self._capture(partial(self._clock.stamped, self._enqueue, self._calls))

    @cached_property
    def _skewed(self) -> Call:
        return self._capture(partial(self._clock.skewed, self._enqueue, self._calls))


class Eager:
    """One library's call, enqueued from Python."""

    def __init__(self, clock: GpuClock, enqueue: Call) -> None:
        self._clock = clock
        self._enqueue = enqueue

    def run(self) -> None:
        """One call; waits for its end."""
        self._enqueue()
        self._clock.gpu.wait()

    def time(self, iterations: int, warmup: int) -> tuple[Array, Array]:
        """A Clock of the harness: means of blocks of calls, and single calls between events."""
        clock, gpu = self._clock, self._clock.gpu
        with uncollected():
            repeat(self._enqueue, min(warmup, _LONGEST_BLOCK))
            gpu.wait()
            block = min(iterations, _LONGEST_BLOCK)
            count = -(-iterations // block)
            calls = partial(repeat, self._enqueue, block)
            blocks_us = clock.intervals_us(calls, count, leads=False)
            singles_us = self._gaps_us(self._enqueue, block)
            cost_us = float(np.median(self._gaps_us(_nothing, block)))
        return blocks_us / block, np.maximum(singles_us - cost_us, 0)

    def host_us(self, iterations: int) -> float:
        """Microseconds in which one call returns to Python, whatever the device does."""
        block = min(iterations, _LONGEST_BLOCK)
        with uncollected():
            self._clock.gpu.wait()
            begin = time.perf_counter_ns()
            repeat(self._enqueue, block)
            end = time.perf_counter_ns()
        self._clock.gpu.wait()
        return (end - begin) / 1e3 / block

    def _gaps_us(self, call: Call, count: int) -> Array:
        gpu = self._clock.gpu
        events = gpu.events(count + 1)
        gpu.record(events[0])
        for event in events[1:]:
            call()
            gpu.record(event)
        gpu.wait()
        return np.array([gpu.between_us(*pair) for pair in pairwise(events)])


def both_modes(
    clock: GpuClock,
    collective: Collective,
    names: Sequence[str],
    buffers: DeviceBuffers,
    enqueue: Call,
    capture: Capture,
) -> list[Contender]:
    """A call of one library as two contenders, in a graph and from Python.

    Args:
        clock: This rank's.
        collective: The table of functions.
        names: Library, algorithm, and how the call is made.
        buffers: What the call works on.
        enqueue: Makes the call on the clock's stream.
        capture: Makes graphs of such calls.
    """
    library, algorithm, call = names
    graph, eager = InGraph(clock, buffers, enqueue, capture), Eager(clock, enqueue)
    further: dict[str, Callable[[int], float]] = {}
    if collective.waits_for_all and buffers.problem.world_size > 1:
        further["skewed_us"] = graph.skewed_us
    return [
        Contender(
            *(library, algorithm, "graph", call, buffers, graph.run, graph.time), further=further
        ),
        Contender(
            *(library, algorithm, "eager", call, buffers, eager.run, eager.time),
            further={"host_us": eager.host_us},
        ),
    ]
