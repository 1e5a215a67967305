"""What the benchmarks write, their peers, and what tuning and checks make of the rows."""

from __future__ import annotations

import json
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
)

import kccl
from kccl.bench import cli, collectives
from kccl.bench.harness import document, measure
from kccl.bench.peers import mpi, second_job
from kccl.bench.tune import choice, tune
from kccl.plan.specs import SPECS
from kccl.tools import cli as commands

# What is written


@pytest.mark.usefixtures("probes")
def test_the_documents_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, png = tmp_path / "rows.csv", tmp_path / "rows.png"
    sizes = ("-b", "8", "-e", "32", "-d", "bfloat16")
    args = parse("all_reduce", *sizes, "--json", "--csv", str(csv), "--plot", str(png))
    assert FakeWorld(2).run(partial(cli.main, args)) == [0, 0]
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
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
    made = document.document([], {}, command)
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


@pytest.mark.parametrize("flag", ["-f", "--repeats", "--iterations", "-n"])
def test_a_number_with_a_fraction_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("all_reduce", flag, "1.5")
    assert "'1.5' is no whole number, as in 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("all_reduce", "-b", "64", "-e", "8"), "range is empty"),
        (("broadcast", "--out-of-place"), "no out-of-place form"),
        (("broadcast", "--root", "2"), "not a rank of 2"),
        (("all_reduce", "--root", "0"), "all_reduce has no root: leave out --root 0"),
        (("broadcast", "--op", "sum"), "broadcast reduces nothing: leave out --op sum"),
        (("barrier", "--op", "max"), "barrier reduces nothing: leave out --op max"),
        (("put", "--in-place"), "put has one form, between two arrays: leave out --in-place"),
        (("put", "--out-of-place"), "put has one form, between two arrays: leave out --out-of"),
        (("barrier", "-b", "8"), "barrier sends no data: leave out -b"),
        (("barrier", "--sizes", "8"), "barrier sends no data: leave out --sizes"),
        (("barrier", "-d", "fp32"), "barrier sends no data: leave out -d"),
        (("barrier", "--in-place"), "barrier sends no data: leave out --in-place"),
        (("all_reduce", "--sizes", "8", "-b", "8", "-f", "2"), "leave out -b, -f"),
        (("all_reduce", "-b", "0"), "range is empty"),
        (("all_reduce", "-e", "0"), "range is empty"),
        (("exchange",), "inside kernels only: add --in-kernel and --backend cuda, hip or sim"),
        (("all_reduce", "--in-kernel"), "needs --backend cuda, hip or sim"),
        (("all_reduce", "--sizes", "8", "20000G"), "measure smaller sizes"),
        ((), "name a collective"),
    ],
)
def test_arguments_without_sense_are_named(
    argv: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert FakeWorld(2).run(partial(cli.main, parse(*argv))) == [2, 2]
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("allreduce", "all_reduce"),
        ("AllGather", "all_gather"),
        ("reduce-scatter", "reduce_scatter"),
        ("bcast", "broadcast"),
    ],
)
def test_collectives_have_the_names_that_people_know(text: str, name: str) -> None:
    assert parse(text).collective == name


@pytest.mark.parametrize(
    ("text", "name"),
    [("fp32", "float32"), ("f32", "float32"), ("BF16", "bfloat16"), ("half", "float16")],
)
def test_types_have_the_names_that_people_know(text: str, name: str) -> None:
    assert parse("all_reduce", "-d", text).dtype == name


