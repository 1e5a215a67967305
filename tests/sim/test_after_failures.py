"""Calls behind a failed one, on a channel that a kernel keeps open."""

import numpy as np
import pytest

import kccl
from kccl.base.abi import lib

# Call `refused` is longer than its channel allows.
SOURCE = """
#include <kccl/kccl.cuh>

KCCL_KERNEL void calls(kccl::DeviceComm comm, float* x, int refused, int* statuses, int count) {
    kccl::Channel<kccl::Block> channel(kccl::block(), comm);
    for (int call = 0; call < count; ++call) {
        const kccl::Status status = kccl::all_reduce(channel, x, x, call == refused ? 64 : 4);
        if (kccl::leads(kccl::block())) statuses[call] = static_cast<int>(status);
    }
}
"""
CALLS = 8


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, ["calls"])


@pytest.mark.parametrize("refused", [0, 1, 4])
def test_every_later_call_fails(module, refused):
    """They push nothing: their packets would lie in slots that the peer may still read."""

    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        x, statuses = comm.empty(64, np.float32), comm.empty(CALLS, np.int32)
        x[:] = 1
        with pytest.raises(kccl.InvalidArgument, match="has 256 bytes, must have at most"):
            module.kernel("calls")(
                comm, device_comm, x, np.int32(refused), statuses, np.int32(CALLS), block=32
            )
            comm.check()
        return statuses.tolist()

    for seed in range(30):
        for statuses in kccl.run_threads(main, 2, backend="sim", seed=seed):
            # A rank may hear of its peer's failure in a call before.
            failed = [status != lib.kKcclOk for status in statuses]
            assert failed[refused:] == [True] * (CALLS - refused), statuses
            assert failed == sorted(failed), statuses
