"""Adds the measurements of a GPU probe to a machine. The caller runs the probe's kernels."""

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
"""Id of the Source of all figures that a probe measures on GPUs."""
_SHOWN_LINES = 64  # columns of the matrix of L2 that are kept in a record
_TPC = 2  # SMs of a TPC, which always run a cluster together; a GPC has several TPCs
# A link between two GPUs that is faster than this is not PCIe: 16 lanes of PCIe 5 carry 63 GB/s.
_PCIE_MOST_GBPS = 70
# Name of a compute unit -> the kind of a link that is faster than PCIe.
_BESIDE_PCIE = {"sm": "nvlink", "cu": "xgmi"}
_Cells = Sequence[Sequence[float | None]]
_Measured = TypeVar("_Measured", Reading, Matrix)


@dataclass(frozen=True, kw_only=True)
class GpuProbe:
    """What was measured on one GPU.

    Attributes:
        units: The hardware's number of each compute unit. All rows below have this order.
        dies: Number of the die of each unit; all 0 if the hardware does not tell it.
        unit_name: "sm" or "cu".
        unit_to_unit_us: `[i][j]`: latency of a word between units i and j, one way; None for i == j
            and what was not measured.
        line_ticks: `[i][k]`: ticks of a load of line k in L2 by unit i.
        line_stride_bytes: Bytes from the beginning of one measured line to that of the next.
        together: For each observed cluster, the numbers of the units that ran its blocks.
        figures: Further numbers, by key of QUANTITIES.
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
    """What was measured between GPUs. In both matrices `[i][j]` is from gpus[i] to gpus[j]: the
    microseconds of a word one way, and the gigabytes a second of writes.
    """

    gpus: tuple[str, ...]
    peer_us: _Cells
    peer_gbps: _Cells


def with_gpu_probe(machine: Machine, gpu: str, probe: GpuProbe) -> Machine:
    """Adds a GPU's partitions of L2, groups of units, latencies and bandwidths to a machine.

    The probe's parts replace the machine's parts of this GPU, except for memories. Memories and
    links of parts that are removed are attached to the GPU itself.

    Args:
        machine: The machine.
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
    """Adds latencies and bandwidths between GPUs to a machine: as matrices, readings and figures of
    links. Adds a link for two GPUs that have none.
    """
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
            # A route passes two links, one on each side of the switch. Each gets half the latency.
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
    """Returns the old readings or matrices that no new one replaces."""
    again = {(each.of, each.what) for each in new}
    return [each for each in old if (each.of, each.what) not in again]


def _split(probe: GpuProbe) -> Split | None:
    """Splits the units of a GPU of one die into halves by the latencies between units.

    Returns None if the GPU has several dies, or the latencies show no halves.
    """
    if len(set(probe.dies)) > 1:
        return None
    known = [us for row in probe.unit_to_unit_us for us in row if us is not None]
    if not known:
        return None
    # The cell of a unit and itself gets the mean of its row, which hardly affects the split.
    means = [fmean([us for us in row if us is not None] or known) for row in probe.unit_to_unit_us]
    return halves(
        [
            [mean if us is None else us for us in row]
            for mean, row in zip(means, probe.unit_to_unit_us, strict=True)
        ]
    )


def _split_by_lines(probe: GpuProbe) -> Split | None:
    """Groups the compute units by the lines of L2 whose loads take them the fewest ticks. Returns
    None if it finds no groups.

    A group has the units beside one half of L2 or, if the GPU has several dies, the units of the
    dies beside one I/O die.
    """
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
    """Returns (number, units) of each die or, with one die, of each group of units that ran
    clusters together. It leaves out a pair of SMs that ran no larger cluster: its group is unknown.
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
    """Returns the units' indices, sorted by half, then by side of the lines, then by group. Units
    of no known group come last.
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
    """Returns the devices within a GPU: partitions, groups or dies in them, and compute units.

    `near` is the latency of a word within a partition, or None.
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
    # Five digits: more are noise, and people read the records.
    return Figure(value=float(f"{value:.5g}"), source=SOURCE)


def _rounded(cells: _Cells, digits: int) -> tuple[tuple[float | None, ...], ...]:
    return tuple(
        tuple(None if value is None else round(value, digits or None) for value in row)
        for row in cells
    )
