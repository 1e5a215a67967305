"""rms_norm and all_reduce_rms_norm: the bits of NumPy's, on the host and on the simulator."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import oracle
import pytest
from source_tree import replace_once
from worlds import World

import kccl
from kccl.backends.settings import Settings
from kccl.jit import cache
from kccl.sim.machine import Simulation

DTYPES = ("float32", "float16", "bfloat16")
# Rows and elements of each: one, an odd tail, whole groups, more than a piece with an odd tail.
SHAPES = ((3, 1), (2, 37), (1, 4096), (2, 8197))
EPS = 1e-5
FUSED = "all_reduce_rms_norm"
PIECE_BYTES = 16384


def normalised(hidden, weight, scale=None):
    """The rows of `hidden`, by the order of sums that norm.cuh has."""
    values = hidden.astype(np.float32)
    width = hidden.shape[-1]
    line, piece = 16 // hidden.itemsize, PIECE_BYTES // hidden.itemsize
    squares = np.zeros((*hidden.shape[:-1], -(-width // piece) * piece), np.float32)
    squares[..., :width] = values * values
    lines = tree(squares.reshape(*hidden.shape[:-1], -1, 16, 2, 32, line))
    columns = lines[..., 0, :] + lines[..., 1, :]
    total = np.zeros(hidden.shape[:-1], np.float32)
    for each in np.moveaxis(tree(tree(columns)), -1, 0):
        total += each
    share = np.float32(1) / np.float32(width)
    inverse = np.float32(1) / np.sqrt(total * share + np.float32(EPS))
    found = values * inverse[..., None] * weight.astype(np.float32)
    if scale is None:
        return found.astype(hidden.dtype)
    by = np.float32(1) / scale
    return np.clip(found * by, -448, 448).astype(oracle.numpy_dtype("float8_e4m3fn"))


def tree(values):
    """Adds neighbours along the last axis until one value is left."""
    while values.shape[-1] > 1:
        values = values[..., ::2] + values[..., 1::2]
    return values[..., 0]


def added(total, residual):
    return (total.astype(np.float32) + residual.astype(np.float32)).astype(total.dtype)


def numbers(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(oracle.numpy_dtype(dtype)) * 2


def same(found, wanted):
    return found.dtype == wanted.dtype and (oracle.bits(found) == oracle.bits(wanted)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_on_the_host(dtype):
    for shape in SHAPES:
        x, rest, weight = (numbers(*each) for each in _three(shape, dtype))
        hidden, before = added(x, rest), x.copy()
        out = np.empty_like(x)
        assert kccl.rms_norm(x, weight, EPS, residual=rest, out=out) is out
        assert same(out, normalised(hidden, weight)) and same(rest, hidden) and same(x, before)
        small = np.empty(shape, oracle.numpy_dtype("float8_e4m3fn"))
        scale = np.array([0.01], np.float32)
        kccl.rms_norm(x, weight, EPS, out=small, scale=scale)
        assert same(small, normalised(x, weight, scale[0]))
        assert kccl.rms_norm(x, weight, EPS) is x and same(x, normalised(before, weight))


def _three(shape, dtype):
    return (shape, dtype, 1), (shape, dtype, 2), (shape[-1], dtype, 3)


def test_numbers_without_end():
    """They make a row of NaN or zeros, and touch no other row."""
    x = np.ones((4, 5), oracle.numpy_dtype("bfloat16"))
    x[0, 1], x[1, 2], x[2] = np.inf, np.nan, 0
    kccl.rms_norm(x, np.ones_like(x[0]), EPS)
    assert np.isnan(x[0, 1]) and (x[0, [0, 2, 3, 4]] == 0).all()
    assert (oracle.bits(x[1]) == 0x7FC0).all() and (x[2] == 0).all() and (x[3] == 1).all()


def check_calls(comm, dtype, shapes=SHAPES, algorithms=("",)):
    """In place and out of place, with a residual and without, of 8 bits, and prepared."""
    is_one_kernel = []
    for shape in shapes:
        inputs = [numbers(shape, dtype, 10 + rank) for rank in range(comm.world_size)]
        weight, rest = numbers(shape[-1], dtype, 3), numbers(shape, dtype, 2)
        total = comm.all_reduce(inputs[comm.rank].copy())
        hidden = added(total, rest)
        wanted = normalised(hidden, weight)
        scale = np.array([0.01], np.float32)
        for algorithm in algorithms:
            call = partial(comm.all_reduce_rms_norm, algorithm=algorithm)
            x, residual = inputs[comm.rank].copy(), rest.copy()
            assert call(x, residual, weight, EPS) is x
            assert same(x, wanted) and same(residual, hidden)
            x[...], residual[...] = inputs[comm.rank], rest
            out = np.empty_like(x)
            op = comm.all_reduce_rms_norm.prepare(
                x, residual, weight, EPS, out=out, algorithm=algorithm
            )
            for _ in range(2):
                residual[...] = rest
                assert op() is out and same(out, wanted) and same(residual, hidden)
            assert same(x, inputs[comm.rank])
            small = np.empty(shape, oracle.numpy_dtype("float8_e4m3fn"))
            residual[...] = rest
            call(x, residual, weight, EPS, out=small, scale=scale)
            assert same(small, normalised(hidden, weight, scale[0])) and same(residual, hidden)
            assert same(call(x, None, weight, EPS), normalised(total, weight))
            is_one_kernel.append(op.plan.name == FUSED)
    return is_one_kernel


def check_numbers_without_end(comm, dtype):
    """One kernel gives the host's bits of rows with NaN and infinities."""
    shape = 2, 300
    inputs = [numbers(shape, dtype, 10 + rank) for rank in range(comm.world_size)]
    inputs[0][0, 1], inputs[-1][1, 299] = np.inf, np.nan
    weight, rest = numbers(shape[-1], dtype, 3), numbers(shape, dtype, 2)
    rest[0, 2], weight[7] = np.nan, np.inf
    x, residual, hidden = inputs[comm.rank], rest.copy(), rest.copy()
    wanted = kccl.rms_norm(comm.all_reduce(x.copy()), weight, EPS, residual=hidden)
    comm.all_reduce_rms_norm(x, residual, weight, EPS, algorithm=FUSED)
    assert same(x, wanted) and same(residual, hidden)


