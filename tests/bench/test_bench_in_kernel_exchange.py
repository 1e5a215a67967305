"""The parts of `kccl bench exchange --in-kernel` that need no GPU: shapes, simulated kernels."""

from functools import partial

import numpy as np
import pytest
from device_compilers import find_nvrtc
from long import hunted

import kccl
from kccl.bench import collectives
from kccl.bench.harness import measure
from kccl.bench.in_kernel import contenders, exchange
from kccl.bench.in_kernel import side as in_kernel_side

TABLE = collectives.load("exchange")


def problem(world_size, nbytes, table=TABLE):
    dtype = table.dtype or "float32"
    (found,) = table.problems(
        [nbytes],
        dtype=dtype,
        np_dtype=kccl.dtypes.to_numpy(dtype),
        op="sum",
        root=0,
        in_place=table.name != "exchange",
        world_size=world_size,
    )
    return found


@pytest.mark.parametrize(
    ("nbytes", "blocks", "threads", "words"),
    [
        (8, 132, 288, 1),
        (2048, 132, 288, 2),
        (8192, 132, 544, 8),
        (8192, 128, 544, 8),
        (64, 4, 32, 2),
    ],
)
def test_every_block_has_whole_words(nbytes, blocks, threads, words):
    shape = exchange.exchange_shape(problem(4, nbytes), blocks)
    assert shape == contenders.Shape(blocks, threads, words)
    # A slice takes a line of its own.
    assert exchange.exchange_bytes(shape, 4) == 4 * blocks * 64


def test_the_end_is_that_of_call_after_call():
    slices = np.random.default_rng(0).integers(2**64, size=(6, 3), dtype=np.uint64)
    first = 2**64 - 5
    published = slices + np.uint64(first)
    for call in range(1, 20):
        assert (exchange.end(slices, first, call) == published).all()
        published = np.stack([published[(g + call) % 6] for g in range(6)]) + np.uint64(1)


def measured(comm, *, nbytes, iterations, table=TABLE):
    made = problem(comm.world_size, nbytes, table)
    side = in_kernel_side.InKernelSide(comm, table, [made])
    rows = measure.measure(
        table,
        made,
        side.contenders(made),
        rank=comm.rank,
        gather=comm.gather_objects,
        repeats=1,
        iterations=iterations,
    )
    side.fill(rows)
    notes = side.notes()
    side.close()
    return rows, notes


def on_simulator(world_size=2, seed=0, nbytes=64, iterations=9):
    main = partial(measured, nbytes=nbytes, iterations=iterations)
    return kccl.run_threads(main, world_size, backend="sim", seed=seed)[0]


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "nbytes"), [(1, 8), (3, 500)])
def test_rows(world_size, nbytes):
    rows, notes = on_simulator(world_size, nbytes=nbytes)
    # With one rank both reaches are the same, and one is measured.
    sizes = dict.fromkeys([1, world_size])
    wanted = [(size, order) for size in sizes for order in ("relaxed", "acq_rel")]
    assert [(row["world_size"], row["order"]) for row in rows] == wanted
    for row in rows:
        assert tuple(row) == measure.COLUMNS
        assert (row["algorithm"], row["mode"], row["wrong"]) == ("grid_exchange", "in_kernel", 0)
        assert (row["complete"], row["blocks"], row["dtype"]) == ("message", 4, "int64")
        assert row["time_us"] > 0 and row["p99_us"] > 0
        # The simulator measures no machine.
        assert row["floor_us"] is row["busbw_gbps"] is row["skewed_us"] is None
    assert notes == []


@pytest.mark.long
def test_each_reach_has_its_own_floor(monkeypatch):
    ways = {True: lambda: 0.25, False: lambda: 0.75}
    monkeypatch.setattr(in_kernel_side.SimRunner, "probe", lambda self, *, within: ways[within])
    rows, _ = on_simulator(2)
    assert [(row["world_size"], row["floor_us"]) for row in rows] == [
        *[(1, 0.25)] * 2,
        *[(2, 0.75)] * 2,
    ]


