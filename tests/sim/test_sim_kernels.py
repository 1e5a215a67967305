"""A user's kernels on the simulator: arguments, launches, and the reports of planted bugs."""

import ctypes
import json
import re

import ml_dtypes
import numpy as np
import pytest

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

using kccl::mem::Order;
using kccl::mem::Scope;

struct Pair {
    int32_t a;
    int32_t b;
};

KCCL_KERNEL void take(double* out, kccl::DeviceComm comm, int8_t small, double big, Pair pair,
                      bool flag, uint16_t half, float single, int64_t number) {
    if (!kccl::leads(kccl::block())) return;
    const double values[] = {double(comm.rank), double(comm.world_size), double(small), big,
                             double(pair.a), double(pair.b), double(flag), double(half),
                             double(single), double(number)};
    for (int i = 0; i < 10; ++i) out[i] = values[i];
}

KCCL_KERNEL void nothing() {}

KCCL_KERNEL void shape(uint32_t* out) {
    auto* shared = reinterpret_cast<uint32_t*>(kccl::platform::dynamic_shared());
    shared[kccl::block().index()] = kccl::platform::block_in_grid();
    kccl::block().sync();
    const uint32_t mirror = kccl::block().size() - 1 - kccl::block().index();
    out[kccl::platform::block_in_grid() * kccl::block().size() + mirror] =
        shared[mirror] * 1000 + mirror;
}

// A line to the right neighbour, then a flag there.
template <Order order>
KCCL_KERNEL void exchange(uint64_t to_right, uint64_t from_left, const float* values, float* halo,
                          uint64_t count) {
    const kccl::Block block = kccl::block();
    auto* line = reinterpret_cast<float*>(to_right);
    for (uint64_t i = block.index(); i < count; i += block.size()) line[i] = values[i];
    block.sync();
    auto* flag = reinterpret_cast<uint32_t*>(to_right + 512);
    if (kccl::leads(block)) kccl::mem::store<order, Scope::kSystem>(flag, 1u);
    flag = reinterpret_cast<uint32_t*>(from_left + 512);
    while (kccl::platform::warp_any(kccl::mem::load<Order::kAcquire, Scope::kSystem>(flag) == 0)) {
        kccl::mem::poll_pause();
    }
    line = reinterpret_cast<float*>(from_left);
    for (uint64_t i = block.index(); i < count; i += block.size()) halo[i] = line[i];
}

// Waits for what nobody sends.
KCCL_KERNEL void forever(uint64_t window) {
    auto* flag = reinterpret_cast<uint32_t*>(window);
    while (kccl::platform::warp_any(kccl::mem::load<Order::kAcquire, Scope::kSystem>(flag) == 0)) {
        kccl::mem::poll_pause();
    }
}

