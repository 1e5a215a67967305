"""How windows on GPUs are shared: the choice, and the two ways without VMM, with a fake driver."""

import gc
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from ranks import eventually

import kccl
from kccl.base import env, failure
from kccl.base.abi import ffi, lib
from kccl.gpu import driver as gpu
from kccl.gpu import memory, release, sharing
from kccl.gpu.table import DriverError
from kccl.jit.nvrtc import NVRTC
from kccl.ranks import bootstrap
from kccl.ranks.mesh import Mesh
from kccl.tools.checks import gpus

FDS, VMM = "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
UNIT = 2 << 20


class Driver:
    """A fake driver of two devices. Opened memory has another address, as in another process."""

    def __init__(self, monkeypatch):
        self.lacks = set()
        self.refuses = ""
        self.cannot_open = None
        self.enabled = []
        self.calls = []
        self._next = UNIT
        self._lock = threading.Lock()
        self.devices = [
            SimpleNamespace(ordinal=i, name="H200", uuid=f"uuid{i}", context=100 + i, arch="sm_90a")
            for i in range(2)
        ]
        for device in self.devices:
            device.current = lambda device=device: self._current(device)
        self.current = threading.local()
        for name in ("call", "attempt", "constant"):
            monkeypatch.setattr(gpu.table(), name, getattr(self, name))
        monkeypatch.setattr(gpu.table(), "error_text", lambda *facts: " ".join(map(str, facts)))
        for name in ("attribute", "device", "num_devices", "uuid"):
            monkeypatch.setattr(gpu, name, getattr(self, name))
        monkeypatch.setattr(gpu, "can_access", lambda a, b: True)
        monkeypatch.setattr(gpu, "fill", lambda *args: None)

    def _current(self, device):
        self.current.context = device.context
        return nullcontext()

    def device(self, ordinal):
        return self.devices[ordinal]

    def num_devices(self):
        return 2

    def uuid(self, ordinal):
        return f"uuid{ordinal}"

    def attribute(self, ordinal, name):
        return int(name not in self.lacks)

    def constant(self, name):
        return SimpleNamespace if name == "CUipcMemHandle" else 0

    def call(self, name, *args, note=""):
        self.calls.append((name, *args))
        if name == "cuMemAlloc":
            with self._lock:
                address, self._next = self._next, self._next + args[0]
            return address
        if name == "cuThreadExchangeStreamCaptureMode":
            return args[0]
        if name == "cuDeviceGetCount":
            return len(self.devices)
        if name == "cuIpcGetMemHandle":
            return SimpleNamespace(reserved=args[0].to_bytes(64, "little"))
        if name == "cuIpcOpenMemHandle":
            if self.cannot_open and self.current.context == self.cannot_open.context:
                raise DriverError("cuIpcOpenMemHandle failed", 1)
            handle, flags = args
            assert flags == 1 and len(handle.reserved) == 64
            return int.from_bytes(handle.reserved, "little") + (1 << 40)
        raise AssertionError(name)

    def attempt(self, name, *args):
        self.calls.append((name, *args))
        if name == "cuCtxEnablePeerAccess":
            pair = self.current.context, args[0]
            code = 704 if pair in self.enabled else 0
            self.enabled.append(pair)
            return 217 if self.refuses == name else code
        return 0


class Shareable:
    """Replaces memory.Shareable in tests of the choice."""

    def __init__(self, driver, device):
        if driver.refuses == "cuMemCreate":
            raise DriverError("cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800)", 800)
        self.refuses = driver.refuses

    def export(self):
        if self.refuses == "export":
            raise DriverError("cuMemExportToShareableHandle failed: NOT_SUPPORTED (801)", 801)
        return os.open(os.devnull, os.O_RDONLY)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(monkeypatch)
    made = lambda device, nbytes: Shareable(driver, device)  # noqa: E731
    monkeypatch.setattr(sharing, "Shareable", made)
    yield driver
    # What the test dropped must be released by this driver, not by the machine's.
    gc.collect()
    release.drain()


class Meshes:
    """Meshes of ranks that are threads and stand for processes."""

    def __init__(self, world_size):
        sockets = bootstrap.thread_sockets(world_size)
        self._meshes = [Mesh(rank, world_size, each) for rank, each in enumerate(sockets)]

    def run(self, main):
        """main(mesh) on every rank; results by rank, or what was raised."""
        found = [None] * len(self._meshes)

        def body(rank):
            try:
                found[rank] = main(self._meshes[rank])
            except Exception as error:
                found[rank] = error.with_traceback(None)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


