"""kccl.gpu with the table of a vendor that is made up, whose driver is in host memory."""

import dataclasses
import gc
import json
import queue
import threading
from types import SimpleNamespace

import pytest
from made_up_vendor import LAUNCH_US, OK, MadeUp
from ranks import eventually

import kccl
from kccl.base import dlpack
from kccl.base.abi import ffi
from kccl.gpu import arrays, driver, graphs, library, memory, release, state
from kccl.gpu.cuda import CUDA
from kccl.gpu.table import DriverError, Names, Table


def test_a_process_drives_gpus_of_one_vendor(toys):
    assert driver.choose(driver.table()) is driver.table()
    with pytest.raises(kccl.BackendError, match=r"GPUs of Toys, .* drive those of NVIDIA: one"):
        driver.choose(CUDA)
    assert driver.num_devices() == 2


def test_nvidia_is_the_vendor_unless_another_was_chosen():
    assert driver.table() is CUDA


def test_a_table_without_a_name_or_a_method_cannot_be_made():
    names = dataclasses.asdict(CUDA.names)
    del names["fill"]
    with pytest.raises(TypeError, match="'fill'"):
        Names(**names)
    incomplete = type("Incomplete", (MadeUp,), {"pop": Table.pop})
    with pytest.raises(TypeError, match=r"abstract method '?pop"):
        incomplete()


def test_memory_is_filled_copied_and_given_back_on_its_device(toys):
    device = driver.pick_device(1)
    assert (device.name, device.arch, device.multiprocessors) == ("a toy", "toy1", 3)
    with device.current():
        stream = driver.make_stream()
    mine = memory.Memory(device, 16, stream)
    assert driver.read(mine.address, 16, stream) == bytes(16)
    driver.fill(mine.address + 4, 0xFF, 8, stream)
    driver.write(mine.address, b"abcd", stream)
    assert driver.read(mine.address, 16, stream) == b"abcd" + b"\xff" * 8 + bytes(4)
    mine.clear()
    assert driver.read(mine.address, 16, stream) == bytes(16)
    opened = memory.Opened(device, memory.Plain(device, 1, is_exported=True).export(), 0)
    assert opened.address in toys.memory
    address = mine.address
    del mine
    gc.collect()
    assert eventually(lambda: ("toyFree", address, 1) in toys.made)
    assert toys.toyHere() == (OK, 0), "dropping memory changed the current device"


def test_kernels_are_loaded_launched_and_clocked(toys, tmp_path):
    path = tmp_path / "kernels"
    path.write_bytes(b'["add"]\n' + json.dumps({"add": [[0, 16]]}).encode())
    device, stream = driver.device(1), 5
    entry = library.Entry(library.Code(path), 0)
    with device.current():
        assert entry.parameters == ((16, 1),)
    x = memory.Memory(device, 4, stream)
    argument = (20).to_bytes(8, "little") + x.address.to_bytes(8, "little")
    shape = {"grid": 2, "block": 64}
    with device.current():
        function = entry.function()
        launch = lambda: driver.launch(  # noqa: E731
            function, [argument], **shape, shared_bytes=0, stream=stream
        )
        assert driver.intervals_us(stream, [launch, lambda: None, launch]) == pytest.approx(
            [LAUNCH_US, 0, LAUNCH_US]
        )
    graph = graphs.KernelGraph(device, function, argument, **shape)
    driver.call("toyLaunchGraph", graph.handle, stream)
    assert driver.read(x.address, 4, stream) == (60).to_bytes(4, "little")


@pytest.fixture
def code(monkeypatch, tmp_path):
    """The file of a compiled module, in a process that has loaded nothing."""
    for name in ("_loaded", "_modules", "_served"):
        monkeypatch.setattr(library, name, {})
    monkeypatch.setattr(library, "_here", threading.local())
    path = tmp_path / "kernels"
    path.write_bytes(b'["add"]\n' + json.dumps({"add": [[0, 16]]}).encode())
    return path


def test_no_rank_waits_for_another_ones_gpu_to_load(toys, code):
    """The kernel on device 0 ends when device 1 launches one, which it has to load first."""
    toys.ends[0] = threading.Event()
    entry = library.Entry(library.Code(code), 0)

    def load(ordinal):
        with driver.device(ordinal).current():
            entry.function()

    first = threading.Thread(target=load, args=(0,))
    first.start()
    assert toys.waiting.get(timeout=30) == 0
    second = threading.Thread(target=load, args=(1,))
    second.start()
    second.join(30)
    assert toys.loads == [1]
    toys.ends[0].set()
    first.join()
    second.join()
    load(0)
    load(1)
    assert toys.loads == [1, 0]


