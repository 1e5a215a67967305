"""`kccl bench --in-kernel` on GPUs: right results, and a floor in each row."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from suites import run_suite

DTYPES = ("bfloat16", "float32")
OF_CHUNKS = ("all_gather", "reduce_scatter", "broadcast")
COMPLETE = ("slice", "message", "message")
SHORT = ("--in-kernel", "--repeats", "3", "--iterations", "1000")


@cache
def benches(world_size):
    """All benches for a number of ranks, run in one job: name -> rows and output."""
    wanted = {"grid_sync": (), "exchange": ("--sizes", "2K", "8K")}
    if world_size > 1:
        sizes = ("--sizes", "16", "1K", "64K")
        wanted |= {f"all_reduce_{dtype}": (*sizes, "-d", dtype) for dtype in DTYPES}
        wanted |= dict.fromkeys(OF_CHUNKS, ("--sizes", "64", "4K")) | {"barrier": ()}
    with TemporaryDirectory() as folder:
        return run_suite(
            world_size,
            Path(folder),
            {
                name: (name.removesuffix("_bfloat16").removesuffix("_float32"), *more, *SHORT)
                for name, more in wanted.items()
            },
        )


def look_at(rows):
    for row in rows:
        assert (row["mode"], row["call"], row["wrong"]) == ("in_kernel", "open", 0)
        # Below a quarter of the floor no data was exchanged; above fifty times the floor each
        # exchange would be a launch.
        assert 0.1 < row["floor_us"] < 5
        assert row["floor_us"] / 4 < row["time_us"] < 50 * row["floor_us"]
        assert row["p99_us"] > 0
        if row["skewed_us"] is not None:
            assert 0 < row["skewed_us"] < 5 * row["time_us"]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(world_size, dtype):
    rows, _ = benches(world_size)[f"all_reduce_{dtype}"]
    look_at(rows)
    assert [(row["bytes"], row["complete"], row["blocks"]) for row in rows] == [
        (nbytes, complete, blocks)
        for nbytes, shapes in ((16, (1, 1)), (1024, (1, 1)), (65536, (64, 64)))
        for complete, blocks in zip(COMPLETE, (shapes[0], *shapes), strict=True)
    ]
    assert all(row["skewed_us"] is not None for row in rows)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("collective", OF_CHUNKS)
def test_others_of_data(world_size, collective):
    rows, _ = benches(world_size)[collective]
    look_at(rows)
    assert [(row["bytes"], row["complete"]) for row in rows] == [(64, "slice"), (4096, "slice")]


@pytest.mark.parametrize("world_size", [2, 4])
def test_barrier(world_size):
    rows, _ = benches(world_size)["barrier"]
    look_at(rows)
    assert [(row["order"], row["blocks"]) for row in rows] == [("relaxed", 1), ("acq_rel", 1)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_grid_sync(world_size):
    from kccl import gpu

    rows, printed = benches(world_size)["grid_sync"]
    look_at(rows)
    assert {row["blocks"] for row in rows} == {gpu.device(0).multiprocessors}
    found = [(row["library"], row["order"]) for row in rows]
    assert found[:2] == [("kccl", "relaxed"), ("kccl", "acq_rel")]
    # Without CUDA's headers the output says so.
    has_peer = found[2:] == [("cooperative_groups", "acq_rel")]
    assert has_peer or "# no row of cooperative groups: " in printed


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exchange(world_size):
    from kccl import gpu

    rows, _ = benches(world_size)["exchange"]
    look_at(rows)
    assert {row["blocks"] for row in rows} == {gpu.device(0).multiprocessors}
    # Within each GPU; over all GPUs too, if there are several.
    assert [(row["bytes"], row["world_size"], row["order"]) for row in rows] == [
        (nbytes, ranks, order)
        for nbytes in (2048, 8192)
        for ranks in dict.fromkeys([1, world_size])
        for order in ("relaxed", "acq_rel")
    ]
    assert all(row["skewed_us"] is not None for row in rows)
