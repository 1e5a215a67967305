"""Implements `kccl topo --probe` on GPUs: runs kernels on the GPUs that this process sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ... import gpu, topology
from ...base.errors import BackendError
from ...gpu import driver
from ...start import run_threads
from .between import Between, Cells
from .within import Sizes, Within, module_for

if TYPE_CHECKING:
    from ...comm import Communicator

__all__ = ["MOST_GPUS", "Sizes", "probed"]

MOST_GPUS = 8
"""How many GPUs are probed: the first ones that this process sees."""


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class _Found:
    """What one rank has measured on its GPU and, if there are several GPUs, between them."""

    ordinal: int
    probe: topology.GpuProbe
    pairs: tuple[Cells, Cells] | None


def probed(machine: topology.Machine, sizes: Sizes | None = None) -> topology.Machine:
    """Returns the machine with what kernels measure on its first MOST_GPUS GPUs and between them.

    Args:
        machine: This machine. If it has no GPUs, those that this process sees are added.
        sizes: How much to measure.

    Raises:
        BackendError: There is no GPU, or a GPU cannot be measured.
        Timeout: Two GPUs did not answer each other.
    """
    world_size = min(gpu.num_devices(), MOST_GPUS)
    if world_size == 0:
        raise BackendError("there is no GPU to probe")
    asked = sizes or Sizes()

    def main(comm: Communicator) -> _Found:
        within = Within(comm, module_for(comm), asked)
        # Measures one GPU after another, because they share the host's memory and its links.
        probe = None
        for rank in range(comm.world_size):
            if rank == comm.rank:
                probe = within.measure()
            comm.gather_objects(None)
        assert probe is not None
        pairs = None
        if comm.world_size > 1:
            pairs = Between(comm, within, asked).measure()
        return _Found(within.device.ordinal, probe, pairs)

    found = run_threads(main, world_size, backend=gpu.backend())
    machine, names = _named(machine, [each.ordinal for each in found])
    for name, each in zip(names, found, strict=True):
        machine = topology.with_gpu_probe(machine, name, each.probe)
    if found[0].pairs is not None:
        us, gbps = found[0].pairs
        pairs = topology.PairsProbe(gpus=tuple(names), peer_us=us, peer_gbps=gbps)
        machine = topology.with_pairs_probe(machine, pairs)
    return machine


def _named(machine: topology.Machine, ordinals: list[int]) -> tuple[topology.Machine, list[str]]:
    """Returns the machine with a device for each of these GPUs, and the devices' ids.

    It matches them by PCI address where machine and driver know it, because the environment may
    hide GPUs from this process or change their order.
    """
    gpus = topology.Graph(machine).gpus
    by_bus = {each.bus_id: each.id for each in gpus if each.bus_id}
    found = [by_bus.get(_bus_id(ordinal) or "") for ordinal in ordinals]
    names = [name for name in found if name is not None]
    if len(names) == len(ordinals):
        return machine, names
    # Matches by order only if the machine knows no PCI address.
    if len(gpus) == len(ordinals) and not by_bus:
        return machine, [each.id for each in gpus]
    if gpus:
        raise BackendError(
            f"the driver shows {len(gpus)} GPUs, this process sees {len(ordinals)}, and their PCI "
            "addresses do not tell which"
        )
    names = [f"gpu{ordinal}" for ordinal in ordinals]
    devices = tuple(
        topology.Device(id=name, kind="gpu", name=gpu.device(ordinal).name, bus_id=_bus_id(ordinal))
        for name, ordinal in zip(names, ordinals, strict=True)
    )
    return replace(machine, devices=(*machine.devices, *devices)), names


def _bus_id(ordinal: int) -> str | None:
    """Returns a GPU's PCI address as Linux writes it, "0000:1b:00.0"; None if it is not known."""
    table = driver.table()
    try:
        domain, bus, device = (table.attribute(ordinal, name) for name in table.bus_parts)
    except gpu.DriverError:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
