"""Rows for people: a table, a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .measure import COLUMNS, Row

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
# What rows have in common that may be compared.
_ALIKE = ("bytes", "dtype", "op", "mode", "in_place", "complete", "order", "world_size")


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
        and all(other[key] == row[key] for key in _ALIKE)
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
    # Names of libraries and algorithms need its place.
    counts = ("count",) if _has_counts(rows) else ()
    for name in ("size\n(B)", *counts, "type", "redop"):
        table.add_column(name, justify="right", no_wrap=True)
    modes: tuple[str, ...] = ("mode",)
    if _are_in_kernels(rows):
        modes = ("complete", "order", "blocks")
    modes += ("ranks",) if _have_reaches(rows) else ()
    for name in ("library", "algorithm", *modes):
        table.add_column(name, no_wrap=True)
    figures = _figures(rows)
    for name in (*figures.values(), "#wrong", "best\npeer"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("speed-\nup", justify="right", no_wrap=True)
    for _, group in groupby(rows, key=lambda row: row["bytes"]):
        members = list(group)
        for index, row in enumerate(members):
            style = "bold red" if row["wrong"] else None
            last = index == len(members) - 1
            cells = _cells(members, row, (*counts, *modes, *figures), first=index == 0)
            table.add_row(*cells, style=style, end_section=last)
    out.print(table)


def legend(out: Console, rows: Sequence[Row]) -> None:
    """What the columns mean, in as few lines as carry it."""
    if _are_in_kernels(rows):
        out.print(_LEGEND_IN_KERNELS)
    elif _are_of_gpus(rows):
        out.print(_LEGEND_ON_GPUS)
    else:
        has_floors = any(row["floor_us"] is not None for row in rows)
        out.print(_LEGEND.format(floor=_FLOOR if has_floors else ""))
    wrong = sum(row["wrong"] for row in rows)
    verdict = "OK" if wrong == 0 else "FAILED"
    out.print(f"# wrong elements: {wrong} {verdict}", style="bold red" if wrong else None)


_LEGEND = """\
# time: median of the repeats of the slowest rank; p99: of single calls, slowest rank
{floor}# mode: host = prepared, looped in C; eager = prepared, op() from Python;
#       direct = not prepared, called from Python, as every MPI row
# speed-up: best MPI row / this row, both called from Python"""
_FLOOR = """\
# floor: one-way latency of a cache line + one copy of the message, measured in this run
"""
_LEGEND_ON_GPUS = """\
# time: median of the repeats of the slowest rank; p99: of single calls, slowest rank
# skewed: since the last rank arrived, a random one 0-5 us late each time; host: of op() in Python
# floor: one way of a word between two GPUs' memories, measured in this run; nothing for the bytes
# mode: graph = many calls in one CUDA graph; eager = op() from Python, back to back on a stream
# speed-up: best peer's row of the same mode / this row; no library uses NVLink multicast"""
_LEGEND_IN_KERNELS = """\
# a call inside a persistent kernel, by the GPU's clock; each call's input is the output before
# time: slowest block of the slowest rank, median of the launches; p99: of single calls
# skewed: since the last one arrived, a random rank (within a GPU: block) 0-5 us late each time
# floor: one way of a word, between GPUs (within a GPU: between blocks), measured in this run
# complete: slice = a block may use its own part of the result; message = all of it
# order: relaxed = only the call's own data is ordered; acq_rel = all that was written before"""


def _have_reaches(rows: Sequence[Row]) -> bool:
    """Whether rows of one GPU stand beside those of all, as an exchange's do."""
    return len({row["world_size"] for row in rows}) > 1


def _are_in_kernels(rows: Sequence[Row]) -> bool:
    return any(row["mode"] == "in_kernel" for row in rows)


def _has_counts(rows: Sequence[Row]) -> bool:
    return not _are_of_gpus(rows) and not _are_in_kernels(rows)


def _are_of_gpus(rows: Sequence[Row]) -> bool:
    return any(row["mode"] == "graph" or row["host_us"] is not None for row in rows)


def _figures(rows: Sequence[Row]) -> dict[str, str]:
    """Column of a row -> heading, for this table."""
    further = {"skewed_us": "skewed\n(us)"} if not _has_counts(rows) else {}
    if _are_of_gpus(rows):
        further["host_us"] = "host\n(us)"
    return {
        "time_us": "time\n(us)",
        "p99_us": "p99\n(us)",
        **further,
        "floor_us": "floor\n(us)",
        **({"algbw_gbps": "algbw\n(GB/s)"} if _has_counts(rows) else {}),
        # An exchange has none, and its ranks take the place.
        **({"busbw_gbps": "busbw\n(GB/s)"} if not _have_reaches(rows) else {}),
    }


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All fields of all rows, in the schema's order."""
    import pandas as pd

    pd.DataFrame(list(rows), columns=list(COLUMNS)).to_csv(path, index=False)


def _cells(group: Sequence[Row], row: Row, columns: Sequence[str], *, first: bool) -> list[str]:
    counts = [] if "count" not in columns else ["" if row["dtype"] is None else str(_count(row))]
    head = [size_text(row["bytes"]), *counts, row["dtype"] or "-", row["op"] or "-"]
    if not first:
        head = [""] * len(head)
    names = [row["library"], row["algorithm"].removeprefix(row["collective"] + "_")]
    if "mode" in columns:
        is_direct = "count" in columns and row["call"] == "direct"
        names.append("direct" if is_direct else row["mode"])
    else:
        names += [row["complete"], row["order"], str(row["blocks"])]
    if "ranks" in columns:
        names.append(str(row["world_size"]))
    peer = best_peer(group, row) if row["library"] == "kccl" else None
    time_us = row["time_us"]
    return [
        *head,
        *names,
        *(_number(row[column]) for column in columns if column.endswith(("_us", "_gbps"))),
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
