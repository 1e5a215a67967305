"""kccl.compile(target="host"): the same source on the CPU, where a block is an OS thread."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from ranks import run
from test_linking import source_of

import kccl
from kccl.backends import host_launch

SOURCE = """
#include <kccl/kccl.cuh>
#include <cuda_bf16.h>

__global__ void everything(kccl::DeviceComm comm, kccl::Window window, float* x, int* seen) {
    const kccl::Block block = kccl::block();
    const int next = (comm.rank + 1) % comm.world_size;
    float* slice = x + blockIdx.x * 8;
    for (uint32_t i = block.index(); i < 8; i += block.size()) slice[i] = comm.rank + blockIdx.x;
    block.sync();
    kccl::all_reduce<float, kccl::Sum>(block, comm, slice, slice, 8);
    // The rank's blocks meet, and one of them tells the next rank.
    if (kccl::grid_sync(comm) != kKcclOk) return;
    if (blockIdx.x == 0) {
        kccl::put(block, comm, window, next, 0, x, gridDim.x * 8 * sizeof(float));
        kccl::signal(block, comm, next, 0);
        kccl::wait(block, comm, -1, 0, 1);
    }
    atomicAdd(seen, 1 + static_cast<int>(__bfloat162float(__float2bfloat16(0.25f))));
}

__global__ void waits(kccl::DeviceComm comm) { kccl::wait(kccl::block(), comm, -1, 0, 1); }

__global__ void wide(uint8_t* out) { out[0] = kccl::platform::dynamic_shared()[0] = 7; }
"""
KERNELS = ["everything", "waits", "wide"]
BLOCKS = 3


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, KERNELS, target="host")


def use_everything(comm, module):
    window, x = comm.window(512), np.zeros(8 * BLOCKS, np.float32)
    seen, device_comm = np.zeros(1, np.int32), comm.device_comm(channels=BLOCKS, max_bytes=32)
    for _ in range(20):
        module.kernel("everything")(comm, device_comm, window, x, seen, grid=BLOCKS)
    comm.barrier()
    got = np.frombuffer(window.local, np.float32, 8 * BLOCKS)
    return got.tolist(), x.tolist(), int(seen[0])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_and_ranks_talk_to_each_other(module, ranks):
    assert (module.target, module.warp_size) == ("host", 1)
    total = ranks * (ranks - 1) / 2
    want = [total + ranks * block for block in range(BLOCKS) for _ in range(8)]
    results = kccl.run_threads(lambda comm: use_everything(comm, module), ranks)
    assert results == [(want, want, 20 * BLOCKS)] * ranks


@pytest.mark.parametrize("is_started", [False, True], ids=["no thread", "Ctrl-C"])
def test_a_launch_of_which_a_block_does_not_start_ends(module, monkeypatch, is_started):
    """The blocks before it wait for it in grid_sync()."""
    start = threading.Thread.start

    def start_or_raise(thread):
        if thread.name != "kccl block 2":
            return start(thread)
        if not is_started:
            raise RuntimeError("can't start new thread")
        start(thread)
        raise KeyboardInterrupt

    def main(comm):
        x, seen = np.zeros(8 * 4, np.float32), np.zeros(1, np.int32)
        window, device_comm = comm.window(512), comm.device_comm(channels=4, max_bytes=32)
        kernel = module.kernel("everything")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_or_raise)
            kernel(comm, device_comm, window, x, seen, grid=4)

    error, text = (KeyboardInterrupt, None) if is_started else (kccl.BackendError, "block 2 of 4")
    with pytest.raises(error, match=text):
        kccl.run_threads(main, 1)


def test_the_limit_of_shared_memory_is_the_headers():
    header = Path(kccl.include_dir(), "kccl/platform.cuh").read_text()
    (limit,) = re.findall(r"\bkDynamicSharedBytes = (\d+);", header)
    assert int(limit) == host_launch._MOST_SHARED_BYTES


@pytest.mark.long
def test_ranks_are_processes(tmp_path):
    (tmp_path / "source.cu").write_text(SOURCE)
    program = f"""
from pathlib import Path
module = kccl.compile(Path({str(tmp_path / "source.cu")!r}), ["everything"], target="host")
comm = kccl.init()
x, seen = np.zeros(8, np.float32), np.zeros(1, np.int32)
window, device_comm = comm.window(512), comm.device_comm(channels=1, max_bytes=32)
module.kernel("everything")(comm, device_comm, window, x, seen)
say(rank=comm.rank, x=x.tolist())
"""
    code, said, err = run(3, program)
    assert code == 0, err
    assert [said[rank]["x"] for rank in range(3)] == [[3.0] * 8] * 3


def test_a_wait_ends_and_names_itself(module):
    def main(comm):
        comm.timeout = 0.1
        device_comm = comm.device_comm(channels=1, max_bytes=32)
        with pytest.raises(kccl.Timeout, match="wait on signal_id 0: any peer did not arrive"):
            module.kernel("waits")(comm, device_comm)

    kccl.run_threads(main, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 64}, "block is 64, must be 1: on the host a block is one OS thread"),
        ({"grid": 5000}, "grid is 5000, must be at most 1024 on the host"),
        ({"shared_bytes": 300_000}, "shared_bytes is 300000, must be at most 232448 on the host"),
    ],
)
def test_shapes_that_the_host_cannot_have(module, options, message):
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match=message):
            module.kernel("wide")(comm, np.zeros(1, np.uint8), **options)
        out = np.zeros(1, np.uint8)
        module.kernel("wide")(comm, out, shared_bytes=64, block=1)
        return int(out[0])

    assert kccl.run_threads(main, 1) == [7]


def test_arguments_of_compile():
    with pytest.raises(kccl.InvalidArgument, match="warp_size is 32, must be 1: target is 'host'"):
        kccl.compile(SOURCE, KERNELS, target="host", warp_size=32)
    with pytest.raises(kccl.CompileError, match="__shared__: "):
        kccl.compile(
            "#include <kccl/kccl.cuh>\n__global__ void f() { __shared__ int x; x = 1; }",
            ["f"],
            target="host",
        )


def test_an_example_runs_on_the_host():
    module = kccl.compile(source_of("11_put_signal_in_a_kernel"), ["spread"], target="host")
    heat = np.random.default_rng(1).random(40, np.float32)

    def main(comm):
        rod = heat[comm.rank * 20 :][:20].copy()
        spare, edges = np.zeros_like(rod), comm.window(16)
        device_comm = comm.device_comm(channels=1, max_bytes=4)
        module.kernel("spread")(comm, device_comm, edges, rod, spare, 20, 2)
        return rod

    rods = np.concatenate(kccl.run_threads(main, 2))
    for _ in range(2):
        heat = (np.roll(heat, 1) + heat + np.roll(heat, -1)) / 3
    np.testing.assert_allclose(rods, heat, rtol=1e-5)
