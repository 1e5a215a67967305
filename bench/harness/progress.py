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
    """Shows a progress line below the printed lines, if `wanted` and `out` can draw one. Yields a
    function that sets its text.

    The line is redrawn only between sizes: a thread that redraws would disturb rank 0's figures.
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
