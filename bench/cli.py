"""`kccl bench <collective>`: measure every size, print a table, write the files asked for."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

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

_ON_GPUS = ("cuda", "hip")  # backends on which a rank drives a GPU
_CALLS_IN_KERNEL = 5000


class Side(Protocol):
    """The part of a run that depends on the backend: HostSide, GpuSide or InKernelSide."""

    machine: dict[str, Any]

    def contenders(self, problem: Problem) -> list[Contender]: ...

    def finish(
        self, rows: Sequence[Row], request: baselines.Request, problem: Problem
    ) -> tuple[list[Row], list[str]]: ...

    def close(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kccl bench` to a parser. Flags of nccl-tests keep their names."""
    parser.add_argument("collective", choices=NAMES, help="what to measure; or decode")
    parser.add_argument(
        "-b", "--begin", type=message_size, default=8, metavar="SIZE", help="first size (8)"
    )
    parser.add_argument(
        "-e",
        "--end",
        type=message_size,
        metavar="SIZE",
        help="last size (1M; in kernels 64K; simulated 8K)",
    )
    parser.add_argument("-f", "--factor", type=int, default=2, help="factor between sizes (2)")
    parser.add_argument(
        "--sizes",
        type=message_size,
        nargs="+",
        metavar="SIZE",
        help="measure these sizes; -b, -e and -f are ignored",
    )
    parser.add_argument("-d", "--dtype", help="element type (float32; on GPUs bfloat16)")
    parser.add_argument("--op", choices=OPS, default="sum", help="reduction operator (sum)")
    parser.add_argument("--root", type=int, default=0, help="root of a broadcast (0)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--in-place",
        dest="in_place",
        action="store_true",
        default=True,
        help="the result replaces the input (this is the default)",
    )
    form.add_argument(
        "--out-of-place", dest="in_place", action="store_false", help="the result has its own array"
    )
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="also measure peers: MPICH and Open MPI; on GPUs NCCL or RCCL, PyTorch's symmetric "
        "memory, NVSHMEM and FlashInfer",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        help="timed calls per repeat (8 ms of them; in kernels 5000; simulated 3)",
    )
    parser.add_argument("--repeats", type=int, help=f"number of repeats ({REPEATS}; simulated 1)")
    parser.add_argument(
        "--backend",
        choices=("host", *_ON_GPUS, "sim"),
        default="host",
        help="cuda, hip: one GPU of NVIDIA or AMD per rank; sim: simulated GPUs (host)",
    )
    parser.add_argument(
        "--in-kernel",
        action="store_true",
        help="measure calls inside a persistent kernel; needs --backend cuda, hip or sim",
    )
    parser.add_argument(
        "-n", "--ranks", type=int, metavar="N", help="number of simulated ranks (2)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the simulation (0)")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print every row, not one line a size"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document; tables go to stderr"
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
    tables: IO[str] | None = None,
) -> int:
    """Run the benchmark; rank 0 prints.

    Args:
        args: The parsed arguments of add_arguments().
        comm: The communicator.
        job: GPU state that several benches share; None creates it for this one.
        command: See document().
        tables: Where tables go. None: to stdout; to stderr with --json.

    Returns:
        0; 1 if any result was wrong; 2 if the arguments are invalid. The same on every rank.
    """
    collective = load(args.collective)
    tables = tables or (sys.stderr if args.json else sys.stdout)
    out = console(tables)
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
        rows, notes, machine = _measure(args, collective, problems, comm, job, tables)
    if comm.rank == 0:
        made = document(rows, comm.world_size, machine, command)
        _print_report(out, args, rows, notes, made)
    return int(any(row["wrong"] for row in rows))


def message_size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _fill_defaults(args: argparse.Namespace, collective: Collective) -> None:
    # Why: a simulated call takes milliseconds, and its time means nothing, so one repeat suffices.
    is_simulated = args.backend == "sim"
    usual = "bfloat16" if args.backend in _ON_GPUS else "float32"
    args.dtype = args.dtype or collective.dtype or usual
    longest = 64 << 10 if args.in_kernel else 1 << 20
    args.end = args.end or collective.end or (8 << 10 if is_simulated else longest)
    args.repeats = (1 if is_simulated else REPEATS) if args.repeats is None else args.repeats
    if args.iterations is None and (is_simulated or args.in_kernel):
        args.iterations = 3 if is_simulated else _CALLS_IN_KERNEL


