"""Implements `kccl bench --compare A B`, which finds rows of B that are slower than those of A.

A file holds documents that `--json` printed, one a line; other lines are skipped. With one file, A
is the records of the same machine. A row of KCCL in B is compared with its partner, the newest row
of A that has the same call: collective or model, size or position, element type, operator, ranks
and so on.

A row is worse if it is slower by more than a tolerance. The tolerance is TOLERANCE plus the spreads
of both rows, which are the interquartile ranges of their repeats relative to the medians. If the
machine's own latency was higher around the row of B, the row may be slower by the same factor.
A slower row is only listed as doubtful, and not as worse, if a run marked its time or its partner's
(for example, because ranks shared a core), or if the floors of both differ by a factor of DRIFTED.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .harness.document import Document, load
from .harness.measure import BELOW_FLOOR, BUSY, DRIFT, DRIFTED, SHARED_CORE, Row, spread

TOLERANCE = 0.1
"""The fraction by which times of two runs may differ, even if the repeats within each run agree."""
UNKNOWN_SPREAD = 0.025
"""The assumed spread of a row that has none, as in older documents."""

OF_RECORDS = "the records of this machine"
RECORDS = Path(__file__).parent / "records"

_MACHINE = ("cpu_model", "architecture", "cpus", "allowed_cpus", "gpus")
_CALL = (
    *("library", "collective", "mode", "call", "complete", "order"),
    *("bytes", "dtype", "op", "in_place", "world_size"),
)
# Fields that identify a call only inside kernels, where the bench measures several algorithms and
# numbers of blocks. Elsewhere the planner chooses them.
_CHOSEN_IN_KERNELS = ("algorithm", "blocks")
_DECODE = ("library", "model", "backend", "world_size", "dtype", "position", "drafts")
# Field -> the value that it has in rows that were recorded before the field existed.
_BEFORE = {"drafts": "off"}
_EXAMPLES = 3
Key = tuple[object, ...]


@dataclass(frozen=True)
class Finding:
    """A row of B that is worse than its partner, or wrong.

    Attributes:
        row: The row.
        before: Its partner in A; None if the row is wrong.
        tolerance: The largest ratio of its time to its partner's that does not count as worse.
    """

    row: Row
    before: Row | None = None
    tolerance: float = 0.0

    def __str__(self) -> str:
        if self.before is None:
            wrong = self.row.get("wrong")
            return f"{_call(self.row)}: wrong " + ("tokens" if wrong is None else "elements")
        now_us, before_us = _time_us(self.row), _time_us(self.before)
        assert now_us and before_us
        return (
            f"{_call(self.row)}: {now_us:.3f} us, was {before_us:.3f}: {now_us / before_us:.2f} "
            f"times, tolerance {self.tolerance:.2f}"
        )


@dataclass
class Comparison:
    """The result of a comparison.

    Attributes:
        worse: Rows of B that are worse or wrong.
        better: The number of rows of B that are faster by more than the tolerance.
        compared: The number of rows of B with a partner.
        alone: Rows of B without a partner, and rows of A without one, as text.
        doubtful: Rows of B, as text, that are slower perhaps because of the machine: a run has
            marked its time, or the floor differed.
        without_time: The number of rows that have no time to compare, as those of a simulation.
    """

    worse: list[Finding] = field(default_factory=list)
    better: int = 0
    compared: int = 0
    alone: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    doubtful: list[str] = field(default_factory=list)
    without_time: int = 0


def compare(old: Iterable[Document], new: Iterable[Document]) -> Comparison:
    """Compares KCCL's rows of the new documents with those of the old ones.

    Of several rows with the same call, the last counts.
    """
    found = Comparison()
    before, _ = _by_call(old)
    now, found.without_time = _by_call(new)
    for key, row in now.items():
        if _is_wrong(row):
            found.worse.append(Finding(row))
        elif key not in before or _is_wrong(before[key]):
            found.alone[0].append(_call(row))
        else:
            _compare_times(found, before[key], row)
    found.alone[1].extend(_call(row) for key, row in before.items() if key not in now)
    return found


def _compare_times(found: Comparison, before: Row, row: Row) -> None:
    found.compared += 1
    now_us, before_us = _time_us(row), _time_us(before)
    assert now_us and before_us
    drift = _drift(before, row)
    is_doubtful = not 1 / DRIFTED < drift < DRIFTED or _is_marked(row) or _is_marked(before)
    tolerance = (1 + TOLERANCE + _spread(before) + _spread(row)) * max(drift, 1.0)
    if now_us > before_us * tolerance:
        if is_doubtful:
            found.doubtful.append(_call(row))
        else:
            found.worse.append(Finding(row, before, tolerance))
    elif before_us > now_us * tolerance and not is_doubtful:
        found.better += 1


def main(args: argparse.Namespace) -> int:
    """Prints what is worse.

    Args:
        args: The parsed arguments of `kccl bench`, with --compare.

    Returns:
        0; 1 if a row is worse or wrong; 2 if nothing could be compared.
    """
    others = _given(args)
    if others:
        return _refused(f"--compare measures nothing: leave out {', '.join(others)}")
    if len(args.compare) > 2:
        return _refused(f"--compare takes one or two files, not {len(args.compare)}")
    try:
        *first, last = [_read(path) for path in args.compare]
    except ValueError as error:
        return _refused(str(error))
    names = [str(path) for path in args.compare]
    if not first:
        if not RECORDS.is_dir():
            return _refused(
                "the records are in a checkout of kccl only: name two files, the older one first"
            )
        names.insert(0, OF_RECORDS)
        first = [_records_of(last)]
    return _report(names, first[0], last)


def _report(names: Sequence[str], old: Sequence[Document], new: Sequence[Document]) -> int:
    found = compare(old, new)
    machines = [{_machine(document) for document in documents} for documents in (old, new)]
    if old and machines[0] != machines[1]:
        print("# the machines differ: what is worse may be the machine")
    for finding in found.worse:
        print(f"worse: {finding}")
    then, now = names
    lonely = [(now, then, found.alone[0])]
    # Rows of the records without a partner are not listed: records hold all earlier measurements.
    lonely += [(then, now, found.alone[1])] if then != OF_RECORDS else []
    for name, other, calls in lonely:
        if calls:
            print(f"# {_some(calls)} of {name} without a partner in {other}")
    if found.doubtful:
        print(
            f"# {_some(found.doubtful)} slower, but maybe by the machine: its floor was another, "
            "or a run has marked the time (notes)"
        )
    if found.without_time:
        print(f"# {_rows(found.without_time)} of {now} without a time: not compared")
    print(
        f"{_rows(found.compared)} compared with {then}: {len(found.worse)} worse, "
        f"{found.better} better, by more than {TOLERANCE:.0%} and the spread of both runs"
    )
    if found.worse:
        return 1
    return 0 if found.compared else _refused("no rows could be compared")


def _refused(why: str) -> int:
    print(f"kccl bench: {why}", file=sys.stderr)
    return 2


def _given(args: argparse.Namespace) -> list[str]:
    """Returns the arguments beside --compare that were given on the command line."""
    names = {"begin", "end", "factor", "sizes", "dtype", "op", "root", "iterations", "repeats"}
    names |= {"ranks", "seed", "csv", "plot", "collective", "in_place"}
    flags = ("baselines", "in_kernel", "no_pin", "verbose", "json")
    found = [name for name in sorted(names) if getattr(args, name, None) is not None]
    found += [name for name in flags if getattr(args, name, False)]
    found += ["backend"] if getattr(args, "backend", "host") != "host" else []
    return [
        str(args.collective) if name == "collective" else f"--{name.replace('_', '-')}"
        for name in found
    ]


def _read(path: Path) -> list[Document]:
    """Returns the documents of a file.

    Raises:
        ValueError: The file cannot be read, or has no documents.
    """
    try:
        found = load(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} has a line that begins like JSON and is none: {error}") from error
    found = [each for each in found if isinstance(each.get("rows"), list)]
    if not found:
        raise ValueError(f"{path} holds no document: was it made with --json?")
    return found


def _records_of(documents: Sequence[Document]) -> list[Document]:
    """Returns the recorded documents of the same machines, oldest first."""
    machines = {_machine(document) for document in documents}
    records = [record for path in sorted(RECORDS.glob("*.jsonl")) for record in load(path)]
    return [record for record in records if _machine(record) in machines]


def _machine(document: Document) -> Key:
    machine = document.get("machine", {})
    # `gpus` is a list of names. Documents of machines without GPUs do not have it.
    return tuple(str(machine.get(name)) for name in _MACHINE)


def _by_call(documents: Iterable[Document]) -> tuple[dict[Key, Row], int]:
    """Returns KCCL's rows by their call, and the number of rows without a time."""
    found: dict[Key, Row] = {}
    without = 0
    for document in documents:
        for row in document["rows"]:
            # Skips rows of other libraries, and of kernels with a part left out (--ablate).
            if row.get("library") != "kccl" or row.get("ablated") is not None:
                continue
            names: tuple[str, ...]
            if "us_per_token" in row:
                names = _DECODE
            elif "mode" in row:
                names = _CALL + (_CHOSEN_IN_KERNELS if row["mode"] == "in_kernel" else ())
            else:
                without += 1
                continue
            found[tuple(_field(row, name) for name in names)] = row
    return found, without


