"""One rank's GPU for the benchmarks: a stream, arrays, events and graphs.

It calls the driver, so that kccl's rows need neither PyTorch nor CuPy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kccl

from ..harness.clock import uncollected
from ..harness.problem import SPOILED, Array, Buffers, Call, Comm, Problem

Capture = Callable[[Call], Call]
"""Captures the work that a function enqueues; returns a function that enqueues it as a graph."""


class Gpu:
    """One rank's GPU, with its own stream for all work.

    Attributes:
        comm: The communicator that uses this GPU.
        device: The device. It must be current when a method is called.
        stream: Handle of the stream.
    """

    def __init__(self, comm: Comm) -> None:
        """Makes the stream. Collective, because it allocates symmetric memory."""
        self.comm = comm
        self.device = kccl.gpu.device(comm.empty(1).device)
        with self.device.current():
            self.stream = kccl.gpu.make_stream()
        self._events: list[Any] = []
        self._scratch = np.empty(0, np.uint8)

    def buffers(self, problem: Problem) -> DeviceBuffers:
        """Returns zeroed arrays for one library, with one element for a barrier. Collective."""
        count, dtype = max(problem.count, 1), problem.dtype or "int32"
        x = self.comm.empty(count, dtype)
        out = self.comm.empty(count, dtype) if problem.in_place is False else x
        return self.wrap(x, out, x.address, out.address, problem)

    def wrap(
        self, x: Any, out: Any, x_address: int, out_address: int, problem: Problem
    ) -> DeviceBuffers:
        """Makes Buffers of arrays that exist already, of any library. Collective."""
        saved = self.comm.empty(max(problem.count, 1), problem.dtype or "int32")
        return DeviceBuffers(x, out, self, problem, x_address, out_address, saved)

    def numbers(self, values: Array) -> Any:
        """Returns a new device array with these 32- or 64-bit integers. Collective."""
        array = self.comm.empty(values.size, str(values.dtype))
        kccl.gpu.write(array.address, values.tobytes(), self.stream)
        return array

    def read(self, address: int, count: int, dtype: Any) -> Array:
        """Copies elements of device memory, after all earlier work on the stream."""
        kind = np.dtype(dtype)
        data = kccl.gpu.read(address, count * kind.itemsize, self.stream)
        return np.frombuffer(data, kind)

    def read_once(self, address: int, count: int, dtype: Any) -> Array:
        """Does what read() does, into host memory that the next read_once() overwrites. So it does
        not allocate memory, which is slow for a long message.
        """
        kind = np.dtype(dtype)
        num_bytes = count * kind.itemsize
        if self._scratch.size < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        data = self._scratch[:num_bytes]
        kccl.gpu.read_into(data, address, self.stream)
        return data.view(kind)

    def wait(self) -> None:
        """Waits for the stream.

        Raises:
            kccl.Error: Work on the stream failed.
        """
        kccl.gpu.synchronize_stream(self.stream)
        self.comm.check()

    def capture(self, body: Call) -> Call:
        """Captures the work that `body` enqueues. Returns a function that enqueues the graph."""
        kccl.gpu.drain()
        end = kccl.gpu.named("end_capture")
        kccl.gpu.begin_capture(self.stream)
        # Garbage collection is disabled, because it may free device memory. To free memory waits
        # for the device, which a capture forbids.
        with uncollected():
            try:
                body()
            except BaseException:
                # Ends the capture before the error of body() is raised.
                kccl.gpu.attempt(end, self.stream)
                raise
            graph = kccl.gpu.call(end, self.stream)
        return _Graph(self.device, self.stream, graph)

    def events(self, count: int) -> list[Any]:
        """Returns events for one measurement. The next measurement gets the same events."""
        while len(self._events) < count:
            self._events.append(kccl.gpu.call(kccl.gpu.named("create_event"), 0))
        return self._events[:count]

    def record(self, event: Any) -> None:
        """Records an event on the stream."""
        kccl.gpu.call(kccl.gpu.named("record_event"), event, self.stream)

    def between_us(self, begin: Any, end: Any) -> float:
        """Returns the microseconds between two completed events."""
        return float(kccl.gpu.call(kccl.gpu.named("elapsed_ms"), begin, end)) * 1e3


class _Graph:
    def __init__(self, device: Any, stream: int, graph: Any) -> None:
        self._stream = stream
        self._launch = kccl.gpu.named("launch_graph")
        try:
            self._ready = kccl.gpu.call(kccl.gpu.named("instantiate_graph"), graph, 0)
        finally:
            kccl.gpu.attempt(kccl.gpu.named("destroy_graph"), graph)
        weakref.finalize(self, _destroy, device, self._ready).atexit = False

    def __call__(self) -> None:
        kccl.gpu.call(self._launch, self._ready, self._stream)


def _destroy(device: Any, ready: Any) -> None:
    with device.current():
        kccl.gpu.attempt(kccl.gpu.named("destroy_instance"), ready)


@dataclass(frozen=True)
class DeviceBuffers(Buffers):
    """Arrays in a GPU's memory, kccl's own or tensors. The host copies them by their addresses.

    Attributes:
        gpu: The GPU.
        problem: The problem, which has the number and type of the elements.
        x_address, out_address: Addresses of the first elements.
        saved: A device array with a copy of the values loaded last, for restore().
    """

    gpu: Gpu
    problem: Problem
    x_address: int
    out_address: int
    saved: Any

    @property
    def nbytes(self) -> int:
        """The bytes of each array that are used, at least one."""
        return max(self.problem.nbytes, 1)

    def load(self, values: Array) -> None:
        """See Buffers."""
        self._fill(self.out_address, SPOILED)
        kccl.gpu.write(self.saved.address, values.view(np.uint8), self.gpu.stream)
        self.restore()

    def restore(self) -> None:
        """Enqueues a copy that restores in `x` the values loaded last."""
        copy = kccl.gpu.named("copy_on_device")
        source = self.saved.address
        kccl.gpu.call(copy, self.x_address, source, self.nbytes, self.gpu.stream)

    def result(self) -> Array:
        """See Buffers. Waits for the stream. The array is valid until this rank's next result()."""
        assert self.problem.np_dtype is not None, "a collective without data has no result"
        return self.gpu.read_once(self.out_address, self.problem.count, self.problem.np_dtype)

    def like(self, values: Array) -> Any:
        """See Buffers."""
        array = self.gpu.comm.empty(values.size, self.problem.dtype)
        kccl.gpu.write(array.address, values.view(np.uint8), self.gpu.stream)
        return array

    def zero(self) -> None:
        """See Buffers."""
        self._fill(self.x_address, 0)
        self._fill(self.out_address, 0)

    def _fill(self, address: int, byte: int) -> None:
        kccl.gpu.fill(address, byte, self.nbytes, self.gpu.stream)
