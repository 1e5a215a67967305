"""What a GPU would refuse to launch, the simulator of that GPU refuses too."""

import ctypes

import numpy as np
import pytest

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

using Floats = float[8];
using ManyFloats = float[20000];
struct Large {
    char bytes[32768];
};

#define ONE if (!kccl::leads(kccl::block())) return

KCCL_KERNEL void dynamic(float* x) {
    ONE;
    auto* shared = reinterpret_cast<float*>(kccl::platform::dynamic_shared());
    shared[0] = 1;
    x[kccl::platform::block_in_grid()] = shared[0];
}
KCCL_KERNEL void variable(float* x) {
    KCCL_BLOCK_SHARED(ManyFloats, shared);
    ONE;
    shared[0] = x[0];
}
KCCL_KERNEL void both(float* x) {
    KCCL_BLOCK_SHARED(Floats, shared);
    ONE;
    shared[0] = x[0];
    reinterpret_cast<float*>(kccl::platform::dynamic_shared())[0] = x[0];
}
KCCL_KERNEL void waits(kccl::DeviceComm comm, float* x) {
    (void)kccl::grid_sync(comm);
    if (kccl::platform::block_in_grid() == 0 && kccl::leads(kccl::block())) x[0] = 1;
}
KCCL_KERNEL void large(Large all, float* x) {
    ONE;
    x[0] = all.bytes[0];
}
"""
MODELS = {"sm_90": 232448, "gfx942": 65536}


class Large(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 32768),)


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, ["dynamic", "variable", "both", "waits", "large"])


def launch(module, kernel, *args, model="sm_90", takes_comm=False, **shape):
    def main(comm):
        first = (comm.device_comm(channels=1),) if takes_comm else ()
        module.kernel(kernel)(comm, *first, *args, np.zeros(512, np.float32), **shape)

    kccl.run_threads(main, 1, backend="sim", model=model)


def refused(words, module, kernel, *args, error=kccl.InvalidArgument, **more):
    with pytest.raises(error) as raised:
        launch(module, kernel, *args, **more)
    assert words in str(raised.value)


@pytest.mark.parametrize("model", MODELS)
def test_dynamic_shared_memory(module, model):
    most = MODELS[model]
    launch(module, "dynamic", model=model, shared_bytes=most)
    words = (
        f"shared_bytes is {most + 1}, must be at most {most}: a block on {model} has no more "
        "shared memory"
    )
    refused(words, module, "dynamic", model=model, shared_bytes=most + 1)


@pytest.mark.parametrize(
    ("model", "most", "more"),
    [("sm_90", 49152, "; platform::dynamic_shared() can have more"), ("gfx942", 65536, "")],
)
def test_variables_in_shared_memory(module, model, most, more):
    words = (
        "declares variables of 80000 bytes in block-shared memory, must have at most "
        f"{most} on {model}{more}"
    )
    refused(words, module, "variable", model=model, error=kccl.ProtocolError)


@pytest.mark.parametrize("model", MODELS)
def test_variables_and_dynamic_shared_memory_together(module, model):
    most = MODELS[model]
    launch(module, "both", model=model, shared_bytes=most - 32)
    words = (
        "declares variables of 32 bytes in block-shared memory besides the "
        f"{most - 31} bytes that shared_bytes gives, must have at most {most} bytes together on "
        f"{model}"
    )
    error = kccl.ProtocolError
    refused(words, module, "both", model=model, shared_bytes=most - 31, error=error)


@pytest.mark.parametrize(
    ("model", "block", "shared_bytes", "room"),
    [
        ("sm_90", 1024, 0, 264),
        ("sm_90", 64, 0, 4224),
        ("sm_90", 64, 120000, 132),
        ("gfx942", 1024, 0, 608),
        ("gfx942", 64, 40000, 304),
    ],
)
def test_blocks_that_wait_for_each_other_all_run_at_once(module, model, block, shared_bytes, room):
    words = (
        f"grid is {room + 1}, must be at most {room}: waits takes a DeviceComm, so its blocks may "
        f"wait for each other, and no more blocks of {block} threads run at once"
    )
    shape = {"grid": room + 1, "block": block, "shared_bytes": shared_bytes}
    refused(words, module, "waits", model=model, takes_comm=True, **shape)


def test_blocks_that_do_not_wait_may_be_more(module):
    launch(module, "dynamic", grid=300, block=32, shared_bytes=200_000)


def test_threads_of_a_block(module):
    refused("block is 1056, must be between 1 and 1024", module, "dynamic", block=1056)
    refused("block is 33, must be a multiple of the warp size, 32", module, "dynamic", block=33)
    for grid in (0, -1):
        refused(f"grid is {grid}, must be between 1 and", module, "dynamic", grid=grid)


def test_bytes_of_arguments(module):
    words = (
        "the arguments have 32776 bytes, must have at most 32764 on sm_90: put them into an array"
    )
    refused(words, module, "large", Large())
