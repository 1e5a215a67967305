"""Prints to stderr what commands show beside an answer: a progress bar, notices, and the speed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kccl

from ..api import Engine

if TYPE_CHECKING:
    from rich.console import Console

# The columns that the screen needs beside the bar and its title: 16 for "1000.0/1000.0 MB", 2
# blanks, and 3 for "^C".
_AROUND_BAR = 16 + 2 + 3

INTERRUPTED = "interrupted"
"""What commands show in place of Piece.end if Ctrl-C interrupted the answer."""


def console(*, is_quiet: bool) -> "Console":
    """Returns a Console that writes to stderr. If is_quiet, it writes nothing."""
    return kccl.screen.console(sys.stderr, is_quiet=is_quiet)


def tell(screen: "Console", text: str) -> None:
    """Prints a line in dim colour."""
    kccl.screen.say(screen, text, "dim")


def bound(engine: Engine, num_prompt: int, times: list[float]) -> str:
    """Returns a text that compares an answer's speed with the speed that the memory's bandwidth
    allows. If the caches hold all weights, that bandwidth is no bound, and the text gives the two
    sizes instead. Collective: all ranks must call it. It measures the bandwidth, which takes some
    time, so it must not be called after Ctrl-C.

    Args:
        engine: The engine that answered.
        num_prompt: The number of the prompt's tokens.
        times: When each token of the answer came, in seconds: at least two times.
    """
    weights, caches = engine.weight_bytes(), engine.cache_bytes()
    if weights <= caches:
        return f"with all weights ({weights / 1e6:.0f} MB) in the caches ({caches / 1e6:.0f} MB)"
    most = engine.bandwidth() / engine.bytes_per_token(num_prompt + len(times) // 2)
    share = f"{_rate(times) / most:.0%} of what the memory allows"
    # The bound is the speed at which each token takes one pass over the weights. With drafts a pass
    # may make several tokens, so the share may exceed 100 %.
    return f"{share} without drafts" if engine.drafted.proposed else share


def summary(
    engine: Engine,
    num_prompt: int,
    times: list[float],
    began: float,
    end: str,
    worth: str,
) -> str:
    """Returns a line with the number of tokens and their speed.

    Args:
        engine: The engine that answered.
        num_prompt: Tokens of the prompt.
        times: When each token of the answer came, in seconds of time.monotonic().
        began: When the prompt was given, in seconds of time.monotonic().
        end: The answer's Piece.end, or INTERRUPTED.
        worth: The text from bound(). "" if bound() was not called.
    """
    ranks = f"{engine.world_size} rank{'s' if engine.world_size > 1 else ''}"
    parts = [f"{num_prompt} tokens of prompt, {len(times)} of answer ({end}), {ranks}"]
    if engine.params.temperature > 0:
        parts.append(f"seed {engine.params.seed}")
    if times:
        parts.append(f"first token after {times[0] - began:.3g} s")
    if len(times) > 1:
        rate = _rate(times)
        speed = f"{rate:.0f} tok/s" if rate >= 10 else f"{rate:.2g} tok/s"
        parts.append(f"{speed}, {worth}" if worth else speed)
    if told := accepted(engine):
        parts.append(told)
    return "; ".join(parts)


def accepted(engine: Engine) -> str:
    """Tells how many drafts of the newest answer were accepted. Returns "" if there were none."""
    drafted = engine.drafted
    return f"{drafted.accepted} of {drafted.proposed} drafts accepted" if drafted.proposed else ""


def _rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


@contextmanager
def progress(screen: "Console") -> Iterator[Callable[[int, int], None]]:
    """Makes a context with a progress bar on a terminal, for the time in which weights are packed.
    Yields the function to call with the bytes that are packed and their total. Elsewhere it draws
    nothing.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    # A terminal may print "^C" after the bar, so the bar leaves room for that.
    words = "reading the model" if screen.width >= kccl.screen.NARROW else "reading"
    bar_width = max(1, min(40, screen.width - len(words) - _AROUND_BAR))
    columns = (TextColumn(words), BarColumn(bar_width), DownloadColumn())
    is_hidden = not kccl.screen.draws(screen)
    with Progress(*columns, console=screen, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("", total=None)

        def told(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield told
