"""Defines the form of this package's tables, and how values are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

UNKNOWN = "unknown"
NARROW = 60
"""A window with fewer columns of characters is narrow."""
# A window of at least this many columns of characters shows all columns of a table.
_WIDEST = 100


@dataclass(frozen=True)
class Titled:
    """A table with a title above it.

    Attributes:
        title: The title. It is printed apart from the table, because rich's own titles wrap at the
            table's width.
        columns: The headings.
        rows: The cells.
        right: Headings of columns with numbers, which are aligned right and never wrapped.
        unbroken: Headings of further columns that are never wrapped. The first column is wrapped
            only in a narrow window, or if `wraps`.
        below: Heading of a column whose cells stand below those of the first column in a window of
            80 columns or fewer. In a narrow window the cells of `only_wide` stand there too, each
            behind its heading.
        wraps: Whether the first column has sentences, which are wrapped in any window.
        only_wide: Headings of columns that a narrow window has no room for.
        only_widest: Headings of columns that are also left out in a window of 80 columns.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    only_wide: Sequence[str] = ()
    only_widest: Sequence[str] = ()
    unbroken: Sequence[str] = ()
    below: str = ""
    wraps: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        is_narrow = options.max_width < NARROW
        is_below = self.below != "" and options.max_width < _WIDEST
        grid = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            show_header=any(self.columns),
            header_style="dim",
            padding=(0, 0 if is_narrow else 1),
        )
        shown = [
            at
            for at, column in enumerate(self.columns)
            if not (is_narrow and column in self.only_wide)
            and not (options.max_width < _WIDEST and column in self.only_widest)
            and not (is_below and column == self.below)
        ]
        for at in shown:
            column = self.columns[at]
            is_number = column in self.right
            is_name = at == 0 and not is_narrow and not self.wraps
            grid.add_column(
                column.replace(" ", "\n") if is_narrow else column,
                justify="right" if is_number else "left",
                no_wrap=is_number or column in self.unbroken or is_name,
                overflow="fold",
            )
        for row in self.rows:
            cells = [row[at] for at in shown if at < len(row)]
            if is_below:
                told = dict(zip(self.columns, row, strict=False))
                below = [told[self.below]]
                if is_narrow:
                    below.append(", ".join(f"{each} {told[each]}" for each in self.only_wide))
                width = options.max_width - 3 if is_narrow else options.max_width * 3 // 7
                lines = [
                    line for text in below for line in wrap(text, width, break_on_hyphens=False)
                ]
                cells[0] += "".join(f"\n  {line}" for line in lines)
            grid.add_row(*map(Text, cells))  # Text, since a name may have [markup]
        yield Text(self.title, "bold")
        yield grid
        yield ""


def known(value: str | int | None) -> str:
    """Returns a value as text, or UNKNOWN for None."""
    return UNKNOWN if value is None else str(value)


def size(num_bytes: float | None) -> str:
    """Returns a number of bytes as text, "2 MiB", or UNKNOWN for None."""
    if num_bytes is None:
        return UNKNOWN
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes} B"
