"""Adds the GPUs of both vendors to a machine, and defines what each vendor's discovery returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import files
from .model import Machine
from .parts import Access, Device, Link, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Devices that a discovery found, with their links and the sources of their figures."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    sources: tuple[Source, ...] = ()
    accesses: tuple[Access, ...] = ()


def with_gpus(machine: Machine, root: str = "/", nvml: Any = None, amdsmi: Any = None) -> Machine:
    """Adds the GPUs that the vendors' drivers report to a machine.

    Args:
        machine: The host, as discover() describes it.
        root: Folder that holds `sys` and `proc`, as for discover().
        nvml: An object with the functions of the module `pynvml`. Default: that module, if it can
            be imported and root is "/". Without it, NVIDIA's GPUs are read from procfs.
        amdsmi: An object with the functions of ROCm's module `amdsmi`; the default is like nvml's.
            It adds to what sysfs tells of AMD's GPUs.

    Returns:
        The machine with the GPUs' devices and links. GPUs of both vendors are numbered gpu0, gpu1
        and so on, NVIDIA's first. Fields that the system hides, as in a container, are None.
    """
    from . import amd, nvidia

    first = nvidia.discover(root, nvml)
    num_gpus = sum(device.kind == "gpu" for device in first.devices)
    second = amd.discover(root, num_gpus, amdsmi)
    return replace(
        machine,
        devices=(*machine.devices, *first.devices, *second.devices),
        links=(*machine.links, *first.links, *second.links),
        sources=(*machine.sources, *first.sources, *second.sources),
        accesses=(*machine.accesses, *first.accesses, *second.accesses),
    )


def numa_node(root: str | Path, bus_id: str | None, told: int | None = None) -> int | None:
    """Returns the host's NUMA node that a PCI device is attached to; None if it is not known.

    Args:
        root: Folder that holds `sys`.
        bus_id: The device's PCI address.
        told: The node by the vendor's library, for devices whose node the system does not know: a
            container may hide the device, and virtual machines often tell -1.

    If nobody knows the node and the host has only one, it is this one.
    """
    base = Path(root) / "sys"
    found = files.number(base / "bus/pci/devices" / bus_id / "numa_node") if bus_id else None
    if found is not None or told is not None:
        return told if found is None else found
    nodes = files.numbered(base / "devices/system/node", "node")
    return nodes[0][0] if len(nodes) == 1 else None
