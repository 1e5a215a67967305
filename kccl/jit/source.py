"""Reads the source of kernels, which a caller gives as a text or as the path of a file."""

import os
from pathlib import Path

from ..base.errors import InvalidArgument

# The suffixes of files with kernels, and of headers.
_SUFFIXES = (".cu", ".cuh", ".hip", ".cpp", ".cc", ".cxx", ".c", ".h", ".hpp", ".inc")
_LONGEST_PATH = 4096


def read_source(source: "str | os.PathLike[str]") -> tuple[str, str, list[Path]]:
    """Returns the text, its name in messages, and the file's folder, if it is a file.

    Args:
        source: A text as a str, or the path of a file as a Path.

    Raises:
        InvalidArgument: The file cannot be read. Or `source` is a str that looks like a path.
    """
    if isinstance(source, str):
        _check_text(source)
        return source, "source", []
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8"), str(path), [path.absolute().parent]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"source {path} cannot be read: {error}") from error


def _check_text(source: str) -> None:
    line = source.strip()
    # No path has a line feed or a zero byte, or is so long.
    if not line or "\n" in line or "\0" in line or len(line) > _LONGEST_PATH:
        return
    try:
        is_there = Path(line).is_file()
    # A part of the path is too long for a file's name, or cannot be encoded in this locale.
    except (OSError, UnicodeEncodeError):
        is_there = False
    if is_there or (line.endswith(_SUFFIXES) and len(line.split()) == 1):
        there = "" if is_there else " (no such file is there now)"
        raise InvalidArgument(
            f"source is {source!r}, which looks like a path{there}: a str is the text of a source; "
            f"for a file pass pathlib.Path({line!r})"
        )
