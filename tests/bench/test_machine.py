"""`python -m kccl.bench.machine`: which jobs it starts, and what it writes."""

import json
from dataclasses import replace

import pytest
from bench_world import row

from kccl import topology
from kccl.bench import machine, plot, readme
from kccl.bench.harness import document


def document_of(job, **changes):
    """What a job prints: a document of two sizes, KCCL's rows and a peer's."""
    command = list(job.command)
    collective = command[command.index("bench") + 1]
    rows = [
        row(collective=collective, library=library, call=call, bytes=size, time_us=us, mode="eager")
        for size in (8, 16)
        for library, call, us in (("kccl", "prepared", 0.5), ("openmpi", "direct", 1.5))
    ]
    found = document.document(rows, document.machine(2), command[2:])
    return json.dumps(found | changes)


def run(tmp_path, *words, fails=()):
    """Runs the command without real jobs: the exit code, and the jobs."""
    jobs = []

    def execute(job, limit_s):
        jobs.append(job)
        assert limit_s > 60
        code = 1 if any(name in job.command for name in fails) else 0
        return code, f"a line of MPI's\n{document_of(job)}\n"

    code = machine.main(["--out", str(tmp_path), "--name", "box", *words], execute)
    return code, jobs


def test_every_collective_has_its_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "plot", lambda rows, path, **_: path.write_text(rows[0]["op"] or ""))
    code, jobs = run(tmp_path)
    assert code == 0
    measured = {}
    for job in jobs:
        words = list(job.command)
        ranks = words[words.index("-n") + 1]
        measured.setdefault((ranks, "KCCL_RANKS_PER_NODE" in job.variables), []).append(
            words[words.index("bench") + 1]
        )
        assert "--baselines" in words and "--json" in words
    pairs = {"get", "put", "send_recv", "signal"}
    all_of_mpi = {
        *("all_gather", "all_reduce", "all_reduce_rms_norm", "all_to_all", "barrier", "broadcast"),
        *("gather", "reduce", "reduce_scatter", "scan", "scatter"),
    }
    assert {where: set(names) for where, names in measured.items()} == {
        ("2", False): all_of_mpi | pairs,
        ("16", False): all_of_mpi,
        ("4", True): all_of_mpi,
    }
    for suffix, names in (("2", all_of_mpi | pairs), ("16", all_of_mpi), ("2x2", all_of_mpi)):
        lines = (tmp_path / f"box_{suffix}.jsonl").read_text().splitlines()
        assert len(lines) == len(names)
        assert len(list(tmp_path.glob(f"box_{suffix}_*.png"))) == len(names)


def test_between_nodes_no_mpi_shares_memory():
    job = machine.job_of(machine.PARTS["nodes"], "barrier")
    assert job.variables["OMPI_MCA_btl"] == "self,tcp"
    assert job.variables["MPI4PY_MPIABI"] == "openmpi"
    assert "openmpi" in job.command[0] and "-b" not in job.command
    assert not machine.job_of(machine.PARTS["pair"], "barrier").variables


def test_the_page_has_the_newest_tables_and_the_failures_are_named(tmp_path, capsys):
    few = "--collectives", "all_reduce", "barrier"
    code, _ = run(tmp_path, "--parts", "pair", *few)
    assert code == 0
    page = (tmp_path / "box.md").read_text()
    assert "## 2 ranks" in page and "16 ranks" not in page
    assert "| 8 | 0.500 | 1.500 | Open MPI | 3.00 |" in page
    assert "![all_reduce with 2 ranks](box_2_all_reduce.png)" in page
    assert (tmp_path / "box_2_all_reduce.png").stat().st_size > 1000
    assert readme.update(page, tmp_path) == page
    code, _ = run(tmp_path, "--parts", "pair", "many", *few, fails=["barrier"])
    assert code == 1
    told = capsys.readouterr().err
    assert "failed: barrier, 2 ranks: exit code 1" in told
    # A bench that fails adds nothing.
    assert len((tmp_path / "box_2.jsonl").read_text().splitlines()) == 3
    assert "## 16 ranks" in (tmp_path / "box.md").read_text()


@pytest.mark.parametrize(
    ("model", "cores", "name"),
    [
        ("Intel(R) Xeon(R) Processor", 2, "intel-xeon-2-cores"),
        ("AMD EPYC", 2, "amd-epyc-2-cores"),
        ("AMD Ryzen 9 7950X 16-Core Processor", 16, "amd-ryzen-9-7950x-16-core-16-cores"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", 6, "intel-core-i7-8700-6-cores"),
    ],
)
def test_a_machines_name_is_its_model_and_its_cores(monkeypatch, model, cores, name):
    found = topology.recorded()["intel-xeon-2-cores"]
    cpus = [replace(found.cpus[0], id=n, smt_siblings=(n,)) for n in range(cores)]
    changed = replace(found, cpu_model=model, cpus=tuple(cpus), core_to_core_us=None)
    assert changed.num_cores == cores
    monkeypatch.setattr(topology, "discover", lambda: changed)
    assert machine.machine_name() == name


@pytest.mark.long
@pytest.mark.takes(30)
def test_a_real_job_is_measured_and_drawn(tmp_path):
    words = ["--out", str(tmp_path), "--name", "box", "--parts", "pair", "--collectives", "barrier"]
    assert machine.main(words) == 0
    (line,) = (tmp_path / "box_2.jsonl").read_text().splitlines()
    libraries = {each["library"] for each in json.loads(line)["rows"]}
    assert "kccl" in libraries and libraries & {"mpich", "openmpi"}
    assert (tmp_path / "box_2_barrier.png").exists()
