"""Mistakes that a run under the default seeds finds, of a kernel that is launched once."""

import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import kccl

SOURCE = """
#include <kccl/kccl.cuh>
using namespace kccl;
using Tile = float[64];
using SmallRing = Ring<2, 256>;

__global__ void no_sync(DeviceComm comm, float* x) {
    x[63 - threadIdx.x] = 1;
    all_reduce(block(), comm, x, x, 64);
}
__global__ void no_sync_of_warps(DeviceComm comm, float* x) {
    if (threadIdx.x >= 32) return;
    x[31 - threadIdx.x] = 1;
    all_gather(warp(), comm, x + 64, x, 32);
}
__global__ void only_warps_sync(DeviceComm comm, float* x) {
    x[threadIdx.x] = 1;
    __syncwarp();
    broadcast(block(), comm, x, x, 64, 0);
}
__global__ void misaligned(DeviceComm comm, float* x) {
    if (threadIdx.x == 0) *reinterpret_cast<float4*>(x + 1) = float4{1, 2, 3, 4};
}
__global__ void misaligned_member(DeviceComm comm, float* x) {
    if (threadIdx.x == 0) reinterpret_cast<float2*>(x + 1)->y = 1;
}
__global__ void misaligned_tile(DeviceComm comm, float* x) {
    KCCL_BLOCK_SHARED(Tile, tile);
    if (threadIdx.x == 0) *reinterpret_cast<float4*>(tile + 2) = float4{1, 2, 3, 4};
}
KCCL_DEVICE float4& wide(float* x) { return *reinterpret_cast<float4*>(x); }
__global__ void misaligned_in_a_function(DeviceComm comm, float* x) {
    if (threadIdx.x == 0) wide(x + 1).y = 1;
}
__global__ void misaligned_line(DeviceComm comm, float* x) {
    if (threadIdx.x == 0) mem::store_plain(reinterpret_cast<mem::Line*>(x + 2), mem::Line{{1, 2}});
}
__device__ void push(const DeviceComm& comm, const float* from, uint32_t num_bytes) {
    KCCL_BLOCK_SHARED(SmallRing, ring);
    init_ring(block(), ring, 1);
    if (threadIdx.x >= 32) return;
    Producer<SmallRing> producer(ring, comm);
    producer.push(from, num_bytes, 2);
    producer.drain();
}
__global__ void long_copy(DeviceComm comm, float* x) { push(comm, x, 512); }
__global__ void odd_copy(DeviceComm comm, float* x) { push(comm, x, 20); }
__global__ void misaligned_copy(DeviceComm comm, float* x) { push(comm, x + 1, 16); }
__global__ void two_producers(DeviceComm comm, float* x) {
    KCCL_BLOCK_SHARED(SmallRing, ring);
    init_ring(block(), ring, 1);
    Producer<SmallRing> producer(ring, comm);
    producer.push(x, 16, 2);
    producer.drain();
}
__global__ void no_such_peer(DeviceComm comm, float* x, Window window) {
    if (threadIdx.x == 0) window.at<float>(comm.world_size)[0] = 1;
}
// What is right.
__global__ void unwritten(DeviceComm comm, float* x) {
    KCCL_BLOCK_SHARED(Tile, tile);
    if (threadIdx.x < 32) tile[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = tile[threadIdx.x];
    __syncthreads();
    all_reduce(block(), comm, x + 64, x, 32);
}
__global__ void halves(DeviceComm comm, bf16* x, f16* y, int32_t* z, double* w) {}
"""
RACE = r"data race: rank \d block 0 thread \d+ at source:{line} gives byte \d+ of `x` \(argument 1 "
RACE += r"of {kernel}\) to {call}, .* plainly wrote it, and no synchronisation orders them"
ALIGNED = r"invalid access: .* at source:{line} accesses {what}, which no GPU can: its address, "
ALIGNED += r"0x\w+, is no multiple of {size};"
COPY = r"bad argument: .* calls Producer::push at source:{line} with {what}"
X = r"byte 4 of `x` \(argument 1 of {kernel}\)"
MISTAKES = {
    "no_sync": (RACE, {"call": "all_reduce"}),
    "no_sync_of_warps": (RACE, {"call": "all_gather"}),
    "only_warps_sync": (RACE, {"call": "broadcast"}),
    "misaligned": (ALIGNED, {"what": X, "size": 16}),
    "misaligned_member": (ALIGNED, {"what": X, "size": 8}),
    "misaligned_in_a_function": (ALIGNED, {"what": X, "size": 16}),
    "misaligned_line": (ALIGNED, {"what": X.replace("byte 4", "byte 8"), "size": 16}),
    "misaligned_tile": (
        ALIGNED,
        {"what": r"byte 8 of a variable of 256 bytes in the shared memory of rank \d block 0"}
        | {"size": 16},
    ),
    "long_copy": (COPY, {"what": "num_bytes 512, must be at most 256, the bytes of a stage"}),
    "odd_copy": (COPY, {"what": "num_bytes 20, must be a multiple of 16"}),
    "misaligned_copy": (COPY, {"what": f"from {X}, must be a multiple of 16"}),
    "two_producers": (
        "invalid access: .*, called in source:{line} accesses {what}",
        {"what": "byte .* it is a CopyBarrier that gets more arrivals in a phase than it was init"},
    ),
    "no_such_peer": (
        "bad argument: .* calls Window::at at source:{line} with peer 2, must be {what}",
        {"what": "at least 0 and below 2, the ranks of the window"},
    ),
}
LINES = {
    "no_sync": "all_reduce(",
    "no_sync_of_warps": "all_gather(",
    "only_warps_sync": "broadcast(",
    "misaligned": "float4*>(x",
    "misaligned_member": "float2*>",
    "misaligned_in_a_function": "float4& wide",
    "misaligned_line": "store_plain",
    "misaligned_tile": "float4*>(tile",
    "two_producers": "push(x, 16",
    "no_such_peer": "at<float>",
}
NAMES = re.findall(r"__global__ void (\w+)\(", SOURCE)


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, NAMES)


