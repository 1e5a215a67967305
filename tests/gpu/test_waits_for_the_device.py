"""reset() and close() on a GPU wait for the device, in this order and within a limit.

The driver is that of tests/support/made_up_vendor.py, so no GPU is needed.
"""

import os
import threading
import time
from types import SimpleNamespace

import pytest
from made_up_vendor import OK

import kccl
from kccl.backends.gpu import GpuBackend
from kccl.backends.watch import Watcher
from kccl.base.abi import ffi, lib
from kccl.collectives import KINDS
from kccl.collectives.context import Context
from kccl.gpu import driver
from kccl.gpu.state import DeviceState


@pytest.fixture
def world(toys):
    world = World(toys)
    yield world
    # The threads that wait for the device must end before it is another vendor's.
    world.ends.set()
    for thread in threading.enumerate():
        if thread.name == "kccl synchronize":
            thread.join()
    # Its memory is to be dropped while that driver is there.
    del world.comm


class World:
    """Rank 1 of 2, with what reset() and close() need.

    Attributes:
        events: What happened, in order.
        ends: Set when the kernels of the device shall end.
    """

    def __init__(self, toys):
        self.events, self.ends = [], threading.Event()
        self.ends.set()
        backend = GpuBackend.__new__(GpuBackend)
        backend.device = driver.device(1)
        backend.caveat = ""
        backend._pid = os.getpid()
        backend.context = ffi.new("KcclHostContext *")
        backend.state = DeviceState(backend.device, backend.context, has_dependents=False)
        backend.state.limit_ns = 200_000_000
        self.window = ffi.new("uint32_t[64]")
        address = int(ffi.cast("uintptr_t", self.window))
        layout = {"abort": 0, "records": 64}
        backend._comm = ffi.new(
            "KcclDeviceComm *",
            {"rank": 1, "world_size": 2, "window": [address, address], "layout": layout},
        )
        backend._watcher = Watcher({}, backend._lose)
        mesh = SimpleNamespace(
            rank=1,
            is_resetting=False,
            has_met=True,
            reset=lambda clear, timeout: self.events.append("announced"),
            close=lambda: self.events.append("mesh closed"),
        )
        comm = self.comm = kccl.Communicator.__new__(kccl.Communicator)
        comm.rank, comm._is_closed = 1, False
        comm._backend, comm._mesh = backend, mesh
        comm.context = Context.__new__(Context)
        comm.context.rank, comm.context.backend, comm.context.mesh = 1, backend, mesh
        calls = SimpleNamespace(forget=lambda: None)
        for name in (*KINDS, "get", "put", "signal", "wait", "send", "recv"):
            setattr(comm, name, calls)
        write, wait = toys.toyToDevice, self.wait
        status = backend.state.address + ffi.offsetof("KcclState", "status")

        def record(to, *rest):
            if to == status:
                self.events.append("status written")
            elif to == address + 4:
                self.events.append("peer told")
            return write(to, *rest)

        toys.toyToDevice, toys.toyWait = record, wait

    def wait(self):
        self.events.append("wait")
        self.ends.wait()
        time.sleep(0.05)
        self.events.append("kernels ended")
        return (OK,)


def test_a_reset_announces_itself_when_no_kernel_can_push_any_more(world):
    world.comm.reset()
    first = ["status written", "wait", "kernels ended", "announced"]
    assert world.events == [*first, "status written"]
    assert world.comm._backend.state.status == lib.kKcclOk


def test_a_reset_does_not_wait_for_ever(world):
    world.ends.clear()
    error = (
        r"rank 1: the kernels on device 1 did not end within 0.2 s; reset\(\) waits for all of them"
    )
    with pytest.raises(kccl.Timeout, match=error) as caught:
        world.comm.reset()
    assert (caught.value.rank, caught.value.collective) == (1, "reset")
    assert "announced" not in world.events
    # The next reset() goes on.
    world.ends.set()
    world.comm.reset()
    assert world.comm._backend.state.status == lib.kKcclOk


def test_a_close_tells_the_peers_when_the_calls_have_ended(world):
    world.comm.close()
    first = ["wait", "kernels ended", "peer told", "mesh closed"]
    assert world.events == [*first, "status written"]
    assert world.window[1] == lib.kKcclLeft


def test_a_close_does_not_wait_for_ever(world):
    world.ends.clear()
    with pytest.raises(kccl.Timeout, match=r"device 1 did not end within 0.2 s; close\(\) waits"):
        world.comm.close()
    assert "mesh closed" in world.events
    assert world.window[1] == lib.kKcclGaveUp
    assert world.comm._backend.state.status == lib.kKcclClosed
    world.comm.close()


def test_a_close_after_a_failure_waits_for_nothing(world):
    world.ends.clear()
    world.comm._backend.state.status = lib.kKcclTimeout
    world.comm.context.has_said_failure = True
    world.comm.close()
    assert "wait" not in world.events and world.window[1] == 0


def test_an_error_of_the_device_is_raised(toys):
    toys.toyWait = lambda: (OK.__class__("TOY_WRONG", 9),)
    with pytest.raises(kccl.BackendError, match="toyWait failed: TOY_WRONG"):
        driver.synchronize_within(driver.device(0), 5.0)
