"""Whether a bench fits into the machine's memory, asked before it begins."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# Of the second version of control groups, and of the first.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
# Of the check: the input, the result that is expected, and NumPy's intermediates in pieces.
_CHECK_ARRAYS = 2


def check_memory(nbytes: int, world_size: int, *, arrays: int) -> None:
    """Checks that messages of `nbytes` fit.

    Args:
        nbytes: The longest message in bytes.
        world_size: Number of ranks.
        arrays: How many arrays of that length each rank has, besides those of the check.

    Raises:
        ValueError: They need more memory than is available.
    """
    needed = nbytes * world_size * (arrays + _CHECK_ARRAYS)
    available = available_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"messages of {gigabytes(nbytes)} need {gigabytes(needed)} on {world_size} "
            f"rank{'s' if world_size > 1 else ''}, and {gigabytes(available)} of memory are "
            "available: measure smaller sizes"
        )


def available_bytes() -> int | None:
    """Bytes that processes may still take, by the kernel and by this one's group of processes;
    None where the system does not say.
    """
    found = []
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text("ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                found.append(int(value.split()[0]) << 10)
    for limit, used in _LIMITS:
        most, now = _number(_CGROUP / limit), _number(_CGROUP / used)
        if most is not None and now is not None:
            found.append(max(most - now, 0))
    return min(found, default=None)


def gigabytes(nbytes: int) -> str:
    """As in "1.5 GiB", and "12 MiB" below one."""
    if nbytes < 1 << 30:
        return f"{nbytes / (1 << 20):.0f} MiB"
    return f"{nbytes / (1 << 30):.1f} GiB"


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # "max" means none
        return None
