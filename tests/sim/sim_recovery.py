"""A rank's program for run_threads() that fails again and again: it makes calls of all kinds, one
fails, later ones must fail too, and after reset() or shrink() all must be right again.
"""

import numpy as np
import pytest
from sim_machine import (
    BARRIER,
    BROADCAST,
    GATHER,
    LL16,
    NUMBERS,
    PUSH,
    SCATTER,
    SENTINEL,
    TWO_SHOT_SENTINEL,
    compiled,
)

import kccl
from kccl.base.abi import ffi, lib
from kccl.jit import cache

KINDS = (
    *(LL16, SENTINEL, SCATTER, "grid_exchange", GATHER, PUSH, "signal", "wait", "grid_sync"),
    *(BROADCAST, "grid_exchange", BARRIER, SENTINEL, "grid_sync", "signal", "wait", LL16),
)
ALGORITHMS = (LL16, SENTINEL, TWO_SHOT_SENTINEL, PUSH)
BLOCKS, THREADS, COUNT = 2, 64, 12
MAX_BYTES, EXCHANGE_BYTES = 256, 2048
SIGNAL = BLOCKS  # kernels use the others
# Of a call, as in kernels/failures.cuh.
NOT_MADE = 1


class Worker:
    """One rank: what it calls, with the windows it needs.

    Args:
        comm: The communicator. The constructor is collective.
    """

    def __init__(self, comm):
        self.comm = comm
        self.device_comm = comm.device_comm(
            channels=BLOCKS, max_bytes=MAX_BYTES, exchange_bytes=EXCHANGE_BYTES
        )

    def work(self, *, refused=None, absent=None):
        """Calls of all kinds, from a kernel that keeps everything open.

        Args:
            refused: (rank, block, index): a call that is too long.
            absent: Likewise: from which call on the rank's block makes none.

        Raises:
            Error: A call failed. Whatever failed, calls behind it did too, and the others were
                right: see kernels/failures.cuh.
        """
        comm = self.comm
        calls = ffi.new("KcclCall[]", BLOCKS * len(KINDS))
        arrays = []
        for at in range(len(calls)):
            block, index = divmod(at, len(KINDS))
            count = EXCHANGE_BYTES if (comm.rank, block, index) == refused else COUNT
            arrays.append(self._fill(calls[at], block, index, count))
            if (comm.rank, block, index) == absent:
                calls[at].fit = NOT_MADE
        bits = sum(1 << NUMBERS[kind] for kind in set(KINDS))
        name = f"kccl::kernels::go_on<{len(KINDS)}, {bits}u, kccl::Block>"
        kernel = compiled("failures.cuh", name, 32, cache.CSRC)
        wrong = np.zeros(BLOCKS, np.uint32)
        packed = np.frombuffer(bytearray(ffi.buffer(calls)), np.uint8)
        arguments = self.device_comm, packed, np.uint32(len(KINDS)), wrong
        try:
            kernel(comm, *arguments, grid=BLOCKS, block=THREADS)
            comm.check()
        finally:
            assert not wrong.any(), wrong

    def _fill(self, call, block, index, count):
        """One call; returns its arrays. All elements of the result's first chunk are equal."""
        comm, kind = self.comm, KINDS[index]
        size = comm.world_size
        unit = index + 3 * block + 1
        sent = np.full(count * size, unit * (comm.rank + 1), np.float32)
        result = np.zeros(count * size, np.float32)
        neighbours = {"signal": (comm.rank + 1) % size, "wait": (comm.rank - 1) % size}
        call.peer = neighbours.get(kind, index % size)
        call.kernel, call.count, call.channel = NUMBERS[kind], count, block
        call.input, call.output = sent.ctypes.data, result.ctypes.data
        sum_of_all = unit * size * (size + 1) // 2
        shares = {
            BROADCAST: unit * (call.peer + 1) * (comm.rank != call.peer),
            GATHER: unit,
            **dict.fromkeys((BARRIER, "grid_sync", "signal", "wait"), 0),
        }
        call.share = shares.get(kind, sum_of_all)
        return sent, result

    def call(self):
        """The communicator's own calls, of every kind."""
        comm = self.comm
        size = comm.world_size
        everyone = np.arange(1, size + 1, dtype=np.float32)
        for algorithm in ALGORITHMS:
            x = np.full(40, comm.rank + 1, np.float32)
            comm.all_reduce(x, algorithm=algorithm)
            assert (x == everyone.sum()).all(), algorithm
        chunk = np.zeros(5, np.float32)
        comm.reduce_scatter(np.repeat(everyone, 5), out=chunk)
        assert (chunk == size * everyone[comm.rank]).all()
        gathered = np.zeros((size, 3), np.float32)
        comm.all_gather(np.full(3, everyone[comm.rank]), out=gathered)
        assert (gathered == everyone[:, None]).all()
        for root in range(size):
            x = np.full(3, comm.rank)
            comm.broadcast(x, root)
            assert (x == root).all()
        comm.signal((comm.rank + 1) % size, signal_id=SIGNAL)
        comm.wait(signal_id=SIGNAL, peer=(comm.rank - 1) % size)
        comm.barrier()

    def must_fail(self):
        """Each call fails, of the communicator and of kernels."""
        for call in (self.call, self.work, self.comm.barrier):
            with pytest.raises(kccl.Error):
                call()
        assert self.comm._backend.state.status != lib.kKcclOk


def go_on(comm):
    """The program: a rank's call is refused, a block does not come, a rank waits in vain."""
    worker = Worker(comm)
    last = comm.world_size - 1

    def wait_in_vain():
        # Nor is there one of the signals below.
        if comm.rank == 0:
            comm.wait(signal_id=SIGNAL, peer=last)

    for failing in (
        lambda: worker.work(refused=(last, 1, 2)),
        lambda: worker.work(absent=(last, 0, 5)),
        lambda: worker.work(refused=(0, 0, 3)),
        wait_in_vain,
    ):
        worker.call()
        worker.work()
        if failing is not wait_in_vain:
            # Nobody waits for it: reset() drops it.
            comm.signal((comm.rank + 1) % comm.world_size, signal_id=SIGNAL)
        with pytest.raises(kccl.Error):
            failing()
            # A rank that waits for nobody hears of the failure in its next call.
            comm.barrier()
        worker.must_fail()
        comm.reset()
    worker.call()
    worker.work()
    return worker


def shrink(comm):
    """The program goes on without the rank in the middle, which leaves in a call of the others."""
    worker = go_on(comm)
    if comm.rank == 1:
        comm.abort()
        return None
    with pytest.raises(kccl.Error):
        worker.work()
        comm.barrier()
    smaller = comm.shrink()
    assert smaller.world_size == comm.world_size - 1
    go_on(smaller)
    return smaller.rank
