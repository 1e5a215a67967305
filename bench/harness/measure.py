"""Measures contenders on one problem: checks, times in alternating repeats, checks again, and makes
rows. It needs only this rank's index and an out-of-band all-gather of small objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .clock import current_cpu, time_calls, waited_s
from .collective import Collective
from .problem import Array, Buffers, Call, Comm, Gather, Problem, buffers

Row = dict[str, Any]
Clock = Callable[[int, int], tuple[Array, Array]]
Further = Callable[[int], float]

COLUMNS = (
    *("library", "collective", "algorithm", "mode", "call", "complete", "order"),
    *("world_size", "blocks", "bytes", "dtype", "op", "in_place"),
    *("time_us", "p99_us", "skew_us", "rank_min_us", "rank_avg_us", "rank_max_us"),
    *("q1_us", "q3_us", "skewed_us", "host_us", "floor_us"),
    *("floor_before_us", "floor_after_us"),
    *("algbw_gbps", "busbw_gbps", "wrong", "notes"),
)
"""Fields of a row, in order. `bench/README.md` says what each means."""

REPEATS = 7
SHARED_CORE, BELOW_FLOOR, DRIFT = "shared_core", "below_floor", "drift"
BUSY, SPREAD = "busy", "spread"
"""The notes that a row may have. Each says why the row's time is doubtful."""
WIDE_SPREAD = 0.2
BUSY_SHARE = 0.05
DRIFTED = 1.5
_BUDGET_US = 8000.0
_FEWEST, _MOST = 30, 2000


class ContenderLost(Exception):
    """A contender cannot be measured any further: the job that makes its calls has ended."""


