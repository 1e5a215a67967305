"""Calls on the hip backend besides their results: streams, graphs, users' kernels, time-outs."""

import ctypes
import gc
import weakref

import numpy as np
import pytest
from hip_arrays import from_gpu, ordinal_of, to_gpu

import kccl
from kccl.gpu import driver

SOURCE = """
#include <kccl/kccl.cuh>

// Every block reduces its own slice.
KCCL_KERNEL void reduce_slices(kccl::DeviceComm comm, float* x, long each) {
    float* slice = x + kccl::platform::block_in_grid() * each;
    kccl::all_reduce<float, kccl::Sum>(kccl::block(), comm, slice, slice, each);
}

struct Pair { char tag; double value; };
KCCL_KERNEL void mixed(double* out, char a, Pair pair, short b) {
    if (kccl::platform::thread_in_block() == 0) {
        out[0] = a;
        out[1] = pair.value;
        out[2] = b;
    }
}
"""


class Pair(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_char), ("value", ctypes.c_double))


@pytest.mark.long
def test_a_capture_is_replayed(amd):
    gpu = driver.table()

    def main(comm):
        x = to_gpu(np.full(200, comm.rank + 1, np.float32), ordinal_of(comm))
        with driver.device(x.device).current():
            stream = driver.make_stream()
            op = comm.all_reduce.prepare(x, stream=stream)
            op()
            driver.synchronize_stream(stream)
            mode = gpu.constant("hipStreamCaptureMode.hipStreamCaptureModeGlobal")
            gpu.call("hipStreamBeginCapture", stream, mode)
            op()
            comm.broadcast(x, stream=stream)
            graph = gpu.call("hipStreamEndCapture", stream)
            instance = gpu.call(gpu.names.instantiate_graph, graph, 0)
            for _ in range(2):
                gpu.call("hipGraphLaunch", instance, stream)
            driver.synchronize_stream(stream)
        comm.check()
        return float(from_gpu(x)[7]), op.plan.name

    # 1 + 2, then twice the sum of two equal numbers.
    results = kccl.run_threads(main, 2, backend="hip")
    assert [value for value, _ in results] == [12, 12]


def test_users_kernels_take_arguments_of_any_size(amd):
    module = kccl.compile(SOURCE, ["mixed", "reduce_slices"], target="hip")
    assert (module.arch, module.warp_size) == ("gfx942", 64)

    def main(comm):
        ordinal = ordinal_of(comm)
        out, x = to_gpu(np.zeros(3), ordinal), to_gpu(np.full(80, comm.rank + 1.0, "f4"), ordinal)
        module.kernel("mixed")(comm, out, np.int8(-3), Pair(b"x", 2.5), np.int16(7))
        device_comm = comm.device_comm(channels=2, max_bytes=4096)
        module.kernel("reduce_slices")(comm, device_comm, x, 40, grid=2, block=64)
        with pytest.raises(kccl.InvalidArgument, match=r"grid is 100000, must be at most 9728"):
            module.kernel("reduce_slices")(comm, device_comm, x, 1, grid=100_000, block=64)
        comm.check()
        return from_gpu(out).tolist(), set(from_gpu(x).tolist())

    assert kccl.run_threads(main, 2, backend="hip") == [([-3, 2.5, 7], {3})] * 2


