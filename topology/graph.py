"""Makes a machine one graph: the host's CPUs, GPUs and their parts, and routes between them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from .model import Machine
from .parts import Device, Figure, Link, Source

PROBED = "probe"
"""Id of the Source of latencies between CPUs, which a Machine holds as a matrix without source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path over links from one device to another.

    Attributes:
        stops: Ids of the devices on it, both ends included.
        kinds: The kinds of its links, in order.
        latency_us: Microseconds one way; None if a link's is not known.
        bandwidth_gbps: Gigabytes a second of the narrowest link; None if a link's is not known.
        sources: Ids of the sources of these figures.
    """

    stops: tuple[str, ...]
    kinds: tuple[str, ...]
    latency_us: float | None
    bandwidth_gbps: float | None
    sources: tuple[str, ...]


class Graph:
    """The devices and links of a machine. The host's packages, NUMA nodes and CPUs are devices too.

    Attributes:
        devices: Id -> device. Those of the host come last.
        links: All links. Latencies between CPUs are links of kind "cache".
        sources: Id -> source.
    """

    def __init__(self, machine: Machine) -> None:
        host = tuple(_host_devices(machine))
        taken = {device.id for device in machine.devices}
        self.devices: dict[str, Device] = {
            device.id: device
            for device in (*machine.devices, *(each for each in host if each.id not in taken))
        }
        self.links: tuple[Link, ...] = (*machine.links, *_host_links(machine))
        self.sources: dict[str, Source] = {source.id: source for source in machine.sources}
        if machine.core_to_core_us is not None:
            told = "core-to-core latencies of this machine, by `kccl topo --probe`"
            self.sources.setdefault(PROBED, Source(id=PROBED, kind="measured", text=told))
        self._readings = machine.readings
        self._parts: dict[str | None, list[Device]] = {}
        for device in self.devices.values():
            self._parts.setdefault(device.parent, []).append(device)
        self._next: dict[str, list[tuple[str, Link]]] = {}
        for link in self.links:
            self._next.setdefault(link.a, []).append((link.b, link))
            self._next.setdefault(link.b, []).append((link.a, link))

    def of_kind(self, kind: str) -> tuple[Device, ...]:
        """Returns the devices of a kind, in the machine's order."""
        return tuple(device for device in self.devices.values() if device.kind == kind)

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs in the machine's order. Rank i runs on gpus[i]."""
        return self.of_kind("gpu")

    def parts(self, device_id: str | None, kind: str | None = None) -> tuple[Device, ...]:
        """Returns the direct parts of a device, or the top devices for None; only those of `kind`
        if it is given.
        """
        found = self._parts.get(device_id, [])
        return tuple(part for part in found if kind is None or part.kind == kind)

    def count(self, device_id: str, kind: str) -> int | None:
        """Returns how many parts of a kind a device has, at any depth; None if none is known."""
        found = 0
        for part in self.parts(device_id):
            inner = part.count if part.kind == kind else self.count(part.id, kind) or 0
            found += inner if part.kind == kind else inner * part.count
        return found or None

    def readings_of(self, device_id: str) -> dict[str, float]:
        """Returns quantity -> number of what a probe has measured on a device."""
        return {each.what: each.figure.value for each in self._readings if each.of == device_id}

    def node_of(self, device_id: str) -> str | None:
        """Returns the id of the node that a device is in; None if the machine has no nodes."""
        device: Device | None = self.devices[device_id]
        while device is not None and device.kind != "node":
            device = None if device.parent is None else self.devices[device.parent]
        return None if device is None else device.id

    def links_of(self, device_id: str) -> tuple[tuple[str, Link], ...]:
        """Returns (neighbour's id, link) for each link of a device."""
        return tuple(self._next.get(device_id, ()))

    def route(self, a: str, b: str) -> Route | None:
        """Returns the best route between two devices; None if no links join them.

        The best has the fewest links, then a known latency, then the least latency, then the
        largest bandwidth.

        Raises:
            KeyError: The machine has no such device.
        """
        for device_id in (a, b):
            if device_id not in self.devices:
                raise KeyError(device_id)
        # An entry is a route to its last stop: (number of links, latency, minus the bandwidth, the
        # entry's number, which decides between equal routes, stops, links).
        queue: list[tuple[int, float, float, int, tuple[str, ...], tuple[Link, ...]]]
        queue = [(0, 0.0, -math.inf, 0, (a,), ())]
        done = set()
        order = 0
        while queue:
            hops, latency, width, _, stops, links = heapq.heappop(queue)
            here = stops[-1]
            if here == b:
                return _route(stops, links)
            if here in done:
                continue
            done.add(here)
            for there, link in self._next.get(here, ()):
                # Skips third GPUs, because they do not forward traffic.
                if there not in done and (there == b or self.devices[there].kind != "gpu"):
                    more = link.latency_us.value if link.latency_us else math.inf
                    order += 1
                    wide = max(width, -link.bandwidth_gbps.value if link.bandwidth_gbps else 0.0)
                    step = (hops + 1, latency + more, wide, order)
                    heapq.heappush(queue, (*step, (*stops, there), (*links, link)))
        return None


def _route(stops: tuple[str, ...], links: tuple[Link, ...]) -> Route:
    latencies = [link.latency_us for link in links if link.latency_us]
    bandwidths = [link.bandwidth_gbps for link in links if link.bandwidth_gbps]
    used = dict.fromkeys(figure.source for figure in (*latencies, *bandwidths))
    is_timed, is_wide = len(latencies) == len(links) > 0, len(bandwidths) == len(links) > 0
    return Route(
        stops=stops,
        kinds=tuple(link.kind for link in links),
        latency_us=round(sum(each.value for each in latencies), 6) if is_timed else None,
        bandwidth_gbps=min(each.value for each in bandwidths) if is_wide else None,
        sources=tuple(used),
    )


def _host_devices(machine: Machine) -> Iterator[Device]:
    packages = sorted({cpu.package for cpu in machine.cpus if cpu.package is not None})
    for package in packages:
        yield Device(id=f"package{package}", kind="package", name=machine.cpu_model)
    for node in machine.numa_nodes:
        yield Device(id=f"numa{node.id}", kind="numa_node", parent=_package_of(machine, node.cpus))
    nodes = {node.id for node in machine.numa_nodes}
    for cpu in machine.cpus:
        parent = None if cpu.package is None else f"package{cpu.package}"
        if cpu.numa_node in nodes:
            parent = f"numa{cpu.numa_node}"
        yield Device(id=f"cpu{cpu.id}", kind="cpu", parent=parent, numa_node=cpu.numa_node)


def _package_of(machine: Machine, cpus: tuple[int, ...]) -> str | None:
    """Returns the id of these CPUs' package; None if it is not known, or there are several."""
    found = {cpu.package for cpu in machine.cpus if cpu.id in cpus}
    return f"package{found.pop()}" if len(found) == 1 and None not in found else None


def _host_links(machine: Machine) -> Iterator[Link]:
    rows = machine.core_to_core_us or ()
    for i, row in enumerate(rows):
        for j in range(i):
            there, back = row[j], rows[j][i]
            known = [us for us in (there, back) if us is not None and us > 0]
            if known:
                us = Figure(value=sum(known) / len(known), source=PROBED)
                a, b = machine.cpus[j].id, machine.cpus[i].id
                yield Link(a=f"cpu{a}", b=f"cpu{b}", kind="cache", latency_us=us)
