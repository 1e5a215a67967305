"""A wrong argument of a call in a kernel: a failed status, nothing written, and a sentence."""

import numpy as np
import pytest

import kccl
from kccl.base.abi import lib

SOURCE = """
#include <kccl/kccl.cuh>

using kccl::DeviceComm;

// `a`, `b`: arguments of the call, which this thread reports.
#define CALL(name, call)                                                                  \\
    KCCL_KERNEL void name(DeviceComm comm, float* out, float* in, uint8_t* window, int a, \\
                          uint64_t b, uint32_t* statuses) {                               \\
        const kccl::Status status = call;                                                 \\
        statuses[kccl::default_channel(kccl::thread())] = status;                         \\
    }

CALL(on_channel, kccl::all_reduce(kccl::block(), comm, out, in, b, a))
CALL(on_own_channel, kccl::all_reduce(kccl::block(), comm, out, in, b))
CALL(by_warps, kccl::all_gather(kccl::warp(), comm, out, in, b))
CALL(by_grid, kccl::all_reduce(kccl::grid(), comm, out, in, b))
CALL(from_root, kccl::broadcast(kccl::block(), comm, out, in, b, a))
CALL(grid_from_root, kccl::broadcast(kccl::grid(), comm, out, in, b, a))
CALL(gather_apart, gather_apart_of(comm, out, in, a, b))
CALL(to_peer, kccl::signal(kccl::block(), comm, a, 0))
CALL(with_id, kccl::signal(kccl::warp(), comm, 0, a))
CALL(from_peer, kccl::wait(kccl::block(), comm, a, 0, 1))
CALL(of_id, kccl::wait(kccl::block(), comm, -1, a, 1))
CALL(for_many, kccl::wait(kccl::block(), comm, -1, 0, static_cast<uint32_t>(a)))
CALL(put, kccl::put(kccl::block(), comm, window + a, in, b))
CALL(get, kccl::get(kccl::block(), comm, out, window + a, b))
CALL(put_nowhere, kccl::put(kccl::block(), comm, out, in, b))
CALL(some_slices, some_slices_of(comm, out, in, a, b))
CALL(kept_open, kept_open_of(comm, out, in, a, b))
CALL(of_block, of_block_of(comm, out, in, a, b))
CALL(of_three, of_three_of(comm, out, in, b))
CALL(all_of_three, all_of_three_of(comm, out, in))
""".replace(
    "CALL(on_channel",
    """
KCCL_DEVICE kccl::Status gather_apart_of(const DeviceComm& comm, float* out, float* in, int stride,
                                         uint64_t count) {
    kccl::Channel<kccl::Block> channel(kccl::block(), comm);
    return kccl::all_gather(channel, out, in, count, uint64_t(int64_t{stride}));
}
KCCL_DEVICE kccl::Status some_slices_of(const DeviceComm& comm, float* out, float* in, int first,
                                        uint64_t num) {
    kccl::GridExchange<kKcclReachAllRanks> exchange(comm);
    kccl::publish(exchange, in, 1);
    return kccl::collect(exchange, out, 1, kccl::Slices{uint32_t(first), uint32_t(num)});
}
KCCL_DEVICE kccl::Status kept_open_of(const DeviceComm& comm, float* out, float* in, int channel,
                                      uint64_t count) {
    kccl::Channel<kccl::Block> opened(kccl::block(), comm, channel);
    kccl::barrier(opened);
    kccl::broadcast(opened, out, in, count, 0);
    return kccl::all_reduce(opened, out, in, count);
}
KCCL_DEVICE kccl::Status of_block_of(const DeviceComm& comm, float* out, float* in, int block,
                                     uint64_t count) {
    kccl::Channel<kccl::Block> opened(kccl::block(), comm, 0, block);
    return kccl::all_reduce(opened, out, in, count);
}
KCCL_DEVICE kccl::Status of_three_of(const DeviceComm& comm, float* out, float* in,
                                     uint64_t count) {
    kccl::Channel<kccl::Block, 3> opened(kccl::block(), comm);
    return kccl::all_gather(opened, out, in, count);
}
KCCL_DEVICE kccl::Status all_of_three_of(const DeviceComm& comm, float* out, float* in) {
    kccl::GridExchange<kKcclReachAllRanks, 3> exchange(comm);
    kccl::publish(exchange, in, 1);
    return kccl::collect(exchange, out, 1);
}
CALL(on_channel""",
    1,
)
NAMES = [
    *("on_channel", "on_own_channel", "by_warps", "by_grid", "from_root", "grid_from_root"),
    *("gather_apart", "to_peer", "with_id", "from_peer", "of_id", "for_many"),
    *("put", "get", "put_nowhere", "some_slices", "kept_open", "of_block"),
    *("of_three", "all_of_three"),
]
CHANNELS = ", the channels of its device_comm()"
RANKS = ", the number of ranks"
REDUCE, GATHER = "all_reduce_one_shot_ll16", "all_gather_direct_ll16"
BROADCAST = "broadcast_direct_ll16"
CASES = [
    # kernel, a, b, blocks, threads, what is said.
    ("on_channel", 2, 4, 1, 32, f"Channel: channel is 2, must be below 2{CHANNELS}"),
    ("on_channel", 100_000, 4, 1, 32, f"Channel: channel is 100000, must be below 2{CHANNELS}"),
    (
        *("on_channel", -1, 4, 1, 32),
        f"Channel: channel is -1, must be at least 0 and below 2{CHANNELS}",
    ),
    ("on_own_channel", 0, 4, 3, 32, f"Channel: channel is 2, must be below 2{CHANNELS}"),
    ("by_warps", 0, 4, 1, 96, f"Channel: channel is 2, must be below 2{CHANNELS}"),
    ("by_grid", 0, 4, 3, 32, f"Channel: channel is 2, must be below 2{CHANNELS}"),
    ("kept_open", 2, 4, 1, 64, f"Channel: channel is 2, must be below 2{CHANNELS}"),
    ("of_block", 1, 4, 1, 64, "Channel: block is 1, must be below 1, the blocks of a call"),
    ("of_three", 0, 4, 1, 64, f"Channel: WORLD_SIZE is 3, must be 2{RANKS}, or 0"),
    (
        *("all_of_three", 0, 0, 2, 64),
        f"grid_exchange: WORLD_SIZE is 3, must be 2{RANKS}, or 0",
    ),
    ("by_grid", 0, 2**64 - 1, 2, 32, f"{REDUCE}: count is -1, must be at most 16"),
    ("on_channel", 0, 2**62 + 1, 1, 32, f"{REDUCE}: count is {2**62 + 1}, must be at most 16"),
    ("from_root", 2, 4, 1, 32, f"{BROADCAST}: root is 2, must be below 2{RANKS}"),
    ("from_root", -1, 4, 1, 32, f"{BROADCAST}: root is -1, must be at least 0 and below 2{RANKS}"),
    ("grid_from_root", 2, 8, 2, 32, f"{BROADCAST}: root is 2, must be below 2{RANKS}"),
    ("gather_apart", -1, 4, 1, 32, f"{GATHER}: stride is -1, must be at most {2**58}"),
    ("gather_apart", 3, 4, 1, 32, f"{GATHER}: stride is 3, must be at least 4"),
    ("to_peer", 2, 0, 1, 32, f"signal: peer is 2, must be below 2{RANKS}"),
    ("to_peer", -1, 0, 1, 32, f"signal: peer is -1, must be at least 0 and below 2{RANKS}"),
    ("with_id", 64, 0, 1, 64, "signal: signal_id is 64, must be below 64"),
    ("with_id", 999, 0, 1, 32, "signal: signal_id is 999, must be below 64"),
    ("with_id", -1, 0, 1, 32, "signal: signal_id is -1, must be at least 0 and below 64"),
    ("from_peer", 2, 0, 1, 32, f"wait: peer is 2, must be below 2{RANKS}"),
    ("from_peer", -2, 0, 1, 32, f"wait: peer is -2, must be at least -1 and below 2{RANKS}"),
    ("of_id", 64, 0, 1, 32, "wait: signal_id is 64, must be below 64"),
    ("for_many", -1, 0, 1, 32, f"wait: wanted is {2**32 - 1}, must be at most {2**31 - 1}"),
    (
        *("put", 0, 256, 1, 32),
        "put: num_bytes is 256, must be at most 64, what the window has from there on",
    ),
    (
        *("put", 48, 17, 1, 32),
        "put: num_bytes is 17, must be at most 16, what the window has from there on",
    ),
    (
        *("get", 0, 2**64 - 8, 1, 32),
        "get: num_bytes is -8, must be at most 64, what the window has from there on",
    ),
    ("put_nowhere", 0, 8, 1, 32, "put: out is 0x"),
    (
        *("some_slices", 3, 2, 2, 32),
        "grid_exchange: slices.first + slices.num is 5, must be at most 4, the slices of the "
        "exchange",
    ),
    (
        *("some_slices", -1, 2, 2, 32),
        f"grid_exchange: slices.first + slices.num is {2**32 + 1}, must be at most 4, the slices "
        "of the exchange",
    ),
]


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, NAMES)


