"""Writes rows as tables on a terminal and as a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .measure import COLUMNS, Row

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
# Rows may be compared if they agree in these fields.
_ALIKE = ("bytes", "dtype", "op", "mode", "in_place", "complete", "order", "world_size")


def console(file: IO[str] | None = None) -> Console:
    """A console of at least 120 columns, because the table needs them, even into a pipe."""
    from rich.console import Console

    found = Console(file=file, highlight=False)
    return Console(file=file, highlight=False, markup=False, width=max(WIDTH, found.width))


def headline(rows: Iterable[Row]) -> list[Row]:
    """KCCL's rows of a summary. They are its prepared calls in graphs; if there are no graphs, its
    prepared calls from Python; inside kernels, all its calls.
    """
    ours = [row for row in rows if row["library"] == "kccl" and row["call"] != "direct"]
    modes = {row["mode"] for row in ours}
    mode = next((each for each in ("graph", "in_kernel") if each in modes), "eager")
    return [row for row in ours if row["mode"] == mode]


def best_peer_row(rows: Iterable[Row], row: Row) -> Row | None:
    """The fastest other library's row on the same problem, in the same mode; None without one."""
    peers = [
        other
        for other in rows
        if other["library"] != "kccl"
        and other["time_us"] is not None
        and all(other[key] == row[key] for key in _ALIKE)
    ]
    return min(peers, key=lambda peer: float(peer["time_us"]), default=None)


def best_peer(rows: Iterable[Row], row: Row) -> float | None:
    """Microseconds of best_peer_row()."""
    peer = best_peer_row(rows, row)
    return None if peer is None else float(peer["time_us"])


def size_text(nbytes: int) -> str:
    """Bytes as text, with K, M or G where that is exact."""
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


def print_summary(out: Console, rows: Sequence[Row]) -> None:
    """Print one line a size: KCCL, its best peer, their ratio, the floor. No row may be wrong."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    ours = headline(rows)
    peers = [best_peer_row(rows, row) for row in ours]
    has_floors = any(row["floor_us"] is not None for row in ours)
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("size (B)", justify="right")
    kinds = _kinds(rows)
    for kind in kinds:
        table.add_column("ranks" if kind == "world_size" else kind)
    table.add_column("KCCL (us)", justify="right")
    if any(peers):
        table.add_column("best MPI (us)" if _side(rows) == "host" else "best peer (us)")
        table.add_column("ratio", justify="right")
    if has_floors:
        table.add_column("floor (us)", justify="right")
    for row, peer in zip(ours, peers, strict=True):
        names = (str(row[kind]).removeprefix(f"{row['collective']}_") for kind in kinds)
        cells = [size_text(row["bytes"]), *names]
        cells.append(_number(row["time_us"]))
        if any(peers):
            cells += [_peer_text(peer), _ratio(peer, row)]
        if has_floors:
            cells.append(_number(row["floor_us"]))
        table.add_row(*cells)
    out.print(table)
    calls, ratio = _SUMMARY[_side(rows)]
    out.print(f"# KCCL: {calls}")
    if any(peers):
        out.print(f"# ratio: {ratio}")
    if has_floors:
        out.print(f"# floor: {_FLOOR[_side(rows)]}, measured in this run")
    out.print("# --verbose prints every library, algorithm and mode")


def print_table(out: Console, rows: Sequence[Row]) -> None:
    """Print all rows in nccl-tests' columns, grouped by size; wrong results are red."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    # On GPUs the names of libraries and algorithms need the width of this column.
    counts = ("count",) if _side(rows) == "host" else ()
    for name in ("size\n(B)", *counts, "type", "redop"):
        table.add_column(name, justify="right", no_wrap=True)
    modes: tuple[str, ...] = ("mode",)
    if _side(rows) == "kernels":
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
    """Print what the columns of print_table() mean."""
    times, further = _LEGEND[_side(rows)]
    out.print(times)
    if any(row["floor_us"] is not None for row in rows):
        out.print(f"# floor: {_FLOOR[_side(rows)]}, measured in this run")
    out.print(further)


def verdict(out: Console, rows: Sequence[Row]) -> None:
    """Print the number of wrong elements over all rows."""
    wrong = sum(row["wrong"] for row in rows)
    verdict = "OK" if wrong == 0 else "FAILED"
    out.print(f"# wrong elements: {wrong} {verdict}", style="bold red" if wrong else None)


