"""What becomes of GPU memory and graphs that nobody owns any more. No GPU is needed."""

import contextlib
import ctypes
import gc
import os
import threading
import types

import pytest

import kccl
from kccl.backends import departure
from kccl.base.abi import lib
from kccl.gpu import driver as gpu
from kccl.gpu import graphs, memory, release
from kccl.gpu.table import DriverError

WHERE = gpu.Device(0, "H200", "uuid", "sm_90a", 132, 1024, 7)


def test_dropping_memory_does_not_wait_for_the_device(monkeypatch):
    """A running kernel may wait for the very rank whose garbage collector frees the memory."""
    made = []
    may_go_on, is_over = threading.Event(), threading.Event()

    def attempt(name, *args):
        made.append((name, *args))
        if name == "cuCtxSynchronize":
            may_go_on.wait(20)
        if made.count((name,)) == 2:
            is_over.set()
        return 0

    monkeypatch.setattr(gpu, "uncaptured", contextlib.nullcontext)
    monkeypatch.setattr(gpu.table(), "call", attempt)
    monkeypatch.setattr(gpu.table(), "attempt", attempt)
    owner = memory.Memory.__new__(memory.Memory)
    release.at_end(owner, WHERE, (("cuMemFree", (0x1000,)),), [WHERE])
    del owner
    gc.collect()
    assert ("cuMemFree", 0x1000) not in made
    may_go_on.set()
    assert is_over.wait(20)
    wait = [("cuCtxPushCurrent", 7), ("cuCtxSynchronize",), ("cuCtxPopCurrent",)]
    assert made == [*wait, ("cuCtxPushCurrent", 7), ("cuMemFree", 0x1000), ("cuCtxPopCurrent",)]


def test_a_kernels_graph_is_destroyed_without_waiting_and_during_captures(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    made = []
    is_over = threading.Event()

    def attempt(name, *args):
        made.append(name)
        return 0

    def call(name, *args, **note):
        made.append(name)
        if name == "cuCtxPopCurrent":
            is_over.set()
        if name == "cuGraphAddKernelNode":
            (node,) = (each for each in args if hasattr(each, "kernelParams"))
            assert (int(node.func), node.gridDimX, node.blockDimX) == (0x77, 8, 128)
            address = ctypes.c_uint64.from_address(node.kernelParams).value
            assert ctypes.string_at(address, 5) == b"hello"
        return 9 if name in ("cuGraphCreate", "cuGraphInstantiate") else None

    monkeypatch.setattr(gpu.table(), "attempt", attempt)
    monkeypatch.setattr(gpu.table(), "call", call)
    monkeypatch.setitem(vars(gpu.table()), "binding", driver)
    graph = graphs.KernelGraph(WHERE, 0x77, b"hello", grid=8, block=128)
    assert graph.handle == 9 and made[-2:] == [
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxPopCurrent",
    ]
    made.clear()
    is_over.clear()
    del graph
    gc.collect()
    assert is_over.wait(20)
    relax = "cuThreadExchangeStreamCaptureMode"
    assert made == ["cuCtxPushCurrent", relax, "cuGraphExecDestroy", relax, "cuCtxPopCurrent"]


def test_a_failed_release_leaves_no_context_current(monkeypatch):
    made = []
    monkeypatch.setattr(gpu.table(), "call", lambda name, *args: made.append(name))

    @contextlib.contextmanager
    def uncaptured():
        raise DriverError("cuThreadExchangeStreamCaptureMode failed", 719)
        yield

    monkeypatch.setattr(gpu, "uncaptured", uncaptured)
    with pytest.raises(DriverError):
        release.undo(WHERE, (("cuGraphExecDestroy", (9,)),), os.getpid())
    assert made == ["cuCtxPushCurrent", "cuCtxPopCurrent"]


def test_a_releasing_thread_tells_of_an_error_and_goes_on(monkeypatch):
    class Owner:
        pass

    def fail():
        raise ValueError("mishap")

    told, is_called = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))
    monkeypatch.setattr(release, "_DRAIN_S", 30)
    for call in (fail, is_called.set):
        owner = Owner()
        release.later(owner, WHERE, call)
        del owner
        gc.collect()
    release.drain()
    assert is_called.is_set() and told == ["mishap"] and not release._under_way


