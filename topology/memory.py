"""Finds how much memory this process can still allocate, and which limits it has."""

import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .cgroups import folders

_LIMIT_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Counters of files in the page cache, which the kernel drops before it refuses memory.
_CACHED = ("inactive_file", "active_file")


@dataclass(frozen=True)
class Room:
    """The memory that one limit leaves to this process.

    Attributes:
        limit: The name of the limit, as in "this machine".
        nbytes: The bytes that it leaves.
        is_of_process: Whether it counts only this process, and not other processes, too.
        cure: How to get more.
        is_private: Whether it counts only a process's private memory, and no shared memory.
        counts_mapped: Whether it counts files that the process maps.
        promised: Bytes of `nbytes` that windows will take when they are written. It is always 0 in
            topology.memory_room(). kccl.memory_room() sets it.
    """

    limit: str
    nbytes: int
    is_of_process: bool
    cure: str
    is_private: bool = False
    counts_mapped: bool = False
    promised: int = 0

    @property
    def free(self) -> int:
        """The bytes that are left after `promised`."""
        return max(self.nbytes - self.promised, 0)


def memory_room() -> list[Room]:
    """Returns the room under each memory limit of this process that Linux reports."""
    return [*_of_machine(), *_of_cgroups(), *_of_process()]


def _of_machine() -> Iterator[Room]:
    kib = {line.split(":")[0]: int(line.split()[1]) for line in _lines(Path("/proc/meminfo"))}
    if "MemAvailable" in kib:
        nbytes = (kib["MemAvailable"] + kib.get("SwapFree", 0)) * 1024
        yield Room("this machine", nbytes, False, "end other programs")


def _of_cgroups() -> Iterator[Room]:
    for folder in folders("memory"):
        for limit_file, usage_file in _LIMIT_FILES:
            with suppress(OSError, ValueError):
                # Skips a file with "max", which means no limit: int() raises ValueError.
                most = int((folder / limit_file).read_text())
                used = int((folder / usage_file).read_text())
                stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                # cgroup v1 also has total_* counters, which include the cgroups below this one, as
                # the limit does. In v2 the counters without "total_" include them.
                totals = [int(stat[f"total_{name}"]) for name in _CACHED if f"total_{name}" in stat]
                cached = totals or [int(stat[name]) for name in _CACHED if name in stat]
                room = max(0, most - used + sum(cached))
                cure = "raise the memory limit of the container or job"
                yield Room(f"the cgroup {folder.name or '/'}", room, False, cure)


def _of_process() -> Iterator[Room]:
    pages = [int(number) for line in _lines(Path("/proc/self/statm")) for number in line.split()]
    # statm's first number is the address space, and the sixth is data and stacks, both in pages.
    used = {"RLIMIT_AS": pages[0], "RLIMIT_DATA": pages[5]} if len(pages) > 5 else {}
    for name, option in (("RLIMIT_AS", "v"), ("RLIMIT_DATA", "d")):
        most, _ = resource.getrlimit(getattr(resource, name))
        if most != resource.RLIM_INFINITY and name in used:
            room = max(0, most - used[name] * resource.getpagesize())
            cure = f"raise it, as by `ulimit -{option} unlimited`"
            limit = f"the limit {name} (ulimit -{option})"
            kinds = {"is_private": name == "RLIMIT_DATA", "counts_mapped": name == "RLIMIT_AS"}
            yield Room(limit, room, True, cure, **kinds)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
