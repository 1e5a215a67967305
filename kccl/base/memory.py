"""How much memory this machine can still give to this process."""

from pathlib import Path

from .errors import BackendError

_CGROUPS = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available() -> tuple[int, str] | None:
    """Bytes that can still be used, and what limits them; None where nothing says so.

    The limits are the machine's available memory, and what the process's control groups leave.
    """
    found = []
    machine = {line.split(":")[0]: line.split()[1] for line in _lines(Path("/proc/meminfo"))}
    if "MemAvailable" in machine:
        free_kib = int(machine["MemAvailable"]) + int(machine.get("SwapFree", 0))
        found.append((free_kib * 1024, "MemAvailable and SwapFree of /proc/meminfo"))
    for folder in _folders():
        for limit, usage in _FILES:
            most, used = (_number(folder / name) for name in (limit, usage))
            if most is not None and used is not None:
                found.append((max(most - used + _reclaimable(folder), 0), str(folder / limit)))
    return min(found, default=None)


def check_room(nbytes: int, count: int) -> None:
    """Checks that memory of `nbytes` bytes on each of `count` ranks of this machine can be used.

    Memory is taken when it is written first. Where there is too little, the write would be the end
    of the process.

    Raises:
        BackendError: There is too little memory.
    """
    room = available()
    if room is not None and nbytes * count > room[0]:
        each = f" on each of {count} ranks" if count > 1 else ""
        raise BackendError(
            f"{nbytes} bytes{each} are more than the {room[0]} bytes of memory that are available "
            f"({room[1]})"
        )


def _folders() -> list[Path]:
    """The folders of this process's control groups and of those around them."""
    found = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        # Within a container the path may be the host's, and its own group is the root.
        folder = root / path.lstrip("/")
        found += [each for each in (folder, *folder.parents) if each.is_relative_to(root)]
        found.append(root)
    return list(dict.fromkeys(found))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as in "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    """Bytes of files in a group's usage that the system takes back when memory is needed."""
    names = {"inactive_file", "total_inactive_file"}
    stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
    return max((int(stat[name]) for name in names & stat.keys()), default=0)