def spoil(monkeypatch, folder, old, new):
    """Makes the bench compile copies of the kernels in `folder`, with `new` in place of `old`."""
    names = ("all_reduce.cuh", "chains.cuh", "exchange.cuh")
    texts = {name: (in_kernel_side.FOLDER / name).read_text() for name in names}
    assert sum(old in texts[name] for name in names[1:]) == 1, old
    for name, text in texts.items():
        (folder / name).write_text(text if name == names[0] else text.replace(old, new, 1))
    monkeypatch.setattr(in_kernel_side, "FOLDER", folder)


# What is wrong with the kernels -> a text and its replacement.
BROKEN = {
    "a call is left out": (
        "const Status status = call();",
        "if (k == 7) continue; const Status status = call();",
    ),
    "a slice is not what was collected": ("load_plain(from + i) + 1", "load_plain(mine_ + i) + 1"),
    "a word is not collected": ("load_plain(other_ + i)", "load_plain(other_ + (i == 3 ? 2 : i))"),
}


@pytest.mark.parametrize("what", hunted(BROKEN))
def test_a_launch_that_goes_wrong_has_no_time(what, monkeypatch, tmp_path):
    spoil(monkeypatch, tmp_path, *BROKEN[what])
    rows, _ = on_simulator(2)
    assert all(row["wrong"] > 0 and row["time_us"] is None for row in rows)


def test_a_single_buffer_for_collect_is_a_race(monkeypatch, tmp_path):
    """A relaxed exchange does not wait for threads of the block that still read the last result."""
    spoil(monkeypatch, tmp_path, "to_ = other_;", "other_ = to_;")
    with pytest.raises(kccl.ProtocolError):
        on_simulator(1, nbytes=500)


@pytest.mark.long
@pytest.mark.skipif(find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed")
@pytest.mark.parametrize("world_size", [1, 4])
def test_the_kernels_compile_for_gpus(world_size):
    source, names = in_kernel_side.kernels_of(TABLE, TABLE.dtype, world_size)
    kccl.compile(source, names, target="cuda", arch="sm_90a")


def test_the_kernels_are_bounded_by_the_most_threads():
    assert (
        f"kMostThreads = {exchange._MOST_THREADS};"
        in (in_kernel_side.FOLDER / "exchange.cuh").read_text()
    )
    assert max(exchange._THREADS.values()) <= exchange._MOST_THREADS


# What is wrong with the sums -> a text and its replacement.
BROKEN_SUMS = {
    "a slice is not what was summed": ("        mine_ = other_;\n", ""),
    "a rank is counted twice": (
        "kccl::publish<Order::kRelaxed>(exchange_, static_cast<const T*>(mine_), count_);",
        "block().sync(); if (exchange_.comm().rank == 1) between(0); "
        "kccl::publish<Order::kRelaxed>(exchange_, static_cast<const T*>(mine_), count_);",
    ),
    "a block keeps another slice": ("copy(out, mine_);", "copy(out, other_);"),
}


@pytest.mark.parametrize("what", hunted(BROKEN_SUMS))
def test_sums_that_are_wrong_have_no_time(what, monkeypatch, tmp_path):
    spoil(monkeypatch, tmp_path, *BROKEN_SUMS[what])
    main = partial(measured, nbytes=256, iterations=9, table=collectives.load("all_reduce"))
    rows = kccl.run_threads(main, 2, backend="sim")[0][0]
    by_blocks, by_grid, sums = rows
    assert by_blocks["wrong"] == by_grid["wrong"] == 0
    assert (sums["algorithm"], sums["time_us"]) == ("grid_exchange", None) and sums["wrong"] > 0


@pytest.mark.long
@pytest.mark.parametrize("nbytes", [8, 2056])
def test_sums_of_any_number_of_words(nbytes):
    """One word, and more than the blocks have threads, which the blocks do not divide."""
    # More calls than there are slots and epochs' bits; those of many words take a second each.
    iterations = 40 if nbytes == 8 else 9
    table = collectives.load("all_reduce")
    main = partial(measured, nbytes=nbytes, iterations=iterations, table=table)
    rows = kccl.run_threads(main, 3, backend="sim")[0][0]
    assert [row["wrong"] for row in rows] == [0, 0, 0]


def test_a_message_of_no_whole_words_has_no_row_of_the_grid():
    main = partial(measured, nbytes=12, iterations=3, table=collectives.load("all_reduce"))
    rows, notes = kccl.run_threads(main, 2, backend="sim")[0]
    assert len(rows) == 2
    assert notes == ["12 B have no row of grid_exchange: not whole words of 8"]
