"""The cgroups that limit this process, in cgroup v2 and v1."""

from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


def folders(controller: str) -> list[Path]:
    """This process's cgroup and those above it that can limit something: "cpu" or "memory".

    In v2 all controllers share the folders; a limit is a file that may be missing. None where Linux
    does not tell the cgroup.
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
