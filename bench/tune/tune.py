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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

import kccl

from ..cli import message_size
from ..harness.collective import (
    Buffers,
    Collective,
    Comm,
    Problem,
    buffers,
    callable_outside_kernels,
    load,
    sweep,
)
from ..harness.measure import REPEATS, Contender, Row, looped, measure
from ..harness.report import console, print_table

# Bounds on the shape of a call on GPUs.
BLOCKS = (8, 32, 64, 128)
THREADS = (64, 128, 256, 512)
INDIFFERENCE = 0.05
"""The algorithm of the size before is kept while its time is within this fraction of the best, so
that noise does not change the choice.
"""


class Candidate(NamedTuple):
    """An algorithm, on GPUs with bounds on its shape.

    Attributes:
        algorithm: The algorithm's name.
        blocks, threads: The bounds, as in kccl's tuning tables; 0 on the host.
    """

    algorithm: str
    blocks: int = 0
    threads: int = 0


Candidates = list[tuple[Candidate, Contender]]
Times = Mapping[int, Mapping[Candidate, float]]
"""Bytes -> candidate -> microseconds; a candidate that cannot run at a size is absent there."""


def thresholds(
    collective: str, times_us: Times, floats_only: Set[str] = frozenset()
) -> list[dict[str, Any]]:
    """The fastest candidate per size, neighbours merged.

    Args:
        collective: Name of the collective.
        times_us: The measured times.
        floats_only: Algorithms that integers cannot use. After each entry of such an algorithm come
            entries of the fastest others for the same sizes.

    Returns:
        Entries by ascending `up_to_bytes`, the largest measured size for which the candidate was
        chosen. In the last entry it is None: the entry holds for every larger size.
    """
    everything = _merged(times_us)
    for_all = _merged(
        {
            nbytes: {each: us for each, us in times.items() if each.algorithm not in floats_only}
            for nbytes, times in times_us.items()
        }
    )
    entries: list[dict[str, Any]] = []
    above = -1.0
    for bound, best in everything:
        entries.append(_entry(collective, bound, best))
        if best.algorithm in floats_only:
            low = above
            for other_bound, other in for_all:
                if low < bound and other_bound > above:
                    low = min(other_bound, bound)
                    entries.append(_entry(collective, low, other))
        above = bound
    return entries


def _merged(times_us: Times) -> list[tuple[float, Candidate]]:
    """(Largest size, best candidate), by ascending size; the last size is infinite."""
    merged: list[tuple[float, Candidate]] = []
    for nbytes in sorted(times_us):
        times = times_us[nbytes]
        if not times:
            continue
        best = min(times, key=lambda each: times[each])
        before = merged[-1][1] if merged else best
        if before in times and times[before] <= times[best] * (1 + INDIFFERENCE):
            best = before
        if merged and before == best:
            merged.pop()
        merged.append((nbytes, best))
    return [*merged[:-1], *((math.inf, best) for _, best in merged[-1:])]


def _entry(collective: str, bound: float, best: Candidate) -> dict[str, Any]:
    up_to_bytes = None if math.isinf(bound) else int(bound)
    entry = {"collective": collective, "up_to_bytes": up_to_bytes, "algorithm": best.algorithm}
    return entry | ({"blocks": best.blocks, "threads": best.threads} if best.blocks else {})


def updated(
    tuning: dict[str, Any] | None, backend: str, world_size: int, entries: list[dict[str, Any]]
) -> dict[str, Any]:
    """A tuning document with these entries in place of the same collectives' at this world size.

    Args:
        tuning: the document so far, None for none.
        backend: of the entries.
        world_size: of the entries.
        entries: as `thresholds` returns them, of one or more collectives.
    """
    tables = {} if tuning is None else {t["world_size"]: t["thresholds"] for t in tuning["tables"]}
    new = {entry["collective"] for entry in entries}
    kept = [entry for entry in tables.get(world_size, []) if entry["collective"] not in new]
    tables[world_size] = [*entries, *kept]
    # On which machines the file's tables were measured, as a person wrote it.
    origin = {} if tuning is None or "origin" not in tuning else {"origin": tuning["origin"]}
    return {
        "backend": backend,
        **origin,
        "tables": [{"world_size": n, "thresholds": tables[n]} for n in sorted(tables)],
    }