@pytest.mark.parametrize(
    ("shape", "words"),
    [({"grid": 1, "block": 64}, "grid 1"), ({"grid": 2, "block": 128}, "block 128")],
)
def test_checked_launches_of_kernels(amd, monkeypatch, shape, words):
    """Under KCCL_CHECK=1 the ranks compare what they launch, if it takes a DeviceComm."""
    monkeypatch.setenv("KCCL_CHECK", "1")
    module = kccl.compile(SOURCE, ["mixed", "reduce_slices"], target="hip")

    def main(comm):
        ordinal = ordinal_of(comm)
        out, x = to_gpu(np.zeros(3), ordinal), to_gpu(np.ones(80, "f4"), ordinal)
        device_comm = comm.device_comm(channels=2, max_bytes=4096)
        if comm.rank == 0:
            module.kernel("mixed")(comm, out, np.int8(-3), Pair(b"x", 2.5), np.int16(7))
        reduce_slices = module.kernel("reduce_slices")
        reduce_slices(comm, device_comm, x, 40, grid=2, block=64)
        mine = shape if comm.rank else {"grid": 2, "block": 64}
        with pytest.raises(
            kccl.InvalidArgument, match="the ranks disagree about this call"
        ) as said:
            reduce_slices(comm, device_comm, x, 40, **mine)
        assert "launch of reduce_slices, grid 2, block 64, shared_bytes 0" in str(said.value)
        assert words in str(said.value)
        comm.check()
        return set(from_gpu(x).tolist())

    assert kccl.run_threads(main, 2, backend="hip") == [{2}] * 2


def test_launches_that_no_gpu_can_make_are_refused(amd, monkeypatch):
    module = kccl.compile(SOURCE, ["mixed"], target="hip")

    def main(comm):
        kernel = module.kernel("mixed")
        args = to_gpu(np.zeros(3), ordinal_of(comm)), np.int8(-3), Pair(b"x", 2.5), np.int16(7)
        with pytest.raises(kccl.InvalidArgument, match=r"shared_bytes is 65537, must be at most"):
            kernel(comm, *args, shared_bytes=65537)
        kernel(comm, *args, block=1024)
        needs = {"MAX_THREADS_PER_BLOCK": 512, "NUM_REGS": 128, "SHARED_SIZE_BYTES": 4096}
        monkeypatch.setitem(
            vars(driver.table()), "function_attribute", lambda function, name: needs[name]
        )
        kernel.entry.code._needs.clear()
        with pytest.raises(
            kccl.InvalidArgument,
            match=r"block is 1024, must be at most 512: the code of mixed allows .* its 128 regis",
        ):
            kernel(comm, *args, block=1024)
        with pytest.raises(
            kccl.InvalidArgument,
            match=r"shared_bytes is 61441, must be at most 61440: .* besides the 4096 bytes of the",
        ):
            kernel(comm, *args, block=512, shared_bytes=61441)
        kernel(comm, *args, block=512, shared_bytes=61440)
        kernel.entry.code._needs.clear()

    kccl.run_threads(main, 1, backend="hip")


def test_one_sided_calls(amd):
    def main(comm):
        window = comm.window(4096)
        peer = 1 - comm.rank
        comm.put(to_gpu(np.full(16, comm.rank + 1, np.int32), ordinal_of(comm)), peer, window)
        comm.signal(peer)
        comm.wait()
        comm.check()
        mine = from_gpu(window.array((16,), kccl.int32))
        comm.barrier()
        comm.check()
        return set(mine.tolist())

    assert kccl.run_threads(main, 2, backend="hip") == [{2}, {1}]


def test_prepared_one_sided_calls(amd):
    def main(comm):
        window, ordinal = comm.window(4096), ordinal_of(comm)
        peer = 1 - comm.rank
        x, back = (to_gpu(np.full(16, each, np.int32), ordinal) for each in (comm.rank + 1, 0))
        put, get = comm.put.prepare(x, peer, window, 64), comm.get.prepare(back, peer, window, 64)
        signal, wait = comm.signal.prepare(peer, 3), comm.wait.prepare(3, peer=peer)
        for _ in range(3):
            put()
            signal()
            wait()
        assert get() is back and put.plan.name == "put"
        comm.check()
        mine = from_gpu(window.array((32,), kccl.int32))
        comm.barrier()
        comm.check()
        return set(mine[16:].tolist()), set(from_gpu(back).tolist())

    assert kccl.run_threads(main, 2, backend="hip") == [({2}, {1}), ({1}, {2})]


