"""Parts with lengths of their own: all_gather, gather, scatter, reduce_scatter and all_to_all with
counts give each rank its part, and what does not fit is refused.
"""

import ml_dtypes
import numpy as np
import oracle
import pytest
from long import long_after
from parts import begins, check_all, check_all_to_all, check_reduce_scatter

import kccl

# Elements of each rank's part. Some are short, some fill a slot of packets, some take rounds.
COUNTS = {
    1: ([5],),
    2: ([0, 3], [1, 9000]),
    3: ([2, 0, 7], [0, 0, 0], [33, 1, 2050], [100_000, 0, 70_001]),
    4: ([1, 2, 3, 4], [0, 0, 65_537, 5]),
    8: ([3, 0, 1, 4, 1, 5, 9, 2], [0, 12_000, 1, 0, 0, 40_000, 3, 4]),
}


@pytest.mark.parametrize("world_size", COUNTS)
def test_every_collective_on_the_host(world_size):
    def main(comm):
        for counts in COUNTS[world_size]:
            check_all(comm, counts)

    kccl.run_threads(main, world_size, timeout=60)


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "warp_size"), long_after(1, [(3, 32), (2, 64)]))
def test_every_collective_on_the_simulator(world_size, warp_size):
    def main(comm):
        for counts in ([5, 0, 2050][:world_size], [0, 0, 1][:world_size]):
            check_all(comm, counts)

    kccl.run_threads(main, world_size, backend="sim", seed=1, warp_size=warp_size)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "complex128", "bool"])
def test_types(dtype):
    def main(comm):
        for counts in ([1, 0, 5], [3000, 40_001, 2]):
            check_reduce_scatter(comm, "given", counts, dtype, "sum")
            check_all_to_all(comm, "given", counts, dtype)

    kccl.run_threads(main, 3, timeout=60)


@pytest.mark.parametrize("op", ["sum", "avg", "min"])
def test_sums_have_the_bits_of_an_all_reduce(op):
    counts = [700, 3, 5001]

    def main(comm):
        rng = np.random.default_rng(comm.rank)
        x = rng.standard_normal(sum(counts)).astype(ml_dtypes.bfloat16)
        whole = comm.all_reduce(x.copy(), op=op)
        begin = begins(counts)[comm.rank]
        own = whole[begin : begin + counts[comm.rank]]
        oracle.assert_same(comm.reduce_scatter(x, op=op, counts=counts), own)

    kccl.run_threads(main, 3, timeout=60)


