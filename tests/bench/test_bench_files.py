"""A bench's files and stdout: tried before anything is measured, written whatever ends the run."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench_world import (
    FakeWorld,
    parse,
    probes,  # noqa: F401  # a fixture, asked for by name
)
from long import long_after

import kccl
from kccl.base import mapping
from kccl.bench import cli
from kccl.bench.harness import measure, outputs
from kccl.bench.harness.interrupts import Interrupts

BENCH = (sys.executable, "-m", "kccl", "bench", "all_reduce")
SHORT = ("-e", "64", "--repeats", "2", "--iterations", "9")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("--csv", "folder"), "--csv folder is a folder: name a file"),
        (("--plot", "folder"), "--plot folder is a folder: name a file, as in folder/latency.png"),
        (("--csv", "-"), "--csv takes a file's name, and - is not for stdout here"),
        (("--plot", "-"), "--plot takes a file's name, and - is not for stdout here"),
        (("--csv", "missing/x.csv"), "--csv missing/x.csv cannot be written: No such file"),
        (("--csv", "/dev/full"), "--csv /dev/full cannot be written: No space left"),
        (("--plot", "x.foo"), "--plot x.foo has the suffix .foo: pictures are "),
        (("--plot", "x"), "--plot x has no suffix: pictures are "),
        (("--plot", "file/x.png"), "--plot file/x.png cannot be written: Not a directory"),
        (("--plot", "x.png", "--csv", "x.png"), "name the same file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    argv: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())

    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr(cli, "measure", measured)
    assert FakeWorld(2).run(partial(cli.main, parse("all_reduce", *argv))) == [2, 2]
    printed = capsys.readouterr()
    assert reason in printed.err and len(printed.err.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_what_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("figures\n")
    outputs.try_file("--csv", mine)
    outputs.try_file("--csv", tmp_path / "other.csv")
    outputs.try_file("--csv", Path(os.devnull))
    assert mine.read_text() == "figures\n"
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_full_stdout_is_a_sentence(flags: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*BENCH, *SHORT, *flags], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 2
    assert done.stderr == "kccl bench: stdout cannot be written: No space left on device\n"


def test_a_reader_that_had_enough_ends_the_run_in_peace() -> None:
    command = [sys.executable, "-m", "kccl", "run", "-n", "2", "--", *BENCH, "-e", "64M"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stderr is not None
        for line in job.stdout:
            if line.startswith(b"8 "):
                break
        job.stdout.close()
        assert job.wait(120) == 0
        assert job.stderr.read() == b""


# What ends a run early


def lines_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("number", "launcher"),
    long_after(
        1,
        [
            (signal.SIGINT, ("run", "-n", "2", "--")),
            (signal.SIGTERM, ("run", "-n", "2", "--")),
            (signal.SIGINT, ()),
            (signal.SIGTERM, ()),
        ],
    ),
)
def test_what_was_measured_outlives_ctrl_c(
    launcher: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    table, picture = tmp_path / "rows.csv", tmp_path / "rows.png"
    files = ("--csv", str(table), "--plot", str(picture), "--json")
    # The last size takes so many seconds that the signal comes meanwhile.
    sizes = ("--sizes", "8", "16", "64M", "--repeats", "1", "--iterations", "50")
    start = [sys.executable, "-m", "kccl", *launcher] if launcher else []
    with subprocess.Popen(
        [*start, *BENCH, *sizes, *files],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        for line in job.stderr:
            if line.startswith("16 "):
                break
        job.send_signal(number)
        made = json.loads(job.stdout.read())
        said = job.stderr.read()
    assert job.returncode == (128 + number if launcher else 130) or job.returncode == 130
    assert {each["bytes"] for each in made["rows"]} == {8, 16}
    assert made["interrupted"] == "interrupted after 2 of 3 sizes"
    assert f"# {made['interrupted']}" in said and "# wrong elements: 0 OK" in said
    assert "Traceback" not in said
    assert [int(each["bytes"]) for each in lines_of(table)] == [
        each["bytes"] for each in made["rows"]
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("error", [kccl.BackendError("a driver broke"), MemoryError(), OSError(5)])
@pytest.mark.usefixtures("probes")
def test_what_was_measured_outlives_an_error(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(collective: Any, problem: Any, *rest: Any, **keywords: Any) -> list[measure.Row]:
        if problem.nbytes == 32:
            raise error
        return measure.measure(collective, problem, *rest, **keywords)

    monkeypatch.setattr(cli, "measure", failing)
    table = tmp_path / "rows.csv"
    args = parse("all_reduce", "-e", "64", "--csv", str(table), "--json")
    with pytest.raises((kccl.Error, OSError)):
        FakeWorld(1).run(partial(cli.main, args))
    assert [int(each["bytes"]) for each in lines_of(table)] == [8] * 3 + [16] * 3
    made = json.loads(capsys.readouterr().out)
    assert made["interrupted"] == f"interrupted by {type(error).__name__} after 2 of 4 sizes"


def test_the_rows_of_a_killed_rank_0_are_in_its_csv(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "kccl", "run", "-n", "2", "--", *BENCH, "-e", "64M"]
    with subprocess.Popen(
        [*command, "--csv", str(table)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("# rank 0"):
                first = int(line.split()[4])
            if line.startswith("8 "):
                break
        os.kill(first, signal.SIGKILL)
        job.communicate(timeout=120)
    assert {int(each["bytes"]) for each in lines_of(table)} >= {8}


@pytest.mark.usefixtures("probes")
def test_a_file_that_fails_at_the_end_costs_neither_the_others_nor_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "write_csv", full)
    args = parse("all_reduce", "-e", "8", "--json", "--csv", str(tmp_path / "rows.csv"))
    assert FakeWorld(2).run(partial(cli.main, args)) == [2, 2]
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["rows"]) == 3
    assert "rows.csv could not be written: No space left on device" in printed.err


# Memory


def test_messages_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = kccl.topology.Room("this machine", 1 << 30, False, "end other programs")
    monkeypatch.setattr(kccl.topology, "memory_room", lambda: [room])
    args = parse("all_reduce", "--sizes", "8", "1G")
    assert FakeWorld(2).run(partial(cli.main, args)) == [2, 2]
    said = "messages of 1.0 GiB need 6.0 GiB on 2 ranks, and this machine has 1.0 GiB left"
    assert said in capsys.readouterr().err


def test_windows_that_nobody_has_written_yet_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = kccl.topology.Room("this machine", 7 << 30, False, "end other programs")
    monkeypatch.setattr(kccl.topology, "memory_room", lambda: [room])
    monkeypatch.setattr(mapping, "mapped_bytes", lambda: 3 << 30)
    monkeypatch.setattr(mapping, "untouched_bytes", lambda: 2 << 30)
    args = parse("all_reduce", "--sizes", "8", "1G")
    assert FakeWorld(2).run(partial(cli.main, args)) == [2, 2]
    said = "and this machine has 7.0 GiB left, 2.0 GiB of it promised to windows that nobody has"
    assert said in capsys.readouterr().err


def test_a_rank_that_has_too_little_memory_refuses_for_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = iter([1 << 40, 1 << 30])
    limit = "this machine"
    monkeypatch.setattr(
        kccl.topology, "memory_room", lambda: [kccl.topology.Room(limit, next(asked), False, "")]
    )
    args = parse("all_reduce", "--sizes", "8", "1G")
    assert FakeWorld(2).run(partial(cli.main, args)) == [2, 2]
    assert capsys.readouterr().err.count("messages of 1.0 GiB need 6.0 GiB on 2 ranks") == 1


@pytest.mark.usefixtures("probes")
def test_the_callers_arguments_stay_as_they_are() -> None:
    """Ranks that are threads share them."""
    args = parse("all_reduce", "--sizes", "8")
    before = dict(vars(args))
    assert FakeWorld(2).run(partial(cli.main, args)) == [0, 0]
    assert vars(args) == before


def test_a_rank_that_is_a_thread_knows_that_ctrl_c_ended_the_run() -> None:
    """Only the main thread gets the signal, and the rank's waits fail."""
    seen = []

    def rank() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.number)

    with Interrupts() as outer:
        outer.hold()
        for _ in range(2):
            thread = threading.Thread(target=rank)
            thread.start()
            thread.join()
            signal.raise_signal(signal.SIGINT)
    assert seen == [None, signal.SIGINT]
