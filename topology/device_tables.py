"""Makes tables of a machine's GPUs, of the routes between them, and of recorded machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from .graph import Graph, Route
from .health import expected
from .model import Machine
from .parts import SOURCE_KINDS, Device, Figure, Link, figures
from .readings import QUANTITIES
from .tables import UNKNOWN, Titled, size

_PARTS = {
    "io_die": "I/O dies",
    "die": "compute dies",
    "gpc": "groups of SMs (GPCs)",
    "l2_partition": "L2 partitions",
    "compute_unit": "compute units",
    "memory": "memory stacks",
}
_MOST_GPUS = 72  # of a machine with more GPUs, only the routes from the first GPU are listed
_NO_WAY = "no known link"


def device_tables(machine: Machine, recorded: Mapping[str, Machine]) -> list[Titled]:
    """Returns the tables of a machine with GPUs; none if it has no GPU.

    They show the GPUs, the routes between them, and the sources of the figures. A probe's readings
    are shown beside the ranges of a recorded machine with the same GPUs.
    """
    graph = Graph(machine)
    if not graph.gpus:
        return []
    tables = [_gpus(graph), _parts(graph), _ways(graph)]
    if machine.accesses:
        tables.append(_accesses(machine))
    if machine.readings:
        tables.append(_readings(machine, expected(machine, recorded)))
    if graph.sources:
        rows = [(each.id, each.kind, each.text) for each in graph.sources.values()]
        tables.append(Titled("Where figures come from", ("source", "kind", "origin"), rows))
    return tables


def machines_table(machines: Mapping[str, Machine]) -> Titled:
    """Returns a table with a row for each machine: its GPUs, and the least and the largest latency
    between two of them.
    """
    rows = []
    for name, machine in machines.items():
        graph = Graph(machine)
        routes = [each for each in ways(graph) if each is not None]
        near, far = _ends(routes)
        rows.append(
            (
                name,
                machine.title or UNKNOWN,
                "recorded" if is_recorded(machine) else "described",
                str(len(graph.gpus)),
                near,
                far,
                _weakest(graph),
            )
        )
    columns = ("name", "machine", "basis", "GPUs", "nearest us", "farthest us", "weakest")
    numbers = ("GPUs", "nearest us", "farthest us")
    return Titled(
        "Machines, recorded (measured) or described (by documents)",
        columns,
        rows,
        numbers,
        only_wide=("basis", "nearest us", "farthest us"),
        only_widest=("weakest", "GPUs"),
        unbroken=("basis",),
        below="machine",
    )


def is_recorded(machine: Machine) -> bool:
    """Returns whether the latencies between the machine's GPUs, or its CPUs if it has no GPU, were
    measured on it.

    If not, its figures come from documents or from similar machines.
    """
    graph = Graph(machine)
    if not graph.gpus:
        return machine.core_to_core_us is not None
    told = {
        graph.sources[link.latency_us.source].kind
        for gpu in graph.gpus
        for _, link in graph.links_of(gpu.id)
        if link.latency_us is not None
    }
    return told == {"measured"}


def ways(graph: Graph) -> dict[Route | None, int]:
    """Returns the different routes between two GPUs, and the number of pairs that have each.

    Without GPUs it returns those between two CPUs. Routes have no names of stops, so that equal
    ones can be counted. If there are more than _MOST_GPUS, only pairs with the first one count.
    """
    ends: tuple[Device, ...] = graph.gpus or graph.of_kind("cpu")
    pairs: Iterable[tuple[Device, Device]] = combinations(ends, 2)
    if len(ends) > _MOST_GPUS:
        pairs = ((ends[0], other) for other in ends[1:])
    found: dict[Route | None, int] = {}
    for a, b in pairs:
        route = graph.route(a.id, b.id)
        alike = route and Route(
            stops=(),
            kinds=route.kinds,
            latency_us=route.latency_us,
            bandwidth_gbps=route.bandwidth_gbps,
            sources=route.sources,
        )
        found[alike] = found.get(alike, 0) + 1
    return found


def _gpus(graph: Graph) -> Titled:
    alike: dict[tuple[str, ...], int] = {}
    for gpu in graph.gpus:
        row = (
            gpu.name or UNKNOWN,
            size(gpu.memory_bytes.value if gpu.memory_bytes else None),
            figure(gpu.bandwidth_gbps, graph),
            figure(gpu.latency_us, graph),
        )
        alike[row] = alike.get(row, 0) + 1
    rows = [(str(count), *row) for row, count in alike.items()]
    numbers = ("GPUs", "memory", "GB/s", "within us")
    title = "GPUs (* by the datasheet, ~ estimated)"
    return Titled(title, ("GPUs", "model", "memory", "GB/s", "within us"), rows, right=numbers)


def _parts(graph: Graph) -> Titled:
    first = graph.gpus[0].id
    counts = {name: graph.count(first, kind) for kind, name in _PARTS.items()}
    rows = [(name, str(count)) for name, count in counts.items() if count]
    grouped = [each.id for each in graph.of_kind("gpc") if each.id.startswith(f"{first}/")]
    if grouped:
        within = sum(graph.count(each, "compute_unit") or 0 for each in grouped)
        if lone := (graph.count(first, "compute_unit") or 0) - within:
            rows.append(("compute units of an unknown GPC", str(lone)))
    return Titled("Parts of a GPU", ("part", "count"), rows or [(UNKNOWN,)], right=("count",))


def _ways(graph: Graph) -> Titled:
    rows = []
    for route, pairs in ways(graph).items():
        if route is None:
            rows.append((_NO_WAY, str(pairs), UNKNOWN, UNKNOWN, ""))
            continue
        marks = {graph.sources[source].kind for source in route.sources}
        rows.append(
            (
                way_name(graph, route),
                str(pairs),
                UNKNOWN if route.latency_us is None else f"{route.latency_us:.3g}",
                UNKNOWN if route.bandwidth_gbps is None else f"{route.bandwidth_gbps:.4g}",
                " ".join(sorted(marks)),
            )
        )
    columns = ("way", "pairs", "one way us", "GB/s", "figures are")
    return Titled(
        "Between two GPUs",
        columns,
        rows,
        right=("pairs", "one way us", "GB/s"),
        only_wide=("figures are",),
    )


def _accesses(machine: Machine) -> Titled:
    """Returns the table of what the driver says that GPUs may do in a peer's memory."""
    words = {True: "yes", False: "no", None: UNKNOWN}
    alike: dict[tuple[str, ...], int] = {}
    for pair in machine.accesses:
        row = tuple(words[can] for can in (pair.reads, pair.writes, pair.atomics))
        alike[row] = alike.get(row, 0) + 1
    rows = [(str(count), *row) for row, count in alike.items()]
    title = "Access to a peer's memory, by the driver"
    return Titled(title, ("pairs", "reads", "writes", "atomics"), rows, right=("pairs",))


