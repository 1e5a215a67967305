"""Reads small files of sysfs and procfs. What cannot be read is None."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def text(path: Path) -> str | None:
    """The text of a file without surrounding blanks; None if there is none."""
    try:
        return path.read_text("utf-8", errors="replace").strip() or None
    except OSError:
        return None


def number(path: Path) -> int | None:
    """The number that a file has; the kernel writes -1 for one that the firmware does not give."""
    found = text(path) or ""
    return int(found) if found.isascii() and found.isdecimal() else None


def numbered(folder: Path, prefix: str = "") -> list[tuple[int, Path]]:
    """(number, path) of the entries of a folder that are the prefix and a number, by number."""
    return sorted(
        (int(path.name.removeprefix(prefix)), path)
        for path in entries(folder)
        if path.name.startswith(prefix) and path.name.removeprefix(prefix).isdecimal()
    )


def entries(folder: Path) -> Iterator[Path]:
    """The entries of a folder; none if it cannot be read."""
    try:
        yield from folder.iterdir()
    except OSError:
        return
