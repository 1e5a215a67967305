"""Shows what a run is doing, on one line of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kccl

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress(wanted: bool, sizes: int, out: Console) -> Iterator[Callable[[str], None]]:
    """Shows a progress line if `out` may draw one, below what is printed meanwhile. Yields the
    function that sets its text.

    The line is redrawn between sizes only: a redrawing thread would disturb rank 0's figures.
    """
    if not (wanted and kccl.screen.draws(out)):
        yield lambda what: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=sizes + 1, completed=-1)

        def show(what: str) -> None:
            bar.update(task, description=what, advance=1, refresh=True)

        yield show