def _check_backend(args: argparse.Namespace, collective: Collective, world_size: int) -> None:
    collective.check_place(args.backend, in_kernel=args.in_kernel)
    if args.backend in _ON_GPUS:
        from .gpu.side import check_gpus

        check_gpus(world_size)
    if args.backend == "sim":
        if args.baselines:
            raise ValueError("--baselines would compare a simulation's time with a machine's")
    elif args.ranks is not None or args.seed is not None:
        raise ValueError("--ranks and --seed are for --backend sim; use mpirun or kccl run")


def _check_in_kernel(args: argparse.Namespace, collective: Collective) -> None:
    """Raises ValueError for arguments that persistent kernels do not support."""
    if not args.in_kernel:
        if collective.only_in_kernels:
            raise ValueError(f"{collective.name} is called inside kernels only: add --in-kernel")
        return
    if args.backend == "host":
        raise ValueError(
            "--in-kernel needs --backend cuda, hip or sim: the host has no persistent kernels, and "
            "mode host already makes its calls in a loop in C"
        )
    if args.baselines:
        raise ValueError(
            "--baselines has no peer inside a kernel; that of grid_sync is always measured"
        )
    if collective.dtype is not None and args.dtype != collective.dtype:
        raise ValueError(
            f"{collective.name} takes --dtype {collective.dtype} only: it copies bits unchanged"
        )
    if collective.has_data and args.dtype not in (*DTYPES, collective.dtype):
        raise ValueError(
            f"--in-kernel takes --dtype {', '.join(DTYPES)}: in {args.dtype} a chain of thousands "
            "of sums goes out of range, and its result checks nothing"
        )
    if collective.has_op and args.op != "sum":
        raise ValueError(
            f"--in-kernel takes --op sum: the result of a chain of {args.op} calls would not show "
            "a missing call"
        )
    if not args.in_place:
        raise ValueError(
            "--out-of-place is not for --in-kernel: a call works on the result of the call before"
        )
    if args.root != 0:
        raise ValueError(f"--root {args.root} is not for --in-kernel: the ranks take turns as root")


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises ValueError, before a long sweep, for files that could not be written after it."""
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
            raise ValueError(f"{option} {path}: {folder} is not a writable folder")


def _problems(args: argparse.Namespace, collective: Collective, world_size: int) -> list[Problem]:
    if args.repeats < 1 or (args.iterations is not None and args.iterations < 1):
        raise ValueError("--repeats and --iterations must be at least 1")
    if not 0 <= args.root < world_size:
        raise ValueError(f"--root {args.root} is not a rank of {world_size}")
    if not args.in_place and not collective.has_out:
        raise ValueError(f"{collective.name} has no out-of-place form")
    _check_backend(args, collective, world_size)
    _check_in_kernel(args, collective)
    _check_outputs(args)
    in_place = args.in_place and not (args.in_kernel and collective.is_apart_in_kernels)
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
    tables: IO[str],
) -> tuple[list[Row], list[str], dict[str, Any]]:
    """All rows, a note for each peer without rows, and facts about the machine. Collective."""
    with closing(_side(args, collective, problems, comm, job)) as side:
        rows: list[Row] = []
        with progress(comm.rank == 0, len(problems), tables) as show:
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
            show("floors, and peers with their own job")
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
    return args.backend in _ON_GPUS and not args.in_kernel


def _gpu_job(comm: kccl.Communicator) -> GpuJob:
    from .gpu.side import GpuJob

    return GpuJob(comm)


def _print_head(
    out: Console, args: argparse.Namespace, collective: Collective, comm: kccl.Communicator
) -> None:
    ranks = "1 rank" if comm.world_size == 1 else f"{comm.world_size} ranks"
    form = (", in place" if args.in_place else ", out of place") if collective.has_out else ""
    form = ", inside kernels" if args.in_kernel else form
    kind = f", {args.dtype}" if collective.has_data else ""
    kind += f" {args.op}" if collective.has_op else ""
    out.print(f"# kccl bench {collective.name}: {ranks}, backend {comm.backend}{kind}{form}")
    if args.backend == "sim":
        out.print("# times are those of the simulation on this CPU, not of any GPU or link")
    if comm.world_size == 1:
        is_on_gpus = args.backend in _ON_GPUS
        start = "kccl run -n 2 --" if is_on_gpus else "mpirun -n 2"
        again = f" --backend {args.backend}" if is_on_gpus else ""
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
    # With a wrong result every row is printed, because the user needs all of them to find it.
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
