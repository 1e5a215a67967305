"""Shows on stderr what accompanies an answer of `kccl generate`: a progress bar, notices, the
speed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kccl

from ..api import Engine

if TYPE_CHECKING:
    from rich.console import Console

# The columns that the text beside the bar needs: "1000.0/1000.0 MB", blanks, and a ^C.
_AROUND_BAR = 16 + 2 + 3

INTERRUPTED = "interrupted"
"""The end of an answer that Ctrl-C ended."""


def console(*, is_quiet: bool) -> "Console":
    """Returns a function that writes to stderr."""
    return kccl.screen.console(sys.stderr, is_quiet=is_quiet)


def tell(screen: "Console", text: str) -> None:
    """Prints a line without breaks of its own."""
    kccl.screen.say(screen, text, "dim")


def bound(engine: Engine, num_prompt: int, times: list[float]) -> str:
    """Returns the speed of an answer of several tokens as a share of what the memory allows. If
    caches hold the weights, it returns their size instead, because the share says nothing then.
    Collective. It measures the memory, which takes too long for somebody who has typed Ctrl-C.

    Args:
        engine: The engine that answered.
        num_prompt: Tokens of the prompt.
        times: When each token of the answer came.
    """
    weights, caches = engine.weight_bytes(), engine.cache_bytes()
    if weights <= caches:
        return f"with all weights ({weights / 1e6:.0f} MB) in the caches ({caches / 1e6:.0f} MB)"
    most = engine.bandwidth() / engine.bytes_per_token(num_prompt + len(times) // 2)
    share = f"{_rate(times) / most:.0%} of what the memory allows"
    # A pass reads the weights once for several tokens, so drafts may give more than that.
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
        times: When each token of the answer came.
        began: When the prompt was given; both by time.monotonic().
        end: The answer's Piece.end, or INTERRUPTED.
        worth: The text from bound(); "" if it is not known.
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
    if engine.drafted.proposed:
        parts.append(f"{engine.drafted.accepted} of {engine.drafted.proposed} drafts accepted")
    return "; ".join(parts)


def _rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


@contextmanager
def progress(screen: "Console") -> Iterator[Callable[[int, int], None]]:
    """Draws a bar on a terminal while the weights are packed. Elsewhere it draws nothing."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    # The bar leaves room for the ^C that a terminal may print behind it.
    words = "reading the model" if screen.width >= kccl.screen.NARROW else "reading"
    bar_width = max(1, min(40, screen.width - len(words) - _AROUND_BAR))
    columns = (TextColumn(words), BarColumn(bar_width), DownloadColumn())
    is_hidden = not kccl.screen.draws(screen)
    with Progress(*columns, console=screen, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("", total=None)

        def told(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield told
