"""Shows a machine: tables for a terminal (needs rich), and the heat map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from .distances import NOT_MEASURED, distances, latencies_ns, measured_cpus
from .model import Machine

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult

_UNKNOWN = "unknown"
_MAX_MATRIX_CPUS = 16  # a wider matrix does not fit a terminal
_NARROW = 60  # columns below which a window is narrow
_MAX_INSTANCES = 8  # this many caches are listed with their CPUs


def table(machine: Machine) -> Group:
    """Describe a machine in tables.

    Args:
        machine: The machine to show.

    Returns:
        An object for `rich.print`: overview, caches, NUMA nodes, and, if they are measured,
        latencies in nanoseconds.
    """
    from rich.console import Group

    parts: list[_Titled | _Matrix]
    parts = [_overview(machine), _caches(machine), _numa_nodes(machine)]
    cpus = measured_cpus(machine)
    if not cpus:
        return Group(*parts, NOT_MEASURED)
    parts.append(_distances(machine))
    if len(cpus) <= _MAX_MATRIX_CPUS:
        parts.append(_Matrix(machine))
    return Group(*parts)


@dataclass(frozen=True)
class _Titled:
    """A table with a title. In a narrow window a blank stands between its columns, no more.

    Attributes:
        title: Above it. The table's own title would wrap in a narrow table.
        columns: The headings.
        rows: The cells.
        right: Headings of numbers. These and the first column are not broken.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        is_narrow = options.max_width < _NARROW
        grid = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            show_header=any(self.columns),
            header_style="dim",
            padding=(0, 0 if is_narrow else 1),
        )
        for at, column in enumerate(self.columns):
            is_number = column in self.right
            grid.add_column(
                column.replace(" ", "\n") if is_narrow else column,
                justify="right" if is_number else "left",
                no_wrap=is_number or at == 0,
                overflow="fold",
            )
        for row in self.rows:
            grid.add_row(*(Text(cell) for cell in row))  # Text, since a name may have [markup]
        yield Text(self.title, "bold")
        yield grid
        yield ""


def _overview(machine: Machine) -> _Titled:
    online, allowed = machine.online_cpus, machine.allowed_cpus
    rows = (
        ("CPU model", _known(machine.cpu_model)),
        ("architecture", _known(machine.architecture)),
        ("kernel", _known(machine.kernel)),
        ("packages", _known(machine.num_packages)),
        ("cores", _known(machine.num_cores)),
        ("online CPUs", f"{len(online)} ({_ranges(online)})" if online else _UNKNOWN),
        ("allowed CPUs", f"{len(allowed)} ({_ranges(allowed)})" if allowed else _UNKNOWN),
        ("memory", _size(machine.memory_bytes)),
    )
    return _Titled("Machine", ("", ""), rows)


def _caches(machine: Machine) -> _Titled:
    alike: defaultdict[tuple[int, str | None, int | None, int | None], list[tuple[int, ...] | None]]
    alike = defaultdict(list)
    for cache in machine.caches:
        alike[cache.level, cache.type, cache.size_bytes, cache.line_bytes].append(cache.shared_cpus)
    rows = []
    for (level, kind, size_bytes, line_bytes), shares in alike.items():
        known = [_ranges(share) for share in shares if share is not None]
        shown = known[:_MAX_INSTANCES] + ["…"] * (len(known) > _MAX_INSTANCES)
        rows.append(
            (
                f"L{level} {kind or 'of unknown type'}",
                _size(size_bytes),
                _size(line_bytes),
                str(len(known)) if len(known) == len(shares) else _UNKNOWN,
                " | ".join(shown) or _UNKNOWN,
            )
        )
    numbers = ("size", "line", "count")
    columns = ("cache", *numbers, "shared by CPUs")
    return _Titled("Caches", columns, rows or [(_UNKNOWN,)], right=numbers)


def _numa_nodes(machine: Machine) -> _Titled:
    rows = []
    for node in machine.numa_nodes:
        pairs = zip(machine.numa_nodes, node.distances or (), strict=False)
        distance = ", ".join(f"{to.id}: {distance}" for to, distance in pairs)
        cpus = _ranges(node.cpus) or "none"
        rows.append((str(node.id), cpus, _size(node.memory_bytes), distance or _UNKNOWN))
    columns = ("node", "CPUs", "memory", "distance to node")
    return _Titled("NUMA nodes (distance 10 = local)", columns, rows or [(_UNKNOWN,)])


def _distances(machine: Machine) -> _Titled:
    rows = [
        (d.relation, str(d.num_pairs), f"{d.min_ns:.0f}", f"{d.median_ns:.0f}", f"{d.max_ns:.0f}")
        for d in distances(machine)
    ]
    numbers = ("ordered pairs", "min ns", "median ns", "max ns")
    return _Titled("Core-to-core latency, one way", ("CPUs", *numbers), rows, right=numbers)


@dataclass(frozen=True)
class _Matrix:
    """The latency of each pair of CPUs. What is too wide for the window continues below."""

    machine: Machine

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        cpus = measured_cpus(self.machine)
        latency_ns = latencies_ns(self.machine)

        def cell(a: int, b: int) -> str:
            ns = latency_ns.get((a, b))
            return "·" if a == b else "?" if ns is None else f"{ns:.0f}"

        rows = [["", *(str(cpu.id) for cpu in cpus)]]
        rows += [[str(a.id), *(cell(a.id, b.id) for b in cpus)] for a in cpus]
        # Why not a table: with its padding, 16 columns do not fit into 80 characters.
        width = 1 + max(len(cell) for row in rows for cell in row)
        at_once = max(1, options.max_width // width - 1)
        yield Text("One-way latency in ns, from CPU (row) to CPU (column)", "bold")
        for first in range(1, len(cpus) + 1, at_once):
            some = slice(first, first + at_once)
            lines = ["".join(cell.rjust(width) for cell in (row[0], *row[some])) for row in rows]
            yield Text(lines[0], "dim", no_wrap=True)
            yield Text("\n".join(lines[1:]), no_wrap=True)


def _known(value: str | int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return _UNKNOWN
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes} B"


def _ranges(ids: Iterable[int]) -> str:
    """Write ids as the kernel does: (0, 1, 2, 8) is "0-2,8"."""
    runs = [
        [cpu for _, cpu in run]
        for _, run in groupby(enumerate(sorted(ids)), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
