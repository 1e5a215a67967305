"""Rows for people: a table, a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .harness import COLUMNS, Row

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120


def console(file: IO[str] | None = None) -> Console:
    """A console of at least 120 columns, which the table needs, also into a pipe."""
    from rich.console import Console

    found = Console(file=file, highlight=False)
    return Console(file=file, highlight=False, markup=False, width=max(WIDTH, found.width))


def best_peer(rows: Iterable[Row], row: Row) -> float | None:
    """Microseconds of the fastest other library on the same problem, in the same mode; None without
    one.
    """
    times = [
        other["time_us"]
        for other in rows
        if other["library"] != "kccl"
        and other["time_us"] is not None
        and all(other[key] == row[key] for key in ("bytes", "dtype", "op", "mode", "in_place"))
    ]
    return min(times, default=None)


def size_text(nbytes: int) -> str:
    """Bytes with a K, M or G where it loses nothing."""
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


def print_table(out: Console, rows: Sequence[Row]) -> None:
    """nccl-tests' columns, grouped by size; a wrong result stands out in red."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("size\n(B)", "count", "type", "redop"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("library", "algorithm", "mode"):
        table.add_column(name, no_wrap=True)
    for name in (
        "time\n(us)",
        "p99\n(us)",
        "floor\n(us)",
        "algbw\n(GB/s)",
        "busbw\n(GB/s)",
        "#wrong",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best\nMPI", justify="right", no_wrap=True)
    table.add_column("speed-\nup", justify="right", no_wrap=True)
    for _, group in groupby(rows, key=lambda row: row["bytes"]):
        members = list(group)
        for index, row in enumerate(members):
            style = "bold red" if row["wrong"] else None
            last = index == len(members) - 1
            table.add_row(*_cells(members, row, first=index == 0), style=style, end_section=last)
    out.print(table)


def legend(out: Console, rows: Sequence[Row]) -> None:
    """What the columns mean, in as few lines as carry it."""
    floor = (
        "# floor: one-way latency of a cache line + one copy of the message, measured in this run\n"
    )
    has_floors = any(row["floor_us"] is not None for row in rows)
    out.print(
        "# time: median of the repeats of the slowest rank; p99: of single calls, slowest rank\n"
        f"{floor if has_floors else ''}"
        "# mode: host = prepared, looped in C; eager = prepared, op() from Python;\n"
        "#       direct = not prepared, called from Python, as every MPI row\n"
        "# speed-up: best MPI row / this row, both called from Python"
    )
    wrong = sum(row["wrong"] for row in rows)
    verdict = "OK" if wrong == 0 else "FAILED"
    out.print(f"# wrong elements: {wrong} {verdict}", style="bold red" if wrong else None)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All fields of all rows, in the schema's order."""
    import pandas as pd

    pd.DataFrame(list(rows), columns=list(COLUMNS)).to_csv(path, index=False)


def _cells(group: Sequence[Row], row: Row, *, first: bool) -> list[str]:
    count = "" if row["dtype"] is None else str(_count(row))
    head = (
        [size_text(row["bytes"]), count, row["dtype"] or "-", row["op"] or "-"]
        if first
        else [""] * 4
    )
    peer = best_peer(group, row) if row["library"] == "kccl" else None
    time_us = row["time_us"]
    return [
        *head,
        row["library"],
        row["algorithm"].removeprefix(row["collective"] + "_"),
        "direct" if (row["mode"], row["call"]) == ("eager", "direct") else row["mode"],
        _number(time_us),
        _number(row["p99_us"]),
        _number(row["floor_us"]),
        _number(row["algbw_gbps"]),
        _number(row["busbw_gbps"]),
        str(row["wrong"]),
        _number(peer),
        "" if peer is None or not time_us else f"{peer / time_us:.2f}x",
    ]


def _count(row: Row) -> int:
    import kccl

    return int(row["bytes"] // kccl.dtypes.to_numpy(row["dtype"]).itemsize)


def _number(value: float | None) -> str:
    """Three significant digits; nothing where nothing was measured."""
    if value is None:
        return ""
    return (
        f"{value:.0f}"
        if value >= 1000
        else f"{value:.{2 if value < 100 else 1}f}"
        if value >= 1
        else f"{value:.3f}"
    )
