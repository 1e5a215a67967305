"""For the tests of bench's clock: a GPU in virtual time, where work runs when it is enqueued."""

from types import SimpleNamespace

import numpy as np

from kccl.bench.gpu.clock import CALLS_IN_GRAPH, delays_ns

BARRIER_US, NODE_US = 2.0, 0.7


class FakeGpu:
    """What GpuClock uses of a Gpu; `now_us` is the stream's time."""

    def __init__(self, rank=0, world_size=2):
        self.now_us = 1000.0
        self.memory = {}
        self.log = []
        barrier = SimpleNamespace(prepare=lambda stream: lambda: self.spend("barrier", BARRIER_US))
        self.comm = SimpleNamespace(rank=rank, world_size=world_size, barrier=barrier)
        self.stream = 7

    def spend(self, what, us):
        self.log.append(what)
        self.now_us += us

    def numbers(self, values):
        address = len(self.memory)
        self.memory[address] = values.copy()
        return SimpleNamespace(address=address)

    def read(self, address, count, dtype):
        values = self.memory[address][:count]
        assert values.dtype == dtype
        return values

    def events(self, count):
        return [SimpleNamespace(us=None) for _ in range(count)]

    def record(self, event):
        event.us = self.now_us

    def between_us(self, begin, end):
        return end.us - begin.us

    def wait(self):
        self.log.append("wait")

    def capture(self, body):
        # Captured work does not run.
        now_us, log = self.now_us, list(self.log)
        body()
        self.now_us, self.log = now_us, [*log, "capture"]
        return body


class FakeModule:
    """pause_step in virtual time; each launch costs a graph node."""

    warp_size = 64

    def __init__(self, gpu):
        self.gpu = gpu

    def kernel(self, name):
        assert name == "pause_step"
        return self.pause

    def pause(self, comm, delays, stamps, step, *, block, stream):
        gpu = self.gpu
        assert stream == gpu.stream and block == self.warp_size
        gpu.spend("pause", NODE_US + gpu.memory[delays.address][step] / 1e3)
        gpu.memory[stamps.address][step] = round(gpu.now_us * 1e3)


class Call:
    """A call of two ranks: it takes `us` from the last arrival, every tenth time `slow_us` more."""

    def __init__(self, gpu, us, slow_us=0.0):
        self.gpu, self.us, self.slow_us = gpu, us, slow_us
        self.made = 0
        self.late_us = np.zeros(CALLS_IN_GRAPH)

    def when_skewed(self):
        """From now on the other rank is late by the delays of the schedule."""
        schedule = delays_ns(CALLS_IN_GRAPH, 2, 0) / 1e3
        self.late_us, self.made = schedule[1 - self.gpu.comm.rank], 0

    def __call__(self):
        slow_us = self.slow_us if self.made % 10 == 9 else 0.0
        late_us = self.late_us[self.made % CALLS_IN_GRAPH]
        self.made += 1
        self.gpu.spend("call", self.us + slow_us + late_us)


class FakeBuffers:
    """What InGraph uses of DeviceBuffers."""

    def __init__(self, gpu, nbytes=64):
        self.gpu = gpu
        self.problem = SimpleNamespace(nbytes=nbytes, world_size=2)

    def restore(self):
        self.gpu.log.append("restore")
