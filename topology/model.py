"""Describes a machine by frozen dataclasses, and converts them to and from JSON.

A description has no host name, so that it can be published. None always means "not known",
never "none".
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from . import parts
from .parts import Access, Device, Link, Source
from .readings import Matrix, Range, Reading

FORMAT = 3
"""Version of the JSON form. It must grow when an older reader would misread a newer record."""
_READ = (2, FORMAT)  # the versions that can be read; format 2 describes only the host
_PARTS: dict[str, type[Any]] = {"devices": Device, "links": Link, "sources": Source}
_PARTS |= {"readings": Reading, "matrices": Matrix, "ranges": Range, "accesses": Access}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A logical CPU, to which a thread can be pinned.

    `core_id` is the kernel's number of the core within its package. `smt_siblings` are all logical
    CPUs of the physical core, including this one.
    """

    id: int
    core_id: int | None
    package: int | None
    numa_node: int | None
    smt_siblings: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One instance of a cache. `type` is "data", "instruction", "unified", or None."""

    level: int
    type: str | None
    size_bytes: int | None
    line_bytes: int | None
    shared_cpus: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A NUMA node. A node without CPUs has memory only.

    `distances` are the firmware's numbers (10 = local, no unit), in the order of
    `Machine.numa_nodes`.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None
    distances: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One host or several: their parts and, if known, the latencies between these parts.

    The fields of CPUs, caches and NUMA nodes describe one host. GPUs, switches and further hosts
    are `devices`. `Graph` joins both.

    Attributes:
        cpu_model: Marketing name of the CPU.
        architecture: As `uname -m` prints it.
        kernel: Release of the running kernel.
        cpus: Every online logical CPU, by id.
        allowed_cpus: Ids in the affinity mask of the process that called discover().
        caches: Every cache instance, by level, type and CPUs.
        numa_nodes: Every online NUMA node, by id.
        memory_bytes: Memory that the kernel manages.
        core_to_core_us: One-way latency in microseconds, `[i][j]` from `cpus[i]` to `cpus[j]`.
            None for a pair that was not measured, and so on the diagonal.
        title: A few words that describe the machine; None except for recorded machines.
        devices: GPUs and their parts, switches, nodes.
        links: The links between devices.
        sources: Where the figures of devices and links come from.
        readings, matrices: What a probe of the GPUs has measured.
        ranges: The ranges in which a probe's numbers lie on a healthy machine of this kind.
        accesses: What the driver says of access between two GPUs, for each pair it knows.
    """

    cpu_model: str | None
    architecture: str | None
    kernel: str | None
    cpus: tuple[Cpu, ...]
    allowed_cpus: tuple[int, ...] | None
    caches: tuple[Cache, ...]
    numa_nodes: tuple[NumaNode, ...]
    memory_bytes: int | None
    core_to_core_us: tuple[tuple[float | None, ...], ...] | None = None
    title: str | None = None
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    sources: tuple[Source, ...] = ()
    readings: tuple[Reading, ...] = ()
    matrices: tuple[Matrix, ...] = ()
    ranges: tuple[Range, ...] = ()
    accesses: tuple[Access, ...] = ()

    def __post_init__(self) -> None:
        measured = [reading.figure.source for reading in self.readings]
        measured += [each.source for each in self.matrices]
        measured += [each.source for each in self.ranges]
        parts.check(self.devices, self.links, self.sources, measured, self.accesses)
        if self.core_to_core_us is None:
            return
        size = len(self.cpus)
        rows = self.core_to_core_us
        if len(rows) != size or any(len(row) != size for row in rows):
            raise ValueError(f"core_to_core_us must be {size} x {size}, one row per cpu")
        if any(rows[i][i] is not None for i in range(size)):
            raise ValueError("core_to_core_us must be None on the diagonal")
        if any(us is not None and not math.isfinite(us) for row in rows for us in row):
            raise ValueError("core_to_core_us must be finite, or None where not measured")

    @property
    def online_cpus(self) -> tuple[int, ...]:
        """Ids of the online logical CPUs."""
        return tuple(cpu.id for cpu in self.cpus)

    @property
    def num_cores(self) -> int | None:
        """Number of physical cores."""
        return _num_distinct(cpu.smt_siblings for cpu in self.cpus)

    @property
    def num_packages(self) -> int | None:
        """Number of packages (sockets)."""
        return _num_distinct(cpu.package for cpu in self.cpus)

    def cache_bytes(self, cpus: Iterable[int]) -> int:
        """Returns the bytes of the caches of these CPUs, for the level at which this is the most.

        A cache that is shared with other CPUs counts in full, since these may be idle. The result
        is 0 if no cache is known.
        """
        wanted, levels = set(cpus), dict[int, int]()
        for cache in self.caches:
            if cache.type != "instruction" and wanted & set(cache.shared_cpus or ()):
                levels[cache.level] = levels.get(cache.level, 0) + (cache.size_bytes or 0)
        return max(levels.values(), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the machine as JSON types, "format" first.

        It leaves out fields of devices and links that are None, and fields of GPU probes and of
        access that are empty.
        """
        record = {"format": FORMAT, **asdict(self)}
        for name in ("readings", "matrices", "ranges", "accesses"):
            if not record[name]:
                del record[name]
        for name in ("devices", "links"):
            record[name] = tuple(
                {key: value for key, value in part.items() if value is not None}
                for part in record[name]
            )
        return record

    def to_json(self) -> str:
        """Return the machine as JSON, with one part or matrix row on each line."""
        fields = (
            f"  {json.dumps(key)}: {_json_lines(value)}" for key, value in self.to_dict().items()
        )
        return "{\n" + ",\n".join(fields) + "\n}\n"

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Machine:
        """Return the machine that `to_dict` wrote.

        Raises:
            ValueError: The record has an unknown format version, other fields than that version,
                or parts that refer to parts that are missing.
        """
        version = record.get("format")
        if version not in _READ:
            known = " and ".join(map(str, _READ))
            raise ValueError(
                f"machine record has format {version!r}, this version of topology reads {known}"
            )
        fields = {key: _tuples(value) for key, value in record.items() if key != "format"}
        try:
            fields["cpus"] = tuple(Cpu(**cpu) for cpu in fields["cpus"])
            fields["caches"] = tuple(Cache(**cache) for cache in fields["caches"])
            fields["numa_nodes"] = tuple(NumaNode(**node) for node in fields["numa_nodes"])
            for name, part in _PARTS.items():
                if name in fields:
                    fields[name] = tuple(parts.from_dict(part, each) for each in fields[name])
            return cls(**fields)
        except KeyError as error:
            raise ValueError(f"machine record of format {version} lacks {error}") from error
        except (AttributeError, TypeError) as error:
            raise ValueError(f"machine record of format {version}: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Machine:
        """Return the machine that `to_json` wrote.

        Raises:
            ValueError: `text` is not a JSON object, or as for `from_dict`.
        """
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError(f"machine record is a JSON {type(record).__name__}, not an object")
        return cls.from_dict(record)


def _num_distinct(values: Iterable[Hashable]) -> int | None:
    distinct = set(values)
    return None if not distinct or None in distinct else len(distinct)


def _tuples(value: object) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value


def _json_lines(value: object) -> str:
    if isinstance(value, tuple) and any(isinstance(item, (dict, tuple)) for item in value):
        lines = ",\n".join(f"    {json.dumps(item, allow_nan=False)}" for item in value)
        return f"[\n{lines}\n  ]"
    return json.dumps(value, allow_nan=False)