# The choice


def test_vmm_is_first_and_leaves_nothing_open(driver):
    before = len(os.listdir("/proc/self/fd"))
    for are_threads in (False, True):
        made = sharing.choose(driver.devices[0], are_threads=are_threads, forced="")
        assert (made.way, made.reason, made.caveat) == ("vmm", "", "")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("lacks", "refuses", "reason"),
    [(FDS, "", FDS), ("", "cuMemCreate", "NOT_PERMITTED"), ("", "export", "NOT_SUPPORTED")],
)
def test_without_export_processes_take_ipc_handles_and_say_why(driver, lacks, refuses, reason):
    driver.lacks, driver.refuses = {lacks}, refuses
    made = sharing.choose(driver.devices[0], are_threads=False, forced="")
    assert made.way == "ipc" and reason in made.reason
    assert "not guaranteed that a survivor's GPU context outlives a lost peer" in made.caveat
    with pytest.raises(kccl.BackendError, match=f"'vmm' is impossible: .*{reason}"):
        sharing.choose(driver.devices[0], are_threads=False, forced="vmm")


def test_threads_need_no_export_and_else_take_peer_access(driver):
    driver.lacks, driver.refuses = {FDS}, "export"
    assert sharing.choose(driver.devices[0], are_threads=True, forced="").way == "vmm"
    driver.lacks = {VMM}
    made = sharing.choose(driver.devices[0], are_threads=True, forced="")
    assert made.way == "peer" and VMM in made.reason and made.caveat == ""


@pytest.mark.parametrize(("are_threads", "way"), [(False, "ipc"), (True, "peer")])
def test_a_way_can_be_forced_where_it_fits(driver, are_threads, way):
    made = sharing.choose(driver.devices[0], are_threads=are_threads, forced=way)
    assert (made.way, made.reason) == (way, "KCCL_WINDOWS asks for it")
    other = {"ipc": "peer", "peer": "ipc"}[way]
    with pytest.raises(kccl.InvalidArgument, match=f"KCCL_WINDOWS='{other}' must be vmm or {way}"):
        sharing.choose(driver.devices[0], are_threads=are_threads, forced=other)


def test_the_variable_is_checked():
    assert env.read({"KCCL_WINDOWS": "ipc"}).windows == "ipc"
    with pytest.raises(kccl.InvalidArgument, match="KCCL_WINDOWS='fd' must be one of vmm, ipc"):
        env.read({"KCCL_WINDOWS": "fd"})


def agreed(driver, forced=("", "")):
    return Meshes(2).run(
        lambda mesh: sharing.agree(
            mesh,
            driver.devices[mesh.rank],
            are_threads=False,
            forced=forced[mesh.rank],
            timeout=5,
        )
    )


def test_all_ranks_take_the_way_that_each_can(driver):
    assert [made.way for made in agreed(driver)] == ["vmm", "vmm"]
    can = sharing.choose

    def only_rank_0(device, **how):
        return can(device, **how) if device.ordinal == 0 else sharing.Sharing("ipc", "no fds")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "choose", only_rank_0)
        assert agreed(driver) == [sharing.Sharing("ipc", "rank 1: no fds")] * 2


def test_ranks_that_are_asked_for_different_ways_say_so(driver):
    for error in agreed(driver, ("ipc", "")):
        assert isinstance(error, kccl.InvalidArgument)
        assert "KCCL_WINDOWS differs between ranks: 'ipc', ''" in str(error)


def test_devices_without_a_path_between_them_are_refused(driver, monkeypatch):
    monkeypatch.setattr(gpu, "can_access", lambda a, b: a == b)
    for error in agreed(driver):
        assert isinstance(error, kccl.BackendError) and "no peer-to-peer path" in str(error)


# The windows


def window(driver, mesh, way, nbytes=5000):
    return memory.GpuWindow(
        mesh,
        nbytes,
        "window",
        5,
        device=driver.devices[mesh.rank],
        are_threads=way == "peer",
        way=way,
        stream=1,
    )