def test_shared_memory_is_unmapped_when_its_peers_devices_are_idle_too(monkeypatch):
    """Threads of one process share one mapping. A peer's kernel may still write to it."""
    made, is_over = [], threading.Event()
    devices = [gpu.Device(k, "H200", f"uuid {k}", "sm_90a", 132, 1024, 70 + k) for k in range(3)]

    def call(name, *args, note=""):
        made.append((name, *args))
        if name == "cuMemRelease":
            is_over.set()
        return 0x1000

    table = gpu.table()
    monkeypatch.setattr(gpu, "device", devices.__getitem__)
    monkeypatch.setattr(gpu, "uncaptured", contextlib.nullcontext)
    monkeypatch.setattr(table, "call", call)
    monkeypatch.setattr(table, "attempt", lambda name, *args: call(name, *args) and 0)
    monkeypatch.setattr(table, "memory_kind", lambda ordinal: "kind")
    monkeypatch.setattr(table, "memory_unit", lambda kind: 4096)
    monkeypatch.setattr(table, "allow_access", lambda *args: None)
    part = memory.Shareable(devices[1], 100)
    part.allow([0, 1, 2])
    made.clear()
    del part
    gc.collect()
    assert is_over.wait(20)
    names = [name for name, *_ in made]
    begin = names.index("cuMemUnmap")
    pushed = [args[0] for name, *args in made[:begin] if name == "cuCtxPushCurrent"]
    assert pushed == [70, 72, 71, 71]
    assert names[:begin].count("cuCtxSynchronize") == 3


def test_memory_for_peer_access_is_freed_when_its_peers_devices_are_idle_too(monkeypatch):
    made, is_over = [], threading.Event()
    devices = [gpu.Device(k, "H200", f"uuid {k}", "sm_90a", 132, 1024, 70 + k) for k in range(2)]

    def attempt(name, *args):
        made.append((name, *args))
        if name == "cuMemFree":
            is_over.set()
        return 0

    table = gpu.table()
    monkeypatch.setattr(gpu, "device", devices.__getitem__)
    monkeypatch.setattr(gpu, "uncaptured", contextlib.nullcontext)
    monkeypatch.setattr(table, "call", lambda name, *args, **note: attempt(name, *args))
    monkeypatch.setattr(table, "attempt", attempt)
    monkeypatch.setattr(table, "allocate", lambda nbytes, note: 0x1000)
    part = memory.Plain(devices[0], 100, is_exported=False)
    part.allow([0, 1])
    made.clear()
    del part
    gc.collect()
    assert is_over.wait(20)
    assert made[:3] == [("cuCtxPushCurrent", 71), ("cuCtxSynchronize",), ("cuCtxPopCurrent",)]


@pytest.mark.parametrize("ends", [True, False, "fails"])
def test_a_dropped_backend_tells_its_peers_though_the_device_does_not_end(monkeypatch, ends):
    waited, told = [], []

    def synchronize_within(where, seconds):
        waited.append((where, seconds))
        if ends == "fails":
            raise kccl.BackendError("mishap")
        return ends

    monkeypatch.setattr(departure.driver, "synchronize_within", synchronize_within)
    monkeypatch.setattr(departure, "depart", lambda *args: told.append(args))
    monkeypatch.setattr(gpu.Device, "current", lambda self: contextlib.nullcontext())
    state = types.SimpleNamespace(status=lib.kKcclOk, limit_ns=3 * 10**9)
    scratches = types.SimpleNamespace(comm="comm")
    departure._leave(WHERE, state, scratches, os.getpid())
    assert waited == [(WHERE, 3.0)] and told == [("comm", state, lib.kKcclLeft)]
