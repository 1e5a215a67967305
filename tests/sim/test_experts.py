"""dispatch and combine for experts, in kernels: on simulated GPUs and on the host, and compiled for
real GPUs.
"""

from functools import cache
from itertools import cycle

import ml_dtypes
import numpy as np
import pytest
from compiled_kernels import needs_nvrtc, needs_zig
from device_compilers import amd_functions, amd_metadata, compile_hip
from layers_of_experts import KERNELS, SOURCE, TYPES, Layers, kernel_name
from long import long_after

import kccl

SHAPES = {
    "Channel": {"block": 64},
    "Block": {"block": 128},
    "Warp": {},
    "Grid": {"grid": 3, "block": 64},
}
# Each way of calling with one type.
ELEMENTS = dict(zip(SHAPES, (*TYPES, "float"), strict=True))
NAMES = {by: kernel_name(element, by) for by, element in ELEMENTS.items()}
# More and fewer experts than ranks, and numbers that ranks do not divide.
EXPERTS = {1: 3, 2: 5, 3: 2, 4: 9, 5: 7, 8: 12}


@pytest.fixture(params=long_after(1, (32, 64)))
def warp_size(request):
    return request.param


@cache
def kernel_of(by, warp_size):
    """Alone, because a test needs one of them, and each takes seconds to compile."""
    options = {"warp_size": warp_size, "include_dirs": [KERNELS]}
    return kccl.compile(SOURCE, [NAMES[by]], **options).kernel(NAMES[by])


def layers(by, world_size, **more):
    return Layers(world_size, EXPERTS[world_size], element=ELEMENTS[by], seed=world_size, **more)


@pytest.mark.long
@pytest.mark.parametrize(("by", "world_size"), list(zip(cycle(SHAPES), EXPERTS)))
def test_layers_on_simulated_gpus(warp_size, by, world_size):
    made = layers(by, world_size, columns=20 + world_size)
    shape = {"block": warp_size, **SHAPES[by]}
    kernel = kernel_of(by, warp_size)
    kccl.run_threads(
        lambda comm: made.run(comm, kernel, **shape),
        world_size,
        backend="sim",
        warp_size=warp_size,
        seeds=2,
    )


@pytest.mark.parametrize("by", long_after(1, ["Grid", "Channel"]))
def test_layers_on_the_host(by):
    """Blocks are OS threads there, and ranks truly run at the same time."""
    name = NAMES[by]
    kernel = kccl.compile(SOURCE, [name], target="host", include_dirs=[KERNELS]).kernel(name)
    made = layers(by, 3, rounds=40)
    shape = {"grid": 2} if by == "Grid" else {}
    kccl.run_threads(lambda comm: made.run(comm, kernel, **shape), 3, backend="host")


AFTER = "; all ranks may go on after comm.reset()"


@pytest.mark.parametrize("by", long_after(1, ["Block", "Channel", "Grid"]))
def test_more_rows_than_the_capacity_end_the_call_on_all_ranks(warp_size, by):
    """The sentence names the expert, its rows and the capacity. After a reset the ranks go on, with
    the same window, though one has made more calls than the other.
    """
    small, enough = layers(by, 2, capacity=1), layers(by, 2)
    kernel = kernel_of(by, warp_size)
    shape = {"block": warp_size, **SHAPES[by]}
    too_many = {
        f"dispatch: rank {rank} has {len(small.sent(0, expert, rank))} rows for expert {expert}, "
        f"must have at most 1, the capacity of its Experts{AFTER}"
        for rank in range(2)
        for expert in range(small.num_experts)
        if len(small.sent(0, expert, rank)) > 1
    }
    assert too_many

    def main(comm):
        with pytest.raises(kccl.InvalidArgument) as raised:
            small.run(comm, kernel, **shape)
        assert str(raised.value) in too_many
        comm.reset()
        enough.run(comm, kernel, **shape)

    kccl.run_threads(main, 2, backend="sim", warp_size=warp_size, seeds=2)


def wrong_expert(made):
    num_rows, _, chosen, *_ = made.inputs[1]
    num_rows[0], chosen[0, 0, 0] = 1, 5


@pytest.mark.parametrize(
    ("more", "change", "sentence"),
    [
        ({}, wrong_expert, "dispatch: expert is 5, must be below 5, the number of experts"),
        ({"top_k": 17}, None, "dispatch: top_k is 17, must be at most 16, the most experts of a"),
        ({"window_bytes": 1024}, None, "dispatch: num_bytes is {}, must be at most 1024, what the"),
    ],
)
def test_wrong_arguments_are_refused(warp_size, more, change, sentence):
    window_bytes = more.get("window_bytes")
    kernel = kernel_of("Block", warp_size)
    made = layers("Block", 2, **{name: more[name] for name in more if name != "window_bytes"})
    if change is not None:
        change(made)

    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match=sentence.format(made.window_bytes)):
            made.run(comm, kernel, window_bytes=window_bytes, block=64)

    kccl.run_threads(main, 2, backend="sim", warp_size=warp_size)


