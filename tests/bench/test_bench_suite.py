"""Several benches in one job: their documents, and what remains when a bench ends the job."""

import json
import re
from contextlib import nullcontext

import pytest
from bench_world import gpu_document, row

from kccl.bench.gpu import suite
from kccl.bench.harness.document import load


class FakeJob:
    """What suite.main() uses of kccl and of the device."""

    def __init__(self, monkeypatch, rank=0, crashes_in=""):
        self.rank, self.crashes_in = rank, crashes_in
        self.closed = False
        self.commands = []
        monkeypatch.setattr(suite.kccl, "init", lambda backend: nullcontext(self))
        monkeypatch.setattr(suite, "GpuJob", lambda comm: self)
        monkeypatch.setattr(suite.cli, "main", self.measure)

    def close(self):
        self.closed = True

    def measure(self, args, comm, *, job, command, tables):
        assert comm is self and job is self and args.backend == "cuda"
        self.commands.append(list(command))
        if args.collective == self.crashes_in:
            raise RuntimeError("the device is gone")
        if comm.rank == 0:
            print("# a table", file=tables)
            print(json.dumps(gpu_document(row(collective=args.collective))))
        return int(args.collective == "broadcast")


TWO = ("barrier_4: barrier --baselines", "all_reduce_4: all_reduce --sizes 1K 16M")


def test_a_suite_writes_a_document_a_bench(tmp_path, monkeypatch, capsys):
    job = FakeJob(monkeypatch)
    assert suite.main(["--out", str(tmp_path), *TWO]) == 0
    assert job.closed
    assert job.commands[1] == [
        "bench",
        "all_reduce",
        *TWO[1].split()[2:],
        "--backend",
        "cuda",
        "--json",
    ]
    (written,) = load(tmp_path / "barrier_4.json")
    assert written["rows"][0]["collective"] == "barrier"
    assert (tmp_path / "all_reduce_4.txt").read_text().startswith("# a table\n{")
    printed = capsys.readouterr().out
    # If the job is killed, the last line names the bench that was running.
    assert re.findall(r"# (\w+) (?:has begun|took)", printed) == [
        *("barrier_4", "barrier_4", "all_reduce_4", "all_reduce_4")
    ]


def test_a_wrong_row_is_the_suites_exit_code_and_the_others_run(tmp_path, monkeypatch):
    FakeJob(monkeypatch)
    assert suite.main(["--out", str(tmp_path), "broadcast_4: broadcast", *TWO]) == 1
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_only_rank_0_writes(tmp_path, monkeypatch, capsys):
    FakeJob(monkeypatch, rank=1)
    assert suite.main(["--out", str(tmp_path), *TWO]) == 0
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


def test_a_bench_that_ends_the_job_leaves_the_documents_before_it(tmp_path, monkeypatch):
    job = FakeJob(monkeypatch, crashes_in="all_reduce")
    with pytest.raises(RuntimeError, match="the device is gone"):
        suite.main(["--out", str(tmp_path), *TWO])
    assert job.closed
    assert [path.stem for path in tmp_path.glob("*.json")] == ["barrier_4"]


@pytest.mark.parametrize("bench", ["barrier", "a name: barrier", ": barrier"])
def test_a_bench_of_a_suite_has_a_name(bench, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        suite.main(["--out", str(tmp_path), bench])
    assert end.value.code == 2
    assert "expected NAME: COLLECTIVE" in capsys.readouterr().err
