"""Reads the XML that `lstopo machine.xml` of hwloc 2 or later writes."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from .model import Cache, Cpu, Machine, NumaNode
from .parts import Device, Figure, Link, Source

_SOURCE = Source(id="hwloc", kind="reported", text="hwloc, in the XML that lstopo wrote")
_CACHE_TYPES = {"0": "unified", "1": "data", "2": "instruction"}
_GPU_CLASSES = ("0300", "0302", "0380", "1200")  # PCI: display controllers, accelerators
_LIBRARIES = ("NVML", "CUDA", "RSMI", "LevelZero")
_PAIRS = {"NVLinkBandwidth": "nvlink", "XGMIBandwidth": "xgmi"}


def from_hwloc(text: str) -> Machine:
    """Returns the machine that an XML of lstopo describes.

    Args:
        text: The XML.

    Returns:
        The machine, without core-to-core latencies. Fields that need a feature which hwloc was
        built without, such as links of GPUs, are not known. The host's name is left out.

    Raises:
        ValueError: The text is not XML of hwloc 2 or later.
    """
    if "<!ENTITY" in text:
        raise ValueError("the XML defines entities, which hwloc's does not")
    try:
        top = ElementTree.fromstring(text.encode())
    except ElementTree.ParseError as error:
        raise ValueError(f"it is not XML: {error}") from error
    version = top.get("version", "1")
    if top.tag != "topology" or version.split(".")[0] < "2":
        raise ValueError(
            f"it is <{top.tag} version={version!r}>, must be <topology> of version 2 or later: "
            "write it with lstopo of hwloc 2"
        )
    machine = top.find("object[@type='Machine']")
    if machine is None:
        raise ValueError("<topology> has no object of type Machine")
    told = {**_infos(top), **_infos(machine)}
    parents = {child: parent for parent in machine.iter() for child in parent}
    cpus = tuple(_cpus(machine, parents))
    nodes = _numa_nodes(machine, top)
    devices, links = _gpus(machine, top, parents)
    packages = [_infos(each) for each in _objects(machine, "Package")]
    models = {each["CPUModel"].strip() for each in packages if each.get("CPUModel")}
    allowed = _cpuset(machine.get("allowed_cpuset"))
    return Machine(
        cpu_model=models.pop() if len(models) == 1 else None,
        architecture=told.get("Architecture"),
        kernel=told.get("OSRelease"),
        cpus=cpus,
        allowed_cpus=allowed,
        caches=tuple(sorted(_caches(machine), key=lambda c: (c.level, c.type or "", _key(c)))),
        numa_nodes=nodes,
        memory_bytes=sum(node.memory_bytes or 0 for node in nodes) or None,
        devices=devices,
        links=links,
        sources=(_SOURCE,) if links else (),
    )


def _objects(top: ElementTree.Element, kind: str) -> Iterator[ElementTree.Element]:
    return (each for each in top.iter("object") if each.get("type") == kind)


def _infos(element: ElementTree.Element) -> dict[str, str]:
    return {info.get("name", ""): info.get("value", "") for info in element.findall("info")}


def _index(element: ElementTree.Element | None, name: str = "os_index") -> int | None:
    found = "" if element is None else element.get(name, "")
    return int(found) if found.isascii() and found.isdecimal() else None


def _cpuset(text: str | None) -> tuple[int, ...] | None:
    """Returns the CPUs in a mask as "0x00000001,0xffffffff": words of 32 bits, the highest first.

    Returns None if there is no mask, or it is malformed.
    """
    if not text:
        return None
    mask = 0
    try:
        for word in text.split(","):
            mask = mask << 32 | int(word or "0", 16)
    except ValueError:
        return None
    return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def _above(
    element: ElementTree.Element,
    kind: str,
    parents: dict[ElementTree.Element, ElementTree.Element],
) -> ElementTree.Element | None:
    above: ElementTree.Element | None = element
    while above is not None and above.get("type") != kind:
        above = parents.get(above)
    return above


def _cpus(
    machine: ElementTree.Element, parents: dict[ElementTree.Element, ElementTree.Element]
) -> list[Cpu]:
    node_of = {
        cpu: _index(node)
        for node in _objects(machine, "NUMANode")
        for cpu in _cpuset(node.get("cpuset")) or ()
    }
    found = []
    for unit in _objects(machine, "PU"):
        number = _index(unit)
        if number is None:
            continue
        core = _above(unit, "Core", parents)
        own = None if core is None else [_index(each) for each in _objects(core, "PU")]
        found.append(
            Cpu(
                id=number,
                core_id=_index(core),
                package=_index(_above(unit, "Package", parents)),
                numa_node=node_of.get(number),
                smt_siblings=None
                if own is None
                else tuple(sorted(i for i in own if i is not None)),
            )
        )
    return sorted(found, key=lambda cpu: cpu.id)


def _caches(machine: ElementTree.Element) -> Iterator[Cache]:
    for each in machine.iter("object"):
        level = _index(each, "depth")
        if "Cache" not in each.get("type", "") or level is None:
            continue
        yield Cache(
            level=level,
            type=_CACHE_TYPES.get(each.get("cache_type", "")),
            size_bytes=_index(each, "cache_size") or None,
            line_bytes=_index(each, "cache_linesize") or None,
            shared_cpus=_cpuset(each.get("cpuset")),
        )


def _key(cache: Cache) -> tuple[int, ...]:
    return cache.shared_cpus or ()


def _numa_nodes(machine: ElementTree.Element, top: ElementTree.Element) -> tuple[NumaNode, ...]:
    distances = _matrices(top).get("NUMALatency", {})
    nodes = sorted(_objects(machine, "NUMANode"), key=lambda node: _index(node) or 0)
    numbers = [_index(node) for node in nodes]
    found = []
    for number, node in zip(numbers, nodes, strict=True):
        row = [distances.get((number, other)) for other in numbers]
        known = [int(each) for each in row if each is not None]
        found.append(
            NumaNode(
                id=number or 0,
                cpus=_cpuset(node.get("cpuset")) or (),
                memory_bytes=_index(node, "local_memory"),
                distances=tuple(known) if len(known) == len(row) else None,
            )
        )
    return tuple(found)


def _matrices(top: ElementTree.Element) -> dict[str, dict[tuple[int | None, int | None], float]]:
    """Returns the XML's matrices: name -> (index, index) -> value."""
    found: dict[str, dict[tuple[int | None, int | None], float]] = {}
    for each in (*top.iter("distances2"), *top.iter("distances2hetero")):
        # An index is "12", or "OSDev:12" in a matrix of objects of several types.
        words = " ".join(part.text or "" for part in each.findall("indexes")).split()
        indexes = [int(word.rpartition(":")[2]) for word in words]
        numbers = " ".join(part.text or "" for part in each.findall("u64values")).split()
        if len(numbers) == len(indexes) ** 2:
            values = iter(map(float, numbers))
            found[each.get("name", "")] = {(a, b): next(values) for a in indexes for b in indexes}
    return found