@pytest.mark.parametrize(
    ("kernel", "a", "b", "blocks", "threads", "said"), CASES, ids=[case[-1][:40] for case in CASES]
)
def test_the_call_fails_and_says_why(module, kernel, a, b, blocks, threads, said):
    def main(comm):
        device_comm = comm.device_comm(channels=2, max_bytes=64)
        window = comm.window(64)
        out, theirs = np.full(64, 7, np.float32), window.addresses[1 - comm.rank]
        given = np.ones(64, np.float32)
        statuses = np.full(blocks * threads, 99, np.uint32)
        with pytest.raises(kccl.InvalidArgument) as caught:
            module.kernel(kernel)(
                *(comm, device_comm, out, given, np.uint64(theirs), a, np.uint64(b), statuses),
                grid=blocks,
                block=threads,
            )
        text = str(caught.value)
        assert text.startswith(said), text
        assert text.endswith(
            f", in a call in the kernel on rank {comm.rank}; all ranks may go on after comm.reset()"
        )
        refused = statuses == lib.kKcclBadArgument
        assert refused.any()
        # A grid call fails in all blocks; other blocks than the first may be right.
        if (blocks == 1 and kernel != "by_warps") or kernel == "by_grid":
            assert refused.all()
            assert (out == 7).all() or kernel == "by_grid"
        assert bytes(window.local) == bytes(64)
        comm.reset()
        # The communicator is as before.
        x = np.ones(4, np.float32)
        comm.all_reduce(x)
        assert (x == 2).all()

    kccl.run_threads(main, 2, backend="sim", seed=len(said), timeout=10)