FLOAT8 = """
#include <kccl/kccl.cuh>
using namespace kccl;

// Rows of float8 go out with a scale for 128 columns; results come back in bfloat16.
KCCL_KERNEL void layer(DeviceComm comm, Window window, uint32_t capacity, uint32_t num_rows,
                       const f8e4m3* x, const float* scales, const int32_t* chosen,
                       const float* weights, f8e4m3* rows, float* row_scales, uint32_t* counts,
                       int32_t* slots, bf16* results, bf16* out) {
    constexpr uint32_t kColumns = 200, kScales = 2;
    const Experts experts = {window, /*num_experts=*/2, capacity, kColumns};
    const Routes routes = {chosen, slots, num_rows, /*top_k=*/1};
    Channel<Block> channel(block(), comm);
    if (dispatch(channel, experts, rows, counts, x, routes,
                 Scales{row_scales, scales, kScales}) != kKcclOk) return;
    for (uint64_t i = channel.thread(); i < (counts[0] + counts[1]) * kColumns;
         i += channel.num_threads()) {
        const float scale = row_scales[i / kColumns * kScales + i % kColumns / 128];
        results[i] = Element<bf16>::narrow(Element<f8e4m3>::widen(rows[i]) * scale);
    }
    block().sync();
    combine<bf16>(channel, experts, out, results, counts, routes, weights);
}

KCCL_KERNEL void tell_bytes(uint64_t* bytes) {
    if (!leads(block())) return;
    bytes[0] = experts_bytes(/*world_size=*/2, /*per_rank=*/1, /*capacity=*/3, 400, 8);
}
"""


def test_rows_of_float8_come_with_their_scales():
    module = kccl.compile(FLOAT8, ["layer", "tell_bytes"])
    layer, tell_bytes = map(module.kernel, module.names)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 3, 200)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((2, 3, 2), np.float32)
    chosen = np.array([[0, 1, 1], [1, 1, 1]], np.int32)
    weights = rng.random((2, 3), np.float32)

    def main(comm):
        nbytes = np.zeros(1, np.uint64)
        tell_bytes(comm, nbytes)
        out = np.zeros((3, 200), ml_dtypes.bfloat16)
        rank = comm.rank
        layer(
            *(comm, comm.device_comm(channels=1, max_bytes=64), comm.window(int(nbytes[0])), 3, 3),
            *(x[rank], scales[rank], chosen[rank], weights[rank], np.zeros_like(x)),
            *(np.zeros((6, 2), np.float32), np.zeros(2, np.uint32), np.zeros(3, np.int32)),
            *(np.zeros((6, 200), ml_dtypes.bfloat16), out),
        )
        wide = x[rank].astype(np.float32) * scales[rank].repeat(128, axis=1)[:, :200]
        sums = weights[rank][:, None] * wide.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(out, sums.astype(ml_dtypes.bfloat16))

    kccl.run_threads(main, 2, backend="sim")


def test_threads_that_do_not_call_it_are_named():
    source = """
    #include <kccl/kccl.cuh>
    KCCL_KERNEL void half(kccl::DeviceComm comm, kccl::Window window, float* x, uint32_t* counts,
                          int32_t* chosen) {
        if (kccl::block().index() < 32) {
            kccl::dispatch(kccl::block(), comm, kccl::Experts{window, 1, 1, 1}, x, counts, x,
                           kccl::Routes{chosen, chosen, 0, 1});
        }
    }
    """
    kernel = kccl.compile(source, ["half"]).kernel("half")

    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=64)
        arrays = [np.zeros(4, dtype) for dtype in (np.float32, np.uint32, np.int32)]
        kernel(comm, device_comm, comm.window(4096), *arrays, block=64)

    with pytest.raises(kccl.ProtocolError, match="threads 32 to 63 did not call dispatch"):
        kccl.run_threads(main, 1, backend="sim")


@pytest.mark.long
@pytest.mark.takes(16)
@needs_nvrtc
def test_they_compile_for_nvidias_gpus():
    name = kernel_name("kccl::bf16", "Grid")
    module = kccl.compile(SOURCE, [name], target="cuda", arch="sm_90a", include_dirs=[KERNELS])
    assert module.names == (name,)


@pytest.mark.long
@pytest.mark.takes(16)
@needs_zig
def test_they_compile_for_amds_gpus(tmp_path):
    name = kernel_name("kccl::bf16", "Grid")
    numbers, counts = "uint32_t, " * 7, "const uint32_t*, "
    arrays = "const bf16*, const int32_t*, const float*, const float*, bf16*, float*, uint32_t*, "
    made = f"template __attribute__((global)) void {name}(DeviceComm, Window, {numbers}{counts}"
    unit = f"{SOURCE}namespace kccl {{\n{made}{arrays}int32_t*, bf16*, bf16*);\n}}\n"
    options = [f"-I{KERNELS}"]
    for arch in ("gfx942", "gfx950"):
        assembly = compile_hip(unit, arch, tmp_path, kccl.include_dir(), options)
        (function,) = (
            text for symbol, text in amd_functions(assembly).items() if "layers_of" in symbol
        )
        # Its rows are written back before its packets.
        assert "buffer_wbl2" in function
        (numbers,) = (
            each for symbol, each in amd_metadata(assembly).items() if "layers_of" in symbol
        )
        assert numbers["vgpr_spill_count"] == 0
        # Arrays of the slow path, for which each lane has memory.
        assert numbers["private_segment_fixed_size"] <= 576