KCCL_KERNEL void sum(kccl::DeviceComm comm, float* x, uint64_t count) {
    kccl::all_reduce<float>(kccl::block(), comm, x, x, count);
}
"""
RELAXED, RELEASE = "exchange<Order::kRelaxed>", "exchange<Order::kRelease>"
KERNELS = ["take", "nothing", "shape", RELAXED, RELEASE, "forever", "sum"]


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, KERNELS)


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int32), ("b", ctypes.c_int32))


def values():
    """The arguments of `take` from the third on."""
    return [np.int8(-3), 2.5, Pair(7, -8), True, ctypes.c_uint16(9), np.float32(0.25), -(2**40)]


def on_sim(main, world_size=1, **options):
    return kccl.run_threads(main, world_size, backend="sim", **options)


def test_arguments_arrive(module):
    def main(comm):
        out = np.zeros(10)
        module.kernel("take")(comm, out, comm.device_comm(channels=1, max_bytes=4096), *values())
        return out.tolist()

    for rank, out in enumerate(on_sim(main, 2)):
        assert out == [rank, 2, -3, 2.5, 7, -8, 1, 9, 0.25, -(2.0**40)]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (1, 5, "argument 1 of take is an int, the parameter has 304 bytes, as many as a kccl::D"),
        (1, np.float32(1), "argument 1 of take is a float32 of 4 bytes, the parameter has"),
        (1, 1.0, "argument 1 of take is a float, the parameter has 304 bytes, as many as a"),
        (4, np.zeros(2), "argument 4 of take is a ndarray of 8 bytes"),
        (8, 2**64, "argument 8 is 18446744073709551616, must fit 64 bits"),
        (0, "text", "argument 0 is a str, must be an array"),
        (0, np.zeros(8)[::2], "argument 0 .* is not C-contiguous"),
        (0, np.broadcast_to(np.zeros(1), 1), "argument 0 is read-only"),
    ],
)
def test_arguments_that_do_not_fit(module, index, value, message):
    """A wrong size is refused before anything runs; any 8 bytes fit a parameter of 8 bytes."""

    def main(comm):
        args = [np.zeros(10), comm.device_comm(channels=1, max_bytes=4096), *values()]
        args[index] = value
        if index == 4:
            module.kernel("take")(comm, *args)
        else:
            with pytest.raises(kccl.InvalidArgument, match=message):
                module.kernel("take")(comm, *args)

    on_sim(main)


def test_number_of_arguments(module):
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match="take takes 9 arguments, got 1"):
            module.kernel("take")(comm, np.zeros(1))
        module.kernel("nothing")(comm)

    on_sim(main)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.complex64, ml_dtypes.bfloat16])
def test_arrays_of_any_type_are_pointers(module, dtype):
    kernel = module.kernel("shape")
    array = np.zeros(64, dtype)
    data, _ = kernel.pack([array])
    assert data == array.ctypes.data.to_bytes(8, "little")


@pytest.mark.parametrize("warp_size", [32, 64])
def test_grid_block_and_shared_memory(warp_size):
    module = kccl.compile(SOURCE, ["shape"], warp_size=warp_size)

    def main(comm):
        out = np.zeros((3, 128), np.uint32)
        module.kernel("shape")(comm, out, grid=3, block=128, shared_bytes=512)
        return out

    (out,) = on_sim(main, warp_size=warp_size)
    assert (out == np.arange(3)[:, None] * 1000 + np.arange(128)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": 0}, "grid is 0, must be between 1"),
        ({"block": 48}, "block is 48, must be a multiple of the warp size, 32"),
        ({"block": 2048}, "block is 2048, must be between 1 and 1024"),
        ({"shared_bytes": -1}, "shared_bytes is -1, must not be negative"),
    ],
    ids=lambda value: "",
)
def test_shapes_that_no_gpu_has(module, options, message):
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match=message):
            module.kernel("nothing")(comm, **options)

    on_sim(main)


def test_kernels_and_simulation_have_one_warp_size(module):
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match="compiled with warp_size 32, must be"):
            module.kernel("nothing")(comm)

    on_sim(main, warp_size=64)


def test_a_kernel_for_another_backend(module):
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match="comm has backend 'host', the kernel is"):
            module.kernel("nothing")(comm)

    kccl.run_threads(main, 1)


def test_names(module):
    assert module.names == tuple(KERNELS)
    with pytest.raises(kccl.InvalidArgument, match="kernel is 'absent', must be one of take"):
        module.kernel("absent")


def test_the_librarys_calls_inside_a_kernel(module):
    """Its channels are not those of the host's calls."""

    def main(comm):
        x = np.arange(50, dtype=np.float32) + comm.rank
        device_comm = comm.device_comm(channels=1, max_bytes=4096)
        module.kernel("sum")(comm, device_comm, x, x.size, block=64)

        comm.all_reduce(x)
        return x

    for x in on_sim(main, 3):
        assert (x == 3 * (3 * np.arange(50) + 3)).all()


def test_a_file_with_a_header_beside_it(tmp_path):
    (tmp_path / "value.cuh").write_text("constexpr int64_t kValue = 5;\n")
    path = tmp_path / "five.cuh"
    path.write_text(
        '#include <kccl/kccl.cuh>\n#include "value.cuh"\n'
        "KCCL_KERNEL void five(int64_t* out) { if (kccl::leads(kccl::block())) *out = kValue; }\n"
    )
    module = kccl.compile(path, ["five"])

    def main(comm):
        out = np.zeros(1, np.int64)
        module.kernel("five")(comm, out)
        return int(out[0])

    assert on_sim(main) == [5]


