"""`kccl bench` on GPUs: right results, and a floor in each row."""

import json
import subprocess
import sys

import pytest
from gpu_vendor import BACKEND
from ranks import LAUNCHER, environment
from suites import run_suite

from kccl.plan import tuning

PEERS = {
    "cuda": {
        "all_reduce": {"nccl", "torch_symm_mem"},
        **{name: {"nccl"} for name in ("broadcast", "all_to_all", "send_recv")},
    },
    "hip": {name: {"rccl"} for name in ("all_reduce", "broadcast", "all_to_all", "send_recv")},
}
SHORT = ("--repeats", "3", "--iterations", "100", "--json")


def bench(world_size, collective, *options):
    command = [*LAUNCHER, "-n", str(world_size), "--", sys.executable, "-m", "kccl", "bench"]
    done = subprocess.run(
        [*command, collective, "--backend", BACKEND, *options, *SHORT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert len(document["machine"]["gpus"]) == world_size
    return document["rows"], done.stderr


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_of_kccl(world_size, tmp_path):
    benches = {
        "all_reduce": ("all_reduce", "--sizes", "16", "8K", *SHORT[:-1]),
        "broadcast": ("broadcast", "--sizes", "16", "8K", *SHORT[:-1]),
        "barrier": ("barrier", *SHORT[:-1]),
    }
    for collective, (rows, _) in run_suite(world_size, tmp_path, benches).items():
        check_rows(rows, collective, world_size)


def check_rows(rows, collective, world_size):
    sizes = [0] if collective == "barrier" else [16, 8192]
    assert [(row["bytes"], row["mode"]) for row in rows] == [
        (size, mode) for size in sizes for mode in ("graph", "eager")
    ]
    has_skewed_run = collective != "broadcast" and world_size > 1
    for row in rows:
        assert row["wrong"] == 0 and 0.5 < row["time_us"] < 200
        assert row["p99_us"] > 0
        assert (row["host_us"] is not None) == (row["mode"] == "eager")
        assert (row["skewed_us"] is not None) == (row["mode"] == "graph" and has_skewed_run)
        if world_size > 1:
            assert 0.2 < row["floor_us"] < 5
        if row["skewed_us"] is not None:
            assert 0.5 < row["skewed_us"] < 3 * row["time_us"]


@pytest.mark.parametrize("world_size", [2])
def test_types_operators_and_out_of_place(world_size):
    for options in (("-d", "float64", "--op", "max"), ("-d", "int32", "--out-of-place")):
        rows, _ = bench(world_size, "all_reduce", "-b", "24", "-e", "24", *options)
        assert [row["wrong"] for row in rows] == [0, 0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_peers_are_measured_in_the_same_run(world_size, tmp_path):
    """The peers are measured again in the job's next bench."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    with_peers = ("--sizes", "1K", "8K", "--baselines", *SHORT[:-1])
    benches = {name: (name, *with_peers) for name in PEERS[BACKEND]}
    benches["all_to_all"] += ("--out-of-place",)
    documents = run_suite(world_size, tmp_path, benches)
    for collective, peers in PEERS[BACKEND].items():
        rows, printed = documents[collective]
        found = {(row["library"], row["mode"]) for row in rows if row["time_us"] is not None}
        assert {(peer, mode) for peer in peers for mode in ("graph", "eager")} <= found, printed
        assert all(row["wrong"] == 0 for row in rows), printed


@pytest.mark.parametrize("world_size", [2])
def test_tuning_writes_a_table_that_the_planner_takes(world_size, tmp_path):
    table = tmp_path / "tuned.json"
    tune = ["-m", "kccl.bench.tune", "all_reduce", "--backend", BACKEND, "--out", str(table)]
    few = ["-b", "64", "-e", "128", "--blocks", "4", "64", "--threads", "64", "--repeats", "1"]
    done = subprocess.run(
        [*LAUNCHER, "-n", str(world_size), "--", sys.executable, *tune, *few],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = tuning.read_tuning(table).thresholds[world_size][:1]
    assert (made.blocks, made.threads) in ((4, 64), (64, 64))
    bench = ["-m", "kccl", "bench", "all_reduce", "--backend", BACKEND, "-b", "64", "-e", "64"]
    done = subprocess.run(
        [*LAUNCHER, "-n", str(world_size), "--", sys.executable, *bench, *SHORT],
        env=environment(KCCL_TUNING=str(table)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {(row["algorithm"], row["wrong"]) for row in rows} == {(made.algorithm, 0)}


def test_more_ranks_than_gpus_are_refused():
    from kccl import gpu

    many = gpu.num_devices() + 1
    if many > 8:
        pytest.skip("a communicator has at most 8 ranks")
    command = [
        *LAUNCHER,
        "-n",
        str(many),
        "--",
        sys.executable,
        "-m",
        "kccl",
        "bench",
        "barrier",
    ]
    done = subprocess.run(
        [*command, "--backend", BACKEND],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"{many} ranks need as many GPUs" in done.stderr
