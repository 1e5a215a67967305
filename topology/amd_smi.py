"""Adds what ROCm's library amdsmi tells of AMD's GPUs to what the driver's sysfs tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

from .accelerators import Found
from .parts import Access, Device, Figure, Source

_SOURCE = Source(id="amdsmi", kind="reported", text="ROCm's management library (amdsmi)")
_UNKNOWN_NODE = 2**32 - 1  # the library's -1


def completed(found: Found, smi: Any = None) -> Found:
    """Completes GPUs that were found in sysfs.

    Args:
        found: The GPUs. The library's GPUs are matched to them by their PCI addresses, and those
            that are not among them are left out: this process must not use them.
        smi: An object with the functions of the module `amdsmi`. Default: that module. If it
            cannot be imported, or the library does not start, `found` is returned.

    Returns:
        The GPUs, with facts that were not known, and what the library tells of access between them.
    """
    if smi is None:
        try:
            import amdsmi
        # Without its C library, the import fails with one of these.
        except (ImportError, OSError, KeyError, AttributeError):
            return found
        smi = amdsmi
    fault = getattr(smi, "AmdSmiException", None)
    if not isinstance(fault, type) or not issubclass(fault, BaseException):
        # It is another module of this name.
        return found
    # What the module's wrapper raises where a driver or a version differs.
    faults = (fault, AttributeError, KeyError, TypeError, ValueError, OSError)
    try:
        smi.amdsmi_init()
    except faults:
        return found
    try:
        return _completed(found, smi, faults)
    finally:
        with suppress(*faults):
            smi.amdsmi_shut_down()


def _completed(found: Found, smi: Any, faults: tuple[type[BaseException], ...]) -> Found:
    def ask(name: str, *given: Any) -> Any:
        """Returns the library's answer; None if it has none."""
        try:
            return getattr(smi, name)(*given)
        except faults:
            return None

    handles = {
        str(ask("amdsmi_get_gpu_device_bdf", handle)).lower(): handle
        for handle in ask("amdsmi_get_processor_handles") or ()
    }
    gpus = {device.id: handles.get(device.bus_id or "") for device in found.devices}
    known = {name: handle for name, handle in gpus.items() if handle is not None}
    if not known:
        return found
    # Partitions of a card are GPUs that differ in the function of the PCI address.
    cards = Counter((device.bus_id or "").rpartition(".")[0] for device in found.devices)
    devices = [
        _device(device, known[device.id], ask, cards[(device.bus_id or "").rpartition(".")[0]] == 1)
        if device.id in known
        else device
        for device in found.devices
    ]
    accesses = [_access(a, b, known[a], known[b], ask) for a, b in combinations(known, 2)]
    return replace(
        found,
        devices=tuple(devices),
        sources=(*found.sources, _SOURCE),
        accesses=tuple(each for each in accesses if each is not None),
    )


def _device(gpu: Device, handle: Any, ask: Callable[..., Any], is_whole: bool) -> Device:
    """Returns the GPU with the facts that the driver does not tell, or hides in a container.

    The library tells the memory of the whole card, which a partition does not have.
    """
    memory = _fields(ask("amdsmi_get_gpu_vram_info", handle)) if is_whole else {}
    name = _fields(ask("amdsmi_get_gpu_asic_info", handle)).get("market_name")
    node = ask("amdsmi_topo_get_numa_node_number", handle)
    is_node = isinstance(node, int) and 0 <= node < _UNKNOWN_NODE
    mebibytes, gbps = _number(memory.get("vram_size")), _number(memory.get("vram_max_bandwidth"))
    own = gpu.name is not None and not gpu.name.startswith("AMD gfx")
    return replace(
        gpu,
        name=gpu.name if own or not isinstance(name, str) or name == "N/A" else name,
        numa_node=node if gpu.numa_node is None and is_node else gpu.numa_node,
        memory_bytes=gpu.memory_bytes or _figure(mebibytes << 20),
        bandwidth_gbps=gpu.bandwidth_gbps or _figure(gbps),
    )


def _access(a: str, b: str, one: Any, other: Any, ask: Callable[..., Any]) -> Access | None:
    reaches = ask("amdsmi_is_P2P_accessible", one, other)
    reaches = reaches if isinstance(reaches, bool) else None
    told = _fields(_fields(ask("amdsmi_topo_get_p2p_status", one, other)).get("cap"))
    words = [told.get(f"is_iolink_atomics_{bits}bit") for bits in (32, 64)]
    # The library tells 0 or 1, and another number if it does not know.
    atomics = all(words) if all(word in (0, 1) for word in words) else None
    if reaches is None and atomics is None:
        return None
    return Access(a=a, b=b, reads=reaches, writes=reaches, atomics=atomics)


def _figure(value: int) -> Figure | None:
    return Figure(value=value, source=_SOURCE.id) if value else None


def _fields(answer: Any) -> dict[str, Any]:
    """Returns the fields of an answer; none if it is "N/A" or None."""
    return answer if isinstance(answer, dict) else {}


def _number(answer: Any) -> int:
    """Returns a number of the library; 0 for its "N/A" or None."""
    return answer if isinstance(answer, int) else 0
