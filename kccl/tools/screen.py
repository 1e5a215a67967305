"""Fits text to the window: lines end between words, and keep their indent."""

import os
import shutil
import textwrap
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

NARROW = 60
"""A window with fewer columns has texts below each other that stand side by side elsewhere."""
_LEAST_WIDTH = 20
# Columns of a table that goes to a file or a pipe.
_WIDE = 140


def columns_of(file: TextIO) -> int | None:
    """Columns of the window that a file writes to, or COLUMNS; None where it is no terminal."""
    if not file.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return max(int(columns), _LEAST_WIDTH)
    try:
        found = os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):
        found = 0
    # A terminal that does not know its size says 0.
    return max(found or shutil.get_terminal_size().columns, _LEAST_WIDTH)


def console(file: TextIO) -> "Console":
    """What writes tables to a file, as wide as its window."""
    from rich.console import Console

    made = Console(file=file, highlight=False, markup=False, emoji=False)
    made.size = made.size._replace(width=columns_of(file) or _WIDE)
    # A bar hides the cursor, and a command that is killed could not show it again.
    setattr(made, "show_cursor", lambda show=True: False)  # noqa: B010
    return made


def fitted(text: str, file: TextIO, hanging: int = 0) -> str:
    """The text as a file should get it: as it is, or for a terminal with each line broken between
    words. The lines that follow are indented by the line's own indent and `hanging` more.
    """
    columns = columns_of(file)
    if columns is None:
        return text
    lines = text.split("\n")
    return "\n".join(wrapped(line, columns, hanging) if line else line for line in lines)


def wrapped(line: str, width: int, hanging: int = 0) -> str:
    """One line, broken between words so that no part is longer than the width, where that can be.
    The parts behind the first have the line's indent and `hanging` blanks more.
    """
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return "\n".join(
        textwrap.wrap(
            line.strip(),
            width,
            initial_indent=indent,
            subsequent_indent=indent + " " * hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
