"""Discovers NVIDIA GPUs by NVML, or without NVML by the driver's files in procfs and sysfs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from . import files
from .accelerators import Found, numa_node
from .parts import Access, Device, Figure, Link, Source

_NVML = Source(id="nvml", kind="reported", text="NVIDIA's management library (NVML)")
_SPECIFIED = Source(
    id="rates", kind="specified", text="GB/s of a link in one direction, by its version"
)
_NVLINK_GBPS = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}
_PCIE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # version -> GB/s of a lane
# NVML's number of an NVLink version -> the major version. They are 1.0, 2.0, 2.2, 3.0, 3.1, 4.0
# and 5.0.
_VERSIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}
# Hopper always has NVLink 4. This overrides the driver: one was seen to report 5.0.
_HOPPER, _OF_HOPPER = 9, 4
_MOST_LINKS = 18
_TO_GPU, _TO_SWITCH = 0, 2  # NVML's NVML_NVLINK_DEVICE_TYPE_*
_MEMORY_CLOCK = 2  # NVML_CLOCK_MEM
# NVML's NVML_P2P_CAPS_INDEX_*, and its NVML_P2P_STATUS_OK and _UNKNOWN.
_READ, _WRITE, _ATOMICS = 0, 1, 3
_P2P_OK, _P2P_UNKNOWN = 0, 6
_NODE_WORDS = 4  # words of 64 bits of a set of NUMA nodes
_OF_NODES = 0  # NVML_AFFINITY_SCOPE_NODE
_BRIDGE, _SWITCH = "host_bridge", "nvswitch"


def discover(root: str = "/", nvml: Any = None) -> Found:
    """Finds the GPUs of this machine, or those under a root.

    The arguments are those of accelerators.with_gpus().
    """
    if nvml is None and Path(root).resolve() == Path("/"):
        try:
            import pynvml
        except ImportError:
            pynvml = None
        nvml = pynvml
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            # There is no driver, or the container hides it.
            return Found()
        try:
            return _by_nvml(nvml, root)
        finally:
            nvml.nvmlShutdown()
    return _by_files(Path(root))


def _by_nvml(nvml: Any, root: str) -> Found:
    def ask(name: str, *given: Any) -> Any:
        """Returns NVML's answer; None if the device, the driver or the container has none."""
        try:
            return getattr(nvml, name)(*given)
        except (nvml.NVMLError, AttributeError):
            return None

    handles = [ask("nvmlDeviceGetHandleByIndex", i) for i in range(ask("nvmlDeviceGetCount") or 0)]
    devices: list[Device] = []
    links: list[Link] = []
    buses = {}
    for i, handle in enumerate(handles):
        made = _gpu(f"gpu{i}", handle, root, ask)
        devices += made
        if made[0].bus_id:
            buses[made[0].bus_id] = f"gpu{i}"
    for i, handle in enumerate(handles):
        if handle is not None:
            links += _nvlinks(f"gpu{i}", handle, buses, ask)
            links += _pcie(f"gpu{i}", handle, ask)
    pairs = combinations(
        [(f"gpu{i}", each) for i, each in enumerate(handles) if each is not None], 2
    )
    told = [_access(a, b, one, other, ask) for (a, one), (b, other) in pairs]
    return _joined(devices, links, tuple(each for each in told if each is not None))


def _access(a: str, b: str, one: Any, other: Any, ask: Callable[..., Any]) -> Access | None:
    """Returns what a GPU may do in a peer's memory; None if NVML tells nothing."""
    states = [
        ask("nvmlDeviceGetP2PStatus", one, other, index) for index in (_READ, _WRITE, _ATOMICS)
    ]
    can = [None if state in (None, _P2P_UNKNOWN) else state == _P2P_OK for state in states]
    if can == [None] * 3:
        return None
    return Access(a=a, b=b, reads=can[0], writes=can[1], atomics=can[2])


def _joined(devices: list[Device], links: list[Link], accesses: tuple[Access, ...] = ()) -> Found:
    """Returns the GPUs and links, and adds the switches that the links lead to."""
    switches = (Device(id=_SWITCH, kind="switch"), Device(id=_BRIDGE, kind="switch"))
    used = {end for link in links for end in (link.a, link.b)}
    reached = [switch for switch in switches if switch.id in used]
    sources = (_NVML, _SPECIFIED) if devices else ()
    return Found(
        devices=(*devices, *reached), links=tuple(links), sources=sources, accesses=accesses
    )


