"""Adds the GPUs of both vendors to a machine, and defines what each vendor's discovery returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .model import Machine
from .parts import Device, Link, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Devices that a discovery found, with their links and the sources of their figures."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    sources: tuple[Source, ...] = ()


def with_gpus(machine: Machine, root: str = "/", nvml: Any = None) -> Machine:
    """Adds the GPUs that the vendors' drivers report to a machine.

    Args:
        machine: The host, as discover() describes it.
        root: Folder that holds `sys` and `proc`, as for discover().
        nvml: An object with the functions of the module `pynvml`. Default: that module, if it can
            be imported and root is "/". Without it, NVIDIA's GPUs are read from procfs.

    Returns:
        The machine with the GPUs' devices and links. GPUs of both vendors are numbered gpu0, gpu1
        and so on, NVIDIA's first. Fields that the system hides, as in a container, are None.
    """
    from . import amd, nvidia

    first = nvidia.discover(root, nvml)
    num_gpus = sum(device.kind == "gpu" for device in first.devices)
    second = amd.discover(root, num_gpus)
    return replace(
        machine,
        devices=(*machine.devices, *first.devices, *second.devices),
        links=(*machine.links, *first.links, *second.links),
        sources=(*machine.sources, *first.sources, *second.sources),
    )