def launch(module, name, arrays=(np.float32,), seed=None):
    def main(comm):
        device_comm = comm.device_comm(channels=4, max_bytes=1024)
        given = [np.zeros(256, dtype) for dtype in arrays]
        window = [comm.window(256)] if name == "no_such_peer" else []
        module.kernel(name)(comm, device_comm, *given, *window)
        return given[0]

    return kccl.run_threads(main, 2, backend="sim", seed=seed)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(module, name):
    pattern, fields = MISTAKES[name]
    text = LINES.get(name, "producer.push(from")
    line = next(n for n, each in enumerate(SOURCE.splitlines(), 1) if text in each)
    wanted = pattern.format(line=line, kernel=name, **fields).replace("{kernel}", name)
    with pytest.raises(kccl.ProtocolError) as caught:
        launch(module, name)
    assert re.match(wanted, str(caught.value)), f"{wanted}\n{caught.value}"


def test_shared_memory_that_nobody_has_written_is_no_number(module):
    for x in launch(module, "unwritten", seed=0):
        assert (x[:32] == 1).all()
        assert np.isnan(x[32:64]).all()
        assert (x[64:96] == 2).all()


RIGHT = (ml_dtypes.bfloat16, np.float16, np.uint32, np.float64)


@pytest.mark.parametrize(
    ("index", "dtype", "wanted"),
    [
        (0, np.float16, "bfloat16"),
        (1, np.float32, "float16"),
        (2, np.int64, "int32"),
        (2, np.float32, "int32"),
        (3, np.float32, "float64"),
        (3, np.int64, "float64"),
    ],
)
def test_elements_of_another_type_are_refused(module, index, dtype, wanted):
    given = [*RIGHT[:index], dtype, *RIGHT[index + 1 :]]
    told = f"is an array of {np.dtype(dtype)}, must be one of {wanted}, to which the parameter"
    with pytest.raises(kccl.InvalidArgument, match=told):
        launch(module, "halves", given, seed=0)


def test_elements_that_fit_and_bytes_are_taken(module):
    launch(module, "halves", RIGHT, seed=0)
    launch(module, "halves", [np.uint8] * 4, seed=0)


def test_what_an_earlier_run_has_made_is_refused(module):
    kept = {}

    def first(comm):
        kept[comm.rank] = comm.device_comm(), comm.window(256)

    def later(comm, own, index):
        arguments = [comm.device_comm(), np.zeros(256, np.float32), comm.window(256)]
        arguments[own] = kept[comm.rank][index]
        module.kernel("no_such_peer")(comm, *arguments)

    kccl.run_threads(first, 2, backend="sim", seed=0)
    for own, index, told in (
        (0, 0, "argument 0 of no_such_peer is the DeviceComm of a communicator that is closed"),
        (2, 1, "window is one of 256 bytes of rank \\d, whose simulation has ended, must be"),
    ):
        with pytest.raises(kccl.InvalidArgument, match=told):
            kccl.run_threads(partial(later, own=own, index=index), 2, backend="sim", seed=0)


@pytest.mark.parametrize(
    ("element", "op", "told"),
    [
        ("long long", "Sum", "reductions take float, double, int8_t to int64_t"),
        ("float", "Band", "Band, Bor and Bxor integers and boolean"),
    ],
)
def test_types_that_no_reduction_takes_are_refused_in_one_sentence(element, op, told):
    source = f"""
    #include <kccl/kccl.cuh>
    __global__ void bad(kccl::DeviceComm comm, {element}* x) {{
        kccl::all_reduce<{element}, kccl::{op}>(kccl::block(), comm, x, x, 4);
    }}
    """
    with pytest.raises(kccl.CompileError) as caught:
        kccl.compile(source, ["bad"])
    (error,) = [line for line in str(caught.value).splitlines() if " error: " in line]
    assert told in error