class Tuner(Protocol):
    """What differs between backends: HostTuner or GpuTuner."""

    def candidates(self, collective: Collective, problem: Problem) -> Candidates:
        """Every candidate that runs this problem, with the contender that measures it. Collective.

        Candidates that lead to the same launch share one contender.
        """

    def only(self, collective: Collective) -> Candidate | None:
        """The only candidate if there is no choice, and nothing to measure; else None."""

    def floats_only(self, collective: Collective) -> Set[str]:
        """Algorithms of the collective that integers cannot use. Collective."""

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
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows of every candidate on every problem, and the thresholds they give. Collective.

    Args:
        comm, collective, problems, repeats, iterations: As in measure().
        tuner: Makes the contenders; None for a HostTuner.

    Raises:
        kccl.Error: An algorithm's result was wrong, or none runs at a size.
    """
    tuner = tuner or HostTuner(comm)
    only = tuner.only(collective)
    if only is not None:
        return [], [_entry(collective.name, math.inf, only)]
    rows: list[Row] = []
    times_us: dict[int, dict[Candidate, float]] = {}
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
        )
        for row in found:
            if row["wrong"]:
                raise kccl.Error(
                    f"{row['algorithm']}: {row['wrong']} wrong elements at {row['bytes']} bytes"
                )
        of_contender = {
            id(each): row["time_us"] for each, row in zip(contenders, found, strict=True)
        }
        times_us[problem.nbytes] = {each: of_contender[id(who)] for each, who in candidates}
        rows += found
    return rows, thresholds(collective.name, times_us, tuner.floats_only(collective))


def main(argv: list[str] | None = None) -> int:
    """Tune on all ranks; rank 0 writes."""
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = callable_outside_kernels()
    parser.add_argument(
        "collectives", nargs="*", default=names, metavar="COLLECTIVE", help=", ".join(names)
    )
    parser.add_argument(
        "-b", "--begin", type=message_size, default=8, metavar="SIZE", help="first size (8)"
    )
    parser.add_argument(
        "-e", "--end", type=message_size, default=1 << 20, metavar="SIZE", help="last size (1M)"
    )
    parser.add_argument("-d", "--dtype", help="element type (float32; on GPUs bfloat16)")
    parser.add_argument("--backend", choices=("host", "cuda", "hip"), default="host", help="(host)")
    for name, default in (("blocks", BLOCKS), ("threads", THREADS)):
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs="+",
            default=default,
            metavar="N",
            help="bounds to try on GPUs",
        )
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"repeats ({REPEATS})")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="F",
        help="tuning file to update or to create; the last line printed is its JSON either way",
    )
    args = parser.parse_args(argv)
    unknown = set(args.collectives) - set(names)
    if unknown:
        parser.error(f"no collective {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    comm: Any = kccl.init(backend=args.backend)
    if args.dtype is None:
        args.dtype = "float32" if args.backend == "host" else "bfloat16"
    out = console()
    tuner: Tuner = HostTuner(comm)
    if args.backend != "host":
        from .gpu import GpuTuner

        tuner = GpuTuner(comm, shapes=[(n, m) for n in args.blocks for m in args.threads])
    entries: list[dict[str, Any]] = []
    for name in args.collectives:
        collective = load(name)
        problems = collective.problems(
            sweep(args.begin, args.end, 2),
            dtype=args.dtype,
            np_dtype=kccl.dtypes.to_numpy(args.dtype),
            op="sum",
            root=0,
            in_place=True,
            world_size=comm.world_size,
        )
        rows, found = tune(comm, collective, problems, repeats=args.repeats, tuner=tuner)
        entries += found
        if comm.rank == 0 and rows:
            print_table(out, rows)
    tuner.close()
    if comm.rank == 0:
        known = args.out is not None and args.out.exists()
        before = json.loads(args.out.read_text("utf-8")) if known else None
        tuning = updated(before, comm.backend, comm.world_size, entries)
        if args.out:
            args.out.write_text(json.dumps(tuning, indent=2) + "\n", "utf-8")
        print(json.dumps(tuning))
    return 0


class HostTuner:
    """See Tuner. One candidate per algorithm, looped in C: Python's time is not measured."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._refusals = Refusals(comm.rank)

    def only(self, collective: Collective) -> Candidate | None:
        """See Tuner."""
        names = self._comm.algorithms(collective.name)
        return Candidate(names[0]) if len(names) == 1 else None

    def candidates(self, collective: Collective, problem: Problem) -> Candidates:
        """See Tuner. All use the same arrays."""
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


def floats_only(
    comm: Comm, collective: Collective, make_buffers: Callable[[Problem], Buffers]
) -> Set[str]:
    """Algorithms of the collective that integers cannot use. Collective.

    It prepares calls with integers and with floats, and compares which algorithms refuse.
    """
    kind = np.dtype(np.int32)
    (problem,) = collective.problems(
        [kind.itemsize * comm.world_size],
        dtype="int32",
        np_dtype=kind,
        op="sum",
        root=0,
        in_place=True,
        world_size=comm.world_size,
    )

    def able(problem: Problem) -> set[str]:
        mine, found = make_buffers(problem), set()
        for name in comm.algorithms(collective.name):
            try:
                collective.prepare(comm, mine, problem, algorithm=name)
            except kccl.InvalidArgument:
                continue
            found.add(name)
        return found

    is_float = replace(problem, dtype="float32", np_dtype=np.dtype(np.float32))
    return able(is_float) - able(problem)


class Refusals:
    """Prints, once for each reason, why an algorithm does not run."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._said: set[str] = set()

    @contextmanager
    def of(self, name: str, problem: Problem) -> Iterator[None]:
        """Catches kccl.InvalidArgument inside the context: the reason why `name` does not run."""
        try:
            yield
        except kccl.InvalidArgument as error:
            text = f"# {name} does not run at {problem.nbytes} bytes: {error}"
            if self._rank == 0 and str(error) not in self._said:
                print(text, file=sys.stderr)
            self._said.add(str(error))


if __name__ == "__main__":
    sys.exit(main())