def test_moved_types_and_shapes():
    """Rows stay rows; counts that cut rows give one dimension."""

    def main(comm):
        rows = np.zeros((comm.rank + 1, 3), "M8[s]")
        assert comm.all_gather(rows, counts=(3, 6)).shape == (3, 3)
        assert comm.all_gather(np.zeros(comm.rank + 1), counts=np.array([1, 2])).shape == (3,)
        x = np.arange(12).reshape(4, 3)
        assert comm.scatter(x, counts=[9, 3]).shape == (3 - 2 * comm.rank, 3)
        assert comm.scatter(x, counts=[8, 4]).shape == (8 - 4 * comm.rank,)
        sends = [[3, 6], [0, 3]][comm.rank]
        receives = [[3, 0], [6, 3]][comm.rank]
        x = np.zeros((sum(sends) // 3, 3))
        got = comm.all_to_all(x, send_counts=sends, recv_counts=receives)
        assert got.shape == (sum(receives) // 3, 3)

    kccl.run_threads(main, 2, timeout=60)


@pytest.mark.parametrize("check", ["0", "1"])
def test_prepared_calls(monkeypatch, check):
    monkeypatch.setenv("KCCL_CHECK", check)
    counts = [4, 0, 3000]

    def main(comm):
        x = np.zeros(counts[comm.rank], np.int64)
        op = comm.all_gather.prepare(x, counts=counts)
        assert op.plan.name == "all_to_all_parts"
        assert "the parts have lengths of their own" in op.plan.explain()
        whole = np.ones(sum(counts), np.int64)
        reduced = comm.reduce_scatter.prepare(whole, counts=counts)
        for number in range(30):
            x[:] = 10 * number + comm.rank
            assert (op() == 10 * number + np.repeat(range(3), counts)).all()
            assert (reduced() == 3).all()
        own = [1] * 3
        exchanged = comm.all_to_all.prepare(np.arange(3), send_counts=own, recv_counts=own)
        assert (exchanged() == comm.rank).all()

    kccl.run_threads(main, 3, timeout=60)


def test_checked_calls_whose_ranks_move_different_lengths(monkeypatch):
    monkeypatch.setenv("KCCL_CHECK", "1")

    def main(comm):
        rank, others = comm.rank, [peer for peer in range(3) if peer != comm.rank]
        sends = [0 if peer == rank else rank + 1 for peer in range(3)]
        receives = [0 if peer == rank else peer + 1 for peer in range(3)]
        got = comm.all_to_all(
            np.full(2 * (rank + 1), rank), send_counts=sends, recv_counts=receives
        )
        assert (got == np.repeat(others, [peer + 1 for peer in others])).all()

    kccl.run_threads(main, 3, timeout=60)


def test_counts_that_fit_no_packet_are_refused():
    def main(comm):
        for call in (comm.gather, comm.scatter, comm.all_gather):
            with pytest.raises(
                kccl.InvalidArgument, match=r"counts\[1\] is \d+, must be between 0"
            ):
                call(np.zeros(2), counts=[2, 2**61])

    kccl.run_threads(main, 2, timeout=60)


WRONG = [
    ("all_gather", {"counts": [2]}, "counts has 1 entries, must have 2, one for each rank"),
    ("all_gather", {"counts": 2}, "counts is 2, must be a sequence of 2 integers"),
    ("all_gather", {"counts": [-1, 4]}, r"counts\[0\] is -1, must be between 0 and"),
    ("all_gather", {"counts": [4, 2.5]}, r"counts\[1\] is 2.5, must be an integer"),
    ("all_gather", {"counts": [3, 3]}, r"counts\[.\] is 3, x has 4 elements on rank ."),
    ("gather", {"counts": [3, 3]}, r"counts\[.\] is 3, x has 4 elements on rank ."),
    ("scatter", {"counts": [3, 3]}, "counts adds up to 6, x has 4 elements: must be equal"),
    ("reduce_scatter", {"counts": [3, 3]}, "counts adds up to 6, x has 4 elements"),
    ("all_to_all", {"send_counts": [2, 2]}, "recv_counts is None, must be given with"),
    ("all_to_all", {"recv_counts": [2, 2]}, "send_counts is None, must be given with"),
    (
        "all_to_all",
        {"send_counts": [2, 1], "recv_counts": [2, 2]},
        "send_counts adds up to 3, x has 4 elements",
    ),
    (
        "all_gather",
        {"counts": [4, 4], "algorithm": "all_gather_direct_ll16"},
        "must be 'all_to_all_parts' where counts are given",
    ),
]


@pytest.mark.parametrize(("name", "keywords", "message"), WRONG)
def test_wrong_arguments(name, keywords, message):
    def main(comm):
        for call in (getattr(comm, name), getattr(comm, name).prepare):
            with pytest.raises(kccl.InvalidArgument, match=message):
                call(np.zeros(4, np.float32), **keywords)
        comm.barrier()

    kccl.run_threads(main, 2, timeout=60)


def test_wrong_arrays():
    def main(comm):
        x, peer = np.zeros(6, np.float32), 1 - comm.rank
        sends, receives = [3, 3], [3, 3]
        receives[peer] = 2
        with pytest.raises(kccl.InvalidArgument, match="send_counts and recv_counts differ"):
            comm.all_to_all(x, out=x[:5], send_counts=sends, recv_counts=receives)
        receives[comm.rank] = 9
        with pytest.raises(kccl.InvalidArgument, match=r"send_counts\[.\] is 3 and recv_counts"):
            comm.all_to_all(x, send_counts=sends, recv_counts=receives)
        with pytest.raises(kccl.InvalidArgument, match="out has 5 elements, x has 3: out must"):
            comm.all_gather(x[:3], counts=[3, 3], out=np.zeros(5, np.float32))
        with pytest.raises(kccl.InvalidArgument, match="must be this rank's chunk of out"):
            comm.all_gather(x[1:4], counts=[3, 3], out=x)
        comm.barrier()

    kccl.run_threads(main, 2, timeout=60)


def differing(comm):
    """Rank 1 expects one element less of rank 0 than it sends."""
    sends, receives = [2, 3], [2, 3]
    if comm.rank == 1:
        sends, receives = [3, 4], [2, 4]
    x = np.zeros(sum(sends), np.int32)
    with pytest.raises(kccl.InvalidArgument) as raised:
        for _ in range(2):
            comm.all_to_all(x, send_counts=sends, recv_counts=receives)
    assert (
        "all_to_all_parts: rank 1 expects 8 bytes of rank 0, which sends it 12: the counts on both "
        "ranks must agree"
    ) in str(raised.value)
    comm.reset()
    assert comm.all_gather(np.zeros(comm.rank), counts=[0, 1]).size == 1


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_ranks_whose_counts_differ(backend):
    kccl.run_threads(differing, 2, backend=backend)


def test_ranks_whose_lists_differ():
    """The ranks have other ideas of the parts of a sum, and of a scatter."""

    def main(comm):
        counts = [3, 5] if comm.rank else [4, 4]
        with pytest.raises(kccl.InvalidArgument, match="the counts on both ranks must agree"):
            for _ in range(2):
                comm.reduce_scatter(np.zeros(8, np.float32), counts=counts)
        comm.reset()
        with pytest.raises(kccl.InvalidArgument, match="expects 20 bytes of rank 0, which sends"):
            for _ in range(2):
                comm.scatter(np.zeros(8, np.float32), counts=counts)

    kccl.run_threads(main, 2, timeout=60)


def test_equal_parts_on_one_rank_and_counts_on_another():
    def main(comm):
        keywords = {"counts": [4, 4]} if comm.rank else {}
        with pytest.raises(kccl.InvalidArgument, match="the ranks disagree about this call"):
            for _ in range(2):
                comm.all_gather(np.zeros(4, np.float32), **keywords)

    kccl.run_threads(main, 2, timeout=60)