def _gpu(name: str, handle: Any, root: str, ask: Callable[..., Any]) -> list[Device]:
    if handle is None:
        return [Device(id=name, kind="gpu")]
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    bits = ask("nvmlDeviceGetMemoryBusWidth", handle)
    megahertz = ask("nvmlDeviceGetMaxClockInfo", handle, _MEMORY_CLOCK)
    gbps = bits / 8 * 2 * megahertz / 1000 if bits and megahertz else None
    # Not nvmlDeviceGetNumaNodeId: it tells the node that a GPU's own memory is, as beside a Grace.
    nodes = ask("nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _OF_NODES)
    bus_id = _bus_id(ask("nvmlDeviceGetPciInfo", handle))
    gpu = Device(
        id=name,
        kind="gpu",
        name=_word(ask("nvmlDeviceGetName", handle)),
        bus_id=bus_id,
        numa_node=numa_node(root, bus_id, _only(nodes)),
        memory_bytes=Figure(value=memory.total, source=_NVML.id) if memory else None,
        bandwidth_gbps=Figure(value=gbps, source=_NVML.id) if gbps else None,
    )
    cores = ask("nvmlDeviceGetNumGpuCores", handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    if not (cores and capability):
        return [gpu]
    # NVML counts FP32 cores. `each` is the number of them in an SM.
    each = 64 if tuple(capability) <= (8, 0) else 128
    return [gpu, Device(id=f"{name}/sm", kind="compute_unit", parent=name, count=cores // each)]


def _only(words: Any) -> int | None:
    """Returns the number of the one node in a set of bits, in words of 64; None if not one."""
    mask = sum(int(word) << 64 * i for i, word in enumerate(words or ()))
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def _nvlinks(name: str, handle: Any, buses: dict[str, str], ask: Callable[..., Any]) -> list[Link]:
    """Returns a Link for each device that the GPU's active NVLinks lead to.

    NVLinks to another GPU are returned only for the GPU with the lower number, so that they are not
    returned twice.
    """
    found: Counter[tuple[str, int | None]] = Counter()
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    is_hopper = bool(capability) and capability[0] == _HOPPER
    for link in range(_MOST_LINKS):
        if ask("nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        number = ask("nvmlDeviceGetNvLinkVersion", handle, link)
        version = _OF_HOPPER if is_hopper else _VERSIONS.get(number or 0)
        kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        other = buses.get(_bus_id(ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)) or "")
        if kind == _TO_SWITCH:
            found[_SWITCH, version] += 1
        elif other and (kind in (_TO_GPU, None)) and int(name[3:]) < int(other[3:]):
            found[other, version] += 1
    return [
        Link(
            a=name,
            b=end,
            kind="nvlink",
            version=version,
            count=count,
            bandwidth_gbps=_rate(_NVLINK_GBPS.get(version or 0), count),
        )
        for (end, version), count in found.items()
    ]


def _pcie(name: str, handle: Any, ask: Callable[..., Any]) -> list[Link]:
    generation = ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
    lanes = ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
    return [_pcie_link(name, generation, lanes)]


def _pcie_link(name: str, generation: int | None, lanes: int | None) -> Link:
    return Link(
        a=name,
        b=_BRIDGE,
        kind="pcie",
        version=generation,
        count=lanes,
        bandwidth_gbps=_rate(_PCIE_GBPS.get(generation or 0), lanes),
    )


def _rate(gbps: float | None, count: int | None) -> Figure | None:
    if not (gbps and count):
        return None
    return Figure(value=round(gbps * count, 3), source=_SPECIFIED.id)


def _by_files(root: Path) -> Found:
    devices, links = [], []
    folders = sorted(files.entries(root / "proc/driver/nvidia/gpus"), key=lambda path: path.name)
    for i, folder in enumerate(folders):
        lines = (files.text(folder / "information") or "").splitlines()
        told = dict(line.split(":", 1) for line in lines if ":" in line)
        card = root / "sys/bus/pci/devices" / folder.name
        model = told.get("Model", "").strip()
        device = Device(
            id=f"gpu{i}",
            kind="gpu",
            name=model or None,
            bus_id=folder.name.lower(),
            numa_node=numa_node(root, folder.name.lower()),
        )
        devices.append(device)
        lanes = files.number(card / "max_link_width")
        links.append(_pcie_link(device.id, _generation(card / "max_link_speed"), lanes))
    return _joined(devices, links)


def _generation(path: Path) -> int | None:
    """Returns the PCIe version for the speed in a file of sysfs, as 5 for "32.0 GT/s PCIe"."""
    speed = (files.text(path) or "").split(" ")[0]
    return {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}.get(speed)


def _word(answer: Any) -> str | None:
    # Old versions of pynvml return bytes.
    return answer.decode() if isinstance(answer, bytes) else answer


def _bus_id(pci: Any) -> str | None:
    """Returns a PCI address as Linux writes it: NVML's domain has eight digits, Linux's four."""
    found = _word(getattr(pci, "busId", None))
    if not found:
        return None
    domain, _, place = found.partition(":")
    return f"{int(domain, 16):04x}:{place.lower()}"
