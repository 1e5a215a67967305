"""With KCCL_CHECK=1 ranks that begin different calls get an error before anything is sent."""

import numpy as np
import oracle
import pytest

import kccl


def four():
    return np.ones(4, np.float32)


DISAGREEMENTS = {
    "collective": (
        lambda comm: comm.all_reduce(four()),
        lambda comm: comm.broadcast(four()),
        [": all_reduce, 16 bytes, float32, sum", ": broadcast, 16 bytes, float32, root 0"],
    ),
    "bytes": (
        lambda comm: comm.all_reduce(four()),
        lambda comm: comm.all_reduce(np.ones(5, np.float32)),
        ["16 bytes", "20 bytes"],
    ),
    "nothing": (
        lambda comm: comm.all_reduce(np.ones(0, np.float32)),
        lambda comm: comm.all_reduce(np.ones(1, np.float32)),
        [" 0 bytes", " 4 bytes"],
    ),
    "dtype": (
        lambda comm: comm.all_reduce(four()),
        lambda comm: comm.all_reduce(np.ones(4, np.int32)),
        ["float32", "int32"],
    ),
    "op": (
        lambda comm: comm.all_reduce.prepare(four())(),
        lambda comm: comm.all_reduce(four(), op="max"),
        ["sum", "max"],
    ),
    "root": (
        lambda comm: comm.broadcast(four(), 0),
        lambda comm: comm.broadcast.prepare(four(), 1)(),
        ["root 0", "root 1"],
    ),
    "barrier": (
        lambda comm: comm.barrier(),
        lambda comm: comm.all_reduce(four()),
        ["barrier", "all_reduce"],
    ),
    "prepared barrier": (
        lambda comm: comm.barrier.prepare(channel=1)(),
        lambda comm: comm.barrier.prepare(channel=2)(),
        ["barrier, channel 1", "barrier, channel 2"],
    ),
    "size of a chunk": (
        lambda comm: comm.all_gather(four()),
        lambda comm: comm.all_gather(four()[:2]),
        ["all_gather, 16 bytes, float32, channel 0", "8 bytes"],
    ),
    "op of chunks": (
        lambda comm: comm.reduce_scatter(np.ones(12), op="min"),
        lambda comm: comm.reduce_scatter.prepare(np.ones(12), op="max")(),
        ["reduce_scatter, 96 bytes, float64, min", "max"],
    ),
    "channel": (
        lambda comm: comm.all_reduce(four()),
        lambda comm: comm.all_reduce(four(), channel=1),
        ["channel 0", "channel 1"],
    ),
    "algorithm": (
        lambda comm: comm.all_reduce(four(), algorithm="all_reduce_one_shot_ll16"),
        lambda comm: comm.all_reduce(four(), algorithm="all_reduce_one_shot_pull_simple"),
        ["ll16", "pull"],
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_disagree(monkeypatch, what):
    """Every rank's error says what each was about to do; the next calls are right."""
    monkeypatch.setenv("KCCL_CHECK", "1")
    monkeypatch.setenv("KCCL_TIMEOUT", "1")
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "1")
    first, others, words = DISAGREEMENTS[what]

    def main(comm):
        for odd_rank in range(3):
            with pytest.raises(kccl.InvalidArgument, match="the ranks disagree") as caught:
                (first if comm.rank == odd_rank else others)(comm)
            assert all(word in str(caught.value) for word in words), caught.value
            x = np.full(40, comm.rank + 1, np.float32)
            comm.all_reduce(x)
            oracle.assert_same(x, np.full(40, 6, np.float32))

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("check", ["0", "1"])
def test_only_checked_calls_pass_through_python(monkeypatch, check):
    """Without KCCL_CHECK a call goes straight to the compiled core."""
    monkeypatch.setenv("KCCL_CHECK", check)

    def main(comm):
        x = four()
        for call in (comm.barrier, comm.barrier.prepare(channel=1), comm.all_reduce.prepare(x)):
            assert is_python(type(call)) == (check == "1")
            call()

    kccl.run_threads(main, 2)


def is_python(kind):
    return any(
        "__call__" in vars(base)
        for base in kind.__mro__
        if base.__module__ in ("kccl.collectives.prepared", "kccl.collectives.collective")
    )
