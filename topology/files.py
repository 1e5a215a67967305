"""Reads small files of sysfs and procfs. Functions return None for a file that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def text(path: Path) -> str | None:
    """Returns the text of a file, stripped; None if it is empty or cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip() or None
    except OSError:
        return None


def number(path: Path) -> int | None:
    """Returns the number in a file; None if there is none, or it is -1, the kernel's "unknown"."""
    found = text(path) or ""
    return int(found) if found.isascii() and found.isdecimal() else None


def numbered(folder: Path, prefix: str = "") -> list[tuple[int, Path]]:
    """Returns (number, path) of a folder's entries that are named prefix + number, by number."""
    return sorted(
        (int(path.name.removeprefix(prefix)), path)
        for path in entries(folder)
        if path.name.startswith(prefix) and path.name.removeprefix(prefix).isdecimal()
    )


def entries(folder: Path) -> Iterator[Path]:
    """Yields the entries of a folder; none if it cannot be read."""
    try:
        yield from folder.iterdir()
    except OSError:
        return