def test_ipc_windows_open_the_peers_handles_and_close_but_never_free_them(driver):
    windows = Meshes(2).run(lambda mesh: window(driver, mesh, "ipc"))
    first, second = (each.addresses for each in windows)
    assert first[1] == second[1] + (1 << 40) and second[0] == first[0] + (1 << 40)
    sizes = [args[0] for name, *args in driver.calls if name == "cuMemAlloc"]
    assert sizes == [UNIT] * 2, "a window shares a block of the driver with other memory"
    del windows
    gc.collect()
    closed = [("cuIpcCloseMemHandle", each) for each in (first[1], second[0])]
    assert eventually(lambda: all(each in driver.calls for each in closed))
    assert "cuMemFree" not in {name for name, *_ in driver.calls}


def test_ipc_memory_of_a_window_that_failed_is_freed_when_all_have_closed_it(driver):
    """The ranks know with their next window that the others have closed what they opened."""
    meshes = Meshes(2)
    driver.cannot_open = driver.devices[1]
    for error in meshes.run(lambda mesh: window(driver, mesh, "ipc")):
        assert isinstance(error, kccl.BackendError) and "failed on rank 1" in str(error)
    opened = [args[0].reserved for name, *args in driver.calls if name == "cuIpcOpenMemHandle"]
    failed = {int.from_bytes(handle, "little") for handle in opened}
    # Rank 0 may have heard that before it opened rank 1's part.
    closed = {args[0] - (1 << 40) for name, *args in driver.calls if name == "cuIpcCloseMemHandle"}
    assert len(failed) - len(closed) == 1 and closed < failed

    def freed():
        return {args[0] for name, *args in driver.calls if name == "cuMemFree"}

    assert freed() == set()
    driver.cannot_open = None
    windows = meshes.run(lambda mesh: window(driver, mesh, "ipc"))
    gc.collect()
    assert eventually(lambda: len(freed()) == 2) and freed() >= failed
    assert not freed() & {each.addresses[mesh] for mesh, each in enumerate(windows)}


def test_threads_windows_give_every_device_access_and_are_freed(driver):
    for _ in range(2):
        windows = Meshes(2).run(lambda mesh: window(driver, mesh, "peer"))
        assert windows[0].addresses == windows[1].addresses
    assert set(driver.enabled) == {(101, 100), (100, 101)}
    addresses = windows[0].addresses
    del windows
    gc.collect()
    freed = [("cuMemFree", each) for each in addresses]
    assert eventually(lambda: all(each in driver.calls for each in freed))


def test_peer_access_that_is_refused_is_an_error(driver):
    driver.refuses = "cuCtxEnablePeerAccess"
    found = Meshes(2).run(lambda mesh: window(driver, mesh, "peer"))
    assert any(isinstance(each, DriverError) and each.code == 217 for each in found)
    # The other rank may fail because this one has withdrawn its memory.
    assert all(isinstance(each, kccl.Error) for each in found)


def test_a_rank_that_has_taken_its_part_back_is_named(driver, monkeypatch):
    monkeypatch.setattr(memory, "_handed", Forgetful())
    found = Meshes(2).run(lambda mesh: window(driver, mesh, "peer"))
    assert any(
        isinstance(each, kccl.PeerLost) and each.peer == 1 - i for i, each in enumerate(found)
    )


class Forgetful(dict):
    """A table of handed-over memory in which peers find nothing."""

    def __contains__(self, address):
        return False


# Messages


def lost(caveat):
    record = ffi.new("KcclRecord *")
    record.status = lib.kKcclPeerLost
    record.peer = 1
    return str(failure.error_of(lib.kKcclPeerLost, record, 0, caveat))


def test_a_lost_peer_has_the_caveat_of_ipc_handles():
    caveat = sharing.Sharing("ipc", "rank 1: no fds").caveat
    assert lost(caveat).endswith(f"comm.shrink(); {caveat}") and "rank 1: no fds" in caveat
    assert lost("").endswith("comm.shrink()")


@pytest.mark.parametrize("variable", ["", "ipc", "peer"])
def test_doctor_warns_of_ipc_handles(driver, monkeypatch, variable):
    monkeypatch.setitem(vars(NVRTC), "full_name", "NVRTC 13.0")
    monkeypatch.setenv("KCCL_WINDOWS", variable)
    look = gpus.cuda()
    if variable == "ipc":
        assert look.status == "warn" and "windows by CUDA IPC" in look.found
        assert "not guaranteed" in look.reason and "KCCL_WINDOWS asks for it" in look.reason
    else:
        assert look.status == "ok" and look.reason == look.cure == ""
    driver.refuses = "export"
    monkeypatch.delenv("KCCL_WINDOWS")
    look = gpus.cuda()
    assert look.status == "warn" and "cuMemExportToShareableHandle failed" in look.reason
