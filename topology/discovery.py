"""Describes a machine, from its sysfs and procfs or from the records in machines/."""

from __future__ import annotations

import os
from pathlib import Path

from .files import number, numbered, text
from .model import Cache, Cpu, Machine, NumaNode

# On Arm /proc/cpuinfo has no model name, only (implementer, part). These are the server cores.
_ARM_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
}


_RECORDS = Path(__file__).parent / "machines"


def discover(root: str | os.PathLike[str] = "/") -> Machine:
    """Describe the machine whose sysfs and procfs are under a root.

    Args:
        root: Folder that holds `sys` and `proc`. With "/", the allowed CPUs are the calling
            thread's affinity mask. Otherwise `proc/self/status` gives them.

    Returns:
        The machine, without latencies. Fields that cannot be read are None, but `cpus`, `caches`
        and `numa_nodes` are empty tuples then.
    """
    base = Path(root)
    system = base / "sys/devices/system"
    cpuinfo = _cpuinfo(base)
    numa_nodes = _numa_nodes(system / "node")
    numa_of = {cpu: node.id for node in numa_nodes for cpu in node.cpus}
    online = _online(system / "cpu", cpuinfo)
    return Machine(
        cpu_model=_cpu_model(cpuinfo),
        architecture=_architecture(base),
        kernel=text(base / "proc/sys/kernel/osrelease"),
        cpus=tuple(_cpu(system / "cpu", cpu, numa_of.get(cpu)) for cpu in online),
        allowed_cpus=_allowed(base),
        caches=_caches(system / "cpu", online),
        numa_nodes=numa_nodes,
        memory_bytes=_mem_total(base / "proc/meminfo"),
    )


def recorded() -> dict[str, Machine]:
    """Return the machines recorded with this package, by file name without suffix."""
    return {
        name: Machine.from_json((_RECORDS / f"{name}.json").read_text("utf-8"))
        for name in recorded_names()
    }


def recorded_names() -> list[str]:
    """Return the names of recorded(), without reading the machines."""
    return sorted(path.stem for path in _RECORDS.glob("*.json"))


def _is_live(base: Path) -> bool:
    return base.resolve() == Path("/")


def _online(folder: Path, cpuinfo: list[dict[str, str]]) -> tuple[int, ...]:
    online = _id_list(folder / "online")
    if online:
        return online
    # Some containers and jails hide the list of online CPUs. Then the CPUs with a cpuN folder are
    # taken, or else those in /proc/cpuinfo.
    found = [cpu for cpu, path in numbered(folder, "cpu") if text(path / "online") != "0"]
    if not found:
        found = [int(entry["processor"]) for entry in cpuinfo if entry["processor"].isdecimal()]
    return tuple(sorted(found))


def _allowed(base: Path) -> tuple[int, ...] | None:
    if _is_live(base) and hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    for line in (text(base / "proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            return _parse_id_list(value)
    return None


def _cpu(folder: Path, cpu: int, numa_node: int | None) -> Cpu:
    topology = folder / f"cpu{cpu}" / "topology"
    siblings = _id_list(topology / "core_cpus_list")  # since Linux 5.3
    if siblings is None:
        siblings = _id_list(topology / "thread_siblings_list")
    return Cpu(
        id=cpu,
        core_id=number(topology / "core_id"),
        package=number(topology / "physical_package_id"),
        numa_node=numa_node,
        smt_siblings=siblings,
    )


def _caches(folder: Path, online: tuple[int, ...]) -> tuple[Cache, ...]:
    # A shared cache is listed under each of its CPUs. The set keeps it once.
    caches: set[Cache] = set()
    for cpu in online:
        for _, path in numbered(folder / f"cpu{cpu}" / "cache", "index"):
            level = number(path / "level")
            kind = text(path / "type")
            if level is not None:
                caches.add(
                    Cache(
                        level=level,
                        type=kind.lower() if kind else None,
                        size_bytes=_parse_size(text(path / "size")),
                        line_bytes=number(path / "coherency_line_size"),
                        shared_cpus=_id_list(path / "shared_cpu_list"),
                    )
                )
    return tuple(sorted(caches, key=lambda c: (c.level, c.type or "", c.shared_cpus or ())))


def _numa_nodes(folder: Path) -> tuple[NumaNode, ...]:
    found = numbered(folder, "node")
    nodes = []
    for node, path in found:
        words = (text(path / "distance") or "").split()
        distances = tuple(int(word) for word in words if word.isdecimal())
        nodes.append(
            NumaNode(
                id=node,
                cpus=_id_list(path / "cpulist") or (),
                memory_bytes=_mem_total(path / "meminfo"),
                # A list of another length cannot be matched to node ids, so it is dropped.
                distances=distances if len(distances) == len(found) else None,
            )
        )
    return tuple(nodes)


def _cpuinfo(base: Path) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = []
    for line in (text(base / "proc/cpuinfo") or "").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "processor":
            entries.append({})
        if key and entries:
            entries[-1][key] = value
    return entries


def _cpu_model(cpuinfo: list[dict[str, str]]) -> str | None:
    first = cpuinfo[0] if cpuinfo else {}
    for key in ("model name", "cpu", "uarch"):  # x86, POWER, RISC-V
        if first.get(key):
            return " ".join(first[key].split())
    implementer, part = first.get("CPU implementer"), first.get("CPU part")
    if implementer and part:
        return _ARM_PARTS.get((implementer, part), f"Arm implementer {implementer} part {part}")
    return None


def _architecture(base: Path) -> str | None:
    # Kernels before 6.1 do not have this file. uname() describes only the running machine, so it is
    # asked only if `base` is its root.
    found = text(base / "proc/sys/kernel/arch")
    return os.uname().machine if found is None and _is_live(base) else found


def _mem_total(path: Path) -> int | None:
    # "MemTotal:  4810968 kB" in procfs, "Node 0 MemTotal:  4810968 kB" in sysfs; kB means KiB.
    for line in (text(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.split()[-1:] == ["MemTotal"] and value.split()[:1]:
            number = value.split()[0]
            return int(number) * 1024 if number.isdecimal() else None
    return None


def _id_list(path: Path) -> tuple[int, ...] | None:
    listed = text(path)
    return None if listed is None else _parse_id_list(listed)


def _parse_id_list(text: str) -> tuple[int, ...] | None:
    """Parse the kernel's list format: "0-3,8" is (0, 1, 2, 3, 8)."""
    ids: list[int] = []
    try:
        for part in text.strip().split(","):
            first, dash, last = part.partition("-")
            ids.extend(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        return None
    return tuple(ids)


def _parse_size(text: str | None) -> int | None:
    """Parse a cache's size: "48K" is 49152 bytes."""
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get((text or "")[-1:], 1)
    number = (text or "").rstrip("KMG")
    return int(number) * unit if number.isdecimal() else None
