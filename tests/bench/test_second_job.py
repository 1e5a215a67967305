"""Open MPI's ranks in a job of their own: started, asked in turn, ended, missed with a sentence."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from bench_world import (
    FakeComm,
    FakeWorld,
    parse,
    probes,  # noqa: F401  # a fixture, asked for by name
    problem,
)

from kccl.bench import cli, collectives
from kccl.bench.harness import measure
from kccl.bench.peers import second_job

# A launcher: it starts ranks that do what the real ones do, without MPI.
# The shell reads the second line, and Python passes over it: the first may have no blank in a path.
LAUNCHER = """\
#!/bin/sh
"exec" "{python}" "$0" "$@"
import json, os, socket, subprocess, sys
size = int(sys.argv[sys.argv.index("-n") + 1])
request = sys.argv[-1]
start = [sys.executable, __file__ + ".rank"]
ranks = [subprocess.Popen([*start, str(i), request]) for i in range(size)]
with open(__file__ + ".pids", "w") as file:
    file.write(" ".join(str(each.pid) for each in ranks))
sys.exit(max(each.wait() for each in ranks))
"""
RANK = """\
import json, os, socket, sys
rank, request = int(sys.argv[1]), json.loads(sys.argv[2])
{before}
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(chr(0) + request["name"] + "-" + str(rank))
    with connection.makefile("rw") as stream:
        for line in stream:
            (order, argument), *_ = json.loads(line).items()
            {on_order}
            answer = {{
                "problem": {{"contenders": [["openmpi", "default"]]}},
                "check": {{"wrong": 0}},
                "time": {{"typical_us": [5.0] * 4, "single_us": [6.0] * 4, "cpu": rank,
                          "waited": 0.0}},
            }}[order]
            stream.write(json.dumps(answer) + "\\n")
            stream.flush()
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the environment of Open MPI, whose ranks run these lines before they connect and at
    each order; returns the launcher.
    """

    def make(*, before: str = "pass", on_order: str = "pass") -> Path:
        (tmp_path / "bin").mkdir()
        launcher = tmp_path / "bin" / "mpirun"
        launcher.write_text(LAUNCHER.format(python=sys.executable), "utf-8")
        launcher.chmod(0o755)
        rank = RANK.format(before=before, on_order=on_order)
        launcher.with_name("mpirun.rank").write_text(rank, "utf-8")
        monkeypatch.setenv("KCCL_OPENMPI_PREFIX", str(tmp_path))
        return launcher

    return make


def measured(comm: FakeComm, times: int = 1) -> tuple[list[measure.Row], str | None]:
    """The rows of a problem, measured so many times beside the second job; why it is missing."""
    table, asked = collectives.load("all_reduce"), problem(n=comm.world_size)
    second = second_job.SecondJob(comm, list(range(comm.world_size)))  # type: ignore[arg-type]
    rows: list[measure.Row] = []
    try:
        for _ in range(times):
            contenders = measure.kccl_contenders(comm, table, asked) + second.contenders(asked)
            common = {"rank": comm.rank, "gather": comm.gather_objects}
            rows += measure.measure(table, asked, contenders, **common, repeats=2, iterations=4)
        second.contenders(asked)
        return rows, second.missing
    finally:
        second.close()


def are_gone(launcher: Path) -> bool:
    def state(pid: str) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "Z"

    pids = launcher.with_name("mpirun.pids").read_text("utf-8").split()
    limit = monotonic() + 20
    while not all(state(pid) == "Z" for pid in pids) and monotonic() < limit:
        sleep(0.01)
    return all(state(pid) == "Z" for pid in pids)


def test_its_calls_alternate_with_those_of_this_job(job: Any, tmp_path: Path) -> None:
    log = tmp_path / "orders"
    launcher = job(on_order=f"print(order, argument, file=open('{log}', 'a')) if rank == 0 else 0")
    results = FakeWorld(2).run(measured)
    for rows, missing in results:
        assert missing is None
        (peer,) = (row for row in rows if row["library"] == "openmpi")
        assert (peer["time_us"], peer["p99_us"], peer["mode"]) == (5.0, 6.0, "eager")
        assert len(rows) == 4
    assert results[0] == results[1]
    orders = [line.split()[0] for line in log.read_text("utf-8").splitlines()]
    assert orders == ["problem", "check", "time", "time", "check", "problem"]
    assert are_gone(launcher)


@pytest.mark.parametrize("order", ["problem", "check", "time"])
def test_a_job_that_ends_leaves_the_other_rows(order: str, job: Any) -> None:
    """One rank dies at an order of the second size; the launcher ends the others, as MPI's do."""
    job(
        before="orders = []",
        on_order=f"""orders.append(order)
            if orders.count('{order}') == (2 if order == 'problem' else 3) and rank == 1:
                print('it broke', file=sys.stderr)
                os._exit(7)""",
    )
    for rows, missing in FakeWorld(2).run(partial(measured, times=2)):
        assert [row["library"] for row in rows] == ["kccl"] * 3 + ["openmpi"] + ["kccl"] * 3
        assert "no Open MPI rows: its job returned 7: it broke" in str(missing)


def test_a_job_that_does_not_start_says_why(job: Any) -> None:
    job(before="sys.exit('not enough slots')")
    for rows, missing in FakeWorld(2).run(measured):
        assert [row["library"] for row in rows] == ["kccl"] * 3
        assert "no Open MPI rows: its job returned 1: not enough slots" in str(missing)


@pytest.mark.long
def test_a_job_that_hangs_is_ended(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = job(before="import time; time.sleep(600)")
    monkeypatch.setattr(second_job, "LIMIT_S", 2.0)
    rows, missing = FakeWorld(1).run(measured)[0]
    assert [row["library"] for row in rows] == ["kccl"] * 3
    assert "its job took longer than 2 s to start" in str(missing)
    assert are_gone(launcher)


@pytest.mark.long
def test_an_answer_that_does_not_come_is_not_awaited_forever(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = job(on_order="import time; time.sleep(600 if order == 'time' else 0)")
    monkeypatch.setattr(second_job, "LIMIT_S", 2.0)
    rows, missing = FakeWorld(1).run(measured)[0]
    assert [row["library"] for row in rows] == ["kccl"] * 3
    assert "did not answer within 2 s" in str(missing)
    assert are_gone(launcher)


def test_the_second_job_inherits_nothing_from_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "HYDI_CONTROL_FD", "MPI_LOCALRANKID", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LANG", "C")
    environment = second_job.clean_environment(1)
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


@pytest.mark.skipif(os.cpu_count() == 1, reason="there is one core")
@pytest.mark.usefixtures("probes")
def test_its_ranks_run_on_the_cores_of_this_jobs(job: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"
    job(before=f"print(request['cpus'], len(os.sched_getaffinity(0)), file=open('{told}', 'a'))")
    FakeWorld(2).run(partial(cli.main, parse("all_reduce", "-e", "8", "--baselines")))
    lines = told.read_text("utf-8").splitlines()
    allowed = sorted(os.sched_getaffinity(0))
    assert len(lines) == 2
    for line in lines:
        cpus, count = line.rsplit(" ", 1)
        assert len(set(eval(cpus))) == 2 and set(eval(cpus)) <= set(allowed)
        # The launcher itself may use all, so that it does not think it has one core.
        assert int(count) == len(allowed)