def _readings(machine: Machine, alike: tuple[str, Machine] | None) -> Titled:
    """Returns the table of what a probe has measured: the least and the most over GPUs or pairs."""
    found: dict[str, list[float]] = {}
    for reading in machine.readings:
        found.setdefault(reading.what, []).append(reading.figure.value)
    ranges = {each.what: each for each in alike[1].ranges} if alike else {}
    rows = []
    # A record has its readings in any order, and some texts refer to the line before.
    for what in (each for each in QUANTITIES if each in found):
        values, quantity, wanted = found[what], QUANTITIES[what], ranges.get(what)
        least, most = (f"{value:.4g}" for value in (min(values), max(values)))
        between = f"{wanted.low:.4g} to {wanted.high:.4g}" if wanted else ""
        rows.append((quantity.text, least, "" if least == most else most, quantity.unit, between))
    return Titled(
        f"Measured on the GPUs{f' (expected: as on {alike[0]})' if alike else ''}",
        ("what", "least", "most", "unit", "expected"),
        rows,
        right=("least", "most"),
        unbroken=("unit", "expected"),
        only_wide=("expected",),
        wraps=True,
    )


def way_name(graph: Graph, route: Route) -> str:
    """Describes the links of a route, as "nvlink 4 x18, through a switch"."""
    kinds = dict.fromkeys(route.kinds)
    named = []
    for kind in kinds:
        links = [link for link in graph.links if link.kind == kind]
        versions = {link.version for link in links}
        counts = {link.count for link in links}
        version = versions.pop() if len(versions) == 1 else None
        count = counts.pop() if len(counts) == 1 else None
        named.append(f"{kind}{f' {version}' if version else ''}{f' x{count}' if count else ''}")
    through = ""
    if len(route.kinds) == 2:
        # PCIe links of two GPUs meet at the host's bridge.
        through = ", through the host" if "pcie" in kinds else ", through a switch"
    return " + ".join(named) + through


def figure(value: Figure | None, graph: Graph) -> str:
    """Returns a figure as text. A tilde marks an estimated one, a star a specified one."""
    if value is None:
        return UNKNOWN
    marks = {"estimated": "~", "specified": "*"}
    return f"{marks.get(graph.sources[value.source].kind, '')}{value.value:.4g}"


def _weakest(graph: Graph) -> str:
    """Returns the least trusted kind of source among the machine's figures."""
    parts: Iterable[Device | Link] = (*graph.devices.values(), *graph.links)
    kinds = {graph.sources[each.source].kind for part in parts for _, each in figures(part)}
    return next((kind for kind in reversed(SOURCE_KINDS) if kind in kinds), UNKNOWN)


def _ends(routes: list[Route]) -> tuple[str, str]:
    known = [route.latency_us for route in routes if route.latency_us is not None]
    return (f"{min(known):.3g}", f"{max(known):.3g}") if known else (UNKNOWN, UNKNOWN)
