"""What all commands know about the window that they write to: is there one, how wide is it, may a
bar be drawn in it. Text is fitted to it: lines end between words, and keep their indent.
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
"""A window with fewer columns has texts below each other that stand side by side elsewhere."""
_LEAST_WIDTH = 20
# Columns of a table that goes to a file or a pipe.
_WIDE = 140


def __dir__() -> list[str]:
    return __all__


def columns_of(file: IO[str]) -> int | None:
    """Columns of the window that a file writes to, or COLUMNS; None where it is no terminal."""
    if not file.isatty():
        return None
    if given := _given_columns():
        return given
    try:
        found = os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):
        found = 0
    # A terminal that does not know its size says 0.
    return max(found or shutil.get_terminal_size().columns, _LEAST_WIDTH)


def width_of(file: IO[str], elsewhere: int) -> int:
    """Columns for a text in a file: those of its window, else COLUMNS, else `elsewhere`."""
    return columns_of(file) or _given_columns() or elsewhere


def _given_columns() -> int | None:
    columns = os.environ.get("COLUMNS", "")
    return max(int(columns), _LEAST_WIDTH) if columns.isdigit() and int(columns) > 0 else None


def console(
    file: IO[str] | None = None, *, is_quiet: bool = False, elsewhere: int = _WIDE
) -> "Console":
    """Returns what writes tables and lines to a file, as wide as its window. Only a terminal gets
    colours, and none where NO_COLOR is set or TERM is dumb.

    Args:
        file: Where to; None: standard output.
        is_quiet: Writes nothing.
        elsewhere: Columns where the file is no terminal and COLUMNS is not set.

    Raises:
        BrokenPipeError: By the console: the file's reader has left.
    """
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            # This raises instead of exiting, as rich does: measurements may have yet to be written.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        def show_cursor(self, show: bool = True) -> bool:
            # A bar hides the cursor, and a command that is killed could not show it again.
            return False

    file = sys.stdout if file is None else file
    made = Plain(file=file, highlight=False, markup=False, emoji=False, quiet=is_quiet)
    made.size = made.size._replace(width=width_of(file, elsewhere))
    return made


def draws(out: "Console") -> bool:
    """Tells whether a bar or another line that is redrawn may be shown: on a terminal that can move
    its cursor, and that no other rank of a job writes to.
    """
    if not out.is_terminal or out.is_dumb_terminal or out.quiet:
        return False
    return not launchers.is_one_of_several(os.environ)


def say(out: "Console", text: str, style: str | None = None, hanging: int = 2) -> None:
    """Prints lines. Only a terminal's window breaks them, as fitted() does: others may be searched
    by line.
    """
    if out.is_terminal:
        text = _broken(text, out.width, hanging)
    out.print(text, style=style, soft_wrap=True)


def fitted(text: str, file: IO[str], hanging: int = 0) -> str:
    """Returns the text as a file should get it: as it is, or for a terminal with each line broken
    between words. The lines that follow are indented by the line's own indent and `hanging` more.
    """
    columns = columns_of(file)
    return text if columns is None else _broken(text, columns, hanging)


def _broken(text: str, columns: int, hanging: int) -> str:
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
