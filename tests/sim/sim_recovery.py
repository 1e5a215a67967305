"""A rank's program for run_threads() that fails again and again: it makes calls of all kinds, one
fails, later ones must fail too, and after reset() or shrink() all must be right again.
"""

import collectives
import numpy as np
import oracle
import pytest
from programs import OF_DATA, algorithms_for
from sim_failures import COUNT, KINDS_OF_USERS, NOT_MADE, go_on_kernel, going_on
from sim_machine import LL16, LOCAL_EXCHANGE, NUMBERS, SCATTER, SENTINEL

import kccl
from kccl.base.abi import ffi, lib
from kccl.jit import cache

# Each kind comes before a failure, and after it.
KINDS = (
    *(LL16, SENTINEL, SCATTER, "grid_exchange"),
    *(
        LOCAL_EXCHANGE,
        "signal",
        "wait",
        "grid_sync",
        *KINDS_OF_USERS,
        LOCAL_EXCHANGE,
        *KINDS_OF_USERS,
    ),
)
BLOCKS, THREADS = 2, 64
MAX_BYTES, EXCHANGE_BYTES = 256, 2048
SIGNAL = BLOCKS  # kernels use the others


def of_all_kinds():
    """The kernel that a Worker launches. The first call compiles it, for seconds."""
    return go_on_kernel(KINDS, len(KINDS), "Block", 32, cache.CSRC)


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
        kernel = of_all_kinds()
        wrong = np.zeros(BLOCKS, np.uint32)
        packed = np.frombuffer(bytearray(ffi.buffer(calls)), np.uint8)
        arguments = self.device_comm, packed, np.uint32(len(KINDS)), wrong
        try:
            kernel(comm, *arguments, grid=BLOCKS, block=THREADS)
            comm.check()
        finally:
            assert not wrong.any(), wrong

    def _fill(self, call, block, index, count):
        """One call; returns its arrays."""
        kind, comm = KINDS[index], self.comm
        sent, right, fields = going_on(
            kind, comm.rank, comm.world_size, block, index, count, BLOCKS
        )
        result = np.zeros_like(right)
        where = {"input": sent.ctypes.data, "output": result.ctypes.data}
        for name, value in {"kernel": NUMBERS[kind], **fields, **where}.items():
            setattr(call, name, value)
        return sent, result

    def call(self):
        """The communicator's own calls, of every kind."""
        comm = self.comm
        size = comm.world_size
        for collective in OF_DATA:
            table = collectives.load(collective)
            count = 40 * size if table.HAS_CHUNKS else 40
            inputs = [np.full(count, rank + 1, np.float32) for rank in range(size)]
            algorithms = algorithms_for(collective, size, "float32", "sim")
            for number in range(max(size, len(algorithms))):
                algorithm, root = algorithms[number % len(algorithms)], number % size
                x = inputs[comm.rank].copy()
                got = table.call(comm, x, op="sum", root=root, algorithm=algorithm)
                want = table.want(inputs, comm.rank, root=root)
                oracle.assert_result(got, want, algorithm, root, comm.rank)
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
