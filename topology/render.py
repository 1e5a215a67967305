"""Shows a machine: tables for a terminal (needs rich), and the heat map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from .distances import NOT_MEASURED, distances, latencies_ns, measured_cpus
from .heatmap import plot
from .model import Machine

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["plot", "table"]

_UNKNOWN = "unknown"
_MAX_MATRIX_CPUS = 16  # a wider matrix does not fit a terminal
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

    parts = [_overview(machine), _caches(machine), _numa_nodes(machine)]
    cpus = measured_cpus(machine)
    if not cpus:
        return Group(*parts, NOT_MEASURED)
    parts.append(_distances(machine))
    if len(cpus) <= _MAX_MATRIX_CPUS:
        parts.append(_matrix(machine))
    return Group(*parts)


def _titled(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> Group:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(columns), header_style="dim")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))  # Text, since a name may have rich's [markup]
    # Why not the table's own title: in a narrow table it wraps.
    return Group(Text(title, "bold"), grid, "")


def _overview(machine: Machine) -> Group:
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
    return _titled("Machine", ("", ""), rows)


def _caches(machine: Machine) -> Group:
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
    numbers = ("size", "line", "instances")
    columns = ("cache", *numbers, "shared by CPUs")
    return _titled("Caches", columns, rows or [(_UNKNOWN,)], right=numbers)


def _numa_nodes(machine: Machine) -> Group:
    rows = []
    for node in machine.numa_nodes:
        pairs = zip(machine.numa_nodes, node.distances or (), strict=False)
        distance = ", ".join(f"{to.id}: {distance}" for to, distance in pairs)
        cpus = _ranges(node.cpus) or "none"
        rows.append((str(node.id), cpus, _size(node.memory_bytes), distance or _UNKNOWN))
    columns = ("node", "CPUs", "memory", "distance to node")
    return _titled("NUMA nodes (distance 10 = local)", columns, rows or [(_UNKNOWN,)])


def _distances(machine: Machine) -> Group:
    rows = [
        (d.relation, str(d.num_pairs), f"{d.min_ns:.0f}", f"{d.median_ns:.0f}", f"{d.max_ns:.0f}")
        for d in distances(machine)
    ]
    numbers = ("ordered pairs", "min ns", "median ns", "max ns")
    return _titled("Core-to-core latency, one way", ("CPUs", *numbers), rows, right=numbers)


def _matrix(machine: Machine) -> Group:
    from rich.console import Group
    from rich.text import Text

    cpus = measured_cpus(machine)
    latency_ns = latencies_ns(machine)

    def cell(a: int, b: int) -> str:
        ns = latency_ns.get((a, b))
        return "·" if a == b else "?" if ns is None else f"{ns:.0f}"

    rows = [["", *(str(cpu.id) for cpu in cpus)]]
    rows += [[str(a.id), *(cell(a.id, b.id) for b in cpus)] for a in cpus]
    # Why not a table: with its padding, 16 columns do not fit into 80 characters.
    width = 1 + max(len(cell) for row in rows for cell in row)
    lines = ["".join(cell.rjust(width) for cell in row) for row in rows]
    title = Text("One-way latency in ns, from CPU (row) to CPU (column)", "bold")
    header = Text(lines[0], "dim", no_wrap=True)
    return Group(title, header, Text("\n".join(lines[1:]), no_wrap=True))


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
