"""Finds the fastest algorithm for each size.

    mpirun -n 2 python -m kccl.bench.tune --out kccl/plan/tables/host.json
    kccl run -n 2 -- python -m kccl.bench.tune --backend cuda --out kccl/plan/tables/cuda.json

Each algorithm is forced by name, and on GPUs with several bounds on its blocks and threads. It is
checked, then timed in repeats that alternate with the other algorithms: in a loop in C, on GPUs in
CUDA graphs. The result is the planner's tuning data for this backend and world size.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import kccl

from ..arguments import message_size, whole_number
from ..collectives import callable_outside_kernels, load
from ..harness.collective import Collective, sweep
from ..harness.interrupts import Interrupts
from ..harness.measure import REPEATS, Row, looped, measure, spread
from ..harness.outputs import try_file
from ..harness.problem import Comm, Problem, buffers
from ..harness.report import Screen, console
from ..host.places import placed
from ..names import collective_name, dtype_name
from .candidates import Candidates, Refusals, floats_only
from .choice import Candidate, Timing, entry_of, read, thresholds, updated

# On GPUs: the bounds on a call's blocks, and on their threads, that are tried in all combinations.
BLOCKS = (8, 32, 64, 128)
THREADS = (64, 128, 256, 512)


class Tuner(Protocol):
    """What differs between backends: HostTuner or GpuTuner."""

    def candidates(self, collective: Collective, problem: Problem) -> Candidates:
        """Returns each candidate that can run this problem, with the contender that measures it.
        Collective.

        Candidates with the same launch share one contender.
        """

    def only(self, collective: Collective) -> Candidate | None:
        """Returns the candidate if there is only one, so nothing must be measured; else None."""

    def floats_only(self, collective: Collective) -> Set[str]:
        """Returns the algorithms of the collective that do not take integers. Collective."""

    def close(self) -> None:
        """Releases its resources. Collective."""


def tune(
    comm: Comm,
    collective: Collective,
    problems: Sequence[Problem],
    *,
    repeats: int,
    tuner: Tuner | None = None,
    iterations: int | None = None,
    core_of: Callable[[int], int] | None = None,
    show: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Returns the rows of every candidate on every problem, and the thresholds they give.
    Collective.

    Args:
        comm, collective, problems, repeats, iterations, core_of: As in measure().
        tuner: Makes the contenders; None for a HostTuner.
        show: Called with the rows of each size when they have been measured.

    Raises:
        kccl.Error: An algorithm's result was wrong, or none runs at a size.
    """
    tuner = tuner or HostTuner(comm)
    only = tuner.only(collective)
    if only is not None:
        return [], [entry_of(collective.name, math.inf, only)]
    rows: list[Row] = []
    times: dict[int, dict[Candidate, Timing]] = {}
    for problem in problems:
        candidates = tuner.candidates(collective, problem)
        if not candidates:
            raise kccl.Error(f"no algorithm of {collective.name} runs at {problem.nbytes} bytes")
        contenders = list({id(each): each for _, each in candidates}.values())
        found = measure(
            collective,
            problem,
            contenders,
            rank=comm.rank,
            gather=comm.gather_objects,
            repeats=repeats,
            iterations=iterations,
            core_of=core_of,
        )
        show(found)
        for row in found:
            if row["wrong"]:
                raise kccl.Error(
                    f"{row['algorithm']}: {row['wrong']} wrong elements at {row['bytes']} bytes"
                )
        of_contender = {
            id(each): Timing(row["time_us"], spread(row))
            for each, row in zip(contenders, found, strict=True)
        }
        times[problem.nbytes] = {each: of_contender[id(who)] for each, who in candidates}
        rows += found
    return rows, thresholds(collective.name, times, tuner.floats_only(collective))