def _gpus(
    machine: ElementTree.Element,
    top: ElementTree.Element,
    parents: dict[ElementTree.Element, ElementTree.Element],
) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    devices: list[Device] = []
    of_index: dict[int, str] = {}
    for card in _objects(machine, "PCIDev"):
        os_devices = [each for each in card.findall("object") if each.get("type") == "OSDev"]
        ours = [each for each in os_devices if each.get("subtype") in _LIBRARIES]
        if not ours and card.get("pci_type", "")[:4] not in _GPU_CLASSES:
            continue
        name = f"gpu{len(devices)}"
        told = {**_infos(card)}
        for each in ours:
            told |= _infos(each)
        for each in (card, *os_devices):
            index = _index(each, "gp_index")
            if index is not None:
                of_index[index] = name
        models = (told.get(key) for key in ("GPUModel", "CUDADeviceName", "PCIDevice"))
        device = Device(
            id=name,
            kind="gpu",
            name=next((model for model in models if model), None),
            bus_id=card.get("pci_busid"),
            numa_node=_node_of(card, parents),
        )
        devices.append(device)
    links = {}
    for matrix, kind in _PAIRS.items():
        for (a, b), megabytes in _matrices(top).get(matrix, {}).items():
            one, other = of_index.get(a or 0), of_index.get(b or 0)
            if one and other and one < other and megabytes > 0:
                gbps = Figure(value=megabytes / 1000, source=_SOURCE.id)
                links[one, other] = Link(a=one, b=other, kind=kind, bandwidth_gbps=gbps)
    return tuple(devices), tuple(links.values())


def _node_of(
    card: ElementTree.Element, parents: dict[ElementTree.Element, ElementTree.Element]
) -> int | None:
    """Returns the NUMA node that a card is attached to; None if it is attached to several."""
    above: ElementTree.Element | None = card
    while above is not None and not above.get("nodeset"):
        above = parents.get(above)
    found = None if above is None else _cpuset(above.get("nodeset"))
    return found[0] if found and len(found) == 1 else None
