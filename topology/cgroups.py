"""Finds the cgroups that limit this process, in cgroup v2 and v1."""

from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


def folders(controller: str) -> list[Path]:
    """Returns the folders of this process's cgroup and of those above it, for one controller.

    In cgroup v2 all controllers share the folders, and the file of a limit may be missing. The list
    is empty if /proc/self/cgroup cannot be read.

    Args:
        controller: "cpu" or "memory".
    """
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # no /proc, or this process may open no more files
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [_MOUNT, _MOUNT / "unified"]
        elif controller in controllers.split(","):
            roots = [_MOUNT / controller, _MOUNT / controllers]
        else:
            continue
        for root in roots:
            own = root / path.lstrip("/")
            found += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return list(dict.fromkeys(found))
