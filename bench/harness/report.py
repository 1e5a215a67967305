"""Prints the tables of a run: a line for each size or row, when it has been measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

import kccl

from .lines import Column, Table
from .measure import (
    BELOW_FLOOR,
    BUSY,
    BUSY_SHARE,
    DRIFT,
    DRIFTED,
    SHARED_CORE,
    SPREAD,
    WIDE_SPREAD,
    Row,
)

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
"""The width in columns of a file that is no terminal, as a pipe to mpirun. COLUMNS overrides it."""

# Rows may be compared if they agree in these fields.
_ALIKE = ("bytes", "dtype", "op", "mode", "in_place", "complete", "order", "world_size")
# Note of a row -> (the letter at the end of its line, the meaning of the letter).
_MARKS = {
    SHARED_CORE: ("c", "two ranks were on one core: this is the scheduler's time"),
    BUSY: (
        "b",
        f"others had a rank's core for over {BUSY_SHARE:.0%} of the time in half the repeats",
    ),
    BELOW_FLOOR: ("f", "below its floor: calls overlapped, or ranks shared a core"),
    DRIFT: ("d", f"the floor changed by more than {DRIFTED - 1:.0%} while this was measured"),
    SPREAD: ("s", f"the middle half of the repeats spreads over more than {WIDE_SPREAD:.0%}"),
}


def console(file: IO[str] | None = None) -> Console:
    """Returns a console as wide as its terminal."""
    return kccl.screen.console(file, elsewhere=WIDTH)


def headline(rows: Iterable[Row]) -> list[Row]:
    """Returns KCCL's rows for a summary: its prepared calls in graphs; or, if there are none, all
    its calls inside kernels; or its prepared calls from Python.
    """
    ours = [row for row in rows if row["library"] == "kccl" and row["call"] != "direct"]
    modes = {row["mode"] for row in ours}
    mode = next((each for each in ("graph", "in_kernel") if each in modes), "eager")
    return [row for row in ours if row["mode"] == mode]


def best_peer_row(rows: Iterable[Row], row: Row) -> Row | None:
    """Returns the fastest other library's row on the same problem in the same mode, or None."""
    peers = [
        other
        for other in rows
        if other["library"] != "kccl"
        and other["time_us"] is not None
        and all(other[key] == row[key] for key in _ALIKE)
    ]
    return min(peers, key=lambda peer: float(peer["time_us"]), default=None)


def best_peer(rows: Iterable[Row], row: Row) -> float | None:
    """Returns the microseconds of best_peer_row(), or None."""
    peer = best_peer_row(rows, row)
    return None if peer is None else float(peer["time_us"])


def size_text(nbytes: int) -> str:
    """Returns a number of bytes as text, with K, M or G if that is exact."""
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


