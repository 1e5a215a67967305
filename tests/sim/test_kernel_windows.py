"""Windows as arguments of kernels, and put and get by window and offset."""

import numpy as np
import pytest
from long import long_after

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

// Every rank writes its number into word `rank` of every rank's window.
KCCL_KERNEL void announce(kccl::DeviceComm comm, kccl::Window window, uint64_t* facts) {
    const kccl::Block block = kccl::block();
    if (kccl::leads(block)) {
        for (int peer = 0; peer < window.world_size; ++peer) {
            window.at<int>(peer)[comm.rank] = window.rank + 10;
        }
        facts[0] = window.num_bytes;
        facts[1] = reinterpret_cast<uint64_t>(window.local());
    }
    block.sync();
    kccl::barrier(block, comm);
    if (kccl::leads(block)) facts[2] = window.local<int>(4 * window.world_size - 4)[0];
}

KCCL_KERNEL void copy(kccl::DeviceComm comm, kccl::Window window, int peer, uint64_t offset,
                      int* out, const int* in, uint64_t num_bytes, int* statuses) {
    const kccl::Block block = kccl::block();
    const kccl::Status put = kccl::put(block, comm, window, peer, offset, in, num_bytes);
    kccl::barrier(block, comm);
    const kccl::Status get = kccl::get(block, comm, window, peer, offset, out, num_bytes);
    if (kccl::leads(block)) statuses[0] = put, statuses[1] = get;
}
"""
ADDRESS_KERNELS = ["announce", "copy"]


@pytest.fixture(scope="module", params=long_after(1, (32, 64)))
def module(request):
    return kccl.compile(SOURCE, ADDRESS_KERNELS, warp_size=request.param)


@pytest.mark.parametrize("made_by", ["window", "empty"])
def test_a_kernel_gets_every_ranks_address(module, made_by):
    def main(comm):
        window = comm.window(64) if made_by == "window" else comm.empty(16, np.int32)
        facts = np.zeros(3, np.uint64)
        device_comm = comm.device_comm(channels=1, max_bytes=64)
        module.kernel("announce")(comm, device_comm, window, facts)
        comm.barrier()
        local = window.local if made_by == "window" else window
        address = np.frombuffer(local, np.int32).ctypes.data
        assert facts.tolist() == [64, address, 12]
        return np.frombuffer(local, np.int32, 4).tolist()

    options = {"backend": "sim", "warp_size": module.warp_size}
    assert kccl.run_threads(main, 3, **options) == [[10, 11, 12, 0]] * 3


def copied(module, peer, offset, num_bytes, window_bytes=64):
    """Runs `copy` on two ranks: what each one's window has, what it got, its statuses."""

    def main(comm):
        window = comm.window(window_bytes)
        out, statuses = np.zeros(64, np.int32), np.full(2, -1, np.int32)
        x = np.arange(64, dtype=np.int32) + 100 * comm.rank
        device_comm = comm.device_comm(channels=1, max_bytes=64)
        facts = (comm, device_comm, window, peer(comm.rank), offset, out, x, num_bytes, statuses)
        try:
            module.kernel("copy")(*facts)
        except kccl.InvalidArgument as error:
            return str(error), np.frombuffer(window.local, np.int32).any(), statuses.tolist()
        mine = np.frombuffer(window.local, np.int32)
        return mine.tolist(), out.tolist(), statuses.tolist()

    return kccl.run_threads(main, 2, backend="sim", warp_size=module.warp_size)


def test_put_and_get_by_window_and_offset(module):
    for rank, (mine, out, statuses) in enumerate(copied(module, lambda rank: 1 - rank, 16, 48)):
        theirs = [i + 100 * (1 - rank) for i in range(12)]
        assert mine == [0] * 4 + theirs
        assert out[:13] == [i + 100 * rank for i in range(12)] + [0]
        assert statuses == [0, 0]


@pytest.mark.parametrize(
    ("offset", "num_bytes", "words"),
    [
        (0, 68, "num_bytes is 68, must be at most 64, what the window has from there on"),
        (60, 8, "num_bytes is 8, must be at most 4, what the window has from there on"),
        (72, 0, "offset is 72, must be at most 64, the window's bytes"),
        (68, 4, "offset is 68, must be at most 64, the window's bytes"),
    ],
)
def test_bytes_beyond_the_window_are_refused(module, offset, num_bytes, words):
    for message, wrote, statuses in copied(module, lambda rank: 1 - rank, offset, num_bytes):
        assert f"put: {words}, in a call in the kernel on rank" in message
        assert not wrote and 0 not in statuses


def test_an_offset_that_wraps_is_refused(module):
    """Offset and length together are 4 in 64 bits."""
    for message, wrote, _ in copied(module, lambda rank: 1 - rank, 2**64 - 4, 8):
        assert "must be at most 64, the window's bytes" in message and not wrote


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda comm: np.zeros(16),
            r"argument 1 of announce is a ndarray of 8 bytes, the parameter"
            r" has 80, as a kccl::Window has, which comm.window\(\) returns",
        ),
        (lambda comm: comm.empty(16)[4:], "is a ndarray of 8 bytes"),
        (lambda comm: comm.device_comm(channels=1), "is a DeviceComm of 304 bytes"),
    ],
)
def test_what_is_no_window_is_refused(module, wrong, message):
    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=64)
        with pytest.raises(kccl.InvalidArgument, match=message):
            module.kernel("announce")(comm, device_comm, wrong(comm), np.zeros(3, np.uint64))

    kccl.run_threads(main, 1, backend="sim", warp_size=module.warp_size)


def test_a_closed_window_is_refused(module):
    def main(comm):
        window, device_comm = comm.window(64), comm.device_comm(channels=1, max_bytes=64)
        window.close()
        with pytest.raises(kccl.InvalidArgument, match="window is one of 64 bytes that rank"):
            module.kernel("announce")(comm, device_comm, window, np.zeros(3, np.uint64))

    kccl.run_threads(main, 2, backend="sim", warp_size=module.warp_size)


def test_an_array_keeps_the_parts_of_all_ranks(module):
    """comm.empty() returns only this rank's part; the others live as long."""

    def main(comm):
        array = comm.empty((4, 4), np.int32)
        view = array[0]
        del array
        device_comm = comm.device_comm(channels=1, max_bytes=64)
        comm.barrier()
        module.kernel("announce")(comm, device_comm, view, np.zeros(3, np.uint64))
        comm.barrier()
        return view.tolist()

    options = {"backend": "sim", "warp_size": module.warp_size}
    assert kccl.run_threads(main, 2, **options) == [[10, 11, 0, 0]] * 2
