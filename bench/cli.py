"""Implements `kccl bench <collective>`: measures one size after another, prints the rows of a size
as soon as it is measured, and writes the requested files, also if the run is interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Protocol

import kccl

from .arguments import ON_GPUS, add_arguments, check_flags, fill_defaults, problems_of
from .collectives import load
from .compare import main as compare
from .harness.collective import Collective
from .harness.document import document, machine, subtitle
from .harness.interrupts import Interrupts
from .harness.measure import COLUMNS, Contender, Row, measure
from .harness.outputs import silence, try_file, try_picture, try_stdout, write, write_csv
from .harness.problem import Problem
from .harness.progress import progress
from .harness.report import Screen, console, size_text
from .host.places import Places, placed
from .host.side import HostSide

if TYPE_CHECKING:
    from rich.console import Console

    from .gpu.side import GpuJob

__all__ = ["add_arguments", "compare", "main"]


class Side(Protocol):
    """The part of a run that depends on the backend: HostSide, GpuSide or InKernelSide."""

    machine: dict[str, Any]

    def contenders(self, problem: Problem) -> list[Contender]: ...

    def probe_again(self, problem: Problem) -> None: ...

    def fill(self, rows: Sequence[Row]) -> None: ...

    def notes(self) -> list[str]: ...

    def close(self) -> None: ...


@dataclass
class _Found:
    """The measurements so far.

    Attributes:
        machine: Facts about the machine for the document.
        of_sizes: The number of sizes to measure.
        sizes: The number of sizes that are complete.
        rows: The rows of the complete sizes.
        notes: A sentence for each peer without rows.
        ended: Why the run ended before all sizes were complete; None if it did not.
    """

    machine: dict[str, Any]
    of_sizes: int
    sizes: int = 0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: str | None = None


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
        job: GPU state that several benches share. None: one is opened for this run, if it needs it.
        command: Arguments of `kccl` that repeat the run, for the document; see document().
        tables: The file to which tables are printed. None: stdout, or stderr with --json.

    Returns:
        0; 1 if any result was wrong; 2 if the arguments are invalid, or a file cannot be written.
        All ranks return the same.

    Raises:
        KeyboardInterrupt, kccl.Error: The run ended early. The rows so far have been written.
    """
    if args.collective is None:
        return _refused(comm, "name a collective, as in kccl bench all_reduce; --help lists them")
    # A copy, because defaults are filled in below, and the caller's object must not change.
    args = argparse.Namespace(**vars(args))
    collective = load(args.collective)
    tables = tables or (sys.stderr if args.json else sys.stdout)
    out = console(tables)
    refusal: str | None = None
    try:
        check_flags(args, collective)
        fill_defaults(args, collective)
        problems, rounding = problems_of(args, collective, comm.world_size)
    except ValueError as error:
        refusal = str(error)
    # All ranks refuse if one does: a rank may have less memory than the others.
    refusal = next(filter(None, comm.gather_objects(refusal)), None)
    if refusal is not None:
        return _refused(comm, refusal)
    facts = machine(comm.world_size)
    with ExitStack() as ends:
        pins = args.backend == "host" and comm.world_size > 1 and not args.no_pin
        places = ends.enter_context(placed(comm, pins=pins))
        # All ranks end if rank 0 cannot write the files.
        if comm.rank == 0:
            refusal = _begin(out, args, collective, comm, [rounding, places.note])
        refusal = comm.gather_objects(refusal)[0]
        if refusal is not None:
            return _refused(comm, refusal)
        if job is None and _is_on_gpus(args):
            job = ends.enter_context(closing(_gpu_job(comm)))
        side = ends.enter_context(closing(_side(args, collective, problems, comm, job, places)))
        found = _Found(facts | side.machine, len(problems))
        screen = Screen(out, verbose=args.verbose, has_peers=args.baselines)
        interrupts = ends.enter_context(Interrupts())
        try:
            try:
                is_complete = _measure(
                    args, collective, problems, comm, side, screen, out, places, found
                )
            finally:
                interrupts.hold()
        except BaseException as error:
            _end_early(error, interrupts, out, args, screen, found, comm, command)
            raise
        if not is_complete:
            return 0  # rank 0 raises the OSError
        code = _finish(out, args, screen, found, comm, command) if comm.rank == 0 else 0
        return int(comm.gather_objects(code)[0])