@pytest.mark.parametrize(
    ("argv", "question"),
    [
        (("all_reduc",), "Did you mean all_reduce?"),
        (("brodcast",), "Did you mean broadcast?"),
        (("all_reduce", "-d", "float23"), "Did you mean float32?"),
        (("all_reduce", "--op", "summ"), "Did you mean sum?"),
        (("all_reduce", "-d", "float99"), "known are float32, float64"),
        (("-v", "decode"), "decode stands first: kccl bench decode"),
    ],
)
def test_a_name_that_nothing_has_gets_the_nearest(
    argv: tuple[str, ...], question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert question in capsys.readouterr().err


WITH_PLANS = sorted({spec.collective for spec in SPECS})


def test_plan_takes_the_same_names_and_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", "bcast", "--bytes", "8", "--dtype", "fp32"]) == 0
    assert capsys.readouterr().out.startswith("broadcast of 8 bytes float32")
    for name, rest in (("exchange", ""), ("al_reduce", "Did you mean all_reduce?")):
        assert commands.main(["plan", name]) == 2
        said = capsys.readouterr().err
        assert f"known are {', '.join(WITH_PLANS)}" in said
        assert rest in said and "exchange," not in said


@pytest.mark.usefixtures("probes")
def test_a_size_of_no_whole_elements_says_what_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert FakeWorld(2).run(partial(cli.main, parse("all_reduce", "-b", "7", "-e", "7"))) == [0, 0]
    assert "sizes are whole float32 elements: 7 becomes 4" in capsys.readouterr().out
    args = parse("all_gather", "--sizes", "1", "3", "9", "8", "5")
    assert FakeWorld(2).run(partial(cli.main, args)) == [0, 0]
    said = "in each of 2 chunks: 1 becomes 8, 3 becomes 8, 9 becomes 8, and 1 more"
    assert said in capsys.readouterr().out


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


# Tuning


def test_thresholds_merge_neighbours_and_noise_does_not_flip_them() -> None:
    a, b, c = map(choice.Candidate, "abc")
    times_us = {
        8: {a: 1.0, b: 2.0},
        16: {a: 1.03, b: 1.0},
        32: {a: 2.0, b: 1.5},
        64: {b: 3.0, c: 2.0},
    }
    assert choice.thresholds("all_reduce", timed(times_us)) == [
        {"collective": "all_reduce", "up_to_bytes": 16, "algorithm": "a"},
        {"collective": "all_reduce", "up_to_bytes": 32, "algorithm": "b"},
        {"collective": "all_reduce", "up_to_bytes": None, "algorithm": "c"},
    ]


def timed(times_us: Any, spread: float = 0.0) -> Any:
    return {
        nbytes: {each: choice.Timing(us, spread) for each, us in times.items()}
        for nbytes, times in times_us.items()
    }


def test_a_table_does_not_alternate_where_the_repeats_spread_by_as_much() -> None:
    a, b = map(choice.Candidate, "ab")
    faster = {a: 1.0, b: 1.2}, {a: 1.2, b: 1.0}
    times_us = {8 << i: faster[i % 2] for i in range(8)}
    assert len(choice.thresholds("all_reduce", timed(times_us, spread=0.1))) == 1
    # Steady repeats show that it is no noise.
    assert len(choice.thresholds("all_reduce", timed(times_us, spread=0.01))) == 8


@pytest.mark.parametrize("text", ["[]", "{}", "nonsense", '{"tables": [3]}', '{"tables": []}'])
def test_tune_overwrites_no_file_that_is_not_its_own(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text(text, "utf-8")
    with pytest.raises(SystemExit):
        tune.main(["barrier", "--out", str(tmp_path / "mine.json")])
    assert "mine.json exists and is no tuning file" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text("utf-8") == text


def test_tune_writes_no_tables_into_the_file_of_another_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(choice.updated(None, "cuda", 2, []))
    (tmp_path / "cuda.json").write_text(text, "utf-8")
    with pytest.raises(SystemExit):
        tune.main(["barrier", "--out", str(tmp_path / "cuda.json")])
    assert "has tables of backend cuda, and this run is of host" in capsys.readouterr().err
    assert (tmp_path / "cuda.json").read_text("utf-8") == text


@pytest.mark.parametrize(
    ("name", "why"),
    [("put", "it has one algorithm"), ("exchange", "it is called inside kernels only")],
)
def test_tune_says_why_it_does_not_tune_a_collective(
    name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tune.main(["all_reduce", name])
    assert f"{name} is not tuned: {why}; tuned are " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [(kccl.Error("it broke"), "# ended by Error"), (KeyboardInterrupt(), "# interrupted")],
)
def test_tune_says_what_ended_it(
    error: BaseException,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tune, "measure", failing)
    assert tune.main(["all_reduce", "-e", "8", "--no-pin"]) in (2, 130)
    assert f"{said}; complete: none\n" in capsys.readouterr().err


def test_a_tuning_file_keeps_what_was_not_tuned_again() -> None:
    def entry(collective: str, algorithm: str) -> dict[str, Any]:
        return {"collective": collective, "up_to_bytes": None, "algorithm": algorithm}

    first = choice.updated(None, "host", 2, [entry("all_reduce", "a"), entry("broadcast", "b")])
    second = choice.updated(first, "host", 8, [entry("all_reduce", "c")])
    third = choice.updated(second, "host", 2, [entry("all_reduce", "d")])
    assert third == {
        "backend": "host",
        "tables": [
            {"world_size": 2, "thresholds": [entry("all_reduce", "d"), entry("broadcast", "b")]},
            {"world_size": 8, "thresholds": [entry("all_reduce", "c")]},
        ],
    }


def test_a_tables_machine_is_kept_and_files_of_several_machines_are_refused(
    tmp_path: Path,
) -> None:
    table = {"world_size": 2, "machine": "h200-2", "thresholds": []}
    before = {"backend": "cuda", "tables": [table]}
    after = choice.updated(before, "cuda", 2, [{"collective": "barrier", "algorithm": "a"}])
    assert after["tables"][0]["machine"] == "h200-2" and len(after["tables"][0]["thresholds"]) == 1
    path = tmp_path / "cuda.json"
    path.write_text(json.dumps(before | {"tables": [table, table | {"machine": "h200-4"}]}))
    with pytest.raises(ValueError, match="tables of several machines for one number of ranks"):
        choice.read(path, "cuda")


def tuned(comm: FakeComm, sizes: list[int]) -> Any:
    table = collectives.load("all_reduce")
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
            set(tuner.floats_only(collectives.load(name))) for name in ("all_reduce", "all_gather")
        ]

    for found in kccl.run_threads(main, world_size=2):
        assert found == [{"all_reduce_one_shot_sentinel"}, set()]


def test_tuning_refuses_a_wrong_algorithm() -> None:
    with pytest.raises(kccl.Error, match="wrong elements"):
        FakeWorld(2, off_by_one).run(lambda comm: tuned(comm, [64]))


# The whole, under MPI


@pytest.mark.long
def test_kccl_bench_under_mpirun(tmp_path: Path) -> None:
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        pytest.skip(f"{mpirun.parent} has no mpirun")
    flags = "-b 8 -e 1K --repeats 3 --baselines --json"
    done = subprocess.run(
        # Not the script: its Python, and so its Open MPI, may be those of another checkout.
        [mpirun, "-n", "2", sys.executable, "-m", "kccl", "bench", "all_reduce", *flags.split()],
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
    has_open_mpi = (second_job.open_mpi_prefix() / "bin" / "mpirun").exists()
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