def test_limits_themselves_are_fine(module):
    """The last channel, root, peer, signal_id, byte of a window and slice."""

    def main(comm):
        device_comm = comm.device_comm(channels=2, max_bytes=64)
        window = comm.window(64)
        out, given = np.zeros(64, np.float32), np.ones(64, np.float32)

        def call(kernel, a, b, blocks=1):
            statuses = np.full(blocks * 32, 99, np.uint32)
            theirs = np.uint64(window.addresses[1 - comm.rank])
            arguments = (out, given, theirs, a, np.uint64(b), statuses)
            module.kernel(kernel)(comm, device_comm, *arguments, grid=blocks, block=32)
            assert not statuses.any()

        call("on_channel", 1, 16)
        call("by_grid", 0, 32, blocks=2)
        call("from_root", 1, 16)
        call("gather_apart", 4, 4)
        call("to_peer", 1 - comm.rank, 0)
        call("from_peer", -1, 0)
        call("with_id", 63, 0)
        if comm.rank == 0:
            call("of_id", 63, 0)
            call("of_id", 63, 0)
        comm.barrier()
        call("put", 0, 64)
        call("put", 64 - 4, 4)
        call("put", 64, 0)
        call("get", 0, 64)
        call("some_slices", 0, 2)

    kccl.run_threads(main, 2, backend="sim", timeout=10)


PASS_IT = "pass comm.device_comm(), by which the kernel reaches its peers"


def test_a_kernel_without_a_communicator(module):
    """Each form of it that a newcomer tries."""

    def main(comm):
        kernel = module.kernel("on_own_channel")
        device_comm = comm.device_comm(channels=2, max_bytes=64)
        x = np.ones(4, np.float32)
        for wrong, said in (
            ((device_comm, x), "the first argument of on_own_channel is a DeviceComm, must be the"),
            ((x,), "the first argument of on_own_channel is a ndarray, must be the communicator"),
            ((None,), "the first argument of on_own_channel is a NoneType, must be the"),
            (
                (comm, x, x, x, 0, 4, x),
                "on_own_channel takes 7 arguments, got 6 and no DeviceComm among them: " + PASS_IT,
            ),
            (
                (comm, comm, x, x, x, 0, 4, x),
                "argument 0 of on_own_channel is a Communicator, the parameter has 304 bytes, as "
                "many as a kccl::DeviceComm: " + PASS_IT,
            ),
            (
                (comm, x, x, x, x, 0, 4, x),
                "argument 0 of on_own_channel is a ndarray, the parameter has 304 bytes, as many "
                "as a kccl::DeviceComm: " + PASS_IT,
            ),
            (
                (comm, device_comm, comm, x, x, 0, 4, x),
                "argument 1 of on_own_channel is a Communicator, which is no kernel's argument",
            ),
        ):
            with pytest.raises(kccl.InvalidArgument) as caught:
                kernel(*wrong)
            assert str(caught.value).startswith(said)

    kccl.run_threads(main, 1, backend="sim")


def test_device_comms_that_differ():
    def main(comm):
        with pytest.raises(kccl.InvalidArgument) as caught:
            comm.device_comm(channels=1 + comm.rank, max_bytes=64)
        assert str(caught.value) == (
            f"device_comm: channels is {1 + comm.rank} on rank {comm.rank} and {2 - comm.rank} on "
            f"rank {1 - comm.rank}, must be the same on all ranks"
        )
        comm.device_comm(channels=2, max_bytes=64)

    kccl.run_threads(main, 2, backend="sim")