def _refused(comm: kccl.Communicator, why: str) -> int:
    if comm.rank == 0:
        print(f"kccl bench: {why}", file=sys.stderr)
    return 2


def _begin(
    out: Console,
    args: argparse.Namespace,
    collective: Collective,
    comm: kccl.Communicator,
    notes: Sequence[str],
) -> str | None:
    """Checks that the requested files and stdout can be written, and prints the lines above the
    table. Returns a sentence that says why that failed, or None. Called on rank 0 only.
    """
    try:
        if args.csv is not None:
            try_file("--csv", args.csv)
        if args.plot is not None:
            try_picture("--plot", args.plot)
        if args.csv is not None and args.csv == args.plot:
            raise ValueError(f"--csv and --plot name the same file, {args.csv}")
        try_stdout()
        _print_head(out, args, collective, comm)
        _say_all(out, [f"# {note}" for note in notes if note])
    except ValueError as error:
        return str(error)
    except OSError as error:
        silence(sys.stdout)
        return f"stdout cannot be written: {error.strerror or error}"
    return None


def _measure(
    args: argparse.Namespace,
    collective: Collective,
    problems: Sequence[Problem],
    comm: kccl.Communicator,
    side: Side,
    screen: Screen,
    out: Console,
    places: Places,
    found: _Found,
) -> bool:
    """Measures all sizes, and adds the rows of each to `found`. Collective. Returns True.

    If rank 0 cannot print, it raises OSError, and the other ranks return False.
    """
    try:
        heads = places.lines(side.machine.get("gpus", ()))
        if not _prints(comm, lambda: _say_all(out, heads)):
            return False
        with progress(comm.rank == 0, len(problems), out) as show:
            for problem in problems:
                show(f"{collective.name}, {size_text(problem.nbytes)} bytes")
                rows = measure(
                    collective,
                    problem,
                    side.contenders(problem),
                    rank=comm.rank,
                    gather=comm.gather_objects,
                    repeats=args.repeats,
                    iterations=args.iterations,
                    core_of=places.core_of if args.backend == "host" else None,
                )
                side.probe_again(problem)
                side.fill(rows)
                found.rows += rows
                found.sizes += 1
                if not _prints(comm, partial(_keep, args, screen, rows, found)):
                    return False
    finally:
        if found.rows:
            # All rows get the same floor: the least latency of the whole run.
            side.fill(found.rows)
        found.notes = side.notes()
    return True


def _keep(args: argparse.Namespace, screen: Screen, rows: Sequence[Row], found: _Found) -> None:
    """Prints the rows of one size. Writes all rows so far to the CSV file, so that they are kept if
    this process is killed.
    """
    if args.csv:
        # Ignores failures, because the last write, in _finish(), reports them.
        write(args.csv, lambda path: write_csv(found.rows, COLUMNS, path), [])
    screen.add(rows)


def _prints(comm: kccl.Communicator, act: Callable[[], None]) -> bool:
    """Calls `act`, which prints, on rank 0. Collective.

    Returns:
        False on the other ranks if rank 0 could not print.

    Raises:
        OSError: Rank 0 could not print. Raised on rank 0 only.
    """
    failure = None
    if comm.rank == 0:
        try:
            act()
        except OSError as error:
            failure = error
    has_failed = comm.gather_objects(failure is not None)[0]
    if failure is not None:
        raise failure
    return not has_failed


