"""Chooses how the ranks of a communicator share GPU memory; memory.py implements the ways.

The first choice is memory with a mapping of its own, exported as a file descriptor: a survivor
keeps a dead peer's memory. Where the driver or the container refuses that, processes use legacy IPC
handles. Threads of one process cannot open their own handles, so they use peer access.
"""

import json
import os
from dataclasses import dataclass

from ..base.errors import BackendError, InvalidArgument
from ..ranks.team import Connected
from . import driver
from .memory import Shareable
from .table import DriverError

CAVEAT = (
    "windows are shared by legacy {} handles, with which it is not guaranteed that a "
    "survivor's GPU context outlives a lost peer"
)
_FORCED = "KCCL_WINDOWS asks for it"


@dataclass(frozen=True)
class Sharing:
    """How the ranks of a communicator share GPU memory.

    Attributes:
        way: "vmm", "ipc" or "peer".
        reason: Why the way is not "vmm"; "" if it is.
    """

    way: str
    reason: str = ""

    @property
    def caveat(self) -> str:
        """Returns a warning for the survivors of a lost peer; "" if there is none."""
        caveat = CAVEAT.format(driver.table().handles)
        return f"{caveat} ({self.reason})" if self.way == "ipc" else ""


def why_not_vmm(device: driver.Device, *, are_threads: bool) -> str:
    """Returns why windows cannot have a mapping of their own; "" if they can. Tries to make one.

    Args:
        device: The device that has the memory.
        are_threads: True if the ranks are threads of this process, which need no exported memory.
    """
    gpu = driver.table()
    name = gpu.maps_memory if are_threads else gpu.exports_memory
    if not driver.attribute(device.ordinal, name):
        return f"device {device.ordinal} ({device.name}) says that it has no {name}"
    try:
        memory = Shareable(device, 1)
        if not are_threads:
            os.close(memory.export())
    except BackendError as error:
        # Too little memory is no reason to choose "ipc" or "peer", which are worse than "vmm".
        if isinstance(error, DriverError) and error.code == gpu.out_of_memory:
            raise
        return str(error)
    return ""


def choose(device: driver.Device, *, are_threads: bool, forced: str) -> Sharing:
    """Returns the choice of this rank alone, without regard to the other ranks.

    Args:
        device: This rank's device.
        are_threads: The ranks are threads of this process.
        forced: KCCL_WINDOWS.

    Raises:
        InvalidArgument: Such ranks cannot use the forced way.
        BackendError: The forced way is impossible here.
    """
    second = "peer" if are_threads else "ipc"
    if forced not in ("", "vmm", second):
        raise InvalidArgument(
            f"KCCL_WINDOWS={forced!r} must be vmm or {second}: the ranks are "
            f"{'threads of one process' if are_threads else 'processes'}"
        )
    if forced == second:
        return Sharing(second, _FORCED)
    obstacle = why_not_vmm(device, are_threads=are_threads)
    if obstacle and forced:
        raise BackendError(f"KCCL_WINDOWS='vmm' is impossible: {obstacle}")
    return Sharing(second, obstacle) if obstacle else Sharing("vmm")


def agree(
    mesh: Connected, device: driver.Device, *, are_threads: bool, forced: str, timeout: float
) -> Sharing:
    """Returns the way that all ranks use: "vmm" if each of them can use that. Collective.

    Raises:
        InvalidArgument, BackendError: See choose(); or KCCL_WINDOWS differs between ranks.
        BackendError: Two devices cannot access each other's memory.
    """
    mine = choose(device, are_threads=are_threads, forced=forced)
    told = json.dumps([device.uuid, device.name, forced, mine.way, mine.reason]).encode()
    everyone = [json.loads(reply) for reply in mesh.allgather(told, "start-up", timeout)]
    _check_reach(mesh.rank, device, [(uuid, name) for uuid, name, *_ in everyone])
    wishes = [wish for _, _, wish, *_ in everyone]
    if len(set(wishes)) > 1:
        raise InvalidArgument(f"KCCL_WINDOWS differs between ranks: {', '.join(map(repr, wishes))}")
    for rank, (*_, way, reason) in enumerate(everyone):
        if way != "vmm":
            return Sharing(way, reason if reason == _FORCED else f"rank {rank}: {reason}")
    return mine


def _check_reach(rank: int, device: driver.Device, everyone: list[tuple[str, str]]) -> None:
    known = {driver.uuid(ordinal): ordinal for ordinal in range(driver.num_devices())}
    for peer, (uuid, name) in enumerate(everyone):
        # `uuid` may name a device that this process does not see (CUDA_VISIBLE_DEVICES) and so
        # cannot query. Such a device counts as reachable.
        if uuid in known and not driver.can_access(device.ordinal, known[uuid]):
            raise BackendError(
                f"rank {rank} on device {device.ordinal} ({device.name}) cannot access the "
                f"memory of rank {peer} on device {known[uuid]} ({name}): there is no peer-to-peer "
                'path between them. Use backend="host"'
            )
