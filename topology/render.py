"""Shows a machine: tables for a terminal (needs rich), and the heat map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from .device_tables import device_tables
from .distances import NOT_MEASURED, distances, latencies_ns, measured_cpus
from .model import Machine
from .tables import UNKNOWN, Titled, known, size

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult

_MAX_MATRIX_CPUS = 16  # a wider matrix does not fit a terminal
_MAX_INSTANCES = 8  # at most this many alike caches are listed with their CPUs


def table(machine: Machine, recorded: Mapping[str, Machine] | None = None) -> Group:
    """Describe a machine in tables.

    Args:
        machine: The machine to show.
        recorded: Recorded machines by name. The ranges of the one with the same GPUs are shown
            beside a probe's measurements.

    Returns:
        An object for `rich.print`: overview, caches and NUMA nodes of the host; GPUs and their
        links if there are GPUs; and the CPUs' latencies in nanoseconds if they are measured.
    """
    from rich.console import Group

    parts: list[Titled | _Matrix | str]
    parts = [_overview(machine)]
    if machine.cpus or not machine.devices:
        parts += [_caches(machine), _numa_nodes(machine)]
    parts += device_tables(machine, recorded or {})
    cpus = measured_cpus(machine)
    if not cpus:
        return Group(*parts, *([NOT_MEASURED] if machine.cpus or not machine.devices else []))
    parts.append(_distances(machine))
    if len(cpus) <= _MAX_MATRIX_CPUS:
        parts.append(_Matrix(machine))
    return Group(*parts)


def _overview(machine: Machine) -> Titled:
    online, allowed = machine.online_cpus, machine.allowed_cpus
    rows: tuple[tuple[str, str], ...] = (
        ("CPU model", known(machine.cpu_model)),
        ("architecture", known(machine.architecture)),
        ("kernel", known(machine.kernel)),
        ("packages", known(machine.num_packages)),
        ("cores", known(machine.num_cores)),
        ("online CPUs", f"{len(online)} ({_ranges(online)})" if online else UNKNOWN),
        ("allowed CPUs", f"{len(allowed)} ({_ranges(allowed)})" if allowed else UNKNOWN),
        ("memory", size(machine.memory_bytes)),
    )
    if machine.devices:
        rows = tuple(row for row in rows if row[1] != UNKNOWN)
    return Titled(machine.title or "Machine", ("", ""), rows)


def _caches(machine: Machine) -> Titled:
    alike: defaultdict[tuple[int, str | None, int | None, int | None], list[tuple[int, ...] | None]]
    alike = defaultdict(list)
    for cache in machine.caches:
        alike[cache.level, cache.type, cache.size_bytes, cache.line_bytes].append(cache.shared_cpus)
    rows = []
    for (level, kind, size_bytes, line_bytes), shares in alike.items():
        listed = [_ranges(share) for share in shares if share is not None]
        shown = listed[:_MAX_INSTANCES] + ["…"] * (len(listed) > _MAX_INSTANCES)
        rows.append(
            (
                f"L{level} {kind or 'of unknown type'}",
                size(size_bytes),
                size(line_bytes),
                str(len(listed)) if len(listed) == len(shares) else UNKNOWN,
                " | ".join(shown) or UNKNOWN,
            )
        )
    numbers = ("size", "line", "count")
    columns = ("cache", *numbers, "shared by CPUs")
    return Titled("Caches", columns, rows or [(UNKNOWN,)], right=numbers)


def _numa_nodes(machine: Machine) -> Titled:
    rows = []
    for node in machine.numa_nodes:
        pairs = zip(machine.numa_nodes, node.distances or (), strict=False)
        distance = ", ".join(f"{to.id}: {distance}" for to, distance in pairs)
        cpus = _ranges(node.cpus) or "none"
        rows.append((str(node.id), cpus, size(node.memory_bytes), distance or UNKNOWN))
    columns = ("node", "CPUs", "memory", "distance to node")
    return Titled("NUMA nodes (distance 10 = local)", columns, rows or [(UNKNOWN,)])


def _distances(machine: Machine) -> Titled:
    rows = [
        (d.relation, str(d.num_pairs), f"{d.min_ns:.0f}", f"{d.median_ns:.0f}", f"{d.max_ns:.0f}")
        for d in distances(machine)
    ]
    numbers = ("ordered pairs", "min ns", "median ns", "max ns")
    return Titled("Core-to-core latency, one way", ("CPUs", *numbers), rows, right=numbers)


@dataclass(frozen=True)
class _Matrix:
    """Shows the latency of each pair of CPUs. Columns that do not fit the window follow below."""

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
        # Lines of text and not a table: with a table's padding, 16 columns do not fit into 80
        # characters.
        width = 1 + max(len(cell) for row in rows for cell in row)
        at_once = max(1, options.max_width // width - 1)
        yield Text("One-way latency in ns, from CPU (row) to CPU (column)", "bold")
        for first in range(1, len(cpus) + 1, at_once):
            some = slice(first, first + at_once)
            lines = ["".join(cell.rjust(width) for cell in (row[0], *row[some])) for row in rows]
            yield Text(lines[0], "dim", no_wrap=True)
            yield Text("\n".join(lines[1:]), no_wrap=True)


def _ranges(ids: Iterable[int]) -> str:
    """Write ids as the kernel does: (0, 1, 2, 8) is "0-2,8"."""
    runs = [
        [cpu for _, cpu in run]
        for _, run in groupby(enumerate(sorted(ids)), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
