"""`kccl bench <collective>`: sweep the sizes, print the table, write what was asked for."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import kccl

from .harness.collective import (
    NAMES,
    OPS,
    Collective,
    Problem,
    load,
    parse_size,
    sweep,
)
from .harness.document import Document, document, subtitle
from .harness.measure import REPEATS, Contender, Row, measure
from .harness.progress import progress
from .harness.report import (
    console,
    legend,
    print_summary,
    print_table,
    size_text,
    verdict,
    write_csv,
)
from .host.side import HostSide
from .in_kernel.data import DTYPES
from .peers import baselines

if TYPE_CHECKING:
    from rich.console import Console

    from .gpu.side import GpuJob

_CALLS_IN_KERNEL = 5000


class Side(Protocol):
    """What differs between backends: HostSide, GpuSide or InKernelSide."""

    machine: dict[str, Any]

    def contenders(self, problem: Problem) -> list[Contender]: ...

    def finish(
        self, rows: Sequence[Row], request: baselines.Request, problem: Problem
    ) -> tuple[list[Row], list[str]]: ...

    def close(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kccl bench`; flags are nccl-tests' where it has them."""
    parser.add_argument("collective", choices=NAMES, help="what is measured")
    parser.add_argument(
        "-b", "--begin", type=_size, default=8, metavar="SIZE", help="first size (8)"
    )
    parser.add_argument(
        "-e",
        "--end",
        type=_size,
        metavar="SIZE",
        help="last size (1M; in kernels 64K; simulated 8K)",
    )
    parser.add_argument("-f", "--factor", type=int, default=2, help="from one size to the next (2)")
    parser.add_argument(
        "--sizes",
        type=_size,
        nargs="+",
        metavar="SIZE",
        help="these sizes, in place of those from -b to -e",
    )
    parser.add_argument("-d", "--dtype", help="element type (float32; on GPUs bfloat16)")
    parser.add_argument("--op", choices=OPS, default="sum", help="reduction operator (sum)")
    parser.add_argument("--root", type=int, default=0, help="root of a broadcast (0)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--in-place", dest="in_place", action="store_true", default=True)
    place.add_argument("--out-of-place", dest="in_place", action="store_false")
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="measure the peers beside kccl: MPICH and Open MPI; on GPUs NCCL and PyTorch",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        help="timed calls a repeat (8 ms worth; in kernels 5000; simulated 3)",
    )
    parser.add_argument("--repeats", type=int, help=f"repeats ({REPEATS}; simulated 1)")
    parser.add_argument(
        "--backend",
        choices=("host", "cuda", "sim"),
        default="host",
        help="cuda: a GPU a rank; sim: simulated GPUs (host)",
    )
    parser.add_argument(
        "--in-kernel",
        action="store_true",
        help="calls inside persistent kernels, timed there; with --backend cuda or sim",
    )
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="simulated ranks (2)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the simulation (0)")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print every row, not one line a size"
    )
    parser.add_argument(
        "--json", action="store_true", help="end with one JSON document as the last line"
    )
    parser.add_argument("--csv", type=Path, metavar="F", help="write the rows as CSV")
    parser.add_argument(
        "--plot", type=Path, metavar="F", help="write a picture, latency against size"
    )


def main(
    args: argparse.Namespace,
    comm: kccl.Communicator,
    *,
    job: GpuJob | None = None,
    command: Sequence[str] | None = None,
) -> int:
    """Run the benchmark; rank 0 prints.

    Args:
        args: Of add_arguments().
        comm: The ranks.
        job: What benches on GPUs share, where this one is not alone.
        command: See document().

    Returns:
        0, 1 if any result was wrong, 2 if the arguments make no sense. The same on every rank.
    """
    collective = load(args.collective)
    out = console()
    _fill_defaults(args, collective)
    try:
        problems = _problems(args, collective, comm.world_size)
    except ValueError as error:
        if comm.rank == 0:
            print(f"kccl bench: {error}", file=sys.stderr)
        return 2
    if comm.rank == 0:
        _print_head(out, args, collective, comm)
    with ExitStack() as ends:
        if job is None and _is_on_gpus(args):
            job = ends.enter_context(closing(_gpu_job(comm)))
        rows, notes, machine = _measure(args, collective, problems, comm, job)
    if comm.rank == 0:
        made = document(rows, comm.world_size, machine, command)
        _print_report(out, args, rows, notes, made)
    return int(any(row["wrong"] for row in rows))


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _fill_defaults(args: argparse.Namespace, collective: Collective) -> None:
    # A simulated call takes milliseconds, and its time tells nothing that repeats would sharpen.
    is_simulated = args.backend == "sim"
    usual = "bfloat16" if args.backend == "cuda" else "float32"
    args.dtype = args.dtype or collective.dtype or usual
    longest = 64 << 10 if args.in_kernel else 1 << 20
    args.end = args.end or collective.end or (8 << 10 if is_simulated else longest)
    args.repeats = (1 if is_simulated else REPEATS) if args.repeats is None else args.repeats
    if args.iterations is None and (is_simulated or args.in_kernel):
        args.iterations = 3 if is_simulated else _CALLS_IN_KERNEL


def _check_backend(args: argparse.Namespace, world_size: int) -> None:
    if args.backend == "cuda":
        from .gpu.side import check_gpus

        check_gpus(world_size)
    if args.backend == "sim":
        if args.baselines:
            raise ValueError("--baselines would compare a simulation's time with a machine's")
    elif args.ranks is not None or args.seed is not None:
        raise ValueError("--ranks and --seed are for --backend sim; use mpirun or kccl run")