class Screen:
    """Prints the table of a run. The heading is printed with the first rows."""

    def __init__(self, out: Console, *, verbose: bool, has_peers: bool) -> None:
        """Args:
        out: The console to print to.
        verbose: Whether a line is printed for each row. If not, there is one for each size.
        has_peers: Whether other libraries are measured.
        """
        self._out = out
        self._is_verbose = verbose
        self._has_peers = has_peers
        self._table: Table | None = None
        self._said: list[str] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Prints the rows of one size. After a wrong row, all rows are printed from then on,
        because the user needs them to find the error.
        """
        self._has_peers |= any(row["library"] != "kccl" for row in rows)
        if any(row["wrong"] for row in rows) and not self._is_verbose:
            self._is_verbose, self._table = True, None
        if self._table is None:
            columns = _all_columns(rows) if self._is_verbose else _columns(rows, self._has_peers)
            self._table = Table(columns, self._out.width)
            self._print("", *self._table.heading())
        for note in (note for row in rows for note in row["notes"]):
            if note not in self._said:
                self._said.append(note)
        if self._is_verbose:
            floors = dict.fromkeys(number(row["floor_us"]) for row in rows)
            floor = f", floor {' / '.join(floors)}" if "" not in floors else ""
            self._print(f"{size_text(rows[0]['bytes'])} B{floor}")
        for row in rows if self._is_verbose else headline(rows):
            lines = self._table.lines(
                _all_cells(rows, row) if self._is_verbose else _cells(rows, row)
            )
            self._print(*lines, style="bold red" if row["wrong"] else None)

    def end(self, rows: Sequence[Row]) -> None:
        """Prints what the columns of all these rows mean, and the number of wrong elements."""
        if self._table is None:
            return
        self._print("")
        if self._is_verbose:
            legend(self._out, rows)
            if self._table.dropped:
                names = ", ".join(reversed(self._table.dropped))
                kccl.screen.say(
                    self._out, f"# also measured, in --json and on a wider screen: {names}"
                )
        else:
            _explain(self._out, rows, has_peers=self._has_peers)
        for note, (letter, meaning) in _MARKS.items():
            if note in self._said:
                kccl.screen.say(self._out, f"# {letter}: {meaning}")
        verdict(self._out, rows)

    def _print(self, *lines: str, style: str | None = None) -> None:
        for line in lines:
            self._out.print(line, style=style, soft_wrap=True)


def _columns(rows: Sequence[Row], has_peers: bool) -> list[Column]:
    """Returns the columns of a summary."""
    widths = {"algorithm": 13, "complete": 8, "order": 7, "ranks": 5}
    found = [Column("size", 7, is_label=True)]
    found += [Column(kind, widths[kind], is_label=True) for kind in _kinds(rows)]
    found.append(Column("KCCL (us)", 9))
    if has_peers:
        found += [Column(_peer_heading(rows), 9), Column("ratio", 6)]
        found.append(Column("best peer", 24, drop=2, is_text=True))
    if any(row["floor_us"] is not None for row in rows):
        found.append(Column("floor (us)", 10, drop=1))
    return [*found, Column("", 4, is_text=True)]


def _cells(rows: Sequence[Row], row: Row) -> dict[str, str]:
    peer = best_peer_row(rows, row)
    algorithm = row["algorithm"].removeprefix(f"{row['collective']}_")
    found = {"size": size_text(row["bytes"]), "algorithm": algorithm}
    found |= {"complete": row["complete"], "order": row["order"], "ranks": str(row["world_size"])}
    found |= {"KCCL (us)": number(row["time_us"]), "floor (us)": number(row["floor_us"])}
    if peer is not None:
        found |= {_peer_heading(rows): number(peer["time_us"]), "best peer": _name(peer)}
        found["ratio"] = _ratio(peer, row)
    return found | {"": _marks(row, peer)}


def _peer_heading(rows: Sequence[Row]) -> str:
    return "MPI (us)" if _side(rows) == "host" else "peer (us)"


def _all_columns(rows: Sequence[Row]) -> list[Column]:
    """Returns the columns of a table of all rows, in microseconds and GB/s."""
    side = _side(rows)
    found = [Column("library algorithm", 26, is_label=True)]
    if side == "kernels":
        found += [Column("complete", 8, is_label=True), Column("order", 7, is_label=True)]
    else:
        found.append(Column("mode", 6, is_label=True))
    if _have_reaches(rows):
        found.append(Column("ranks", 5, is_label=True))
    if side == "kernels":
        found.append(Column("blocks", 6, drop=6))
    found += [Column("time", 7), Column("p99", 7, drop=1)]
    if side != "host":
        found.append(Column("skewed", 7, drop=2))
    if side == "gpus":
        found.append(Column("host", 7, drop=2))
    for index, name in enumerate(("min", "avg", "max")):
        found.append(Column(name, 7, drop=3 + (index == 1)))
    if side == "host":
        found.append(Column("algbw", 7, drop=7))
    if any(row["dtype"] for row in rows) and not _have_reaches(rows):
        found.append(Column("busbw", 7, drop=5))
    found.append(Column("ratio", 6, drop=6))
    return [*found, Column("", 4, is_text=True)]


def _all_cells(rows: Sequence[Row], row: Row) -> dict[str, str]:
    found = {"library algorithm": _name(row), "complete": row["complete"], "order": row["order"]}
    is_direct = row["call"] == "direct" and row["mode"] == "eager" and row["host_us"] is None
    found |= {"mode": "direct" if is_direct else row["mode"], "ranks": str(row["world_size"])}
    if row["wrong"]:
        return found | {"time": f"{row['wrong']} wrong elements"}
    fields = {"time": "time_us", "p99": "p99_us", "skewed": "skewed_us", "host": "host_us"}
    fields |= {name: f"rank_{name}_us" for name in ("min", "avg", "max")}
    fields |= {"algbw": "algbw_gbps", "busbw": "busbw_gbps"}
    found |= {heading: number(row[field]) for heading, field in fields.items()}
    peer = best_peer_row(rows, row) if row["library"] == "kccl" else None
    blocks = "" if row["blocks"] is None else str(row["blocks"])
    return found | {"blocks": blocks, "ratio": _ratio(peer, row), "": _marks(row, None)}


def _explain(out: Console, rows: Sequence[Row], *, has_peers: bool) -> None:
    """Prints what a summary's columns mean."""
    calls, ratio = _SUMMARY[_side(rows)]
    kccl.screen.say(out, f"# KCCL: {calls}")
    if has_peers:
        kccl.screen.say(out, f"# ratio: {ratio}")
    if any(row["floor_us"] is not None for row in rows):
        kccl.screen.say(out, f"# floor: {_FLOOR[_side(rows)]}; least so far")
    kccl.screen.say(out, "# --verbose prints every library, algorithm and mode")


