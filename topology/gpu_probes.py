"""Adds what a probe of GPUs has measured to a machine. The caller has run the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, TypeVar

from .model import Machine
from .partitions import Split, alike, granule, halves, joined
from .parts import Device, Figure, Link, Source
from .readings import Matrix, Reading

SOURCE = "gpu_probe"
"""Id of the source of all that a probe measures on GPUs."""
_SHOWN_LINES = 64  # columns of the matrix of L2 that a record keeps
_TPC = 2  # SMs that always run a cluster together; a GPC has many such pairs
# Faster ways between two GPUs are no PCIe: 16 lanes of version 5 carry 63 GB/s.
_PCIE_MOST_GBPS = 70
_BESIDE_PCIE = {"sm": "nvlink", "cu": "xgmi"}
_Cells = Sequence[Sequence[float | None]]
_Measured = TypeVar("_Measured", Reading, Matrix)


@dataclass(frozen=True, kw_only=True)
class GpuProbe:
    """What was measured on one GPU.

    Attributes:
        units: The hardware's number of each compute unit, in the order of all rows.
        dies: Number of the die that each is on; all 0 where the hardware does not tell.
        unit_name: "sm" or "cu".
        unit_to_unit_us: `[i][j]` between units i and j, one way; None where not measured.
        line_ticks: `[i][k]` of a load of line k by unit i.
        line_stride_bytes: Distance of two lines.
        together: Numbers of units that ran blocks of one cluster, a set for each cluster.
        figures: Further numbers, by quantity.
    """

    units: tuple[int, ...]
    dies: tuple[int, ...]
    unit_name: str
    unit_to_unit_us: _Cells
    line_ticks: Sequence[Sequence[float]]
    line_stride_bytes: int
    together: tuple[tuple[int, ...], ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PairsProbe:
    """What was measured between GPUs: `[i][j]` from the i-th to the j-th of `gpus`."""

    gpus: tuple[str, ...]
    peer_us: _Cells
    peer_gbps: _Cells


def with_gpu_probe(machine: Machine, gpu: str, probe: GpuProbe) -> Machine:
    """Add a GPU's partitions of L2, groups of units, latencies and bandwidths to a machine.

    Args:
        machine: The machine; its parts of this GPU are replaced, but for memories. A memory
            whose part goes becomes one of the GPU, and a link of such a part one of the GPU.
        gpu: Id of the GPU.
        probe: What was measured on it.

    Raises:
        ValueError: The machine has no such GPU.
    """
    if not any(device.id == gpu for device in machine.devices):
        raise ValueError(f"the machine has no device {gpu!r}")
    split, lines = _split(probe), _split_by_lines(probe)
    known = [us for row in probe.unit_to_unit_us for us in row if us is not None]
    figures = {
        **({"unit_to_unit_us": fmean(known)} if known else {}),
        **({"same_half_us": split.near, "other_half_us": split.far} if split else {}),
        **({"near_ticks": lines.near, "far_ticks": lines.far} if lines else {}),
        **({"granule_bytes": granule(lines.columns) * probe.line_stride_bytes} if lines else {}),
        **probe.figures,
    }
    readings = tuple(
        Reading(of=gpu, what=what, figure=_figure(value)) for what, value in figures.items()
    )
    groups = _groups(probe)
    parts = lines if len(set(probe.dies)) > 1 else split
    order = _order(probe, split, lines, groups)
    units = tuple(probe.units[i] for i in order)
    shown = range(min(_SHOWN_LINES, len(probe.line_ticks[0])))
    between = [[probe.unit_to_unit_us[i][j] for j in order] for i in order]
    loads = [[probe.line_ticks[i][k] for k in shown] for i in order]
    matrices = (
        Matrix(
            of=gpu,
            what="unit_to_unit_us",
            rows=units,
            columns=units,
            values=_rounded(between, 3),
            source=SOURCE,
        ),
        Matrix(
            of=gpu,
            what="near_ticks",
            rows=units,
            columns=tuple(k * probe.line_stride_bytes for k in shown),
            values=_rounded(loads, 0),
            source=SOURCE,
        ),
    )
    near = _figure(split.near) if split else None
    devices: list[Device] = []
    for device in machine.devices:
        if device.id.startswith(f"{gpu}/") and device.kind != "memory":
            continue
        if device.id == gpu:
            told = {
                "latency_us": figures.get("unit_to_unit_us"),
                "bandwidth_gbps": figures.get("memory_gbps"),
            }
            new: dict[str, Any] = {name: _figure(value) for name, value in told.items() if value}
            devices += [replace(device, **new), *_parts(gpu, probe, parts, groups, near)]
        else:
            devices.append(device)
    ids = {device.id for device in devices}
    devices = [
        replace(device, parent=gpu)
        if device.id.startswith(f"{gpu}/") and device.parent not in ids
        else device
        for device in devices
    ]
    ends = [[end if end in ids else gpu for end in (link.a, link.b)] for link in machine.links]
    links = tuple(
        replace(link, a=a, b=b) for link, (a, b) in zip(machine.links, ends, strict=True) if a != b
    )
    return _with(machine, devices=tuple(devices), links=links, readings=readings, matrices=matrices)


def with_pairs_probe(machine: Machine, probe: PairsProbe) -> Machine:
    """Add latencies and bandwidths between GPUs: as matrices, as readings, and to the links."""
    readings, links = [], list(machine.links)
    for i, a in enumerate(probe.gpus):
        for j, b in enumerate(probe.gpus):
            for what, cells in (("peer_us", probe.peer_us), ("peer_gbps", probe.peer_gbps)):
                value = cells[i][j]
                if value is not None:
                    readings.append(Reading(of=f"{a} > {b}", what=what, figure=_figure(value)))
    both = {
        "latency_us": _mean_by_pair(probe.gpus, probe.peer_us),
        "bandwidth_gbps": _mean_by_pair(probe.gpus, probe.peer_gbps),
    }
    kinds = {device.id: device.kind for device in machine.devices}
    switched = {
        (link.a, link.b): link.a if kinds[link.a] == "gpu" else link.b
        for link in links
        if link.kind in ("nvlink", "xgmi") and {kinds[link.a], kinds[link.b]} == {"gpu", "switch"}
    }
    for at, link in enumerate(links):
        ends = frozenset((link.a, link.b))
        of_gpu = switched.get((link.a, link.b))
        for name, means in both.items():
            # Half of the way is on each side of the switch.
            mine = [us for pair, us in means.items() if of_gpu in pair]
            half = 2 if name == "latency_us" else 1
            value = means.get(ends) if of_gpu is None else fmean(mine) / half if mine else None
            if value:
                changed: dict[str, Any] = {name: _figure(value)}
                links[at] = replace(links[at], **changed)
    unit = next((each for each in _BESIDE_PCIE if any(d.endswith(f"/{each}") for d in kinds)), "sm")
    joined_ends = {frozenset((link.a, link.b)) for link in links}
    for pair, us in both["latency_us"].items():
        a, b = sorted(pair, key=probe.gpus.index)
        of_switch = set(switched.values())
        if pair in joined_ends or {a, b} <= of_switch:
            continue
        gbps = both["bandwidth_gbps"].get(pair)
        kind = _BESIDE_PCIE[unit] if gbps and gbps > _PCIE_MOST_GBPS else "pcie"
        width = _figure(gbps) if gbps else None
        links.append(Link(a=a, b=b, kind=kind, latency_us=_figure(us), bandwidth_gbps=width))
    matrices = tuple(
        Matrix(
            of="gpus",
            what=what,
            rows=probe.gpus,
            columns=probe.gpus,
            values=_rounded(cells, 4),
            source=SOURCE,
        )
        for what, cells in (("peer_us", probe.peer_us), ("peer_gbps", probe.peer_gbps))
    )
    return _with(machine, links=tuple(links), readings=tuple(readings), matrices=matrices)


def _with(
    machine: Machine,
    *,
    devices: tuple[Device, ...] | None = None,
    links: tuple[Link, ...] | None = None,
    readings: tuple[Reading, ...],
    matrices: tuple[Matrix, ...],
) -> Machine:
    told = "kernels on these GPUs, by `kccl topo --probe`"
    source = Source(id=SOURCE, kind="measured", text=told)
    sources = [each for each in machine.sources if each.id != SOURCE]
    return replace(
        machine,
        devices=machine.devices if devices is None else devices,
        links=machine.links if links is None else links,
        readings=(*_others(machine.readings, readings), *readings),
        matrices=(*_others(machine.matrices, matrices), *matrices),
        sources=(*sources, source),
    )


def _others(old: tuple[_Measured, ...], new: tuple[_Measured, ...]) -> list[_Measured]:
    """What was measured earlier and not again."""
    again = {(each.of, each.what) for each in new}
    return [each for each in old if (each.of, each.what) not in again]


def _split(probe: GpuProbe) -> Split | None:
    """The halves of the units of a GPU of one die, by what a word from each to each takes."""
    if len(set(probe.dies)) > 1:
        return None
    known = [us for row in probe.unit_to_unit_us for us in row if us is not None]
    if not known:
        return None
    # A unit and itself: the mean of its row, which says nothing.
    means = [fmean([us for us in row if us is not None] or known) for row in probe.unit_to_unit_us]
    return halves(
        [
            [mean if us is None else us for us in row]
            for mean, row in zip(means, probe.unit_to_unit_us, strict=True)
        ]
    )


def _split_by_lines(probe: GpuProbe) -> Split | None:
    """The groups of units by what is near to them: ends of L2, or dies beside one I/O die."""
    dies = sorted(set(probe.dies))
    if len(dies) < 2:
        return halves(probe.line_ticks)
    rows = []
    for die in dies:
        mine = [row for row, of in zip(probe.line_ticks, probe.dies, strict=True) if of == die]
        rows.append([fmean(column) for column in zip(*mine, strict=True)])
    found = alike(rows)
    if found is None:
        return None
    return replace(found, rows=tuple(found.rows[dies.index(die)] for die in probe.dies))


def _groups(probe: GpuProbe) -> list[tuple[int, tuple[int, ...]]]:
    """(number, units) of each die, or of each group of units that run clusters together. A pair
    that runs no larger cluster is in a group that is not known.
    """
    if len(set(probe.dies)) < 2:
        found = joined(probe.units, probe.together)
        return list(enumerate(group for group in found if len(group) > _TPC))
    by_die: dict[int, list[int]] = {}
    for unit, die in zip(probe.units, probe.dies, strict=True):
        by_die.setdefault(die, []).append(unit)
    return [(die, tuple(sorted(units))) for die, units in sorted(by_die.items())]


def _order(
    probe: GpuProbe,
    split: Split | None,
    lines: Split | None,
    groups: Sequence[tuple[int, tuple[int, ...]]],
) -> list[int]:
    """Indices of the units: those of one half, of one side of the lines and of one group beside
    each other, and those of no known group last.
    """
    group_of = {unit: number for number, units in groups for unit in units}
    none = (0,) * len(probe.units)
    half, side = (each.rows if each else none for each in (split, lines))
    return sorted(
        range(len(probe.units)),
        key=lambda i: (
            *(half[i], side[i]),
            *(group_of.get(probe.units[i], len(groups)), probe.units[i]),
        ),
    )


def _parts(
    gpu: str,
    probe: GpuProbe,
    split: Split | None,
    groups: Sequence[tuple[int, tuple[int, ...]]],
    near: Figure | None,
) -> list[Device]:
    """The devices within a GPU: partitions, groups or dies in them, and compute units.

    near: a word's latency within a partition, where it is known.
    """
    has_dies = len(set(probe.dies)) > 1
    kind, name = ("die", "xcd") if has_dies else ("gpc", "gpc")
    sides = dict(zip(probe.units, split.rows, strict=True)) if split else {}
    devices: list[Device] = []

    def add_units(parent: str, units: Sequence[int]) -> None:
        numbers = tuple(sorted(units))
        name = f"{parent}/{probe.unit_name}"
        count = len(numbers)
        devices.append(
            Device(id=name, kind="compute_unit", parent=parent, count=count, units=numbers)
        )

    def add_within(parent: str, units: Sequence[int]) -> None:
        inside = [(number, group) for number, group in groups if set(group) <= set(units)]
        left = set(units) - {unit for _, group in inside for unit in group}
        for number, group in inside:
            devices.append(Device(id=f"{parent}/{name}{number}", kind=kind, parent=parent))
            add_units(f"{parent}/{name}{number}", group)
        if left:
            add_units(parent, tuple(left))

    if not sides:
        add_within(gpu, probe.units)
        return devices
    kind_of_side, side_name = ("io_die", "iod") if has_dies else ("l2_partition", "l2_")
    for side in sorted(set(sides.values())):
        here = f"{gpu}/{side_name}{side}"
        devices.append(Device(id=here, kind=kind_of_side, parent=gpu, latency_us=near))
        add_within(here, [unit for unit, of in sides.items() if of == side])
    return devices


def _mean_by_pair(gpus: Sequence[str], cells: _Cells) -> dict[frozenset[str], float]:
    found = {}
    for i, a in enumerate(gpus):
        for j in range(i):
            known = [value for value in (cells[i][j], cells[j][i]) if value is not None]
            if known:
                found[frozenset((a, gpus[j]))] = fmean(known)
    return found


def _figure(value: float) -> Figure:
    # More digits are noise, and people read the records.
    return Figure(value=float(f"{value:.5g}"), source=SOURCE)


def _rounded(cells: _Cells, digits: int) -> tuple[tuple[float | None, ...], ...]:
    return tuple(
        tuple(None if value is None else round(value, digits or None) for value in row)
        for row in cells
    )
