"""Processes that have ended and that their parent cannot wait for.

It can when the last thread is gone; one that a driver holds in the kernel goes late or never.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PF_EXITING = 4  # of the kernel's task flags


@dataclass(frozen=True)
class Thread:
    """A thread that is ending.

    Attributes:
        name: As the kernel cuts it.
        state: A letter, see proc(5).
        where: The kernel's function that it waits in; "?" where the kernel does not say.
    """

    name: str
    state: str
    where: str

    def __str__(self) -> str:
        return f"its thread {self.name!r} (state {self.state}, in {self.where})"


@dataclass(frozen=True)
class Remains:
    """What is left of a process.

    Attributes:
        status: As of waitpid().
        threads: Those that the kernel keeps.
    """

    status: int
    threads: Sequence[Thread]


def remains_of(pid: int, proc: Path = Path("/proc")) -> Remains | None:
    """What the kernel keeps of a process that has ended.

    Args:
        pid: Of the process.
        proc: Where proc(5) is mounted.

    Returns:
        None: A thread of it runs, or its parent can wait for it, or proc(5) does not show it.
    """
    threads = []
    try:
        _, _, of_all = _stat(proc / str(pid))
        for folder in sorted((proc / str(pid) / "task").iterdir()):
            state, flags, _ = _stat(folder)
            if not flags & _PF_EXITING:
                return None
            # The first thread is a zombie until all others have gone, and then for its parent.
            if folder.name != str(pid) or state != "Z":
                name, where = _read(folder / "comm"), _read(folder / "wchan")
                threads.append(Thread(name, state, where))
    except (OSError, IndexError, ValueError):
        # It has gone, or a thread of it meanwhile; or it is not shown to this user, or not so.
        return None
    return Remains(of_all, threads) if threads else None


def _stat(folder: Path) -> tuple[str, int, int]:
    """State, flags and exit status."""
    text = (folder / "stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[6]), int(fields[49])


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return "?"
