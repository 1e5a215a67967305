"""Lays out tables that are printed line by line, with the columns that fit the screen.

Lines are printed when they are measured, before the widest cell is known. So each column has a
fixed width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        heading: Its name.
        width: Characters of a cell. A longer cell shifts the rest of its line.
        drop: On a narrow screen, columns with the highest number are dropped first. A column with 0
            is never dropped.
        is_label: Whether it names what the line is about. Labels come first.
        is_text: Whether it is aligned left, as labels are. Figures are aligned right.
    """

    heading: str
    width: int
    drop: int = 0
    is_label: bool = False
    is_text: bool = False


class Table:
    """The layout of a table on a screen of `width` characters.

    If labels and figures do not fit side by side, they are printed on two lines.

    Attributes:
        columns: The columns that are shown.
        dropped: Headings of the columns that are not shown.
    """

    def __init__(self, columns: Sequence[Column], width: int) -> None:
        self.columns = list(columns)
        self.dropped: list[str] = []
        labels = [column for column in columns if column.is_label]
        figures = [column for column in columns if not column.is_label]
        self._is_stacked = False
        while _width(self.columns) > width:
            least = max(self.columns, key=lambda column: column.drop)
            if least.drop == 0:
                self._is_stacked = bool(labels)
                break
            self.columns.remove(least)
            self.dropped.append(least.heading)
        if self._is_stacked:
            # Labels are on another line, so figures may use the whole width.
            kept = list(figures)
            while _width(kept) > width and max(column.drop for column in kept) > 0:
                kept.remove(max(kept, key=lambda column: column.drop))
            self.columns = [*labels, *kept]
            self.dropped = [column.heading for column in figures if column not in kept]

    def heading(self) -> list[str]:
        """Returns the lines above the table."""
        lines = self.lines({column.heading: column.heading for column in self.columns})
        return [*lines, "-" * max(map(len, lines))]

    def lines(self, cells: dict[str, str]) -> list[str]:
        """Returns the one or two lines for `cells`: heading -> text."""
        labels: list[str] = []
        figures: list[str] = []
        for column in self.columns:
            text = cells.get(column.heading, "")
            place = labels if column.is_label else figures
            is_left = column.is_label or column.is_text
            place.append(text.ljust(column.width) if is_left else text.rjust(column.width))
        if self._is_stacked:
            label = " ".join(text.strip() for text in labels if text.strip())
            return [*([label] if label else []), " ".join(figures).rstrip()]
        return [" ".join((*labels, *figures)).rstrip()]


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(columns) - 1