# By _side(): what a summary says about KCCL's calls and about the ratio.
_SUMMARY = {
    "host": (
        "op(), prepared once, called from Python; median of the repeats of the slowest rank",
        "best MPI / KCCL, both called from Python",
    ),
    "gpus": (
        "op(), prepared once, in a CUDA graph; median of the repeats of the slowest rank",
        "best peer / KCCL, both in a CUDA graph; no library uses NVLink multicast",
    ),
    "kernels": (
        "a call inside a persistent kernel; median of the launches, slowest block",
        "best peer / KCCL, both inside a kernel",
    ),
}
_FLOOR = {
    "host": "one-way latency of a cache line + one copy of the message",
    "gpus": "one-way latency of a word between the memories of two GPUs (no copy)",
    "kernels": "one-way latency of a word between GPUs (within a GPU: between blocks)",
}
# By _side(): the lines of a full table's legend before that of the floor, and after it.
_LEGEND = {
    "host": (
        "# time: median of the repeats of the slowest rank; p99: of single calls, slowest rank",
        """\
# mode: host = prepared, looped in C; eager = prepared, op() from Python;
#       direct = not prepared, called from Python, as every MPI row
# speed-up: best MPI row / this row, both called from Python""",
    ),
    "gpus": (
        """\
# time: median of the repeats of the slowest rank; p99: of single calls, slowest rank
# skewed: time since the last rank arrived, when a random rank is 0-5 us late
# host: time until op() returns to Python""",
        """\
# mode: graph = many calls in one CUDA graph; eager = op() from Python, back to back on a stream
# speed-up: best peer's row of the same mode / this row; no library uses NVLink multicast""",
    ),
    "kernels": (
        """\
# calls inside a persistent kernel, timed by the GPU's clock; a call's input is the output before it
# time: slowest block of the slowest rank, median of the launches; p99: of single calls
# skewed: time since the last arrival, when a random rank (within a GPU: block) is 0-5 us late""",
        """\
# complete: slice = a block may use its own part of the result; message = all of it
# order: relaxed = only the call's own data is ordered; acq_rel = all that was written before""",
    ),
}


def _side(rows: Sequence[Row]) -> str:
    """Where the calls were made: "kernels", "gpus" or "host"."""
    if any(row["mode"] == "in_kernel" for row in rows):
        return "kernels"
    is_of_gpus = any(row["mode"] == "graph" or row["host_us"] is not None for row in rows)
    return "gpus" if is_of_gpus else "host"


def _kinds(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns in which a summary's lines of one size differ."""
    kinds = ("algorithm", "complete", "order") if _side(rows) == "kernels" else ()
    return kinds + (("world_size",) if _have_reaches(rows) else ())


def _peer_text(peer: Row | None) -> str:
    """Time and name, as in "0.958 openmpi" and "2.14 mpich recursive_doubling"."""
    if peer is None:
        return ""
    name = "" if peer["algorithm"] == "default" else f" {peer['algorithm']}"
    return f"{_number(peer['time_us']):>5} {peer['library']}{name}"


def _ratio(peer: Row | None, row: Row) -> str:
    return "" if peer is None or not row["time_us"] else f"{peer['time_us'] / row['time_us']:.2f}x"


def _have_reaches(rows: Sequence[Row]) -> bool:
    """Whether some rows are of one GPU and others of all, as for an exchange."""
    return len({row["world_size"] for row in rows}) > 1


def _figures(rows: Sequence[Row]) -> dict[str, str]:
    """Column of a row -> heading, for this table."""
    further = {"skewed_us": "skewed\n(us)"} if _side(rows) != "host" else {}
    if _side(rows) == "gpus":
        further["host_us"] = "host\n(us)"
    return {
        "time_us": "time\n(us)",
        "p99_us": "p99\n(us)",
        **further,
        "floor_us": "floor\n(us)",
        **({"algbw_gbps": "algbw\n(GB/s)"} if _side(rows) == "host" else {}),
        # An exchange has no busbw, and its column "ranks" needs the width.
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
    peer = best_peer_row(group, row) if row["library"] == "kccl" else None
    return [
        *head,
        *names,
        *(_number(row[column]) for column in columns if column.endswith(("_us", "_gbps"))),
        str(row["wrong"]),
        _number(None if peer is None else peer["time_us"]),
        _ratio(peer, row),
    ]


def _count(row: Row) -> int:
    import kccl

    return int(row["bytes"] // kccl.dtypes.to_numpy(row["dtype"]).itemsize)


def _number(value: float | None) -> str:
    """About three significant digits; empty for None."""
    if value is None:
        return ""
    return (
        f"{value:.0f}"
        if value >= 1000
        else f"{value:.{2 if value < 100 else 1}f}"
        if value >= 1
        else f"{value:.3f}"
    )