def main(argv: list[str] | None = None) -> int:
    """Tunes on all ranks. Rank 0 prints the tables and writes the file. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = callable_outside_kernels()
    parser.add_argument(
        "collectives",
        nargs="*",
        type=collective_name,
        default=names,
        metavar="COLLECTIVE",
        help=", ".join(names),
    )
    parser.add_argument(
        "-b", "--begin", type=message_size, default=8, metavar="SIZE", help="first size (8)"
    )
    parser.add_argument(
        "-e", "--end", type=message_size, default=1 << 20, metavar="SIZE", help="last size (1M)"
    )
    parser.add_argument(
        "-d", "--dtype", type=dtype_name, help="element type (float32; on GPUs bfloat16)"
    )
    parser.add_argument("--backend", choices=("host", "cuda", "hip"), default="host", help="(host)")
    for name, default in (("blocks", BLOCKS), ("threads", THREADS)):
        parser.add_argument(
            f"--{name}",
            type=whole_number,
            nargs="+",
            default=default,
            metavar="N",
            help="bounds to try on GPUs",
        )
    parser.add_argument(
        "--repeats", type=whole_number, default=REPEATS, help=f"repeats ({REPEATS})"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="F",
        help="tuning file to update or to create; the last line printed is its JSON either way",
    )
    parser.add_argument(
        "--no-pin", action="store_true", help="leave the ranks wherever the system puts them"
    )
    args = parser.parse_args(argv)
    unknown = set(args.collectives) - set(names)
    for name in sorted(unknown):
        why = "it is called inside kernels only"
        if load(name).is_composed:
            why = "it has one algorithm"
        elif not load(name).is_planned:
            why = "another collective's plan chooses"
        parser.error(f"{name} is not tuned: {why}; tuned are {', '.join(names)}")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, must be at least 1")
    try:
        sizes = sweep(args.begin, args.end, 2)
        if args.out is not None:
            try_file("--out", args.out)
        before = read(args.out, args.backend)
    except ValueError as error:
        parser.error(str(error))
    try:
        return _run(args, sizes, before)
    except KeyboardInterrupt:
        return 130
    except kccl.Error as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, sizes: Sequence[int], before: dict[str, Any] | None) -> int:
    """Tunes. Rank 0 then writes the entries of all complete collectives, also after an error."""
    comm: Any = kccl.init(backend=args.backend)
    if args.dtype is None:
        args.dtype = "float32" if args.backend == "host" else "bfloat16"
    entries: list[dict[str, Any]] = []
    ended = ""
    with Interrupts() as interrupts:
        try:
            _tune_all(args, comm, sizes, entries)
        except BaseException as error:
            is_interrupt = interrupts.number is not None or isinstance(error, KeyboardInterrupt)
            ended = "interrupted" if is_interrupt else f"ended by {type(error).__name__}"
            raise
        finally:
            interrupts.hold()
            if comm.rank == 0:
                done = dict.fromkeys(each["collective"] for each in entries)
                if ended:
                    print(f"# {ended}; complete: {', '.join(done) or 'none'}", file=sys.stderr)
                tuning = updated(before, comm.backend, comm.world_size, entries)
                if args.out and entries:
                    args.out.write_text(json.dumps(tuning, indent=2) + "\n", "utf-8")
                print(json.dumps(tuning), flush=True)
    return 0


def _tune_all(
    args: argparse.Namespace, comm: Any, sizes: Sequence[int], entries: list[dict[str, Any]]
) -> None:
    """Tunes all collectives, and adds the entries of each to `entries`."""
    out = console()
    out.quiet = comm.rank != 0
    is_on_host = args.backend == "host"
    with ExitStack() as ends:
        pins = is_on_host and not args.no_pin
        places = ends.enter_context(placed(comm, pins=pins))
        for line in [*places.lines(), *([f"# {places.note}"] if places.note else [])]:
            kccl.screen.say(out, line)
        tuner: Tuner = HostTuner(comm)
        if not is_on_host:
            from .gpu import GpuTuner

            tuner = GpuTuner(comm, shapes=[(n, m) for n in args.blocks for m in args.threads])
        ends.callback(tuner.close)
        for name in args.collectives:
            collective = load(name)
            problems = collective.problems(
                sizes,
                dtype=args.dtype,
                np_dtype=kccl.dtypes.to_numpy(args.dtype),
                op="sum",
                root=0,
                in_place=True,
                world_size=comm.world_size,
            )
            screen = Screen(out, verbose=True, has_peers=False)
            rows, found = tune(
                comm,
                collective,
                problems,
                repeats=args.repeats,
                tuner=tuner,
                core_of=places.core_of if is_on_host else None,
                show=screen.add,
            )
            screen.end(rows)
            entries += found


class HostTuner:
    """See Tuner. There is one candidate for each algorithm. Calls are repeated in C, so that
    Python's time is not measured.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._refusals = Refusals(comm.rank)

    def only(self, collective: Collective) -> Candidate | None:
        """See Tuner."""
        names = self._comm.algorithms(collective.name)
        return Candidate(names[0]) if len(names) == 1 else None

    def candidates(self, collective: Collective, problem: Problem) -> Candidates:
        """See Tuner. All candidates use the same arrays."""
        mine = buffers(problem)
        found = []
        for name in self._comm.algorithms(collective.name):
            with self._refusals.of(name, problem):
                op = collective.prepare(self._comm, mine, problem, algorithm=name)
                found.append((Candidate(name), looped(op.plan.name, mine, op)))
        return found

    def floats_only(self, collective: Collective) -> Set[str]:
        """See Tuner."""
        return floats_only(self._comm, collective, buffers)

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


if __name__ == "__main__":
    sys.exit(main())