def legend(out: Console, rows: Sequence[Row]) -> None:
    """Prints what the columns of a table of all rows mean."""
    times, further = _LEGEND[_side(rows)]
    kccl.screen.say(out, times)
    kccl.screen.say(
        out,
        "# min, avg, max: of the ranks' medians; algbw, busbw: in GB/s, the rest in us",
    )
    if any(row["floor_us"] is not None for row in rows):
        kccl.screen.say(out, f"# floor: {_FLOOR[_side(rows)]}; least so far")
    kccl.screen.say(out, further)


def verdict(out: Console, rows: Sequence[Row]) -> None:
    """Prints the number of wrong elements over all rows."""
    wrong = sum(row["wrong"] for row in rows)
    verdict = "OK" if wrong == 0 else "FAILED"
    kccl.screen.say(
        out, f"# wrong elements: {wrong} {verdict}", style="bold red" if wrong else None
    )


# What _side() returns -> how a summary explains the column of KCCL's time, and that of the ratio.
_SUMMARY = {
    "host": (
        "op() from Python, prepared once; slowest rank, median of the repeats",
        "best MPI / KCCL, both called from Python",
    ),
    "gpus": (
        "op() in a CUDA graph, prepared once; slowest rank, median of the repeats",
        "best peer / KCCL, both in a CUDA graph; none uses NVLink multicast",
    ),
    "kernels": (
        "a call inside a persistent kernel; median of the launches, slowest block",
        "best peer / KCCL, both inside a kernel",
    ),
}
_FLOOR = {
    "host": "one-way latency of a cache line + a copy of the message",
    "gpus": "one-way latency of a word between the memories of two GPUs (no copy)",
    "kernels": "one-way latency of a word between GPUs (within a GPU: between blocks)",
}
# What _side() returns -> the legend of a table of all rows: the lines before the one about the
# floor, and the lines after it.
_LEGEND = {
    "host": (
        "# time: slowest rank, median of the repeats; p99: of single calls, slowest rank",
        """\
# mode: host = prepared, looped in C; eager = prepared, op() from Python;
#       direct = not prepared, called from Python, as every MPI row
# ratio: best MPI row / this row, both called from Python""",
    ),
    "gpus": (
        """\
# time: slowest rank, median of the repeats; p99: of single calls, slowest rank
# skewed: time since the last rank arrived, when a random rank is 0-5 us late
# host: time until op() returns to Python""",
        """\
# mode: graph = many calls in one CUDA graph; eager = op() from Python, on a stream
# ratio: best peer's row of this mode / this row; none uses NVLink multicast""",
    ),
    "kernels": (
        """\
# calls inside a persistent kernel, by the GPU's clock; each takes the output before
# time: slowest block and rank, median of the launches; p99: of single calls
# skewed: time since the last arrival, when a random rank or block is 0-5 us late""",
        """\
# complete: slice = a block may use its own part of the result; message = all
# order: relaxed = only the call's data is ordered; acq_rel = all written before""",
    ),
}


def _side(rows: Sequence[Row]) -> str:
    """Returns where the calls were made: "kernels", "gpus" or "host"."""
    if any(row["mode"] == "in_kernel" for row in rows):
        return "kernels"
    is_of_gpus = any(row["mode"] == "graph" or row["host_us"] is not None for row in rows)
    return "gpus" if is_of_gpus else "host"


def _kinds(rows: Sequence[Row]) -> tuple[str, ...]:
    """Returns the columns in which a summary's lines of one size differ."""
    kinds = ("algorithm", "complete", "order") if _side(rows) == "kernels" else ()
    return kinds + (("ranks",) if _have_reaches(rows) else ())


def _name(row: Row) -> str:
    """Returns library and algorithm, as "openmpi" or "mpich recursive_doubling"."""
    algorithm = row["algorithm"].removeprefix(f"{row['collective']}_")
    return f"{row['library']}" + ("" if algorithm == "default" else f" {algorithm}")


def _marks(row: Row, peer: Row | None) -> str:
    """Returns the letters of the notes of a row and of its peer's."""
    notes = {*row["notes"], *(peer["notes"] if peer else ())}
    return "".join(letter for note, (letter, _) in _MARKS.items() if note in notes)


def _ratio(peer: Row | None, row: Row) -> str:
    return "" if peer is None or not row["time_us"] else f"{peer['time_us'] / row['time_us']:.2f}x"


def _have_reaches(rows: Sequence[Row]) -> bool:
    """Tells whether some rows are within one GPU and others among all, as for an exchange."""
    return len({row["world_size"] for row in rows}) > 1


def number(value: float | None) -> str:
    """Returns a number with about three significant digits; "" for None."""
    if value is None:
        return ""
    return (
        f"{value:.0f}"
        if value >= 1000
        else f"{value:.{2 if value < 100 else 1}f}"
        if value >= 1
        else f"{value:.3f}"
    )
