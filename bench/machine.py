"""Measure a machine: every collective on its CPUs beside MPI, with records, a page and plots.

    make records                                         # everything, in an hour or two
    python -m kccl.bench.machine --parts pair --collectives all_reduce barrier
    python -m kccl.bench.machine --parts                 # measures nothing, writes pages and plots

Run it when nothing else runs. The parts, with the sizes of OSU's benchmarks:

- pair: 2 ranks beside MPICH and Open MPI.
- many: 16 ranks, however few cores there are.
- nodes: 2 pretended nodes of 2 ranks, beside Open MPI over all ranks. KCCL shares no memory between
  the nodes, so Open MPI must not either: it uses TCP, in its own calls and in those of KCCL.

Each bench is a job of its own. Its document is added to bench/records/<machine>_<ranks>.jsonl; that
of the part nodes to <machine>_2x2.jsonl. Then the page <machine>.md and a picture of each bench are
written from the newest documents, and the tables of README.md and bench/README.md. The exit code is
1 if a bench failed; the summary names it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from . import readme
from .collectives import NAMES, load
from .harness.document import Document, subtitle
from .harness.document import load as load_documents
from .peers.second_job import open_mpi_prefix

ROOT = Path(__file__).resolve().parents[1]
_PAGES = ("README.md", "bench/README.md")
_LIMIT_S = 900.0
_ENDING_S = 10.0
_TIMED_OUT = 124


@dataclass(frozen=True)
class Part:
    """The benches of one kind of job.

    Attributes:
        title: What they measure, for the page.
        ranks: Number of ranks.
        suffix: What the name of the record has behind the machine's.
        sizes: Arguments of `kccl bench`.
        per_node: Ranks of a pretended node; 0: there is one node.
        has_pairs: True if calls between the ranks of each pair are measured too.
    """

    title: str
    ranks: int
    suffix: str
    sizes: tuple[str, ...]
    per_node: int = 0
    has_pairs: bool = False

    def collectives(self) -> list[str]:
        """Returns the names of the collectives that this part measures."""
        tables = [table for table in map(load, NAMES) if not table.only_in_kernels]
        return [table.name for table in tables if self.has_pairs or not table.is_composed]


PARTS = {
    "pair": Part("2 ranks", 2, "2", ("-b", "8", "-e", "1M", "-f", "2"), has_pairs=True),
    "many": Part("16 ranks", 16, "16", ("-b", "8", "-e", "1M", "-f", "4")),
    "nodes": Part(
        "2 pretended nodes of 2 ranks", 4, "2x2", ("-b", "8", "-e", "1M", "-f", "4"), per_node=2
    ),
}


@dataclass(frozen=True)
class Job:
    """A command, and the variables that it needs beyond those of this process."""

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


Execute = Callable[[Job, float], tuple[int, str]]
"""(job, timeout in seconds) -> exit code and stdout."""


def job_of(part: Part, collective: str) -> Job:
    """Returns the job that measures a collective."""
    size = collective_sizes(part, collective)
    bench = ("-m", "kccl", "bench", collective, *size, "--baselines", "--json")
    if not part.per_node:
        launcher = Path(sys.executable).with_name("mpirun")
        return Job((str(launcher), "-n", str(part.ranks), sys.executable, *bench))
    prefix = open_mpi_prefix()
    launcher = prefix / "bin" / "mpirun"
    options = ("--oversubscribe", "--bind-to", "none", "-n", str(part.ranks))
    variables = {
        "KCCL_RANKS_PER_NODE": str(part.per_node),
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # mpi4py's wheel has a module for each library.
        "MPI4PY_MPIABI": "openmpi",
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, (str(prefix / "lib"), os.environ.get("LD_LIBRARY_PATH")))
        ),
    }
    return Job((str(launcher), *options, sys.executable, *bench), variables)


def collective_sizes(part: Part, collective: str) -> tuple[str, ...]:
    """Returns the arguments for the sizes of a bench; none if its calls have no size."""
    table = load(collective)
    return part.sizes if table.has_data and table.end is None else ()


def machine_name() -> str:
    """Returns the name of this machine in records, such as "intel-xeon-2-cores"."""
    from kccl import topology

    found = topology.discover()
    known = [
        name for name, each in topology.recorded().items() if not topology.differences(found, each)
    ]
    if known:
        return min(known)
    model = re.sub(r"\((r|tm)\)|\b(processor|cpu)\b|@.*", " ", (found.cpu_model or "").lower())
    words = "-".join(re.findall(r"[a-z0-9]+", model)) or "unknown"
    return f"{words}-{found.num_cores}-cores"


def execute_processes(job: Job, limit_s: float) -> tuple[int, str]:
    """See Execute. The tables go to stderr, which is this process's."""
    process = subprocess.Popen(
        job.command,
        env=os.environ | dict(job.variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return _TIMED_OUT, ""
    finally:
        if process.poll() is None:
            # The launcher ends its ranks.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)
            process.kill()
            process.communicate()


def page(name: str, records: Path) -> str:
    """Returns the page of a machine: a table and a picture of each collective."""
    lines = [
        f"# {name}\n",
        "Written by `python -m kccl.bench.machine` from the records beside it. All libraries of a "
        "table ran in one job.\n",
    ]
    for part in PARTS.values():
        record = f"{name}_{part.suffix}.jsonl"
        if not (records / record).exists():
            continue
        lines.append(f"## {part.title}\n")
        for collective in _newest(records / record):
            picture = f"{name}_{part.suffix}_{collective}.png"
            lines.append(f"### {collective}, {part.title}\n")
            if (records / picture).exists():
                lines.append(f"![{collective} with {part.title}]({picture})\n")
            lines.append(f"<!-- record {record} {collective} headline -->\n<!-- end -->\n")
    return readme.update("\n".join(lines), records)


def _newest(record: Path) -> dict[str, Document]:
    """Returns the newest document of each collective in a record, by name."""
    found: dict[str, Document] = {}
    for document in load_documents(record):
        for row in document["rows"]:
            found[row["collective"]] = document
    return dict(sorted(found.items()))


def _draw(name: str, records: Path) -> None:
    from .plot import plot

    for part in PARTS.values():
        record = records / f"{name}_{part.suffix}.jsonl"
        if not record.exists():
            continue
        for collective, document in _newest(record).items():
            rows = [row for row in document["rows"] if row["collective"] == collective]
            path = records / f"{name}_{part.suffix}_{collective}.png"
            plot(rows, path, subtitle=subtitle(document))


def main(argv: Sequence[str] | None = None, execute: Execute = execute_processes) -> int:
    """Measure what is asked for. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.machine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=readme.RECORDS, help="folder of the records")
    parser.add_argument("--name", help="the machine's name in records; else its CPU and cores")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--collectives", nargs="+", choices=NAMES, help="only these")
    args = parser.parse_args(argv)
    name = args.name or machine_name()
    args.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for key in args.parts:
        part = PARTS[key]
        record = args.out / f"{name}_{part.suffix}.jsonl"
        for collective in part.collectives():
            if args.collectives is not None and collective not in args.collectives:
                continue
            began, what = monotonic(), f"{collective}, {part.title}"
            print(f"# {what}", file=sys.stderr, flush=True)
            code, output = execute(job_of(part, collective), _LIMIT_S)
            found = output.splitlines()[-1:]
            # With a wrong result the code is 1, and the document has it: it is not added.
            if code == 0 and found:
                json.loads(found[0])
                with open(record, "a", encoding="utf-8") as file:
                    file.write(found[0] + "\n")
            else:
                failed.append(f"{what}: exit code {code}")
            print(f"# {what}: {monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    _draw(name, args.out)
    (args.out / f"{name}.md").write_text(page(name, args.out), "utf-8")
    if args.out.resolve() == readme.RECORDS.resolve():
        readme.main([str(ROOT / each) for each in _PAGES])
    for each in failed:
        print(f"failed: {each}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
