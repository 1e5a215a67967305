"""Compare a new document with the recorded ones: `python -m kccl.bench.check new.json`.

`new.json` holds the output of a run with `--json`; lines that are not JSON are skipped. A row is
compared with the newest record of the same machine, library, collective, mode, call, completeness,
order, size, element type, operator, placement and world size, and in kernels of the same algorithm
and number of blocks; decoding with the newest record of the same model, position and world size.
The exit code is 1 for a regression or a wrong result, and 2 when nothing
could be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .harness.document import Document, load
from .harness.measure import Row

LATENCY_TOLERANCE = 0.15
"""A time may exceed the record's by this fraction."""

_MACHINE = ("cpu_model", "architecture", "cpus", "allowed_cpus", "gpus")
_ROW = (
    *("library", "collective", "mode", "call", "complete", "order"),
    *("bytes", "dtype", "op", "in_place", "world_size"),
)
# The planner chooses them, except in kernels, where the bench measures several side by side.
_CHOSEN_IN_KERNELS = ("algorithm", "blocks")
_DECODE = ("library", "model", "backend", "world_size", "dtype", "position")
Key = tuple[object, ...]


@dataclass(frozen=True)
class Finding:
    """A new row that is worse than its record. `recorded_us` is None when its result is wrong."""

    row: Row
    recorded_us: float | None
    recorded_commit: str

    def __str__(self) -> str:
        row = self.row
        if "collective" not in row:
            what = f"decode {row['model']}, position {row['position']}, {row['world_size']} ranks"
            if self.recorded_us is None:
                return f"{what}: wrong tokens"
            ratio = row["us_per_token"] / self.recorded_us
            record = f"{self.recorded_us:.0f} us of {self.recorded_commit}"
            return f"{what}: {row['us_per_token']:.0f} us, {ratio:.2f} times {record}"
        names = ("collective", "algorithm", "mode", "call", "complete", "order")
        call = " ".join(row[key] for key in names)
        what = f"{call}, {row['bytes']} B, {row['dtype']}"
        if self.recorded_us is None:
            return f"{what}: {row['wrong']} wrong elements"
        ratio = row["time_us"] / self.recorded_us
        record = f"{self.recorded_us:.3f} us of {self.recorded_commit}"
        return f"{what}: {row['time_us']:.3f} us, {ratio:.2f} times {record}"


def compare(new: Document, records: Iterable[Document]) -> tuple[list[Finding], int]:
    """Compare kccl's rows with the records.

    Args:
        new: The new document.
        records: Earlier documents, oldest first.

    Returns:
        The rows that are slower than their record or wrong, and the number of rows compared.
    """
    known: dict[Key, tuple[float, str]] = {}
    for record in records:
        for row in _ours(record):
            time_us = _time_us(row)
            if time_us is not None:
                known[_key(record, row)] = (time_us, record["commit"])
    findings, compared = [], 0
    for row in _ours(new):
        time_us = _time_us(row)
        if time_us is None:
            findings.append(Finding(row, None, ""))
            continue
        if _key(new, row) not in known:
            continue
        compared += 1
        recorded_us, commit = known[_key(new, row)]
        if time_us > recorded_us * (1 + LATENCY_TOLERANCE):
            findings.append(Finding(row, recorded_us, commit))
    return findings, compared


def main(argv: list[str] | None = None) -> int:
    """Print the rows that are slower or wrong. Returns the exit code that the module describes."""
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("document", type=Path, help="output of kccl bench … --json")
    parser.add_argument(
        "--records", type=Path, default=Path(__file__).parent / "records", help="folder of *.jsonl"
    )
    args = parser.parse_args(argv)
    documents = load(args.document)
    if not documents:
        print(f"{args.document} holds no JSON document: was it made with --json?", file=sys.stderr)
        return 2
    records = [record for path in sorted(args.records.glob("*.jsonl")) for record in load(path)]
    findings, compared = compare(documents[-1], records)
    for finding in findings:
        print(finding)
    print(f"{compared} rows compared, {len(findings)} worse (tolerance {LATENCY_TOLERANCE:.0%})")
    if findings:
        return 1
    if compared == 0:
        print(f"no record in {args.records} has this machine and these rows", file=sys.stderr)
        return 2
    return 0


def _ours(document: Document) -> list[Row]:
    # A kernel that left something out is no contender.
    return [
        row for row in document["rows"] if row["library"] == "kccl" and row.get("ablated") is None
    ]


def _time_us(row: Row) -> float | None:
    """The time that is compared; None for a wrong result."""
    if "collective" not in row:
        return row["us_per_token"] if row["tokens_match"] else None
    return None if row["wrong"] else row["time_us"]


def _key(document: Document, row: Row) -> Key:
    machine = document["machine"]
    # `gpus` is a list of names. Documents of machines without GPUs do not have it.
    facts = (str(machine.get(name)) for name in _MACHINE)
    if "collective" not in row:
        return (*facts, *(row[name] for name in _DECODE))
    chosen = _CHOSEN_IN_KERNELS if row["mode"] == "in_kernel" else ()
    return (*facts, *(row[name] for name in (*_ROW, *chosen)))


if __name__ == "__main__":
    sys.exit(main())
