"""Finds the width of the terminal that commands write to, and whether a progress bar may be drawn.
Wraps text to that width, between words and with the line's indent.
"""

import errno
import os
import shutil
import sys
import textwrap
from typing import IO, TYPE_CHECKING

from ..ranks import launchers

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["NARROW", "columns_of", "console", "draws", "fitted", "say", "width_of", "wrapped"]

NARROW = 60
"""In a window with fewer columns, texts are printed below each other instead of side by side."""
_LEAST_WIDTH = 20
# The width in columns of a table that goes to a file or a pipe.
_WIDE = 140


def __dir__() -> list[str]:
    return __all__


def columns_of(file: IO[str]) -> int | None:
    """Returns the width of the terminal that a file writes to, or of COLUMNS if it is set.

    Returns None if the file is no terminal.
    """
    if not file.isatty():
        return None
    if given := _given_columns():
        return given
    try:
        found = os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):
        found = 0
    # A terminal that does not know its size reports 0.
    return max(found or shutil.get_terminal_size().columns, _LEAST_WIDTH)


def width_of(file: IO[str], elsewhere: int) -> int:
    """Returns the width for text in a file: that of its terminal, or COLUMNS, or `elsewhere`."""
    return columns_of(file) or _given_columns() or elsewhere


def _given_columns() -> int | None:
    columns = os.environ.get("COLUMNS", "")
    return max(int(columns), _LEAST_WIDTH) if columns.isdigit() and int(columns) > 0 else None


def console(
    file: IO[str] | None = None, *, is_quiet: bool = False, elsewhere: int = _WIDE
) -> "Console":
    """Returns a rich console that writes to a file, as wide as its terminal. It writes colours only
    to a terminal, and not if NO_COLOR is set or TERM is dumb.

    Printing to the console raises BrokenPipeError if the file's reader has left.

    Args:
        file: The file; None for standard output.
        is_quiet: Whether the console writes nothing.
        elsewhere: The width if the file is no terminal and COLUMNS is not set.
    """
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            # rich would exit the process here, but measurements may still have to be written.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        def show_cursor(self, show: bool = True) -> bool:
            # Never hides the cursor for a bar, because a command that is killed could not show it
            # again.
            return False

    file = sys.stdout if file is None else file
    made = Plain(file=file, highlight=False, markup=False, emoji=False, quiet=is_quiet)
    made.size = made.size._replace(width=width_of(file, elsewhere))
    return made


def draws(out: "Console") -> bool:
    """Tells whether a bar, or another line that is redrawn, may be shown.

    It may on a terminal that can move its cursor, if no other rank of a job writes to it.
    """
    if not out.is_terminal or out.is_dumb_terminal or out.quiet:
        return False
    return not launchers.is_one_of_several(os.environ)


def say(out: "Console", text: str, style: str | None = None, hanging: int = 2) -> None:
    """Prints lines. Wraps them, as fitted() does, only on a terminal, because a file may be
    searched line by line.
    """
    if out.is_terminal:
        text = _broken(text, out.width, hanging)
    out.print(text, style=style, soft_wrap=True)


def fitted(text: str, file: IO[str], hanging: int = 0) -> str:
    """Returns the text. If the file is a terminal, wraps each line between words to its width.

    Continuation lines are indented by the line's own indent and `hanging` more.
    """
    columns = columns_of(file)
    return text if columns is None else _broken(text, columns, hanging)


def _broken(text: str, columns: int, hanging: int) -> str:
    lines = text.split("\n")
    return "\n".join(wrapped(line, columns, hanging) if line else line for line in lines)


def wrapped(line: str, width: int, hanging: int = 0) -> str:
    """Returns one line, wrapped between words to the width. Words longer than it are not broken.

    Continuation lines are indented by the line's indent and `hanging` more.
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
