"""`kccl bench <collective>`: sweep the sizes, print the table, write what was asked for."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kccl

from . import baselines, mpi
from .collective import NAMES, OPS, Collective, Problem, load, parse_size, sweep
from .document import document
from .harness import REPEATS, Row, add_floors, kccl_contenders, measure
from .report import console, legend, print_table, write_csv

if TYPE_CHECKING:
    from rich.console import Console

_LONG_SWEEP = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kccl bench`; flags are nccl-tests' where it has them."""
    parser.add_argument("collective", choices=NAMES, help="what is measured")
    parser.add_argument(
        "-b", "--begin", type=_size, default=8, metavar="SIZE", help="first size (8)"
    )
    parser.add_argument(
        "-e", "--end", type=_size, metavar="SIZE", help="last size (1M; simulated 8K)"
    )
    parser.add_argument("-f", "--factor", type=int, default=2, help="from one size to the next (2)")
    parser.add_argument("-d", "--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--op", choices=OPS, default="sum", help="reduction operator (sum)")
    parser.add_argument("--root", type=int, default=0, help="root of a broadcast (0)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--in-place", dest="in_place", action="store_true", default=True)
    place.add_argument("--out-of-place", dest="in_place", action="store_false")
    parser.add_argument(
        "--baselines", action="store_true", help="measure MPICH and Open MPI beside kccl"
    )
    parser.add_argument(
        "--iterations", type=int, help="timed calls a repeat (8 ms worth; simulated 3)"
    )
    parser.add_argument("--repeats", type=int, help=f"repeats ({REPEATS}; simulated 1)")
    parser.add_argument(
        "--backend", choices=("host", "sim"), default="host", help="sim: simulated GPUs (host)"
    )
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="simulated ranks (2)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the simulation (0)")
    parser.add_argument(
        "--json", action="store_true", help="end with one JSON document as the last line"
    )
    parser.add_argument("--csv", type=Path, metavar="F", help="write the rows as CSV")
    parser.add_argument(
        "--plot", type=Path, metavar="F", help="write a picture, latency against size"
    )


def main(args: argparse.Namespace, comm: kccl.Communicator) -> int:
    """Run the benchmark; rank 0 prints.

    Returns:
        0, 1 if any result was wrong, 2 if the arguments make no sense. The same on every rank.
    """
    collective = load(args.collective)
    out = console()
    _fill_defaults(args)
    try:
        problems = _problems(args, collective, comm.world_size)
    except ValueError as error:
        if comm.rank == 0:
            print(f"kccl bench: {error}", file=sys.stderr)
        return 2
    if comm.rank == 0:
        _print_head(out, args, comm)
    rows, notes = _measure(args, collective, problems, comm)
    if comm.rank == 0:
        _print_report(out, args, comm, rows, notes)
    return int(any(row["wrong"] for row in rows))


def merge(rows: Sequence[Row], more: Sequence[Row]) -> list[Row]:
    """Rows of two jobs, by size; within a size the order of arrival."""
    return sorted([*rows, *more], key=lambda row: row["bytes"])


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _fill_defaults(args: argparse.Namespace) -> None:
    # A simulated call takes milliseconds, and its time tells nothing that repeats would sharpen.
    is_simulated = args.backend == "sim"
    args.end = args.end or (8 << 10 if is_simulated else 1 << 20)
    args.repeats = (1 if is_simulated else REPEATS) if args.repeats is None else args.repeats
    if is_simulated and args.iterations is None:
        args.iterations = 3


def _check_backend(args: argparse.Namespace) -> None:
    if args.backend == "sim":
        if args.baselines:
            raise ValueError("--baselines would compare a simulation's time with a machine's")
    elif args.ranks is not None or args.seed is not None:
        raise ValueError("--ranks and --seed are for --backend sim; start ranks by mpirun -n N")


def _check_outputs(args: argparse.Namespace) -> None:
    """What would fail only after a long sweep fails before it, as a ValueError."""
    for option, path, library in (
        ("--csv", args.csv, "pandas"),
        ("--plot", args.plot, "matplotlib"),
    ):
        if path is None:
            continue
        if find_spec(library) is None:
            raise ValueError(f"{option} needs {library}: pip install 'kccl[bench]'")
        folder = Path(path).resolve().parent
        if not os.access(folder, os.W_OK):
            raise ValueError(f"{option} {path}: {folder} is no folder that can be written to")


