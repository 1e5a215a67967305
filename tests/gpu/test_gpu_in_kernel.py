"""`kccl bench --in-kernel --backend cuda` on GPUs: every launch is right; floors are beside."""

import json
import subprocess
import sys

import pytest
from ranks import LAUNCHER, environment

COMPLETE = ("slice", "message", "message")
SHORT = ("--repeats", "3", "--iterations", "1000", "--json")


def bench(world_size, collective, *options):
    command = [*LAUNCHER, "-n", str(world_size), "--", sys.executable, "-m", "kccl.cli", "bench"]
    done = subprocess.run(
        [*command, collective, "--backend", "cuda", "--in-kernel", *options, *SHORT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["rows"], done.stdout


def look_at(rows):
    for row in rows:
        assert (row["mode"], row["call"], row["wrong"]) == ("in_kernel", "open", 0)
        # A quarter of the floor would be no exchange, fifty times it no kernel that persists.
        assert 0.1 < row["floor_us"] < 5
        assert row["floor_us"] / 4 < row["time_us"] < 50 * row["floor_us"]
        assert row["p99_us"] > 0
        if row["skewed_us"] is not None:
            assert 0 < row["skewed_us"] < 5 * row["time_us"]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_reduce(world_size, dtype):
    rows, _ = bench(world_size, "all_reduce", "-d", dtype, "-b", "16", "-f", "64")
    look_at(rows)
    assert [(row["bytes"], row["complete"], row["blocks"]) for row in rows] == [
        (nbytes, complete, blocks)
        for nbytes, shapes in ((16, (1, 1)), (1024, (1, 1)), (65536, (64, 64)))
        for complete, blocks in zip(COMPLETE, (shapes[0], *shapes), strict=True)
    ]
    assert all(row["skewed_us"] is not None for row in rows)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "broadcast"])
def test_others_of_data(world_size, collective):
    rows, _ = bench(world_size, collective, "-b", "64", "-e", "4K", "-f", "64")
    look_at(rows)
    assert [(row["bytes"], row["complete"]) for row in rows] == [(64, "slice"), (4096, "slice")]


@pytest.mark.parametrize("world_size", [2, 4])
def test_barrier(world_size):
    rows, _ = bench(world_size, "barrier")
    look_at(rows)
    assert [(row["order"], row["blocks"]) for row in rows] == [("relaxed", 1), ("acq_rel", 1)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_grid_sync(world_size):
    from kccl import gpu

    rows, printed = bench(world_size, "grid_sync")
    look_at(rows)
    assert {row["blocks"] for row in rows} == {gpu.device(0).multiprocessors}
    found = [(row["library"], row["order"]) for row in rows]
    assert found[:2] == [("kccl", "relaxed"), ("kccl", "acq_rel")]
    # Where CUDA's headers are missing, this is said.
    has_peer = found[2:] == [("cooperative_groups", "acq_rel")]
    assert has_peer or "# no row of cooperative groups: " in printed


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exchange(world_size):
    from kccl import gpu

    rows, _ = bench(world_size, "exchange", "-b", "2K", "-f", "4")
    look_at(rows)
    assert {row["blocks"] for row in rows} == {gpu.device(0).multiprocessors}
    # Within each GPU, and over all where there are several.
    assert [(row["bytes"], row["world_size"], row["order"]) for row in rows] == [
        (nbytes, ranks, order)
        for nbytes in (2048, 8192)
        for ranks in dict.fromkeys([1, world_size])
        for order in ("relaxed", "acq_rel")
    ]
    assert all(row["skewed_us"] is not None for row in rows)
