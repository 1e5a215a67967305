"""The arguments of rms_norm and of calls that normalise a sum: what is refused, what is planned,
and which memory ranks may share.
"""

import numpy as np
import oracle
import pytest

import kccl
from kccl.backends import alone
from kccl.base.arrays import ArrayView
from kccl.collectives import norm
from kccl.collectives.norm import MOST_WIDTH

EPS = 1e-5
FUSED = "all_reduce_rms_norm"


def _f32(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": np.ones((2, 4), np.int32)}, "x: dtype is int32, must be one of float32"),
        ({"x": np.ones((2, 4))}, "x: dtype is float64"),
        ({"weight": np.ones(4, np.float16)}, "weight has dtype float16, x has float32"),
        ({"weight": _f32(8)}, r"weight has 8 elements and x has shape \(2, 4\)"),
        ({"x": _f32(0, 0), "weight": _f32(0)}, "at least one"),
        ({"residual": _f32(4)}, "residual has 4 elements, x has 8: must be equal"),
        ({"residual": np.ones((2, 4), np.float16)}, "residual has dtype float16"),
        ({"eps": -1e-6}, "eps is -1e-06, must be a number from 0"),
        ({"eps": float("nan")}, "eps is nan, must be a number"),
        ({"eps": "1"}, "eps is '1', must be a number"),
        ({"eps": 1e300}, "must be a number from 0 to the largest float32"),
        ({"scale": _f32(1)}, "out is None and a scale is given"),
        ({"scale": _f32(2)}, "scale has 2 elements of float32, must have one"),
        ({"out": np.ones((2, 4), np.float16)}, "out has dtype float16 and x has float32"),
        ({"out": _f32(2, 4), "scale": _f32(1)}, "must be float8_e4m3fn"),
        ({"out": _f32(4)}, "out has 4 elements, x has 8"),
        ({"stream": 1}, "must be None: host memory has no streams"),
    ],
)
def test_wrong_arguments(change, reason):
    given = {"x": _f32(2, 4), "residual": None, "weight": _f32(4), "eps": EPS} | change
    with pytest.raises(kccl.InvalidArgument, match=reason):
        kccl.rms_norm(**given)
    with kccl.init() as comm:
        for call in (comm.all_reduce_rms_norm, comm.all_reduce_rms_norm.prepare):
            with pytest.raises(kccl.InvalidArgument, match=reason):
                call(**given)


def test_the_stream_of_a_call_waits_for_every_input(monkeypatch):
    waited = []

    def stream(given, view, others=()):
        waited.append([each.address for each in (view, *others)])
        return 0

    x, weight, scale = _f32(2, 4), _f32(4), _f32(1)
    out = np.empty((2, 4), oracle.numpy_dtype("float8_e4m3fn"))
    how = {"residual": None, "out": out, "scale": scale}
    monkeypatch.setattr(alone.OnHost, "stream", staticmethod(stream))
    kccl.rms_norm(x, weight, EPS, **how)
    with kccl.init() as comm:
        monkeypatch.setattr(comm.context.backend, "stream", stream)
        for call in (comm.all_reduce_rms_norm, comm.reduce_scatter_rms_norm.prepare):
            call(x, weight=weight, eps=EPS, **how)
    assert waited == [[each.ctypes.data for each in (x, weight, scale)]] * 3


def test_rows_of_more_elements_than_a_call_can_say():
    class Long:
        shape = 1, MOST_WIDTH + 1

    def view(array, name, *, writable):
        return ArrayView(0, MOST_WIDTH + 1, kccl.float32, False, array)

    with pytest.raises(kccl.InvalidArgument, match="a row of x has 2147483649 elements"):
        norm.check(view, Long(), None, Long(), EPS, None, None)


def test_arrays_that_overlap():
    memory = _f32(4, 4)
    for given in ({"residual": memory[:2]}, {"residual": memory[1:3]}, {"out": memory[1:3]}):
        with pytest.raises(kccl.InvalidArgument, match="they must not overlap"):
            kccl.rms_norm(memory[:2], _f32(4), EPS, **given)
    with pytest.raises(kccl.InvalidArgument, match=r"x begins .* weight at .* must not overlap"):
        kccl.rms_norm(memory, memory[0], EPS)