def check_parts(comm, dtype, width=37):
    """Each rank's rows are those of all_reduce_rms_norm, and all_gather makes them whole."""
    shape = 2 * comm.world_size, width
    weight, rest = numbers(width, dtype, 3), numbers(shape, dtype, 2)
    x, scale = numbers(shape, dtype, comm.rank), np.array([0.01], np.float32)
    hidden = rest.copy()
    whole = comm.all_reduce_rms_norm(x.copy(), hidden, weight, EPS)
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    before, residual = x.copy(), rest[mine].copy()
    found = comm.reduce_scatter_rms_norm(x, residual, weight, EPS)
    assert found.shape == (2, width) and same(found, whole[mine])
    assert same(residual, hidden[mine]) and same(x, before)
    assert same(comm.all_gather(found).reshape(shape), whole)
    small = np.empty_like(found, oracle.numpy_dtype("float8_e4m3fn"))
    residual[...] = rest[mine]
    op = comm.reduce_scatter_rms_norm.prepare(x, residual, weight, EPS, out=small, scale=scale)
    assert op() is small and same(small, normalised(hidden[mine], weight, scale[0]))
    assert same(residual, hidden[mine])
    whole = x.reshape(1, -1, width)  # which the ranks divide along the second dimension
    found = comm.reduce_scatter_rms_norm(whole, rest[mine].copy(), weight, EPS)
    assert found.shape == ((1, 2, width) if comm.world_size == 1 else (2, width))
    assert same(found.reshape(2, width), normalised(hidden[mine], weight))
    with pytest.raises(kccl.InvalidArgument, match=r"must have|must not overlap"):
        comm.reduce_scatter_rms_norm(x, None, weight, EPS, out=x)
    if comm.world_size > 1:
        with pytest.raises(kccl.InvalidArgument, match="x has 1 rows of 37, must have a multiple"):
            comm.reduce_scatter_rms_norm(x[:1], None, weight, EPS, out=found[:1])
        with pytest.raises(kccl.InvalidArgument, match="residual must have 74"):
            comm.reduce_scatter_rms_norm(x, rest, weight, EPS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 9])
def test_calls_on_the_host(world_size):
    def main(comm):
        for dtype in DTYPES if world_size == 2 else DTYPES[2:]:
            assert not any(check_calls(comm, dtype))
            check_parts(comm, dtype)
        x = np.empty((0, 4), np.float32)
        assert comm.all_reduce_rms_norm(x, None, np.ones(4, np.float32), EPS) is x
        assert comm.all_reduce_rms_norm.prepare(x, None, np.ones(4, np.float32), EPS)() is x

    kccl.run_threads(main, world_size)