def test_a_rank_that_does_not_come_is_named_and_reset_recovers(amd):
    def main(comm):
        ordinal = ordinal_of(comm)
        x = to_gpu(np.ones(8, np.float32), ordinal)
        comm.all_reduce(x)
        driver.synchronize(driver.device(ordinal))
        comm.timeout = 0.2
        error = None
        if comm.rank == 0:
            comm.all_reduce(x)
            driver.synchronize(driver.device(ordinal))
            with pytest.raises(kccl.Timeout) as caught:
                comm.check()
            error = str(caught.value)
        comm.timeout = 20
        comm.reset()
        x = to_gpu(np.ones(8, np.float32), ordinal)
        comm.all_reduce(x)
        comm.check()
        return error, float(from_gpu(x)[0])

    (error, first), (_, second) = kccl.run_threads(main, 2, backend="hip")
    assert "on channel 0: peer 1 did not arrive" in error and (first, second) == (2, 2)


def test_a_cooperative_launch_is_refused(amd):
    shape = {"grid": 1, "block": 64, "shared_bytes": 0, "stream": 0}
    with pytest.raises(kccl.BackendError, match="no cooperative launches on GPUs of AMD"):
        driver.launch(0, [], **shape, cooperative=True)


def test_an_array_of_another_device_is_refused(amd):
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match="x is on device 3, must be on the commun"):
            comm.all_reduce(to_gpu(np.ones(1, np.float32), 3))

    kccl.run_threads(main, 1, backend="hip")


WINDOW_SOURCE = """
#include <kccl/kccl.cuh>

KCCL_KERNEL void pass(kccl::DeviceComm comm, kccl::Window window, const int* in) {
    const kccl::Block block = kccl::block();
    const int next = (comm.rank + 1) % comm.world_size;
    kccl::put(block, comm, window, next, 16, in, 64 * sizeof(int));
    kccl::signal(block, comm, next, 0);
    kccl::wait(block, comm, -1, 0, 1);
}
"""


@pytest.mark.parametrize("made_by", ["window", "empty"])
def test_a_window_is_an_argument_of_a_kernel(amd, made_by):
    module = kccl.compile(WINDOW_SOURCE, ["pass"], target="hip")

    def main(comm):
        window = comm.window(512) if made_by == "window" else comm.empty(128, kccl.int32)
        x = to_gpu(np.full(64, comm.rank + 1, np.int32), ordinal_of(comm))
        device_comm = comm.device_comm(channels=1, max_bytes=64)
        module.kernel("pass")(comm, device_comm, window, x)
        driver.synchronize(driver.device(ordinal_of(comm)))
        comm.check()
        mine = window.array((128,), kccl.int32) if made_by == "window" else window
        return set(from_gpu(mine)[4:68].tolist())

    assert kccl.run_threads(main, 3, backend="hip") == [{3}, {1}, {2}]


def test_a_window_is_closed_when_the_device_is_idle(amd):
    """The memory is free at once, except for what an array views; later uses are errors."""

    def main(comm):
        window, peer = comm.window(512), 1 - comm.rank
        x = to_gpu(np.full(16, comm.rank + 1, np.int32), ordinal_of(comm))
        prepared = comm.put.prepare(x, peer, window)
        prepared()
        comm.barrier()
        array = window.array((16,), kccl.int32)
        parts = [weakref.ref(part) for part in window._parts]
        window.close()
        gc.collect()
        assert set(from_gpu(array).tolist()) == {peer + 1}
        for use in (prepared, lambda: comm.put(x, peer, window), lambda: window.array((1,), "f4")):
            with pytest.raises(kccl.InvalidArgument, match=r"window is one of 512 bytes"):
                use()
        comm.barrier()
        driver.synchronize(driver.device(ordinal_of(comm)))
        del array
        # The barrier is a kernel. Behind it no rank's array views the window.
        comm.barrier()
        driver.synchronize(driver.device(ordinal_of(comm)))
        gc.collect()
        return [part() for part in parts]

    assert kccl.run_threads(main, 2, backend="hip") == [[None] * 2] * 2