def test_plans():
    def main(comm):
        for nbytes, width, name in ((4096, 2048, FUSED), (16384, 8192, "all_reduce_")):
            plan = comm.plan(FUSED, nbytes, "bfloat16", width=width)
            assert plan.name.startswith(name)
        plan = comm.plan("reduce_scatter_rms_norm", 4096, "bfloat16", width=1024)
        assert plan.name in comm.algorithms("reduce_scatter")
        with pytest.raises(kccl.InvalidArgument, match="nbytes is 4096, must be a multiple of 6: "):
            comm.plan(FUSED, 4096, "bfloat16", width=3)
        with pytest.raises(kccl.InvalidArgument, match="width is 0, must be"):
            comm.plan(FUSED, 4096, "bfloat16")
        for dtype in ("int32", None):
            with pytest.raises(kccl.InvalidArgument, match=f"dtype is {dtype}, must be one of fl"):
                comm.plan(FUSED, 4096, dtype, width=4)
        with pytest.raises(kccl.InvalidArgument, match="width is 4, must be 0: all_reduce has no"):
            comm.plan("all_reduce", 4096, "float32", width=4)
        assert comm.plan(FUSED, 4096, "bfloat16", width=2048).request.collective == FUSED
        sums = comm.algorithms("all_reduce")
        assert comm.algorithms(FUSED) == [FUSED, *sums]
        assert comm.algorithms("reduce_scatter_rms_norm") == comm.algorithms("reduce_scatter")
        for call in (comm.algorithms, comm.plan):
            with pytest.raises(kccl.InvalidArgument, match=f"all_reduce, {FUSED}, .*_rms_norm, "):
                call("rms_norm")

    kccl.run_threads(main, 2, backend="sim", seed=1)


@pytest.mark.parametrize(
    ("preferred", "rows", "name"),
    [
        ("all_reduce_one_shot_ll16", 1, "all_reduce_one_shot_ll16"),
        ("all_reduce_two_shot_push_simple", 1, "all_reduce_two_shot_push_simple"),
        ("all_gather_direct_ll16", 1, FUSED),
        (FUSED, 1, FUSED),
        (FUSED, 129, FUSED),
        ("", 128, FUSED),
        ("", 129, "all_reduce_one_shot_ll16"),
    ],
)
def test_the_variable_or_the_number_of_rows_chooses(preferred, rows, name, monkeypatch):
    monkeypatch.setenv("KCCL_ALGORITHM", preferred)

    def main(comm):
        assert comm.plan(FUSED, rows * 8, "bfloat16", width=4).name == name

    kccl.run_threads(main, 2, backend="sim", seed=1)


def test_algorithms_that_do_not_exist_here():
    with kccl.init() as comm:
        for algorithm, reason in (
            (FUSED, "for sim and cuda and hip only"),
            ("none", f"must be an algorithm of {FUSED}: {FUSED}, all_reduce_one_shot"),
        ):
            with pytest.raises(kccl.InvalidArgument, match=reason):
                comm.all_reduce_rms_norm(_f32(4), None, _f32(4), EPS, algorithm=algorithm)


def test_calls_are_compared(monkeypatch):
    monkeypatch.setenv("KCCL_CHECK", "1")

    def main(comm):
        x, weight = _f32(2, 4), _f32(4)
        assert (comm.all_reduce_rms_norm(x, None, weight, 0) == 1).all()
        with pytest.raises(kccl.Error, match="eps"):
            comm.all_reduce_rms_norm(x, None, weight, comm.rank)

    kccl.run_threads(main, 2)


def test_ranks_that_share_what_a_call_writes_are_told(monkeypatch):
    """Also threads. Empty arrays share nothing, and threads may share x of an all_reduce."""
    monkeypatch.setenv("KCCL_CHECK", "1")
    memory = _f32(8, 4)

    def main(comm):
        shared, shifted = memory[:2], memory[comm.rank :][:2]
        whole, parts = comm.all_reduce_rms_norm, comm.reduce_scatter_rms_norm
        mixed = {"out": memory[:1]} if comm.rank == 0 else {"residual": memory[:1]}
        for call, given, names in (
            (whole, {"x": shared, "out": None}, ("x", "x")),
            (whole, {"out": shifted}, ("out", "out")),
            (whole, {"residual": shared}, ("residual", "residual")),
            (parts, {"out": _f32(1, 4), "residual": _f32(1, 4)} | mixed, ("out", "residual")),
        ):
            given = {"x": _f32(2, 4), "residual": None, "out": _f32(2, 4)} | given
            given |= {"weight": memory[7], "eps": EPS}
            reason = "{} of rank 0 and {} of rank 1 overlap in memory".format(*names)
            with pytest.raises(kccl.InvalidArgument, match=reason):
                call(**given)
            with pytest.raises(kccl.InvalidArgument, match=reason):
                call.prepare(**given)()
        whole(memory[:0], None, memory[7], EPS)
        comm.all_reduce(shared)
        with pytest.raises(kccl.InvalidArgument, match="or threads of one process the same array"):
            comm.all_reduce(shifted)

    kccl.run_threads(main, 2)


def test_a_prepared_call_ends_with_its_communicator():
    """The sum of a result of 8 bits lies in memory of the communicator's."""
    with kccl.init() as comm:
        out = np.empty(4, oracle.numpy_dtype("float8_e4m3fn"))
        op = comm.all_reduce_rms_norm.prepare(_f32(4), None, _f32(4), 0, out=out, scale=_f32(1))
        assert (op() == 1).all()
    with pytest.raises(kccl.Error, match="closed"):
        op()