# ---- Bugs ------------------------------------------------------------------------------------


def exchange(module, kernel):
    def main(comm):
        window = comm.window(516)
        right = window.addresses[(comm.rank + 1) % comm.world_size]
        mine = np.arange(100, dtype=np.float32) + 1000 * comm.rank
        halo = np.zeros_like(mine)
        module.kernel(kernel)(comm, right, window.addresses[comm.rank], mine, halo, mine.size)
        return float(halo[0])

    return main


def test_a_relaxed_store_where_release_is_needed(module, tmp_path):
    trace = tmp_path / "trace.json"
    with pytest.raises(kccl.ProtocolError) as raised:
        on_sim(exchange(module, RELAXED), 3, seed=1, trace=trace)
    error = raised.value
    line = SOURCE.splitlines().index(
        "    for (uint64_t i = block.index(); i < count; i += block.size()) line[i] = values[i];"
    )
    assert error.kind == "data_race"
    assert error.seed == 1
    assert {error.site, error.other.site} >= {f"source:{line + 1}"}
    assert 0 <= error.rank < 3
    assert error.block == 0
    assert error.rank != error.other.rank
    assert re.search(
        r"data race: rank \d block 0 thread \d+ at source:\d+ plainly \w+ byte \d+ of window 0 of "
        r"rank \d, rank \d block 0 thread \d+ at source:\d+ plainly \w+ it, and no",
        str(error),
    )
    assert "of seed 1, which replays it" in str(error)
    # The timeline has both accesses, and the load of the flag.
    for step in (
        rf"rank {error.rank} block 0 thread {error.thread} +(read|write) byte",
        rf"rank {error.other.rank} block 0 thread {error.other.thread} +(read|write) byte",
        r"load byte 512 of window 0 of rank \d = 0x1, acquire, system scope at source:\d+",
    ):
        assert re.search(step, error.timeline), step

    events = json.loads(trace.read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert steps and all(event["dur"] == 1 for event in steps)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    # The finding may come before the third rank has made a step.
    assert len(names) >= 2 and names <= {"rank 0", "rank 1", "rank 2"}
    assert any("byte 512 of window 0" in event["name"] for event in steps)


def test_the_report_repeats(module):
    reports = []
    for _ in range(2):
        with pytest.raises(kccl.ProtocolError) as raised:
            on_sim(exchange(module, RELAXED), 3, seed=5)
        reports.append(str(raised.value))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("model", ["sm_90", "gfx942"])
def test_with_release_it_is_right(module, model):
    for seed in range(10):
        halos = on_sim(exchange(module, RELEASE), 3, seed=seed, model=model)
        assert halos == [2000, 0, 1000]


def test_every_rank_raises_the_finding(module):
    """run_threads() raises it too, although every rank has caught it."""
    heard = []

    def main(comm):
        try:
            exchange(module, RELAXED)(comm)
            comm.barrier()
        except kccl.ProtocolError as error:
            heard.append((comm.rank, error.kind))
        with pytest.raises(kccl.ProtocolError):
            comm.barrier()
        with pytest.raises(kccl.ProtocolError):
            module.kernel("nothing")(comm)

    with pytest.raises(kccl.ProtocolError):
        on_sim(main, 3, seed=1)
    assert sorted(heard) == [(rank, "data_race") for rank in range(3)]


def test_a_kernel_that_waits_for_ever_is_reported(module):
    def main(comm):
        module.kernel("forever")(comm, comm.window(4).addresses[comm.rank])

    with pytest.raises(kccl.ProtocolError) as raised:
        on_sim(main, 2)
    assert raised.value.kind == "deadlock"
    assert raised.value.site.startswith("source:")
    # The sentence has a waiting thread of each block, with its line.
    for rank in range(2):
        assert re.search(rf"[:;] rank {rank} block 0 thread \d+ at source:\d+", str(raised.value))