@dataclass(frozen=True)
class Contender:
    """One way of making the call: a library, an algorithm and a mode.

    Attributes:
        clock: (iterations, warmup) -> two arrays of microseconds per call: for the median, and for
            the 99th percentile.
        enter: run before this contender's calls; selects the algorithm if a library keeps it as
            global state.
        further: columns that are timed separately: name -> a function of the number of iterations
            that times one repeat, and returns microseconds per call.
        complete: "message", or "slice" if a block may use only its own part of the result.
        order: as in Collective; None for the collective's own.
        blocks: number of blocks of a persistent kernel; None elsewhere.
        world_size: number of ranks that communicate; None for all of the problem's.
        wrong: returns the number of wrong elements that the contender itself has found since the
            last time. They are added to those of the collective's check.
        check: (seed) -> the number of wrong elements that this rank found; None for the
            collective's own check.
        cpu: returns the logical CPU of the thread that makes the calls; None if it is not known.
        waited: returns the seconds for which that thread could have run, but others had its core.
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
    check: Callable[[int], int] | None = None
    cpu: Callable[[], int | None] = current_cpu
    waited: Callable[[], float] = waited_s


def eager(
    library: str,
    algorithm: str,
    call: str,
    buffers: Buffers,
    run: Call,
    enter: Callable[[], None] = lambda: None,
) -> Contender:
    """Returns a contender whose call is made and timed from Python."""
    return Contender(
        library, algorithm, "eager", call, buffers, run, partial(time_calls, run), enter
    )


def looped(algorithm: str, buffers: Buffers, op: Any) -> Contender:
    """Returns a contender whose prepared kccl operation is repeated and timed in C (`op.time`)."""

    def clock(iterations: int, warmup: int) -> tuple[Array, Array]:
        times_us = np.asarray(op.time(iterations, warmup=warmup), np.float64)
        return times_us, times_us

    return Contender("kccl", algorithm, "host", "prepared", buffers, op, clock)


def kccl_contenders(comm: Comm, collective: Collective, problem: Problem) -> list[Contender]:
    """Returns kccl's contenders on ordinary arrays: prepared and looped in C, prepared from Python,
    and direct from Python.
    """
    mine = buffers(problem)
    op = collective.prepare(comm, mine, problem)
    name = op.plan.name
    # A composed collective consists of several calls, which cannot be looped in C.
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
    core_of: Callable[[int], int] | None = None,
) -> list[Row]:
    """Returns the rows of all contenders on one problem, without floors, the same on every rank.
    Collective.

    Each contender is checked with fresh inputs before it is timed and again after. One that is
    wrong gets a row with `wrong` > 0 and no time. One that raises ContenderLost on any rank gets no
    row. Repeats alternate over the contenders, in reversed order every second time, so that a noisy
    moment of the machine hits all of them.

    Args:
        collective: the table of functions.
        problem: size, dtype, operator.
        contenders: what is compared; the same list in the same order on every rank.
        rank: this rank.
        gather: all-gather of a small object.
        repeats: repeats of every contender.
        iterations: timed calls in a repeat; None for as many as take about 8 ms, from 30 to 2000.
        core_of: logical CPU -> its core. A row is marked if ranks were on one core before or after
            a repeat, or others had a core for over BUSY_SHARE of the time in half of the repeats.
            None: no row is marked.
    """
    lost: set[int] = set()

    def attempt(index: int, act: Callable[[], Any]) -> Any:
        """Returns the result of `act`, or None if the contender is lost on this rank."""
        if index in lost:
            return None
        try:
            return act()
        except ContenderLost:
            lost.add(index)
            return None

    def check(index: int, seed: int) -> int:
        contender = contenders[index]
        contender.enter()
        number = (problem.nbytes * 64 + index) * 2 + seed
        if contender.check is not None:
            return contender.check(number)
        found = collective.check(problem, contender.buffers, contender.run, rank, gather, number)
        return found + contender.wrong()

    everyone = range(len(contenders))
    wrong = _sums(gather([attempt(i, partial(check, i, 0)) for i in everyone]))
    sound = [i for i in everyone if wrong[i] == 0]
    if iterations is None:
        pilots = [attempt(i, partial(_time, contenders[i], 10)) for i in sound]
        calls = _iterations(gather([None if each is None else each[0] for each in pilots]))
    else:
        calls = [iterations] * len(sound)

    medians: dict[int, list[float]] = {i: [] for i in sound}
    singles: dict[int, list[Array]] = {i: [] for i in sound}
    further: dict[int, dict[str, list[float]]] = {
        i: {column: [] for column in contenders[i].further} for i in sound
    }
    cpus: dict[int, list[list[int | None]]] = {i: [] for i in sound}
    taken: dict[int, list[float]] = {i: [] for i in sound}

    def repeat_one(index: int, count: int) -> None:
        contender = contenders[index]
        before, waited_before, began = contender.cpu(), contender.waited(), time.perf_counter()
        median_us, single_us = _time(contender, count)
        taken_s, lasted_s = contender.waited() - waited_before, time.perf_counter() - began
        cpus[index].append([before, contender.cpu()])
        taken[index].append(taken_s / lasted_s)
        medians[index].append(median_us)
        singles[index].append(single_us)
        for column, clock in contender.further.items():
            further[index][column].append(clock(count))

    for repeat in range(repeats):
        order = list(zip(sound, calls, strict=True))
        for i, count in reversed(order) if repeat % 2 else order:
            attempt(i, partial(repeat_one, i, count))

    late_wrong = {i: attempt(i, partial(check, i, 1)) for i in sound}
    ranks = gather(
        [
            None
            if late_wrong[i] is None
            else [medians[i], _p99(singles[i]), late_wrong[i], further[i], cpus[i], taken[i]]
            for i in sound
        ]
    )

    rows = []
    for i in everyone:
        of_ranks = [results[sound.index(i)] for results in ranks] if i in medians else []
        count_wrong = wrong[i]
        if count_wrong is None or None in of_ranks:
            continue
        row = _row(collective, problem, contenders[i], count_wrong)
        if of_ranks:
            row["wrong"] = sum(late for _, _, late, *_ in of_ranks)
        if of_ranks and row["wrong"] == 0:
            medians_us = np.array([found for found, *_ in of_ranks])
            _fill_times(row, collective, medians_us, max(p99 for _, p99, *_ in of_ranks))
            for column in contenders[i].further:
                of_repeats = np.array([more[column] for _, _, _, more, *_ in of_ranks])
                row[column] = float(np.median(of_repeats.max(axis=0)))
            if core_of is not None:
                *_, of_cpus, shares = zip(*of_ranks, strict=True)
                row["notes"] += [SHARED_CORE] if _share_a_core(of_cpus, core_of) else []
                # The median exceeds BUSY_SHARE if half of the repeats do.
                is_busy = np.median(np.max(shares, axis=0)) > BUSY_SHARE
                row["notes"] += [BUSY] if is_busy else []
        rows.append(row)
    return rows


def add_floors(
    rows: Sequence[Row],
    one_way_us: float,
    copies_us: Mapping[int, float],
    around_us: Mapping[int, tuple[float, float]] | None = None,
) -> None:
    """Sets the floors of each row, and its notes about them.

    Args:
        rows: the rows of the run in which the floors were measured. They are changed.
        one_way_us: one-way latency of a cache line between two ranks; 0 for one rank.
        copies_us: bytes -> microseconds of one copy of a message of that size.
        around_us: bytes -> the floor in microseconds (one way and copy), probed just before and
            just after that size was measured; None: not known.
    """
    of_floors = (BELOW_FLOOR, DRIFT)
    for row in rows:
        row["floor_us"] = one_way_us + copies_us[row["bytes"]]
        row["notes"] = [note for note in row["notes"] if note not in of_floors]
        both = (around_us or {}).get(row["bytes"])
        if both is not None:
            row["floor_before_us"], row["floor_after_us"] = both
            if max(both) > min(both) * DRIFTED:
                row["notes"].append(DRIFT)
        if row["time_us"] is not None and row["time_us"] < row["floor_us"]:
            row["notes"].append(BELOW_FLOOR)


def spread(row: Row) -> float:
    """Returns the interquartile range of the repeats' times as a fraction of their median; 0 for a
    row without it, as in old records.
    """
    if not row["time_us"] or row.get("q1_us") is None:
        return 0.0
    return float((row["q3_us"] - row["q1_us"]) / row["time_us"])


def _sums(ranks: list[list[int | None]]) -> list[int | None]:
    """Returns for each contender the sum of all ranks' counts; None if a rank has lost it.

    Args:
        ranks: [rank][contender]; None where that rank has lost the contender.
    """
    return [
        None if None in counts else sum(count for count in counts if count is not None)
        for counts in zip(*ranks, strict=True)
    ]


def _p99(singles: Sequence[Array]) -> float:
    return float(np.percentile(np.concatenate(singles), 99))


def _share_a_core(
    cpus: Sequence[Sequence[Sequence[int | None]]], core_of: Callable[[int], int]
) -> bool:
    """Tells whether two ranks were on one core. `cpus` is [rank][repeat][before or after]."""
    for of_ranks in zip(*cpus, strict=True):
        cores = [{core_of(cpu) for cpu in both if cpu is not None} for both in of_ranks]
        if sum(map(len, cores)) > len(set().union(*cores)):
            return True
    return False


def _time(contender: Contender, iterations: int) -> tuple[float, Array]:
    """Times one repeat. Returns the median microseconds, and those of single calls.

    The timed calls work on zeros. So repeated sums in place stay finite and are never denormal.
    """
    contender.buffers.zero()
    contender.enter()
    typical_us, single_us = contender.clock(iterations, max(5, iterations // 10))
    return float(np.median(typical_us)), single_us


def _iterations(pilots: Sequence[Sequence[float | None]]) -> list[int]:
    """Returns the calls in a repeat for each contender, from pilot times [rank][contender]."""
    found: list[int] = []
    for of_ranks in zip(*pilots, strict=True):
        slowest_us = max((us for us in of_ranks if us is not None), default=_BUDGET_US)
        found.append(int(np.clip(_BUDGET_US / max(slowest_us, 1e-3), _FEWEST, _MOST)))
    return found


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
        "notes": [],
    }
    return {column: values.get(column) for column in COLUMNS}


def _fill_times(row: Row, collective: Collective, medians_us: Array, p99_us: float) -> None:
    """Sets the time fields of a row. `medians_us` is [rank, repeat], and the slowest rank of each
    repeat counts.
    """
    slowest_us = medians_us.max(axis=0)
    time_us = float(np.median(slowest_us))
    row["time_us"] = time_us
    row["p99_us"] = p99_us
    row["skew_us"] = float(np.median(slowest_us - medians_us.min(axis=0)))
    of_ranks = np.median(medians_us, axis=1)
    row["rank_min_us"], row["rank_max_us"] = float(of_ranks.min()), float(of_ranks.max())
    row["rank_avg_us"] = float(of_ranks.mean())
    row["q1_us"], row["q3_us"] = map(float, np.percentile(slowest_us, (25, 75)))
    if spread(row) > WIDE_SPREAD:
        row["notes"].append(SPREAD)
    factor = collective.busbw_factor(row["world_size"])
    if factor is not None and row["bytes"] and time_us > 0:
        row["algbw_gbps"] = row["bytes"] / time_us / 1e3
        row["busbw_gbps"] = row["algbw_gbps"] * factor
