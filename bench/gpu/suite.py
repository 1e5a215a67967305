"""Several benches in one job, which starts its ranks, their GPUs and the peers once.

    kccl run -n 4 -- python -m kccl.bench.gpu.suite --out out "4: all_reduce --baselines" ...

Each bench is a name and the arguments of `kccl bench` on the backend of this machine's GPUs. When
it has ended, its output is in NAME.txt and its document in NAME.json, one line as in bench/records.
The exit code is 1 when a result was wrong. A bench that raises an error ends the job: the benches
after it have no document.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path
from time import monotonic

import kccl

from .. import cli
from ..harness.document import load
from .side import GpuJob


def parse(bench: str) -> tuple[str, list[str]]:
    """Returns the name and the arguments of a bench such as "barrier_4: barrier --baselines".

    Raises:
        ValueError: The bench has no name.
    """
    name, colon, rest = bench.partition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"{bench!r} is not a bench: expected NAME: COLLECTIVE [OPTION ...]")
    return name, ["bench", *shlex.split(rest), "--backend", kccl.gpu.backend(), "--json"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benches one after another. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.gpu.suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("benches", nargs="+", metavar="BENCH", help="NAME: COLLECTIVE [OPTION ...]")
    args = parser.parse_args(argv)
    try:
        benches = [parse(bench) for bench in args.benches]
    except ValueError as error:
        parser.error(str(error))
    code = 0
    with kccl.init(kccl.gpu.backend()) as comm, closing(GpuJob(comm)) as job:
        for name, command in benches:
            code = max(code, _run(name, command, comm, job, args.out))
    return code


def _run(name: str, command: Sequence[str], comm: kccl.Communicator, job: GpuJob, out: Path) -> int:
    parser = argparse.ArgumentParser(prog="kccl bench")
    cli.add_arguments(parser)
    args = parser.parse_args(command[1:])
    began = monotonic()
    if comm.rank == 0:
        print(f"# {name} has begun", flush=True)
    printed = StringIO()
    with redirect_stdout(printed):
        code = cli.main(args, comm, job=job, command=command, tables=printed)
    if comm.rank == 0:
        text = out / f"{name}.txt"
        text.write_text(printed.getvalue(), "utf-8")
        documents = load(text)
        if documents:
            (out / f"{name}.json").write_text(json.dumps(documents[-1]) + "\n", "utf-8")
        print(f"# {name} took {monotonic() - began:.1f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
