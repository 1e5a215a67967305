"""Times calls on a GPU's stream, with the same code for kccl and for every peer.

kccl's barrier synchronizes the ranks on the device right before the clock starts. While the clock
runs, the host does nothing in mode "graph", and only makes the calls in mode "eager".
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
from ..harness.collective import Collective
from ..harness.measure import Contender
from ..harness.problem import Array, Call
from .device import Capture, DeviceBuffers, Gpu

CALLS_IN_GRAPH = 200
_FEWEST_CALLS = 4
# The most bytes of all messages of a graph. With long messages a graph has fewer calls.
_BYTES_IN_GRAPH = 64 << 20
_CHECKED_CALLS = 3
LONGEST_DELAY_NS = 5000
# On an H200, the kernels of a context start later once the context has used 16 streams (LOG.md).
# NCCL's windows and NVSHMEM use so many streams, and so do other programs. See use_streams().
_STREAMS_USED = 16
# How long a stream is blocked while the host enqueues the work to be timed.
_LEAD_NS = 100_000
# The most calls that are enqueued and timed together. A stream queues about a thousand launches;
# the next launch would block the host.
_LONGEST_BLOCK = 200


def delays_ns(steps: int, world_size: int, seed: int) -> Array:
    """Returns the delays of a skewed run in nanoseconds, int32 [world_size, steps].

    At each step one random rank is 0 to 5 us late and the others are not. Every rank gets the same
    array for the same arguments.
    """
    rng = np.random.default_rng((seed, world_size))
    delays = np.zeros((world_size, steps), np.int32)
    late = rng.integers(0, world_size, steps)
    delays[late, np.arange(steps)] = rng.integers(0, LONGEST_DELAY_NS, steps, endpoint=True)
    return delays


def calls_in_graph(nbytes: int) -> int:
    """Returns the number of calls in a timed graph, for messages of `nbytes` bytes."""
    return int(np.clip(_BYTES_IN_GRAPH // max(nbytes, 1), _FEWEST_CALLS, CALLS_IN_GRAPH))


def single_calls_us(stamps_ns: Array, cost_us: float) -> Array:
    """Returns the microseconds of each call between two time stamps, minus a stamp's cost."""
    return np.maximum(np.diff(stamps_ns) / 1e3 - cost_us, 0)


class GpuClock:
    """One rank's clock: timed intervals that start with a barrier, time stamps, and pauses."""

    def __init__(self, gpu: Gpu, module: Any, *, seed: int = 0) -> None:
        """Makes the object. Collective.

        Args:
            gpu: The rank's GPU.
            module: SOURCE of bench/gpu/kernels.py, compiled for this GPU.
            seed: Seed of the delays; the same on all ranks.
        """
        comm = gpu.comm
        self.gpu = gpu
        self._kernel = module.kernel("pause_step")
        self._block = module.warp_size
        self._barrier = comm.barrier.prepare(stream=gpu.stream)
        schedule = delays_ns(CALLS_IN_GRAPH, comm.world_size, seed)
        self._none = gpu.numbers(np.zeros(CALLS_IN_GRAPH + 1, np.int32))
        self._mine = gpu.numbers(schedule[comm.rank])
        self._everyones = gpu.numbers(schedule.sum(axis=0, dtype=np.int32))
        self._lead = gpu.numbers(np.full(1, _LEAD_NS, np.int32))
        self._stamps = gpu.numbers(np.zeros(CALLS_IN_GRAPH + 1, np.int64))
        self._pauses: dict[int, tuple[Call, float]] = {}
        # Launches the kernel once now, because a capture must not load it.
        self._pause(self._none, 0)
        gpu.wait()

    def use_streams(self) -> None:
        """Runs a kernel on _STREAMS_USED streams. So kernels start equally late in all rows,
        whether or not a peer has used many streams before.
        """
        streams = [kccl.gpu.make_stream() for _ in range(_STREAMS_USED)]
        for stream in streams:
            self._pause(self._none, 0, stream)
        for stream in streams:
            kccl.gpu.synchronize_stream(stream)
            kccl.gpu.call(kccl.gpu.named("destroy_stream"), stream)

    def intervals_us(self, calls: Call, count: int, *, leads: bool) -> Array:
        """Returns the microseconds from a barrier of the ranks to the end of the work, [count].
        Collective.

        Args:
            calls: Enqueues the work to be timed.
            count: Number of intervals.
            leads: Whether the stream is blocked until the host has enqueued all work, so that the
                host's time is not measured.
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
        """Enqueues `steps` calls, with a time stamp before each and one after the last."""
        for step in range(steps):
            self._pause(self._none, step)
            call()
        self._pause(self._none, steps)

    def stamps_ns(self, replay: Call, steps: int) -> Array:
        """Replays a graph of stamped(). Returns its stamps in nanoseconds. Collective."""
        self.intervals_us(replay, 1, leads=True)
        return self.gpu.read(self._stamps.address, steps + 1, np.int64)

    def skewed(self, call: Call, steps: int) -> None:
        """Enqueues `steps` calls, each after this rank's delay."""
        for step in range(steps):
            self._pause(self._mine, step)
            call()

    def pauses(self, steps: int) -> tuple[Call, float]:
        """Returns a graph with the delays of all ranks, one after another and without calls, and
        the microseconds that a time stamp costs. Collective.
        """
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
        self._kernel(gpu.comm, delays, self._stamps, number, block=self._block, stream=stream)


def repeat(call: Call, count: int) -> None:
    """Makes a call `count` times."""
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
        """Makes some calls in one graph, each on the input loaded last, and waits for their end."""
        self._checked()
        self._clock.gpu.wait()

    def time(self, iterations: int, warmup: int) -> tuple[Array, Array]:
        """Returns the times of Contender.clock: means over the calls of a graph, and single calls
        between time stamps.
        """
        clock, calls = self._clock, self._calls
        clock.intervals_us(self._plain, -(-warmup // calls), leads=True)
        mean_us = clock.intervals_us(self._plain, -(-iterations // calls), leads=True) / calls
        _, cost_us = clock.pauses(calls)
        return mean_us, single_calls_us(clock.stamps_ns(self._stamped, calls), cost_us)

    def skewed_us(self, iterations: int) -> float:
        """Returns the microseconds per call since the last rank's arrival, if one random rank is
        late in each call.
        """
        clock, calls = self._clock, self._calls
        # A quarter of the calls suffices, because each time is already a sum over many calls.
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
        """Makes one call and waits for its end."""
        self._enqueue()
        self._clock.gpu.wait()

    def time(self, iterations: int, warmup: int) -> tuple[Array, Array]:
        """Returns the times of Contender.clock: means over calls that are enqueued together, and
        single calls between events.
        """
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
        """Returns the microseconds until a call returns to Python. The GPU may still be busy."""
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
    """Returns two contenders for a call of one library: in a graph, and from Python.

    Args:
        clock: This rank's clock.
        collective: The table of functions.
        names: The library, algorithm and call of the rows.
        buffers: The arrays that the call uses.
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
