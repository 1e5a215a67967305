"""What the benchmarks write, their peers, and what tuning and checks make of the rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_world import (
    FakeComm,
    FakeWorld,
    off_by_one,
    parse,
    probes,  # noqa: F401  # a fixture, asked for by name
    problem,
    row,
)

import kccl
from kccl.bench import check, cli
from kccl.bench.harness import collective, document, measure, report
from kccl.bench.peers import baselines, mpi
from kccl.bench.tune import tune

# What is written


@pytest.mark.usefixtures("probes")
def test_the_documents_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, png = tmp_path / "rows.csv", tmp_path / "rows.png"
    sizes = ("-b", "8", "-e", "32", "-d", "bfloat16")
    args = parse("all_reduce", *sizes, "--json", "--csv", str(csv), "--plot", str(png))
    assert FakeWorld(2).run(partial(cli.main, args)) == [0, 0]
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert max(len(line) for line in lines) <= report.WIDTH
    assert any(line.startswith("# floor: one-way latency") for line in lines)
    made = json.loads(printed.out)
    assert set(made) == {"machine", "commit", "command", "rows"}
    assert made["machine"]["ranks"] == 2
    assert [each["bytes"] for each in made["rows"]] == [8] * 3 + [16] * 3 + [32] * 3
    assert made["rows"][0]["floor_us"] == pytest.approx(0.258)
    header, *body = csv.read_text("utf-8").splitlines()
    assert tuple(header.split(",")) == measure.COLUMNS
    assert len(body) == 9
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_command_of_a_document_has_no_folders_of_the_machine() -> None:
    command = ["bench", "decode", "--trace", "/somewhere/here/2b.json", "--csv=/somewhere/2b.csv"]
    command += ["--model", "models/mine", "--ablate", "in-flight=1"]
    made = document.document([], 1, {}, command)
    wanted = "kccl bench decode --trace 2b.json --csv=2b.csv --model models/mine --ablate"
    assert made["command"] == f"{wanted} in-flight=1"


@pytest.mark.usefixtures("probes")
def test_sizes_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("all_reduce", "--sizes", "8", "1K", "64", "--json")
    assert FakeWorld(2).run(partial(cli.main, args)) == [0, 0]
    made = json.loads(capsys.readouterr().out)
    assert [each["bytes"] for each in made["rows"]] == [8] * 3 + [1024] * 3 + [64] * 3


@pytest.mark.usefixtures("probes")
def test_one_rank_alone_works_and_says_how_to_start_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = parse("barrier")
    assert FakeWorld(1).run(partial(cli.main, args)) == [0]
    assert "mpirun -n 2 kccl bench barrier" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("all_reduce", "-d", "float99"), "must be one of"),
        (("all_reduce", "-b", "64", "-e", "8"), "range is empty"),
        (("broadcast", "--out-of-place"), "no out-of-place form"),
        (("broadcast", "--root", "2"), "not a rank of 2"),
    ],
)
def test_arguments_without_sense_are_named(
    argv: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert FakeWorld(2).run(partial(cli.main, parse(*argv))) == [2, 2]
    assert reason in capsys.readouterr().err


def test_documents_are_found_between_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    path.write_text('# a table\n{"rows": []}\n', "utf-8")
    assert document.load(path) == [{"rows": []}]


# Peers


def test_mpi_says_what_it_cannot_do() -> None:
    assert mpi.unsupported(problem("float32")) is None
    assert mpi.unsupported(problem("int32")) is None
    assert "bfloat16" in str(mpi.unsupported(problem("bfloat16")))
    assert "float16" in str(mpi.unsupported(problem("float16")))
    assert "avg" in str(mpi.unsupported(problem(op="avg")))
    scatter = replace(problem(), collective="reduce_scatter")
    assert "--out-of-place" in str(mpi.unsupported(scatter))
    assert mpi.unsupported(replace(scatter, in_place=False)) is None


def test_the_second_job_inherits_nothing_from_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "HYDI_CONTROL_FD", "MPI_LOCALRANKID", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LANG", "C")
    environment = baselines.clean_environment()
    assert environment["LANG"] == "C"
    assert environment["OMPI_MCA_btl"] == "self,sm"
    assert not [name for name in environment if name.startswith(("PMI", "HYD", "MPI", "PYTHON"))]


@pytest.mark.usefixtures("probes")
def test_a_missing_open_mpi_is_a_sentence_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KCCL_OPENMPI_PREFIX", str(tmp_path))
    args = parse("all_reduce", "-e", "8", "--baselines")
    assert FakeWorld(2).run(partial(cli.main, args)) == [0, 0]
    printed = capsys.readouterr().out
    assert "no Open MPI rows" in printed
    assert "make setup" in printed
    assert "MPICH rows need MPICH's mpirun" in printed


def fake_mpirun(prefix: Path, script: str) -> None:
    (prefix / "bin").mkdir()
    launcher = prefix / "bin" / "mpirun"
    launcher.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    launcher.chmod(0o755)


REQUEST = baselines.Request("all_reduce", [8], "float32", "sum", 0, True, 2, 4)


def test_rows_of_the_second_job_reach_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = row(library="openmpi", floor_us=None)
    fake_mpirun(tmp_path, f"echo noise; echo '{json.dumps([peer])}'")
    monkeypatch.setenv("KCCL_OPENMPI_PREFIX", str(tmp_path))
    run = partial(baselines.open_mpi_rows, request=REQUEST)
    for rows, missing in FakeWorld(2).run(run):
        assert rows == [peer]
        assert missing is None


def test_a_second_job_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpirun(tmp_path, "echo 'not enough slots' >&2; exit 7")
    monkeypatch.setenv("KCCL_OPENMPI_PREFIX", str(tmp_path))
    run = partial(baselines.open_mpi_rows, request=REQUEST)
    rows, missing = FakeWorld(1).run(run)[0]
    assert rows == []
    assert "returned 7: not enough slots" in str(missing)


def test_a_second_job_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpirun(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    monkeypatch.setenv("KCCL_OPENMPI_PREFIX", str(tmp_path))
    monkeypatch.setattr(baselines, "LIMIT_S", 1.0)
    run = partial(baselines.open_mpi_rows, request=REQUEST)
    rows, missing = FakeWorld(1).run(run)[0]
    assert rows == []
    assert "longer than 1 s" in str(missing)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text("utf-8")), 0)


# Tuning and records


def test_thresholds_merge_neighbours_and_noise_does_not_flip_them() -> None:
    a, b, c = map(tune.Candidate, "abc")
    times_us = {
        8: {a: 1.0, b: 2.0},
        16: {a: 1.03, b: 1.0},
        32: {a: 2.0, b: 1.5},
        64: {b: 3.0, c: 2.0},
    }
    assert tune.thresholds("all_reduce", times_us) == [
        {"collective": "all_reduce", "up_to_bytes": 16, "algorithm": "a"},
        {"collective": "all_reduce", "up_to_bytes": 32, "algorithm": "b"},
        {"collective": "all_reduce", "up_to_bytes": None, "algorithm": "c"},
    ]


def test_a_tuning_file_keeps_what_was_not_tuned_again() -> None:
    def entry(collective: str, algorithm: str) -> dict[str, Any]:
        return {"collective": collective, "up_to_bytes": None, "algorithm": algorithm}

    first = tune.updated(None, "host", 2, [entry("all_reduce", "a"), entry("broadcast", "b")])
    second = tune.updated(first, "host", 8, [entry("all_reduce", "c")])
    third = tune.updated(second, "host", 2, [entry("all_reduce", "d")])
    assert third == {
        "backend": "host",
        "tables": [
            {"world_size": 2, "thresholds": [entry("all_reduce", "d"), entry("broadcast", "b")]},
            {"world_size": 8, "thresholds": [entry("all_reduce", "c")]},
        ],
    }


def tuned(comm: FakeComm, sizes: list[int]) -> Any:
    table = collective.load("all_reduce")
    common = {"dtype": "float32", "np_dtype": np.dtype(np.float32), "op": "sum", "root": 0}
    problems = table.problems(sizes, **common, in_place=True, world_size=comm.world_size)
    return tune.tune(comm, table, problems, repeats=2)


def test_tuning_forces_every_algorithm_and_takes_the_fastest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, found = FakeWorld(2).run(lambda comm: tuned(comm, [8, 16]))[0]
    assert [(each["bytes"], each["algorithm"]) for each in rows] == [
        (8, "all_reduce_one_shot_ll16"),
        (16, "all_reduce_one_shot_ll16"),
        (16, "all_reduce_slow"),
    ]
    best = {
        "collective": "all_reduce",
        "up_to_bytes": None,
        "algorithm": "all_reduce_one_shot_ll16",
    }
    assert found == [best]
    assert "all_reduce_slow does not run at 8 bytes" in capsys.readouterr().err


def test_the_host_has_algorithms_that_integers_cannot_use() -> None:
    def main(comm: kccl.Communicator) -> list[set[str]]:
        tuner = tune.HostTuner(comm)
        return [
            set(tuner.floats_only(collective.load(name))) for name in ("all_reduce", "all_gather")
        ]

    for found in kccl.run_threads(main, world_size=2):
        assert found == [{"all_reduce_one_shot_sentinel"}, set()]


def test_tuning_refuses_a_wrong_algorithm() -> None:
    with pytest.raises(kccl.Error, match="wrong elements"):
        FakeWorld(2, off_by_one).run(lambda comm: tuned(comm, [64]))


MACHINE = {"cpu_model": "some CPU", "architecture": "x86_64", "cpus": 2, "allowed_cpus": 2}


def made(*rows: measure.Row, **machine: Any) -> document.Document:
    return {"machine": MACHINE | machine, "commit": "abc", "command": "kccl", "rows": list(rows)}


def test_check_finds_a_planted_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = made(row(time_us=1.0), row(bytes=16, time_us=2.0))
    (tmp_path / "records.jsonl").write_text(json.dumps(old) + "\n", "utf-8")
    new = tmp_path / "new.json"
    argv = [str(new), "--records", str(tmp_path)]
    new.write_text(json.dumps(made(row(time_us=1.1), row(bytes=16, time_us=2.2))), "utf-8")
    assert check.main(argv) == 0
    new.write_text(json.dumps(made(row(time_us=1.1), row(bytes=16, time_us=2.4))), "utf-8")
    assert check.main(argv) == 1
    assert "16 B, float32: 2.400 us, 1.20 times 2.000 us of abc" in capsys.readouterr().out


def test_check_counts_a_wrong_row_and_refuses_to_compare_nothing(tmp_path: Path) -> None:
    old = made(row())
    findings, compared = check.compare(made(row(wrong=3, time_us=None)), [old])
    assert [str(each).endswith("3 wrong elements") for each in findings] == [True]
    assert compared == 0
    for other in (made(row(), cpus=64), made(row(mode="host")), made(row(world_size=4))):
        assert check.compare(other, [old]) == ([], 0)
    new = tmp_path / "new.json"
    new.write_text(json.dumps(made(row())), "utf-8")
    assert check.main([str(new), "--records", str(tmp_path)]) == 2


def test_check_compares_each_algorithm_in_kernels_with_its_own_record() -> None:
    fast = row(mode="in_kernel", algorithm="fast", time_us=1.0)
    slow = row(mode="in_kernel", algorithm="slow", time_us=2.0)
    few = row(mode="in_kernel", algorithm="slow", time_us=3.0, blocks=8)
    assert check.compare(made(fast, slow, few), [made(few, slow, fast)]) == ([], 3)


def test_check_compares_with_the_newest_record() -> None:
    records = [made(row(time_us=9.0)), made(row(time_us=1.0))]
    assert len(check.compare(made(row(time_us=1.2)), records)[0]) == 1


# The whole, under MPI


def test_kccl_bench_under_mpirun(tmp_path: Path) -> None:
    tools = Path(sys.executable).parent
    for name in ("mpirun", "kccl"):
        if not (tools / name).exists():
            pytest.skip(f"{tools} has no {name}")
    flags = "-b 8 -e 1K --repeats 3 --baselines --json"
    done = subprocess.run(
        [tools / "mpirun", "-n", "2", tools / "kccl", "bench", "all_reduce", *flags.split()],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {each["bytes"] for each in rows} == {8 << i for i in range(8)}
    assert all(each["wrong"] == 0 and each["time_us"] > 0 for each in rows)
    assert all(each["floor_us"] > 0 for each in rows)
    peers = {(each["library"], each["algorithm"]) for each in rows if each["library"] != "kccl"}
    assert {("mpich", "default"), ("mpich", "recursive_doubling")} <= peers
    has_open_mpi = (baselines.open_mpi_prefix() / "bin" / "mpirun").exists()
    assert (("openmpi", "default") in peers) == has_open_mpi
    assert has_open_mpi or "no Open MPI rows" in done.stderr


# The commit of a document


def test_code_without_git_has_the_commit_that_its_archive_names(tmp_path: Path) -> None:
    # In a checkout, where `git archive` will find it.
    assert document._ARCHIVAL.exists()
    archival = tmp_path / ".git_archival.txt"
    assert document._archived(archival) is None
    archival.write_text("node: $Format:%H$\n")
    assert document._archived(archival) is None
    archival.write_text("node: 8cda30a0123456789abcdef0123456789abcdef0\n")
    assert document._archived(archival) == "8cda30a01234"