def _field(row: Row, name: str) -> object:
    """Returns a field of a row, or its value of _BEFORE if the row is older than the field."""
    value = row.get(name)
    return _BEFORE.get(name) if value is None else value


def _time_us(row: Row) -> float | None:
    time_us: float | None = row.get("us_per_token", row.get("time_us"))
    return time_us


def _is_wrong(row: Row) -> bool:
    return _time_us(row) is None


def _is_marked(row: Row) -> bool:
    return bool({SHARED_CORE, BUSY, BELOW_FLOOR, DRIFT} & {*row.get("notes", ())})


def _spread(row: Row) -> float:
    if row.get("q1_us") is not None:
        return spread(row)
    return UNKNOWN_SPREAD


def _drift(before: Row, row: Row) -> float:
    """Returns the machine's own latency around the row, as a multiple of that around its partner;
    1.0 if one of the two rows does not have it.
    """
    floors_us = [
        [us for name in ("floor_before_us", "floor_after_us") if (us := each.get(name))]
        for each in (row, before)
    ]
    here, there = (sum(both) for both in floors_us)
    return here / there if len(floors_us[0]) == len(floors_us[1]) == 2 else 1.0


def _call(row: Row) -> str:
    """Returns a row's call as text."""
    if "us_per_token" in row:
        drafts = _field(row, "drafts")
        more = "" if drafts == "off" else f", drafts {drafts}"
        return f"decode {row['model']}, position {row['position']}, {row['world_size']} ranks{more}"
    names: list[Any] = [row[name] for name in ("collective", "dtype", "op", "mode", "call")]
    names += [row[name] for name in ("complete", "order") if row["mode"] == "in_kernel"]
    names += [row["algorithm"]] if row["mode"] == "in_kernel" else []
    words = " ".join(str(name) for name in names if name is not None)
    return f"{words}, {row['bytes']} B, {row['world_size']} ranks"


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def _some(calls: Sequence[str]) -> str:
    """Returns the number of rows, and the names of the first ones."""
    more = len(calls) - _EXAMPLES
    names = "; ".join(calls[:_EXAMPLES]) + (f"; and {more} more" if more > 0 else "")
    return f"{_rows(len(calls))} ({names})"
