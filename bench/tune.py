"""Which algorithm is fastest at which size.

    mpirun -n 2 python -m kccl.bench.tune --out kccl/tuning/host.json

Every algorithm is forced by name, checked, then timed beside the others in alternating repeats. The
result is the planner's tuning data for this backend and world size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kccl

from .cli import _size
from .collective import NAMES, Collective, Comm, Problem, buffers, load, sweep
from .harness import REPEATS, Contender, Row, looped, measure
from .report import console, print_table

INDIFFERENCE = 0.05
"""A smaller size's algorithm stays while it is within this share of the best: noise must not make
it flip.
"""


def thresholds(
    collective: str, times_us: Mapping[int, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """The fastest algorithm per size, neighbours merged.

    Args:
        collective: name.
        times_us: bytes -> algorithm -> microseconds; an algorithm that cannot run at a size is
            absent there.

    Returns:
        Entries by ascending `up_to_bytes`, the largest measured size that the algorithm was chosen
        for. The last one is None: it holds for every larger size.
    """
    merged: list[dict[str, Any]] = []
    for nbytes in sorted(times_us):
        times = times_us[nbytes]
        best = min(times, key=lambda name: times[name])
        before = merged[-1]["algorithm"] if merged else best
        if before in times and times[before] <= times[best] * (1 + INDIFFERENCE):
            best = before
        if merged and merged[-1]["algorithm"] == best:
            merged[-1]["up_to_bytes"] = nbytes
        else:
            merged.append({"collective": collective, "up_to_bytes": nbytes, "algorithm": best})
    merged[-1]["up_to_bytes"] = None
    return merged


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
    return {
        "backend": backend,
        "tables": [{"world_size": n, "thresholds": tables[n]} for n in sorted(tables)],
    }


def tune(
    comm: Comm, collective: Collective, problems: Sequence[Problem], *, repeats: int
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows of every algorithm on every problem, and the thresholds they give. Collective.

    A collective with one algorithm has nothing to measure.

    Raises:
        kccl.Error: an algorithm's result was wrong, or none runs at a size.
    """
    names = comm.algorithms(collective.name)
    if len(names) == 1:
        entry = {"collective": collective.name, "up_to_bytes": None, "algorithm": names[0]}
        return [], [entry]
    rows: list[Row] = []
    times_us: dict[int, dict[str, float]] = {}
    for problem in problems:
        contenders = _contenders(comm, collective, problem)
        if not contenders:
            raise kccl.Error(f"no algorithm of {collective.name} runs at {problem.nbytes} bytes")
        found = measure(
            collective,
            problem,
            contenders,
            rank=comm.rank,
            gather=comm.gather_objects,
            repeats=repeats,
        )
        for row in found:
            if row["wrong"]:
                raise kccl.Error(
                    f"{row['algorithm']}: {row['wrong']} wrong elements at {row['bytes']} bytes"
                )
        times_us[problem.nbytes] = {row["algorithm"]: row["time_us"] for row in found}
        rows += found
    return rows, thresholds(collective.name, times_us)


def main(argv: list[str] | None = None) -> int:
    """Tune on all ranks; rank 0 writes."""
    parser = argparse.ArgumentParser(prog="python -m kccl.bench.tune", description=__doc__)
    parser.add_argument(
        "collectives", nargs="*", default=NAMES, metavar="COLLECTIVE", help=f"{', '.join(NAMES)}"
    )
    parser.add_argument("-b", "--begin", type=_size, default=8, metavar="SIZE")
    parser.add_argument("-e", "--end", type=_size, default=1 << 20, metavar="SIZE")
    parser.add_argument("-d", "--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="F",
        help="tuning file to update, or to begin; the JSON is the last line printed either way",
    )
    args = parser.parse_args(argv)
    unknown = set(args.collectives) - set(NAMES)
    if unknown:
        parser.error(f"no collective {', '.join(sorted(unknown))}; known are {', '.join(NAMES)}")
    comm: Any = kccl.init()
    out = console()
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
        rows, found = tune(comm, collective, problems, repeats=args.repeats)
        entries += found
        if comm.rank == 0 and rows:
            print_table(out, rows)
    if comm.rank == 0:
        known = args.out is not None and args.out.exists()
        before = json.loads(args.out.read_text("utf-8")) if known else None
        tuning = updated(before, comm.backend, comm.world_size, entries)
        if args.out:
            args.out.write_text(json.dumps(tuning, indent=2) + "\n", "utf-8")
        print(json.dumps(tuning))
    return 0


def _contenders(comm: Comm, collective: Collective, problem: Problem) -> list[Contender]:
    """One per algorithm, on the same arrays, looped in C: Python has no share in the choice."""
    mine = buffers(problem)
    found = []
    for name in comm.algorithms(collective.name):
        try:
            op = collective.prepare(comm, mine, problem, algorithm=name)
        except kccl.InvalidArgument as error:
            if comm.rank == 0:
                print(f"# {name} does not run at {problem.nbytes} bytes: {error}", file=sys.stderr)
            continue
        found.append(looped(op.plan.name, mine, op))
    return found


if __name__ == "__main__":
    sys.exit(main())