@pytest.mark.parametrize(
    ("dtype", "world_size", "warp_size"),
    [
        ("bfloat16", 2, 32),
        pytest.param("float32", 3, 64, marks=pytest.mark.long),
        pytest.param("float16", 1, 32, marks=pytest.mark.long),
    ],
)
def test_calls_on_the_simulator(dtype, world_size, warp_size):
    """One kernel gives the bits of two, which are the host's."""

    def main(comm):
        algorithms = FUSED, "all_reduce_one_shot_ll16"
        assert check_calls(comm, dtype, SHAPES[1:2], algorithms) == [True, False]
        assert check_calls(comm, dtype, SHAPES[:1]) == [True]
        # With two ranks, a row that is longer than a slot's 4096 bytes takes two slots.
        check_calls(comm, dtype, [(1, 2051 if world_size == 2 else 1021)], (FUSED,))
        check_numbers_without_end(comm, dtype)
        check_parts(comm, dtype)
        x = np.zeros((1, 4098), oracle.numpy_dtype(dtype))
        with pytest.raises(kccl.InvalidArgument, match=r"a row has .* bytes, and one kernel takes"):
            comm.all_reduce_rms_norm(x, None, x[0].copy(), EPS, algorithm=FUSED)

    kccl.run_threads(main, world_size, backend="sim", seed=world_size, warp_size=warp_size)


# ---- The kernel for GPUs, with more than one block -----------------------------------------------

ROWS, WIDTH = 3, 4100  # a row takes two slots, and its last group is short


def run_kernel(csrc=cache.CSRC, *, seeds=4, warp_size=32, kernel=FUSED):
    """Runs it on two ranks, and returns the first finding, "wrong_data" or ""."""
    inputs = [numbers((ROWS, WIDTH), "bfloat16", rank) for rank in range(2)]
    rest, weight = numbers((ROWS, WIDTH), "bfloat16", 2), numbers(WIDTH, "bfloat16", 3)
    if kernel == FUSED:
        total = oracle.all_reduce([each.ravel() for each in inputs], "sum").reshape(ROWS, WIDTH)
        wanted = [added(total, rest)] * 2
    else:
        wanted = [added(each, rest) for each in inputs]
    settings = Settings(num_channels=1, blocks_per_channel=2, packet_bytes=8192, epoch_bits=8)
    simulation = Simulation(warp_size=warp_size, ends_when_stuck=True)
    with World(2, simulation, settings, csrc=csrc) as world:
        outs, residuals = np.empty_like([rest] * 2), np.empty_like([rest] * 2)
        program = [
            [
                world.call(
                    rank,
                    kernel,
                    input=inputs[rank],
                    output=outs[rank],
                    count=rest.size,
                    dtype="bfloat16",
                    block=512,
                    grid=2,
                    residual=residuals[rank].ctypes.data,
                    weight=weight.ctypes.data,
                    width=WIDTH,
                    eps=int(np.float32(EPS).view(np.uint32)),
                )
            ]
            for rank in range(2)
        ]
        for seed in range(seeds):
            residuals[:], outs[:] = rest, 0
            report = world.run(program, seed)
            if report.findings:
                return report.findings[0].kind
            for rank in range(2):
                hidden = wanted[rank]
                if not same(residuals[rank], hidden):
                    return "wrong_data"
                if not same(outs[rank], normalised(hidden, weight)):
                    return "wrong_data"
    return ""


@pytest.mark.parametrize(
    ("kernel", "warp_size"),
    [(FUSED, 32), pytest.param(FUSED, 64, marks=pytest.mark.long), ("rms_norm", 64)],
)
def test_blocks_take_rows(kernel, warp_size):
    assert run_kernel(kernel=kernel, warp_size=warp_size) == ""


# Name: file, edit, kernel, what may be found.
BUGS = {
    "every row has the same group sums": (
        f"kernels/{FUSED}.cuh",
        ("held, sums, turn)", "held, sums, 0)"),
        FUSED,
        {"data_race", "wrong_data"},
    ),
    "the norm reads the group sums without a sync": (
        "kernels/rms_norm.cuh",
        ("                coop.sync();\n", ""),
        "rms_norm",
        {"data_race", "wrong_data"},
    ),
    "the fused call reads the group sums without a sync": (
        f"kernels/{FUSED}.cuh",
        ("if (channel.coop().any(status != kKcclOk))", "if (status != kKcclOk)"),
        FUSED,
        {"data_race", "wrong_data"},
    ),
    "the second half of a long row goes behind both slots": (
        "exchange.cuh",
        ("out_move = is_first_rank ? 0 : -2 * slot;", ""),
        FUSED,
        {"deadlock", "wrong_data"},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        each if number == 0 else pytest.param(each, marks=pytest.mark.long)
        for number, each in enumerate(BUGS)
    ],
)
def test_the_simulator_finds_planted_bugs(name, tmp_path):
    file, edit, kernel, kinds = BUGS[name]
    shutil.copytree(cache.CSRC, tmp_path / "csrc")
    path: Path = tmp_path / "csrc/include/kccl" / file
    path.write_text(replace_once(path.read_text(), *edit, file))
    assert run_kernel(tmp_path / "csrc", kernel=kernel, seeds=20) in kinds
