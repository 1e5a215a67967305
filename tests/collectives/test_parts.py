"""Parts with lengths of their own: all_gather, gather, scatter, reduce_scatter and all_to_all with
counts give each rank its part, and what does not fit is refused.
"""

import ml_dtypes
import numpy as np
import oracle
import pytest
from long import long_after

import kccl

# Elements of each rank's part. Some are short, some fill a slot of packets, some take rounds.
COUNTS = {
    1: ([5],),
    2: ([0, 3], [1, 9000]),
    3: ([2, 0, 7], [0, 0, 0], [33, 1, 2050], [100_000, 0, 70_001]),
    4: ([1, 2, 3, 4], [0, 0, 65_537, 5]),
    8: ([3, 0, 1, 4, 1, 5, 9, 2], [0, 12_000, 1, 0, 0, 40_000, 3, 4]),
}
HOWS = ("allocated", "given", "in place")


def begins(counts):
    return np.concatenate(([0], np.cumsum(counts)[:-1])).astype(int)


def pieces(counts, dtype, salt):
    """Each rank's elements."""
    rng = np.random.default_rng(salt)
    return [rng.integers(0, 100, count).astype(dtype) for count in counts]


def place(how, whole, own, rank, counts):
    """The larger and the smaller array of a call, as `how` says."""
    begin = begins(counts)[rank]
    inner = whole[begin : begin + counts[rank]] if how == "in place" else np.zeros_like(own)
    return whole, inner


def check_all_gather(comm, how, counts, dtype, **keywords):
    every = pieces(counts, dtype, len(counts))
    want, x = np.concatenate(every), every[comm.rank]
    out = None
    if how != "allocated":
        out, inner = place(how, np.zeros_like(want), x, comm.rank, counts)
        if how == "in place":
            inner[:] = x
            x = inner
    got = comm.all_gather(x, out=out, counts=counts, **keywords)
    assert out is None or got is out
    oracle.assert_same(got, want, "all_gather", how, counts)


def check_gather(comm, how, counts, dtype, root, **keywords):
    every = pieces(counts, dtype, 7)
    want, x = np.concatenate(every), every[comm.rank].copy()
    out = None
    if how != "allocated" and comm.rank == root:
        out, inner = place(how, np.zeros_like(want), x, comm.rank, counts)
        if how == "in place":
            inner[:] = x
            x = inner
    got = comm.gather(x, root, out=out, counts=counts, **keywords)
    if comm.rank != root:
        assert got is None
    else:
        oracle.assert_same(got, want, "gather", how, counts)


def check_scatter(comm, how, counts, dtype, root, **keywords):
    every = pieces(counts, dtype, 8)
    whole, want = np.concatenate(every), every[comm.rank]
    x, out = whole, None
    if how != "allocated":
        is_root = comm.rank == root
        x, out = place(how if is_root else "given", whole, want, comm.rank, counts)
        x = x if is_root else None
    got = comm.scatter(x, root, out=out, counts=counts, **keywords)
    oracle.assert_same(got, want, "scatter", how, counts)


def check_reduce_scatter(comm, how, counts, dtype, op, **keywords):
    inputs = [np.concatenate(pieces(counts, dtype, 9 + rank)) for rank in range(comm.world_size)]
    own = slice(begins(counts)[comm.rank], begins(counts)[comm.rank] + counts[comm.rank])
    want = oracle.all_reduce(inputs, op)[own]
    x, out = inputs[comm.rank], None
    if how != "allocated":
        x, out = place(how, x, want, comm.rank, counts)
    got = comm.reduce_scatter(x, out=out, op=op, counts=counts, **keywords)
    oracle.assert_same(got, want, "reduce_scatter", how, counts)


def table_of(counts, how):
    """Elements from each rank to each; in place as many both ways."""
    size = len(counts)
    if how == "in place":
        return [[counts[(a + b) % size] for b in range(size)] for a in range(size)]
    # The first rank sends nothing.
    return [[counts[b] if a % 3 else 0 for b in range(size)] for a in range(size)]


def check_all_to_all(comm, how, counts, dtype, **keywords):
    table = table_of(counts, how)
    sent = [pieces(row, dtype, a) for a, row in enumerate(table)]
    x = np.concatenate(sent[comm.rank])
    want = np.concatenate([sent[a][comm.rank] for a in range(comm.world_size)])
    out = {"allocated": None, "given": np.zeros_like(want), "in place": x}[how]
    receives = [row[comm.rank] for row in table]
    got = comm.all_to_all(
        x, out=out, send_counts=table[comm.rank], recv_counts=receives, **keywords
    )
    oracle.assert_same(got, want, "all_to_all", how, counts)


def check_all(comm, counts, dtype="int32"):
    for number, how in enumerate(HOWS):
        keywords = {"channel": number % comm.num_channels}
        check_all_gather(comm, how, counts, dtype, **keywords)
        for root in {0, comm.world_size - 1}:
            check_gather(comm, how, counts, dtype, root, **keywords)
            check_scatter(comm, how, counts, dtype, root, **keywords)
        check_reduce_scatter(comm, how, counts, dtype, "sum", **keywords)
        check_all_to_all(comm, how, counts, dtype, **keywords)
        # Calls of equal parts between them use the same slots.
        assert (comm.all_reduce(np.ones(3, np.float32)) == comm.world_size).all()


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


@pytest.mark.parametrize("world_size", [9, 11, 12])
def test_more_ranks_than_a_team_has(world_size):
    """Groups of one size and of several; small parts, long ones and none."""

    def main(comm):
        last = world_size - 1
        for counts in ([5, 0, 1, 700] * 3, [0] * 12, [3] * 12):
            given = counts[:world_size]
            for how in HOWS:
                check_all_gather(comm, how, given, "int16")
                check_reduce_scatter(comm, how, given, "float16", "sum")
                for root in (0, last):
                    check_gather(comm, how, given, "int16", root)
                    check_scatter(comm, how, given, "int16", root)
        x = np.zeros(counts[comm.rank], np.int16)
        op = comm.all_gather.prepare(x, counts=given)
        assert op.plan.name == "all_gather_grouped_parts" and "longest" in op.plan.explain()
        assert op().size == sum(given)
        ones = [1] * world_size
        with pytest.raises(kccl.InvalidArgument, match=r"for at most 8 ranks.*comm\.split\(\)"):
            comm.all_to_all(np.zeros(world_size), send_counts=ones, recv_counts=ones)

    kccl.run_threads(main, world_size, timeout=60)


@pytest.mark.parametrize("world_size", [9, 12])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_more_ranks_than_a_team_has_notice_other_counts(world_size, name):
    """The longest part and the sum are the same, and one rank's counts differ."""

    def main(comm):
        counts = [5, 5, 9, *[5] * (world_size - 3)]
        if comm.rank == world_size - 1:
            counts[:2] = 4, 6
        size = counts[comm.rank] if name == "all_gather" else sum(counts)
        with pytest.raises(kccl.InvalidArgument) as caught:
            for _ in range(2):
                getattr(comm, name)(np.zeros(size, np.float32), counts=counts)
        text = str(caught.value)
        assert "the ranks disagree about this call" in text and name in text, text
        assert text.count("counts with check sum") == 2, text

    kccl.run_threads(main, world_size, timeout=60)
