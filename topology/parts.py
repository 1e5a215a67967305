"""Defines the parts of a machine's graph: devices, links between them, and sources of figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

# The kind that is trusted most comes first.
SOURCE_KINDS = ("measured", "reported", "published", "specified", "estimated")
"""Kinds of sources, the most certain one first."""
DEVICE_KINDS = (
    *("node", "package", "numa_node", "cpu", "gpu", "die", "io_die", "l2_partition"),
    *("gpc", "compute_unit", "memory", "switch", "nic"),
)
LINK_KINDS = ("nvlink", "xgmi", "c2c", "pcie", "network", "die_to_die", "socket", "cache", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where figures come from.

    Attributes:
        id: The id by which figures refer to it, unique in the machine.
        kind: "measured" (by this project, with a record), "published" (measured by others),
            "specified" (a vendor's datasheet), "reported" (by the driver or the system), or
            "estimated" (a guess, with its reason).
        text: The record and its commit, the document, or the reason.
    """

    id: str
    kind: str
    text: str

    def __post_init__(self) -> None:
        _check("source", self.id, self.kind, SOURCE_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number and the id of the Source that it comes from."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"a figure is {self.value}, must be finite and above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A part of a machine, or several that are alike. A field that is None is not known.

    Attributes:
        id: An id that is unique in the machine and begins with the parents' ids: "node0/gpu1/die2".
        kind: One of DEVICE_KINDS. A "die" computes (an XCD), an "io_die" carries dies and memory,
            a "compute_unit" is an SM or a CU, a "gpc" is a group of SMs that a cluster of blocks
            runs in.
        parent: Id of the device that this is a part of; None at the top.
        count: How many alike devices this entry stands for.
        name: The vendor's name of the model.
        bus_id: PCI address, as in "0000:1b:00.0".
        numa_node: The host's NUMA node that it is attached to.
        memory_bytes: Bytes of its memory, or of a cache.
        bandwidth_gbps: Gigabytes a second at which it can read its memory.
        latency_us: Microseconds of a word from one of its compute units to another, one way.
        units: The hardware's numbers of the compute units that this entry stands for.
    """

    id: str
    kind: str
    parent: str | None = None
    count: int = 1
    name: str | None = None
    bus_id: str | None = None
    numa_node: int | None = None
    memory_bytes: Figure | None = None
    bandwidth_gbps: Figure | None = None
    latency_us: Figure | None = None
    units: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check("device", self.id, self.kind, DEVICE_KINDS)
        if self.count < 1:
            raise ValueError(f"device {self.id!r} has count {self.count}, must be 1 or more")
        if self.units is not None and len(self.units) != self.count:
            raise ValueError(f"device {self.id!r} has {len(self.units)} units, count {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between two devices, in both directions. A field that is None is not known.

    Attributes:
        a, b: Ids of the devices.
        kind: One of LINK_KINDS.
        version: As in NVLink 4 or PCIe 5.
        count: Number of alike links, which share the traffic.
        latency_us: Microseconds of a word over it, one way. The sum along a route is the time from
            a store until the peer's poll sees it.
        bandwidth_gbps: Gigabytes a second of all `count` links in one direction.
    """

    a: str
    b: str
    kind: str
    version: int | None = None
    count: int | None = None
    latency_us: Figure | None = None
    bandwidth_gbps: Figure | None = None

    def __post_init__(self) -> None:
        _check("link", f"{self.a} - {self.b}", self.kind, LINK_KINDS)
        if self.a == self.b:
            raise ValueError(f"link {self.a!r} joins a device with itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What the driver says of a GPU's access to a peer's memory. None means "not known".

    Attributes:
        a, b: Ids of the GPUs. Both ways are alike.
        reads, writes, atomics: Whether a kernel on one GPU can load from the other's memory, store
            to it, and execute atomic operations in it.
    """

    a: str
    b: str
    reads: bool | None = None
    writes: bool | None = None
    atomics: bool | None = None


# The fields of each class that hold a Figure, kept because get_type_hints() is slow.
_FIGURES: dict[type[Any], set[str]] = {}


def from_dict(cls: type[Any], fields: Mapping[str, Any]) -> Any:
    """Returns an object of `cls` with the fields that asdict() returned for it.

    Raises:
        ValueError: A value is not allowed.
        TypeError: A field is unknown or missing.
    """
    if cls not in _FIGURES:
        hints = get_type_hints(cls)
        _FIGURES[cls] = {key for key in hints if Figure in (hints[key], *get_args(hints[key]))}
    figures = _FIGURES[cls]
    made = {
        key: Figure(**value) if isinstance(value, dict) and key in figures else value
        for key, value in fields.items()
    }
    return cls(**made)


def check(
    devices: tuple[Device, ...],
    links: tuple[Link, ...],
    sources: tuple[Source, ...],
    used: Iterable[str] = (),
    accesses: tuple[Access, ...] = (),
) -> None:
    """Checks that all ids that devices, links and figures refer to exist, and are unique.

    Args:
        devices, links, sources: The fields of a Machine.
        used: Ids of sources that other fields refer to.
        accesses: Another field of it.

    Raises:
        ValueError: Two parts have one id, or a parent, an end of a link or a source is missing.
    """
    ids = _unique("device", [device.id for device in devices])
    known = _unique("source", [source.id for source in sources])
    for device in devices:
        if device.parent is not None and device.parent not in ids:
            raise ValueError(f"device {device.id!r} has parent {device.parent!r}, which is missing")
    pairs = [("link", link.a, link.b) for link in links]
    pairs += [("access", pair.a, pair.b) for pair in accesses]
    for what, a, b in pairs:
        for end in (a, b):
            if end not in ids:
                raise ValueError(f"{what} {a!r} - {b!r}: device {end!r} is missing")
    parts: tuple[Device | Link, ...] = (*devices, *links)
    for part in parts:
        for name, figure in figures(part):
            if figure.source not in known:
                raise ValueError(f"{name} has source {figure.source!r}, which is missing")
    for source in used:
        if source not in known:
            raise ValueError(f"a measurement has source {source!r}, which is missing")


def figures(part: Device | Link) -> Iterator[tuple[str, Figure]]:
    """Yields (name, figure) of a part's figures."""
    for name in ("memory_bytes", "bandwidth_gbps", "latency_us"):
        figure = getattr(part, name, None)
        if figure is not None:
            yield name, figure


def _unique(what: str, ids: list[str]) -> set[str]:
    known = set(ids)
    if len(known) != len(ids):
        twice = next(each for each in ids if ids.count(each) > 1)
        raise ValueError(f"{what} {twice!r} is there twice")
    return known


def _check(what: str, name: str, kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise ValueError(f"{what} {name!r} has kind {kind!r}, must be one of {', '.join(known)}")
