"""Measures contenders on one problem: check, time in alternating repeats, check again, make rows.

The same code runs in a kccl job and in a separate Open MPI job (`mpi_job.py`). From a job it needs
only this rank's index and an out-of-band all-gather of small objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .clock import time_calls
from .collective import Array, Buffers, Call, Collective, Comm, Gather, Problem, buffers

Row = dict[str, Any]
Clock = Callable[[int, int], tuple[Array, Array]]
Further = Callable[[int], float]

COLUMNS = (
    *("library", "collective", "algorithm", "mode", "call", "complete", "order"),
    *("world_size", "blocks", "bytes", "dtype", "op", "in_place"),
    *("time_us", "p99_us", "skew_us", "skewed_us", "host_us", "floor_us"),
    *("algbw_gbps", "busbw_gbps", "wrong"),
)
"""Fields of a row, in order. `bench/README.md` says what each means."""

REPEATS = 7
_BUDGET_US = 8000.0
_FEWEST, _MOST = 30, 2000


@dataclass(frozen=True)
class Contender:
    """One way of making the call: a library, an algorithm and a mode.

    Attributes:
        clock: (iterations, warmup) -> microseconds a call for the median, microseconds a call for
            the 99th percentile.
        enter: run before this contender's calls; selects the algorithm if a library keeps it as
            global state.
        further: columns that are timed separately: name -> (iterations) -> microseconds per call of
            one repeat.
        complete: "message", or "slice" if a block may use only its own part of the result.
        order: as in Collective; None for the collective's own.
        blocks: number of blocks of a persistent kernel; None elsewhere.
        world_size: number of ranks that communicate; None for all of the problem's.
        wrong: returns the number of wrong elements that the contender itself has found since the
            last time. They are added to those of the collective's check.
    """

    library: str
    algorithm: str
    mode: str
    call: str
    buffers: Buffers
    run: Call
    clock: Clock
    enter: Callable[[], None] = lambda: None
    further: Mapping[str, Further] = field(default_factory=dict)
    complete: str = "message"
    order: str | None = None
    blocks: int | None = None
    world_size: int | None = None
    wrong: Callable[[], int] = lambda: 0


def eager(
    library: str,
    algorithm: str,
    call: str,
    buffers: Buffers,
    run: Call,
    enter: Callable[[], None] = lambda: None,
) -> Contender:
    """A contender called and timed from Python."""
    return Contender(
        library, algorithm, "eager", call, buffers, run, partial(time_calls, run), enter
    )


def looped(algorithm: str, buffers: Buffers, op: Any) -> Contender:
    """A prepared kccl operation looped and clocked in C (`op.time`)."""

    def clock(iterations: int, warmup: int) -> tuple[Array, Array]:
        times_us = np.asarray(op.time(iterations, warmup=warmup), np.float64)
        return times_us, times_us

    return Contender("kccl", algorithm, "host", "prepared", buffers, op, clock)


def kccl_contenders(comm: Comm, collective: Collective, problem: Problem) -> list[Contender]:
    """kccl on ordinary arrays: prepared and looped in C, prepared and direct from Python."""
    mine = buffers(problem)
    op = collective.prepare(comm, mine, problem)
    name = op.plan.name
    # Several calls, one behind the other, cannot be looped in C.
    in_c = [] if collective.is_composed else [looped(name, mine, op)]
    return [
        *in_c,
        eager("kccl", name, "prepared", mine, op),
        eager("kccl", name, "direct", mine, collective.direct(comm, mine, problem)),
    ]


def measure(
    collective: Collective,
    problem: Problem,
    contenders: Sequence[Contender],
    *,
    rank: int,
    gather: Gather,
    repeats: int = REPEATS,
    iterations: int | None = None,
) -> list[Row]:
    """Rows of all contenders on one problem, without floors, the same on every rank. Collective.

    Each contender is checked with fresh inputs before it is timed and again after. One that is
    wrong gets a row with `wrong` > 0 and no time. Repeats alternate over the contenders, in
    reversed order every second time, so that a noisy moment of the machine hits all of them.

    Args:
        collective: the table of functions.
        problem: size, dtype, operator.
        contenders: what is compared; the same list in the same order on every rank.
        rank: this rank.
        gather: all-gather of a small object.
        repeats: repeats of every contender.
        iterations: timed calls in a repeat; None for as many as take about 8 ms, from 30 to 2000.
    """

    def check(index: int, seed: int) -> int:
        contender = contenders[index]
        contender.enter()
        found = collective.check(
            problem,
            contender.buffers,
            contender.run,
            rank,
            gather,
            (problem.nbytes * 64 + index) * 2 + seed,
        )
        return found + contender.wrong()

    everyone = range(len(contenders))
    wrong = _sums(gather([check(i, 0) for i in everyone]))
    sound = [i for i in everyone if wrong[i] == 0]
    calls = (
        _iterations([contenders[i] for i in sound], gather)
        if iterations is None
        else [iterations] * len(sound)
    )

    medians: dict[int, list[float]] = {i: [] for i in sound}
    singles: dict[int, list[Array]] = {i: [] for i in sound}
    further: dict[int, dict[str, list[float]]] = {
        i: {column: [] for column in contenders[i].further} for i in sound
    }
    for repeat in range(repeats):
        order = list(zip(sound, calls, strict=True))
        for i, count in reversed(order) if repeat % 2 else order:
            median_us, single_us = _time(contenders[i], count)
            medians[i].append(median_us)
            singles[i].append(single_us)
            for column, clock in contenders[i].further.items():
                further[i][column].append(clock(count))

    late_wrong = {i: check(i, 1) for i in sound}
    p99 = {i: float(np.percentile(np.concatenate(singles[i]), 99)) for i in sound}
    ranks = gather([[medians[i], p99[i], late_wrong[i], further[i]] for i in sound])

    rows = []
    for i in everyone:
        row = _row(collective, problem, contenders[i], wrong[i])
        if i in medians:
            of_ranks = [results[sound.index(i)] for results in ranks]
            row["wrong"] = sum(late for _, _, late, _ in of_ranks)
            if row["wrong"] == 0:
                _fill_times(
                    row,
                    collective,
                    np.array([m for m, *_ in of_ranks]),
                    max(p for _, p, *_ in of_ranks),
                )
                for column in contenders[i].further:
                    of_repeats = np.array([each[column] for *_, each in of_ranks])
                    row[column] = float(np.median(of_repeats.max(axis=0)))
        rows.append(row)
    return rows


def add_floors(rows: Sequence[Row], one_way_us: float, copies_us: Mapping[int, float]) -> None:
    """Set `floor_us` of each row.

    Args:
        rows: of the run in which the floors were measured; changed.
        one_way_us: one-way latency of a cache line between two ranks; 0 for one rank.
        copies_us: bytes -> microseconds of one copy of a message of that size.
    """
    for row in rows:
        row["floor_us"] = one_way_us + copies_us[row["bytes"]]


def merge(rows: Sequence[Row], more: Sequence[Row]) -> list[Row]:
    """Rows of two jobs, by size; within a size the order of arrival."""
    return sorted([*rows, *more], key=lambda row: row["bytes"])


def _sums(ranks: list[list[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*ranks, strict=True)]


def _time(contender: Contender, iterations: int) -> tuple[float, Array]:
    """Median and single calls of one repeat.

    The timed calls work on zeros: repeated sums in place stay finite and are never denormal, for
    every library.
    """
    contender.buffers.zero()
    contender.enter()
    typical_us, single_us = contender.clock(iterations, max(5, iterations // 10))
    return float(np.median(typical_us)), single_us


def _iterations(contenders: Sequence[Contender], gather: Gather) -> list[int]:
    """Calls a repeat for each contender, agreed between the ranks from a short pilot run."""
    pilots = gather([_time(contender, 10)[0] for contender in contenders])
    slowest_us = [max(times) for times in zip(*pilots, strict=True)]
    return [int(np.clip(_BUDGET_US / max(us, 1e-3), _FEWEST, _MOST)) for us in slowest_us]


def _row(collective: Collective, problem: Problem, contender: Contender, wrong: int) -> Row:
    values: Row = {
        "library": contender.library,
        "collective": collective.name,
        "algorithm": contender.algorithm,
        "mode": contender.mode,
        "call": contender.call,
        "complete": contender.complete,
        "order": contender.order or collective.order,
        "world_size": contender.world_size or problem.world_size,
        "blocks": contender.blocks,
        "bytes": problem.nbytes,
        "dtype": problem.dtype,
        "op": problem.op,
        "in_place": problem.in_place,
        "wrong": wrong,
    }
    return {column: values.get(column) for column in COLUMNS}


def _fill_times(row: Row, collective: Collective, medians_us: Array, p99_us: float) -> None:
    """Times of one contender from its medians, shaped [rank, repeat]: the slowest rank of each
    repeat counts.
    """
    slowest_us = medians_us.max(axis=0)
    time_us = float(np.median(slowest_us))
    row["time_us"] = time_us
    row["p99_us"] = p99_us
    row["skew_us"] = float(np.median(slowest_us - medians_us.min(axis=0)))
    factor = collective.busbw_factor(row["world_size"])
    if factor is not None and row["bytes"] and time_us > 0:
        row["algbw_gbps"] = row["bytes"] / time_us / 1e3
        row["busbw_gbps"] = row["algbw_gbps"] * factor
