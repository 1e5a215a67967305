"""The parts of kccl.gpu.memory and kccl.gpu.state that need no GPU."""

import ctypes
import itertools
import threading

import pytest

from kccl.base.abi import ffi
from kccl.gpu import driver, release
from kccl.gpu import memory as gpu_memory
from kccl.gpu import state as cuda_state


def test_ranks_of_a_device_share_streams_however_they_come(monkeypatch):
    """They share, because kernels begin later in a context that has used 16 streams."""
    together, got = threading.Barrier(4), []
    made, destroyed = itertools.count(1), []

    def call(name, *args):
        if name != "cuStreamCreate":
            return None
        # No lock is held: every rank comes to the driver before any stream is made.
        together.wait(10)
        return next(made)

    monkeypatch.setattr(driver.table(), "call", call)
    monkeypatch.setattr(
        driver.table(), "attempt", lambda name, stream: destroyed.append((name, stream))
    )
    monkeypatch.setattr(gpu_memory, "_streams", {})
    devices = [driver.Device(k, "a GPU", f"uuid {k}", "sm_90a", 132, 1024, 7) for k in range(2)]
    kinds = [(where, work) for where in devices for work in ("writes", "fills")]

    def rank():
        got.append([gpu_memory.shared_stream(*kind) for kind in kinds])

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4 and all(streams == got[0] for streams in got)
    assert len(set(got[0])) == 4
    assert {name for name, _ in destroyed} == {"cuStreamDestroy"}
    assert {stream for _, stream in destroyed} == {*range(1, 17)} - {*got[0]}


@pytest.mark.parametrize("has_dependents", [False, True])
def test_a_state_is_filled_and_written_on_two_streams(monkeypatch, has_dependents):
    """A limit must reach a GPU that is full of kernels, where a fill may have to wait for room."""
    memory = [ctypes.create_string_buffer(8192) for _ in range(2)]
    free, streams, used = [*map(ctypes.addressof, memory)], iter((5, 6)), []

    def call(name, *args, note=""):
        if name == "cuStreamCreate":
            return next(streams)
        return free.pop() if name in ("cuMemAlloc", "cuMemHostAlloc") else None

    def write(address, data, stream):
        used.append(("write", stream))
        ctypes.memmove(address, data, len(data))

    monkeypatch.setattr(driver.table(), "call", call)
    monkeypatch.setattr(driver, "write", write)
    monkeypatch.setattr(driver, "fill", lambda *args: used.append(("fill", args[3])))
    monkeypatch.setattr(driver.table(), "function_address", lambda name, version=0: len(name))
    monkeypatch.setattr(driver.table(), "launches_dependents", lambda ordinal: True)
    monkeypatch.setattr(release, "at_end", lambda *args, **how: None)
    monkeypatch.setattr(gpu_memory, "_streams", {})
    device = driver.Device(0, "a GPU", "a uuid", "sm_90a", 132, 1024, 7)
    context = ffi.new("KcclHostContext *")
    state = cuda_state.DeviceState(device, context, has_dependents=has_dependents)
    state.limit_ns = 12
    assert used == [("fill", 6), ("write", 5), ("write", 5)]
    assert ffi.cast("KcclState *", state.address).limit_ns == 12
    assert (state.queue.capture_info != 0) == has_dependents
    assert state.queue.launch == len("cuLaunchKernel")
