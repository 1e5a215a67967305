"""Which arguments all_gather and reduce_scatter accept and refuse, and what they allocate."""

from array import array

import numpy as np
import pytest

import kccl


def test_shapes_of_what_is_allocated():
    def main(comm):
        for shape in ((), (1,), (5,), (2, 3), (0, 3)):
            out = comm.all_gather(np.full(shape, comm.rank, np.float64))
            assert out.shape == (2, *shape) and out.dtype == np.float64
            assert (out[0] == 0).all() and (out[1] == 1).all()
        for shape, want in (
            ((2,), (1,)),
            ((4, 3), (2, 3)),
            ((3, 4), (6,)),
            ((0, 5), (0, 5)),
            ((5, 0), (0,)),
            ((1, 2, 3), (3,)),
        ):
            out = comm.reduce_scatter(np.full(shape, comm.rank + 1, np.int32))
            assert out.shape == want and out.dtype == np.int32 and (out == 3).all()
        # The result for an array of another library is a NumPy array.
        assert comm.all_gather(array("i", [comm.rank, 7])).tolist() == [[0, 7], [1, 7]]
        view = memoryview(np.full((2, 3), comm.rank, np.float32))
        assert comm.all_gather(view).shape == (2, 2, 3)
        assert comm.reduce_scatter(view).tolist() == [[1, 1, 1]]

    kccl.run_threads(main, 2)


# The call, x and out of rank 1 of 2, and what the message says.
X4, X8 = np.ones(4, np.float32), np.ones(8, np.float32)
GATHER, SCATTER = "all_gather", "reduce_scatter"
WRONG = {
    "gather too small": (GATHER, X4, np.ones(7, "f4"), "out has 7 .*x has 4: out must have 8"),
    "gather type": (GATHER, X4, np.ones(8, "f8"), "out has dtype float64, x has float32"),
    "gather next to": (GATHER, X8[:4], X8, "overlap; x must be this rank's chunk of out, or"),
    "gather read-only": (GATHER, X4, memoryview(bytes(32)).cast("f"), "out is read-only"),
    "gather masked": (GATHER, np.ma.array(X4, mask=[1, 0, 0, 0]), X8, "x is a MaskedArray"),
    "scatter masked": (SCATTER, X8, np.ma.array(X4, mask=True), "out is a MaskedArray"),
    "gather list": (GATHER, [1.0], None, "x is a list, must be an array"),
    "gather object": (GATHER, np.ones(2, object), None, "x: dtype is object, must have no Python"),
    "scatter odd": (SCATTER, np.ones(7, "f4"), None, "x has 7 .*divisible by world_size, 2"),
    "scatter too big": (SCATTER, X8, np.ones(8, "f4"), "out has 8 .*: out must have 4"),
    "scatter type": (SCATTER, X8, np.ones(4, "i4"), "out has dtype int32, x has float32"),
    "scatter next to": (SCATTER, X8, X8[:4], "overlap; out must be this rank's chunk of x, or"),
    "scatter between": (SCATTER, X8, X8[2:6], "they overlap"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("is_known", [False, True])
def test_wrong_arrays(name, is_known):
    """Nothing is sent, so the next call is right. This also holds on the fast path."""
    collective, x, out, message = WRONG[name]

    def main(comm):
        if is_known:
            comm.all_gather(X4.copy(), out=np.ones(8, np.float32))
            comm.reduce_scatter(X8.copy(), out=np.ones(4, np.float32))
        if comm.rank == 1:
            call = getattr(comm, collective)
            for use in (call, call.prepare):
                with pytest.raises(kccl.InvalidArgument, match=message):
                    use(x, out=out)
        assert comm.all_gather(X4).sum() == 8
        assert comm.reduce_scatter(X8).sum() == 8

    kccl.run_threads(main, 2)


def test_wrong_keywords():
    wrong = (
        (lambda comm: comm.all_gather(X4, channel=4), "channel is 4"),
        (lambda comm: comm.all_gather(X4, algorithm="ring"), "algorithm is 'ring'"),
        (lambda comm: comm.all_gather(X4, stream=1), "stream is 1, must be None"),
        (lambda comm: comm.reduce_scatter(X8, op="no"), "op is 'no', must be one of"),
        (lambda comm: comm.reduce_scatter(X8.astype("i4"), op="avg"), "must be a float"),
        (lambda comm: comm.reduce_scatter(X8, channel=-1), "channel is -1"),
        (
            lambda comm: comm.reduce_scatter(X8, algorithm="all_gather_direct_ll16"),
            "algorithm is 'all_gather_direct_ll16', must be an algorithm of reduce_scatter: ",
        ),
    )

    def main(comm):
        for use, message in wrong:
            with pytest.raises(kccl.InvalidArgument, match=message):
                use(comm)
        with pytest.raises(TypeError):
            comm.all_gather(X4, op="sum")

    kccl.run_threads(main, 1)


def test_ranks_that_disagree(monkeypatch):
    monkeypatch.setenv("KCCL_CHECK", "1")

    def main(comm):
        x = np.ones(4 + 2 * comm.rank, np.float32)
        with pytest.raises(
            kccl.InvalidArgument, match=r"disagree.*all_gather, 16 bytes, float32, c"
        ):
            comm.all_gather(x)
        x = np.ones(4, np.float32)
        with pytest.raises(kccl.InvalidArgument, match=r"rank 1: reduce_scatter, 16 .*, max, chan"):
            comm.reduce_scatter(x, op=("sum", "max")[comm.rank])
        for _ in range(2):
            assert (comm.all_gather(x, out=np.zeros(8, np.float32)) == 1).all()
            assert (comm.reduce_scatter(x, out=np.zeros(2, np.float32)) == 2).all()

    kccl.run_threads(main, 2)


def test_the_plan_says_why():
    def main(comm):
        plan = comm.plan("all_gather", 1 << 20, kccl.float32)
        assert plan.name == "all_gather_pull_simple" and "all_gather of 1048576" in plan.explain()
        assert "not all_gather_direct_ll16" in plan.explain()
        assert comm.plan("reduce_scatter", 16, kccl.float32).name == "reduce_scatter_direct_ll16"
        # The plan is for the size of the larger array.
        assert comm.all_gather.prepare(X4).plan.request.nbytes == 32
        assert comm.reduce_scatter.prepare(X8).plan.request.nbytes == 32

    kccl.run_threads(main, 2)