def _problems(args: argparse.Namespace, collective: Collective, world_size: int) -> list[Problem]:
    if args.repeats < 1 or (args.iterations is not None and args.iterations < 1):
        raise ValueError("--repeats and --iterations are 1 or more")
    if not 0 <= args.root < world_size:
        raise ValueError(f"--root {args.root} is no rank of {world_size}")
    if not args.in_place and not collective.has_out:
        raise ValueError(f"{collective.name} has no out-of-place form")
    _check_outputs(args)
    _check_backend(args)
    return collective.problems(
        sweep(args.begin, args.end, args.factor),
        dtype=args.dtype,
        np_dtype=kccl.dtypes.to_numpy(args.dtype),
        op=args.op,
        root=args.root,
        in_place=args.in_place,
        world_size=world_size,
    )


def _measure(
    args: argparse.Namespace,
    collective: Collective,
    problems: Sequence[Problem],
    comm: kccl.Communicator,
) -> tuple[list[Row], list[str]]:
    """All rows, and a sentence for each peer that has none. Collective."""
    in_job = baselines.InJob(comm) if args.baselines else None
    notes = [in_job.missing] if in_job is not None and in_job.missing else []
    unsupported = mpi.unsupported(problems[0])
    if args.baselines and unsupported:
        notes.append(unsupported)
    one_ways_us: list[float] = []
    copies_us: dict[int, float] = {0: 0.0}
    rows: list[Row] = []
    with _progress(comm.rank == 0 and len(problems) >= _LONG_SWEEP, len(problems)) as advance:
        for problem in problems:
            if args.backend != "sim":
                # Probed at every size, since a machine drifts during a sweep.
                one_ways_us.append(kccl.probe.one_way_latency_us(comm))
                if problem.nbytes:
                    copies_us[problem.nbytes] = kccl.probe.copy_us(comm, problem.nbytes)
            contenders = kccl_contenders(comm, collective, problem)
            if in_job is not None:
                contenders += in_job.contenders(collective, problem)
            rows += measure(
                collective,
                problem,
                contenders,
                rank=comm.rank,
                gather=comm.gather_objects,
                repeats=args.repeats,
                iterations=args.iterations,
            )
            advance()
    if in_job is not None and not unsupported and in_job.library != "openmpi":
        request = baselines.Request(
            collective=collective.name,
            sizes=[problem.nbytes for problem in problems],
            dtype=args.dtype,
            op=args.op,
            root=args.root,
            in_place=args.in_place,
            repeats=args.repeats,
            iterations=args.iterations,
        )
        peers, missing = baselines.open_mpi_rows(comm, request)
        rows = merge(rows, peers)
        notes += [missing] if missing else []
    if args.backend == "sim":
        # Nothing that a machine could be measured by.
        for row in rows:
            row["algbw_gbps"] = row["busbw_gbps"] = None
        return rows, notes
    # A floor is the least that was seen: a disturbed probe would make results look too good.
    add_floors(rows, min(one_ways_us), copies_us)
    return rows, notes


@contextmanager
def _progress(wanted: bool, total: int) -> Iterator[Any]:
    """Progress on stderr; yields the function that advances it.

    A bar on a terminal, a line a size elsewhere: mpirun hands its ranks a pipe. Both are drawn
    between sizes only: a thread that redraws would be noise in rank 0's figures.
    """
    if not wanted:
        yield lambda: None
        return
    if not sys.stderr.isatty():
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            print(f"# size {done} of {total} measured", file=sys.stderr, flush=True)

        yield count
        return
    from rich.progress import Progress

    with Progress(console=console(sys.stderr), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("sizes", total=total)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance


def _print_head(out: Console, args: argparse.Namespace, comm: kccl.Communicator) -> None:
    ranks = "1 rank" if comm.world_size == 1 else f"{comm.world_size} ranks"
    place = ", in place" if args.in_place else ", out of place"
    place = place if load(args.collective).has_out else ""
    out.print(f"# kccl bench {args.collective}: {ranks}, backend {comm.backend}{place}")
    if args.backend == "sim":
        out.print("# times are those of the simulation on this CPU, not of any GPU or link")
    if comm.world_size == 1:
        out.print(
            f"# 1 rank exchanges nothing. Start two: mpirun -n 2 kccl bench {args.collective}"
        )


def _print_report(
    out: Console,
    args: argparse.Namespace,
    comm: kccl.Communicator,
    rows: Sequence[Row],
    notes: Sequence[str],
) -> None:
    print_table(out, rows)
    legend(out, rows)
    for note in notes:
        out.print(f"# {note}", soft_wrap=True)
    made = document(rows, ranks=comm.world_size)
    if args.csv:
        write_csv(rows, args.csv)
    if args.plot:
        from .plot import plot

        machine = made["machine"]
        place = f"{machine['cpu_model']}, {machine['cpus']} CPUs"
        plot(rows, args.plot, subtitle=f"{place}, commit {made['commit']}")
    if args.json:
        print(json.dumps(made), flush=True)