def test_ranks_of_one_gpu_load_a_file_once(toys, code):
    """The kernel that the first one launches may wait for the second one, which must not load."""
    toys.ends[0] = threading.Event()
    entry = library.Entry(library.Code(code), 0)
    begun, found = threading.Event(), []

    def load(is_second):
        with driver.device(0).current():
            if is_second:
                begun.set()
            found.append(entry.function())

    ranks = [threading.Thread(target=load, args=(is_second,)) for is_second in (False, True)]
    ranks[0].start()
    assert toys.waiting.get(timeout=30) == 0
    ranks[1].start()
    assert begun.wait(30)
    with pytest.raises(queue.Empty):
        toys.waiting.get(timeout=0.5)
    toys.ends[0].set()
    for rank in ranks:
        rank.join(30)
    assert toys.loads == [0] and found[0] == found[1]


def test_a_load_that_failed_is_tried_again(toys, code):
    entry = library.Entry(library.Code(code.with_name("gone")), 0)
    with driver.device(0).current():
        with pytest.raises(Exception, match="gone"):
            entry.function()
        code.rename(code.with_name("gone"))
        entry.function()
    assert toys.loads == [0]


def test_no_entry_lowers_the_shared_memory_that_another_one_allowed(toys, code, monkeypatch):
    told, both = [], threading.Barrier(2)
    monkeypatch.setitem(
        vars(driver.table()), "allow_shared_bytes", lambda *told_now: told.append(told_now)
    )
    whole = library.Code(code)
    one, other = library.entries(whole, 1) + library.entries(whole, 1)
    with driver.device(0).current():
        function = one.function(2048)
        assert other.function(1024) == function
        one.function(2048)
    assert told == [(function, 2048)]

    def grow(entry):
        with driver.device(1).current():
            both.wait(30)
            for shared_bytes in range(1, 500):
                entry.function(shared_bytes)

    ranks = [threading.Thread(target=grow, args=(entry,)) for entry in (one, other)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert [size for _, size in told[1:]] == list(range(1, 500))


def test_what_calls_need_is_loaded_before_a_kernel_can_wait(toys, code, monkeypatch):
    """Whether a module was compiled before the communicator was made, or after."""
    monkeypatch.setattr(library, "_ready", lambda arch, world_size, compiles: [code])
    later = code.with_name("later")
    later.write_bytes(code.read_bytes())
    for path in (code, later):
        if path == later:
            code.unlink()
        library.load(path, "toy1")
        if path == code:
            assert toys.loads == []
            library.serve(driver.device(1), 2, "all")
    # The module and the library's kernel, which is the same file here, and the later module.
    assert toys.loads == [1, 1, 1]
    toys.ends[1] = threading.Event()
    with driver.device(1).current():
        for kernel in library.entries(library.load(later, "toy1"), 1):
            kernel.function()
    library.serve(driver.device(1), 2, "all")
    # A device of another rank, which another thread serves, loads for itself.
    other = threading.Thread(target=library.serve, args=(driver.device(0), 2, "none"))
    other.start()
    other.join()
    assert toys.loads == [1, 1, 1, 0, 0]
    library.load(later, "another architecture")


def test_a_later_communicator_may_need_kernels_that_an_earlier_one_did_not(toys, monkeypatch):
    """One between nodes compiles no kernels, one of as many ranks in a node does."""
    compiled = []

    def ready(arch, world_size, compiles):
        compiled.append((world_size, compiles))
        return []

    monkeypatch.setattr(library, "_ready", ready)
    for which in ("cached", "cached", "all", "all", "cached"):
        library.serve(driver.device(1), 3, which)
    assert compiled == [(3, False), (3, True)]


def frees(toys, *memories):
    """Tells which of these addresses were freed."""
    freed = [address for name, address, _ in toys.made if name == "toyFree"]
    return [each in freed for each in memories]


def test_what_is_dropped_waits_for_its_users_and_for_no_other_gpu(toys, monkeypatch):
    """Device 0 runs a kernel. What device 1 alone has used is freed meanwhile."""
    toys.ends[0] = threading.Event()
    busy, idle = (memory.Memory(driver.device(ordinal), 8, 5) for ordinal in (0, 1))
    shared = memory.Plain(driver.device(1), 8, is_exported=False)
    shared.allow([0, 1])
    addresses = busy.address, shared.address, idle.address
    # Longer than the kernel of device 0 runs.
    monkeypatch.setattr(release, "_DRAIN_S", 60)
    del shared
    assert toys.waiting.get(timeout=30) == 0
    del busy
    del idle
    release.drain(driver.device(1))
    assert frees(toys, *addresses) == [False, False, True]
    toys.ends[0].set()
    release.drain()
    assert frees(toys, *addresses) == [True] * 3


@pytest.mark.parametrize("is_viewed", [False, True])
def test_a_window_that_is_closed_waits_for_no_other_ranks_gpu(toys, toy_ranks, is_viewed):
    """Rank 0 goes on, and its GPU waits for rank 1, which still closes."""
    goes_on = threading.Event()

    def main(comm):
        window = comm.window(64)
        view = window.array((4,), kccl.float32)
        if not is_viewed:
            del view
        address = window.addresses[comm.rank]
        if comm.rank == 1:
            free = window.free
            window.free = lambda: goes_on.wait(30) and free()
        window.close()
        if comm.rank == 0:
            toys.ends[0] = threading.Event()
            goes_on.set()
        else:
            assert frees(toys, address) == [not is_viewed]
            if is_viewed:
                # Kernels of GPU 0 may have the view. What is dropped later need not wait for them.
                other = memory.Memory(driver.device(1), 8, 5)
                addresses = address, other.address
                del view
                del other
                release.drain(driver.device(1))
                assert frees(toys, *addresses) == [False, True]
            toys.ends[0].set()
        comm.gather_objects(0)

    toy_ranks(main, 2)


def test_a_ranks_state_reaches_the_device(toys):
    context = ffi.new("KcclHostContext *")
    made = state.DeviceState(driver.device(0), context, has_dependents=True)
    made.limit_ns = 12
    assert ffi.cast("KcclState *", made.address).limit_ns == 12
    assert made.queue.launch == len("toyLaunch") and made.queue.launch_ex == 0


def test_numbers_of_other_interfaces_are_the_vendors(toys):
    array = arrays.DeviceArray(0x1000, (2,), kccl.float32, 1, None)
    assert array.__dlpack_device__() == (77, 1)
    found = dlpack.read(array, "x", 77)
    assert (found.device_type, found.device_id) == (77, 1)
    assert arrays.view(array, "x", writable=True, device=1).stream() == 5
    assert kccl.gpu.LEGACY_STREAM == 5


def test_errors_name_the_drivers_function_and_code(toys):
    mine = memory.Memory(driver.device(0), 4, 5)
    with pytest.raises(DriverError, match=r"^toyFill failed: TOY_WRONG \(9\)$"):
        driver.fill(mine.address, 0, 4, stream=6)
    toys.is_full = True
    with pytest.raises(DriverError, match=r"^toyAllocate failed: TOY_FULL \(7\) of 8 bytes$"):
        memory.Memory(driver.device(0), 8, 5)


def test_cudas_table_has_names_that_cuda_bindings_knows():
    binding = pytest.importorskip("cuda.bindings.driver")
    # Functions that only C calls are not in `names`: they are looked up at run time.
    for name in dataclasses.astuple(CUDA.names):
        assert callable(getattr(binding, name)), name
    for name in (CUDA.multiprocessors, CUDA.shared_bytes, CUDA.maps_memory, CUDA.exports_memory):
        assert hasattr(binding.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    numbers = SimpleNamespace(
        out_of_memory=binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
        not_ready=binding.CUresult.CUDA_ERROR_NOT_READY,
        is_accessible=binding.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
        stream_flags=binding.CUstream_flags.CU_STREAM_NON_BLOCKING,
        legacy_stream=binding.CU_STREAM_LEGACY,
        host_flags=binding.CU_MEMHOSTALLOC_PORTABLE | binding.CU_MEMHOSTALLOC_DEVICEMAP,
    )
    for name, wanted in vars(numbers).items():
        assert getattr(CUDA, name) == int(wanted), name
    fields = {name for name, _ in ffi.typeof("KcclGpuQueue").fields}
    assert {*CUDA.queue, *CUDA.dependents_queue} <= fields
