"""Discovers AMD GPUs in the topology that the kernel's KFD driver writes to sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import amd_smi, files
from .accelerators import Found, numa_node
from .model import Machine
from .parts import Device, Figure, Link, Source

_NODES = "sys/class/kfd/kfd/topology/nodes"
_SOURCE = Source(id="kfd", kind="reported", text="the KFD driver, in /sys/class/kfd")
_LINK_KINDS = {2: "pcie", 11: "xgmi"}
# PCI device id -> marketing name, which the driver does not have.
_MODELS = {
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A5: "AMD Instinct MI325X",
    0x74B5: "AMD Instinct MI300X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}
# Architecture -> memory transfers in one cycle of the memory clock that the driver reports.
# HBM2 has 2 and HBM3 has 4.
_TRANSFERS = {"gfx908": 2, "gfx90a": 2, "gfx942": 4, "gfx950": 4}


def discover(root: str = "/", first: int = 0, smi: Any = None) -> Found:
    """Find the GPUs under a root.

    Args:
        root: Folder that holds `sys`.
        first: Number of the first GPU's id.
        smi: The argument `amdsmi` of accelerators.with_gpus().

    Returns:
        GPUs with their compute dies and units, in the driver's order, and the links between them.
        GPUs whose properties a container hides are left out.
    """
    found = _found(root, first)
    is_here = Path(root).resolve() == Path("/")
    if not found.devices or (smi is None and not is_here):
        return found
    return amd_smi.completed(found, smi)


def amd_gpus(root: str = "/") -> Machine:
    """Returns a machine that has only the AMD GPUs, by what the driver writes to sysfs. A rank
    that starts calls it, so it loads no vendor's library, and does not read CPUs and caches.

    Args:
        root: Folder that holds `sys`.

    Raises:
        ValueError: The driver's figures contradict each other.
    """
    found = _found(root, 0)
    return Machine(
        cpu_model=None,
        architecture=None,
        kernel=None,
        cpus=(),
        allowed_cpus=None,
        caches=(),
        numa_nodes=(),
        memory_bytes=None,
        devices=found.devices,
        links=found.links,
        sources=found.sources,
    )


def _found(root: str, first: int) -> Found:
    """Returns what the driver tells; the arguments are as in discover()."""
    nodes = files.numbered(Path(root) / _NODES)
    properties = {number: _properties(path / "properties") for number, path in nodes}
    gpus = [number for number, path in nodes if properties[number].get("simd_count")]
    cpus = [number for number, path in nodes if properties[number].get("cpu_cores_count")]
    if not gpus:
        return Found()
    paths = dict(nodes)
    names = {number: f"gpu{first + i}" for i, number in enumerate(gpus)}
    ways = {number: _links(paths[number]) for number in gpus}
    devices: list[Device] = []
    for number in gpus:
        near = [way["node_to"] for way in ways[number] if way.get("node_to") in cpus]
        # The driver lists the host's NUMA nodes in their order, so the index of a node with CPUs is
        # the number of the NUMA node, unless numbers have gaps or a container hides nodes.
        told = cpus.index(near[0]) if near else None
        node = numa_node(root, _bus_id(properties[number]), told)
        devices += _gpu(names[number], paths[number], properties[number], node)
    links: dict[frozenset[str], Link] = {}
    for number in gpus:
        for way in ways[number]:
            kind, other = _LINK_KINDS.get(way.get("type", 0)), names.get(way.get("node_to", -1))
            if kind and other and other != names[number]:
                pair = frozenset((names[number], other))
                # The driver gives the bandwidth in megabytes a second; 0 if it does not know it.
                most = way.get("max_bandwidth", 0)
                width = Figure(value=most / 1000, source=_SOURCE.id) if most else None
                made = Link(a=names[number], b=other, kind=kind, bandwidth_gbps=width)
                # Prefers xGMI: between GPUs with xGMI the driver may list a PCIe link, too.
                if pair not in links or (kind == "xgmi" != links[pair].kind):
                    links[pair] = made
    return Found(devices=tuple(devices), links=tuple(links.values()), sources=(_SOURCE,))


def _gpu(name: str, path: Path, facts: dict[str, int], node: int | None) -> list[Device]:
    version, device_id = facts.get("gfx_target_version", 0), facts.get("device_id", 0)
    banks = [_properties(bank / "properties") for _, bank in files.numbered(path / "mem_banks")]
    size = sum(bank.get("size_in_bytes", 0) for bank in banks)
    # The driver gives the width in bits and the clock in megahertz.
    transfers = _TRANSFERS.get(_architecture(version), 0)
    megabytes = sum(
        bank.get("width", 0) // 8 * bank.get("mem_clk_max", 0) * transfers for bank in banks
    )
    gpu = Device(
        id=name,
        kind="gpu",
        name=_MODELS.get(device_id) or (f"AMD {_architecture(version)}" if version else None),
        bus_id=_bus_id(facts),
        numa_node=node,
        memory_bytes=Figure(value=size, source=_SOURCE.id) if size else None,
        bandwidth_gbps=Figure(value=megabytes / 1000, source=_SOURCE.id) if megabytes else None,
    )
    simds, each = facts["simd_count"], facts.get("simd_per_cu", 0)
    dies = facts.get("num_xcc", 0)
    if not each:
        return [gpu]
    if dies < 2:
        units = Device(id=f"{name}/cu", kind="compute_unit", parent=name, count=simds // each)
        return [gpu, units]
    parts = [gpu]
    for die in range(dies):
        here = f"{name}/xcd{die}"
        parts.append(Device(id=here, kind="die", parent=name))
        count = simds // each // dies
        parts.append(Device(id=f"{here}/cu", kind="compute_unit", parent=here, count=count))
    return parts


def _links(path: Path) -> list[dict[str, int]]:
    folders = ("io_links", "p2p_links")
    found = [link for folder in folders for _, link in files.numbered(path / folder)]
    return [_properties(link / "properties") for link in found]


def _properties(path: Path) -> dict[str, int]:
    """Returns the lines "name number" of a file as a dict; empty if a container hides the file."""
    found = {}
    for line in (files.text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.isascii() and value.isdecimal():
            found[name] = int(value)
    return found


def _architecture(version: int) -> str:
    """Returns the name of an architecture: "gfx942" for 90402, "gfx1201" for 120100."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _bus_id(facts: dict[str, int]) -> str | None:
    if "location_id" not in facts:
        return None
    place = facts["location_id"]
    return f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 31:02x}.{place & 7}"