def _check_in_kernel(args: argparse.Namespace, collective: Collective) -> None:
    """What persistent kernels do not do, as a ValueError."""
    if not args.in_kernel:
        if collective.only_in_kernels:
            raise ValueError(f"{collective.name} is called in kernels only: add --in-kernel")
        return
    if args.backend == "host":
        raise ValueError(
            "--in-kernel is for --backend cuda and sim: on the host no kernel lasts for many "
            "calls, and those of mode host are looped in C already"
        )
    if args.baselines:
        raise ValueError(
            "--baselines has no peer inside a kernel but that of grid_sync, which is always there"
        )
    if collective.dtype is not None and args.dtype != collective.dtype:
        raise ValueError(
            f"{collective.name} takes --dtype {collective.dtype}: it moves bits, whatever they mean"
        )
    if collective.has_data and args.dtype not in (*DTYPES, collective.dtype):
        raise ValueError(
            f"--in-kernel takes {', '.join(DTYPES)}: in {args.dtype} thousands of sums, each on "
            "the one before, leave nothing to check"
        )
    if collective.has_op and args.op != "sum":
        raise ValueError(
            f"--in-kernel takes --op sum: a call of {args.op} on the result of the one before "
            "changes nothing, so that none would be missed"
        )
    if not args.in_place:
        raise ValueError(
            "--out-of-place: in a kernel each call works on the result of the one before"
        )
    if args.root != 0:
        raise ValueError(f"--root {args.root}: in a kernel the ranks are root in turn")


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
    _check_in_kernel(args, collective)
    _check_outputs(args)
    _check_backend(args, world_size)
    # What is gathered in kernels goes from one array to another.
    is_gathered = args.in_kernel and collective.name in ("all_gather", "exchange")
    in_place = args.in_place and not is_gathered
    return collective.problems(
        args.sizes or sweep(args.begin, args.end, args.factor),
        dtype=args.dtype,
        np_dtype=kccl.dtypes.to_numpy(args.dtype),
        op=args.op,
        root=args.root,
        in_place=in_place,
        world_size=world_size,
    )


def _measure(
    args: argparse.Namespace,
    collective: Collective,
    problems: Sequence[Problem],
    comm: kccl.Communicator,
    job: GpuJob | None,
) -> tuple[list[Row], list[str], dict[str, Any]]:
    """All rows, a sentence for each peer that has none, and the machine. Collective."""
    with closing(_side(args, collective, problems, comm, job)) as side:
        rows: list[Row] = []
        with progress(comm.rank == 0, len(problems)) as show:
            for problem in problems:
                show(f"{collective.name}, {size_text(problem.nbytes)} bytes")
                rows += measure(
                    collective,
                    problem,
                    side.contenders(problem),
                    rank=comm.rank,
                    gather=comm.gather_objects,
                    repeats=args.repeats,
                    iterations=args.iterations,
                )
            show("floors, and peers in a job of their own")
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
            found, notes = side.finish(rows, request, problems[0])
        return found, notes, side.machine


def _side(
    args: argparse.Namespace,
    collective: Collective,
    problems: Sequence[Problem],
    comm: kccl.Communicator,
    job: GpuJob | None,
) -> Side:
    if args.in_kernel:
        from .in_kernel.side import InKernelSide

        return InKernelSide(comm, collective, problems)
    if not _is_on_gpus(args):
        return HostSide(comm, collective, has_baselines=args.baselines)
    from .gpu.side import GpuSide

    assert job is not None, "main() has opened one"
    return GpuSide(job, collective, has_baselines=args.baselines)


def _is_on_gpus(args: argparse.Namespace) -> bool:
    """Whether calls on a GPU's stream are measured."""
    return args.backend == "cuda" and not args.in_kernel


def _gpu_job(comm: kccl.Communicator) -> GpuJob:
    from .gpu.side import GpuJob

    return GpuJob(comm)


def _print_head(
    out: Console, args: argparse.Namespace, collective: Collective, comm: kccl.Communicator
) -> None:
    ranks = "1 rank" if comm.world_size == 1 else f"{comm.world_size} ranks"
    place = ", in place" if args.in_place else ", out of place"
    place = place if collective.has_out else ""
    place = ", inside kernels" if args.in_kernel else place
    kind = f", {args.dtype}" if collective.has_data else ""
    kind += f" {args.op}" if collective.has_op else ""
    out.print(f"# kccl bench {collective.name}: {ranks}, backend {comm.backend}{kind}{place}")
    if args.backend == "sim":
        out.print("# times are those of the simulation on this CPU, not of any GPU or link")
    if comm.world_size == 1:
        start = "kccl run -n 2 --" if args.backend == "cuda" else "mpirun -n 2"
        again = " --backend cuda" if args.backend == "cuda" else ""
        again += " --in-kernel" if args.in_kernel else ""
        out.print(
            f"# 1 rank exchanges nothing. Start two: {start} kccl bench {args.collective}{again}"
        )


def _print_report(
    out: Console,
    args: argparse.Namespace,
    rows: Sequence[Row],
    notes: Sequence[str],
    made: Document,
) -> None:
    # What is wrong is looked for in every row.
    if args.verbose or any(row["wrong"] for row in rows):
        print_table(out, rows)
        legend(out, rows)
    else:
        print_summary(out, rows)
    verdict(out, rows)
    for note in notes:
        out.print(f"# {note}", soft_wrap=True)
    if args.csv:
        write_csv(rows, args.csv)
    if args.plot:
        from .plot import plot

        plot(rows, args.plot, subtitle=subtitle(made))
    if args.json:
        print(json.dumps(made), flush=True)
