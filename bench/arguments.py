"""Defines and checks the arguments of `kccl bench <collective>`, and makes problems of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import kccl

from .collectives import NAMES
from .harness.collective import OPS, Collective, parse_size, sweep
from .harness.measure import REPEATS
from .harness.memory import check_memory
from .harness.problem import Problem
from .in_kernel.data import DTYPES
from .names import collective_name, did_you_mean, dtype_name

ON_GPUS = ("cuda", "hip")
"""Backends on which a rank drives a GPU."""

_BEGIN, _FACTOR = 8, 2
_CALLS_IN_KERNEL = 5000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kccl bench` to a parser. Flags of nccl-tests keep their names."""
    parser.add_argument(
        "collective",
        nargs="?",
        type=collective_name,
        metavar="collective",
        help=f"what to measure: {', '.join(NAMES)}; or decode",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="F",
        help="measure nothing: compare the second file of --json with the first; one file: with "
        "the newest record of this machine in a checkout. Exit code 1: it is slower",
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "-b", "--begin", type=message_size, metavar="SIZE", help=f"first size ({_BEGIN})"
    )
    sizes.add_argument(
        "-e",
        "--end",
        type=message_size,
        metavar="SIZE",
        help="last size (1M; in kernels 64K; simulated 8K)",
    )
    sizes.add_argument(
        "-f", "--factor", type=whole_number, help=f"factor between sizes ({_FACTOR})"
    )
    sizes.add_argument(
        "--sizes",
        type=message_size,
        nargs="+",
        metavar="SIZE",
        help="measure these sizes, without -b, -e and -f",
    )
    parser.add_argument(
        "-d", "--dtype", type=dtype_name, help="element type (float32; on GPUs bfloat16)"
    )
    parser.add_argument("--op", type=_op, help=f"reduction operator: {', '.join(OPS)} (sum)")
    parser.add_argument(
        "--root", type=whole_number, help="root of broadcast, reduce, gather, scatter (0)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--in-place",
        action="store_const",
        const=True,
        help="the result replaces the input (this is the default)",
    )
    form.add_argument(
        "--out-of-place",
        dest="in_place",
        action="store_const",
        const=False,
        help="the result has its own array",
    )
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="also measure peers: MPICH and Open MPI; on GPUs NCCL or RCCL, PyTorch's symmetric "
        "memory, NVSHMEM and FlashInfer",
    )
    parser.add_argument(
        "--iterations",
        type=whole_number,
        help="timed calls per repeat (8 ms of them; in kernels 5000; simulated 3)",
    )
    parser.add_argument(
        "--repeats", type=whole_number, help=f"number of repeats ({REPEATS}; simulated 1)"
    )
    parser.add_argument(
        "--backend",
        choices=("host", *ON_GPUS, "sim"),
        default="host",
        help="cuda, hip: one GPU of NVIDIA or AMD per rank; sim: simulated GPUs (host)",
    )
    parser.add_argument(
        "--in-kernel",
        action="store_true",
        help="measure calls inside a persistent kernel; needs --backend cuda, hip or sim",
    )
    parser.add_argument(
        "--no-pin", action="store_true", help="leave the ranks wherever the system puts them"
    )
    parser.add_argument(
        "-n", "--ranks", type=whole_number, metavar="N", help="number of simulated ranks (2)"
    )
    parser.add_argument("--seed", type=whole_number, metavar="S", help="seed of the simulation (0)")
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


def message_size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def whole_number(text: str) -> int:
    """Converts an argument to an integer.

    Raises:
        argparse.ArgumentTypeError: The text is no whole number.
    """
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, as in 2") from error


def _op(text: str) -> str:
    if text.lower() not in OPS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no operator: known are {', '.join(OPS)}{did_you_mean(text, OPS)}"
        )
    return text.lower()