def _end_early(
    error: BaseException,
    interrupts: Interrupts,
    out: Console,
    args: argparse.Namespace,
    screen: Screen,
    found: _Found,
    comm: kccl.Communicator,
    command: Sequence[str] | None,
) -> None:
    """Writes the rows so far on rank 0. Then raises KeyboardInterrupt or kccl.Error if that
    describes the cause better than `error`. If it returns, the caller raises `error` itself.
    """
    is_interrupt = interrupts.number is not None or isinstance(error, KeyboardInterrupt)
    found.ended = "interrupted" if is_interrupt else f"interrupted by {type(error).__name__}"
    found.ended += f" after {found.sizes} of {found.of_sizes} sizes"
    # kccl.PeerLost and kccl.Timeout are OSErrors, too, but do not mean that printing failed.
    is_of_output = isinstance(error, OSError) and not isinstance(error, kccl.Error)
    if is_of_output:
        silence(out.file)
    if comm.rank == 0:
        _finish(out, args, screen, found, comm, command)
    if is_interrupt:
        raise KeyboardInterrupt from None
    if isinstance(error, MemoryError):
        raise kccl.Error("there is not enough memory for these sizes") from None
    if is_of_output and not isinstance(error, BrokenPipeError):
        raise kccl.Error(f"the table cannot be written: {error}") from None


def _finish(
    out: Console,
    args: argparse.Namespace,
    screen: Screen,
    found: _Found,
    comm: kccl.Communicator,
    command: Sequence[str] | None,
) -> int:
    """Prints the end of the table and writes the files. Returns the exit code."""
    screen.end(found.rows)
    ended = [f"# {found.ended}"] if found.ended else []
    _say_all(out, [*(f"# {note}" for note in found.notes), *ended])
    made = document(found.rows, found.machine, command)
    if found.ended:
        made["interrupted"] = found.ended
    failures: list[str] = []
    if args.csv:
        write(args.csv, lambda path: write_csv(found.rows, COLUMNS, path), failures)
    if args.plot and found.rows:
        from .plot import plot

        title = subtitle(made) + (f", {found.ended}" if found.ended else "")
        write(args.plot, lambda path: plot(found.rows, path, subtitle=title), failures)
    elif args.plot:
        failures.append(f"{args.plot} is not written: there are no rows")
    if args.json:
        try:
            print(json.dumps(made), flush=True)
        except OSError as error:
            silence(sys.stdout)
            failures.append(f"stdout cannot be written: {error.strerror}")
    for failure in failures:
        print(f"kccl bench: {failure}", file=sys.stderr)
    return 2 if failures else int(any(row["wrong"] for row in found.rows))


def _say_all(out: Console, lines: Iterable[str]) -> None:
    for line in lines:
        kccl.screen.say(out, line)


def _side(
    args: argparse.Namespace,
    collective: Collective,
    problems: Sequence[Problem],
    comm: kccl.Communicator,
    job: GpuJob | None,
    places: Places,
) -> Side:
    if args.in_kernel:
        from .in_kernel.side import InKernelSide

        return InKernelSide(comm, collective, problems)
    if not _is_on_gpus(args):
        return HostSide(comm, collective, has_baselines=args.baselines, places=places)
    from .gpu.side import GpuSide

    assert job is not None, "main() has opened one"
    return GpuSide(job, collective, has_baselines=args.baselines)


def _is_on_gpus(args: argparse.Namespace) -> bool:
    """Returns whether calls on a GPU's stream are measured."""
    return args.backend in ON_GPUS and not args.in_kernel


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
    kccl.screen.say(
        out, f"# kccl bench {collective.name}: {ranks}, backend {comm.backend}{kind}{form}"
    )
    if args.backend == "sim":
        kccl.screen.say(
            out, "# times are those of the simulation on this CPU, not of any GPU or link"
        )
    if comm.world_size == 1:
        is_on_gpus = args.backend in ON_GPUS
        start = "kccl run -n 2 --" if is_on_gpus else "mpirun -n 2"
        again = f" --backend {args.backend}" if is_on_gpus else ""
        again += " --in-kernel" if args.in_kernel else ""
        kccl.screen.say(
            out,
            f"# 1 rank exchanges nothing. Start two: {start} kccl bench {args.collective}{again}",
        )