def check_flags(args: argparse.Namespace, collective: Collective) -> None:
    """Raises ValueError if a flag was given that has no effect on this run.

    Must be called before fill_defaults(): afterwards a flag that was left out looks as if given.
    """
    name = collective.name
    of_sizes = {"-b": args.begin, "-e": args.end, "-f": args.factor}
    given = [flag for flag, value in of_sizes.items() if value is not None]
    if args.sizes and given:
        raise ValueError(f"--sizes names each size: leave out {', '.join(given)}")
    given += ["--sizes"] if args.sizes else []
    given += ["-d"] if args.dtype is not None else []
    if given and not collective.has_data:
        raise ValueError(f"{name} sends no data: leave out {', '.join(given)}")
    if args.op is not None and not collective.has_op:
        raise ValueError(f"{name} reduces nothing: leave out --op {args.op}")
    if args.root is not None and not collective.has_root:
        raise ValueError(f"{name} has no root: leave out --root {args.root}")
    if args.in_place is not None and not collective.has_data:
        form = "--in-place" if args.in_place else "--out-of-place"
        raise ValueError(f"{name} sends no data: leave out {form}")
    if args.in_place is not None and collective.is_composed:
        form = "--in-place" if args.in_place else "--out-of-place"
        raise ValueError(f"{name} has one form, between two arrays: leave out {form}")
    if args.no_pin and args.backend != "host":
        raise ValueError(f"--no-pin: ranks of backend {args.backend} are not pinned")


def fill_defaults(args: argparse.Namespace, collective: Collective) -> None:
    """Gives each argument that was left out its default for this backend and collective."""
    # On the simulator one repeat suffices: a call takes milliseconds, and its time means nothing.
    is_simulated = args.backend == "sim"
    usual = "bfloat16" if args.backend in ON_GPUS else "float32"
    args.dtype = args.dtype or collective.dtype or usual
    longest = 64 << 10 if args.in_kernel else 1 << 20
    args.end = (
        collective.end or (8 << 10 if is_simulated else longest) if args.end is None else args.end
    )
    args.begin = _BEGIN if args.begin is None else args.begin
    args.factor = _FACTOR if args.factor is None else args.factor
    args.op = args.op or "sum"
    args.root = args.root or 0
    args.in_place = args.in_place is not False
    args.repeats = (1 if is_simulated else REPEATS) if args.repeats is None else args.repeats
    if args.iterations is None and (is_simulated or args.in_kernel):
        args.iterations = 3 if is_simulated else _CALLS_IN_KERNEL


def problems_of(
    args: argparse.Namespace, collective: Collective, world_size: int
) -> tuple[list[Problem], str]:
    """Returns a Problem for each size that the arguments name, and a sentence about sizes that were
    rounded to whole elements; "" if none was.

    Raises:
        ValueError: The arguments contradict each other, or need more memory than there is.
    """
    for flag, count in (("--repeats", args.repeats), ("--iterations", args.iterations)):
        if count is not None and count < 1:
            raise ValueError(f"{flag} is {count}, must be at least 1")
    if not 0 <= args.root < world_size:
        raise ValueError(f"--root {args.root} is not a rank of {world_size}")
    if not args.in_place and not collective.has_out:
        raise ValueError(f"{collective.name} has no out-of-place form")
    collective.check_place(args.backend, in_kernel=args.in_kernel)
    _check_in_kernel(args, collective)
    _check_backend(args, world_size)
    in_place = args.in_place and not (args.in_kernel and collective.is_apart_in_kernels)
    sizes = args.sizes or sweep(args.begin, args.end, args.factor)
    how = {
        "dtype": args.dtype,
        "np_dtype": kccl.dtypes.to_numpy(args.dtype),
        "op": args.op,
        "root": args.root,
        "in_place": in_place,
        "world_size": world_size,
    }
    found = collective.problems(sizes, **how)
    if collective.has_data:
        longest = max(problem.nbytes for problem in found)
        libraries = 3 if args.baselines and args.backend == "host" else 1
        check_memory(longest, world_size, arrays=libraries * (1 if found[0].in_place else 2))
    rounded = []
    for size in sizes if collective.has_data else ():
        (problem,) = collective.problems([size], **how)
        if problem.nbytes != size:
            rounded.append(f"{size} becomes {problem.nbytes}")
    return found, _rounding(rounded, args.dtype, world_size if collective.has_chunks else 1)


def _rounding(rounded: Sequence[str], dtype: str, chunks: int) -> str:
    """Returns a sentence about sizes that were rounded to whole elements; "" if none was."""
    if not rounded:
        return ""
    of_each = f" in each of {chunks} chunks" if chunks > 1 else ""
    more = f", and {len(rounded) - 3} more" if len(rounded) > 3 else ""
    return f"sizes are whole {dtype} elements{of_each}: {', '.join(rounded[:3])}{more}"


def _check_backend(args: argparse.Namespace, world_size: int) -> None:
    if args.backend in ON_GPUS:
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
            raise ValueError(
                f"{collective.name} is called inside kernels only: add --in-kernel and --backend "
                "cuda, hip or sim"
            )
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
