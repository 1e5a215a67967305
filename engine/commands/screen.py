"""What `kccl generate` shows beside the answer, on stderr: a bar, notices, the speed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kccl

from ..api import Engine

if TYPE_CHECKING:
    from rich.console import Console

# Columns of "1000.0/1000.0 MB", of blanks, and of a ^C.
_AROUND_BAR = 16 + 2 + 3

INTERRUPTED = "interrupted"
"""The end of an answer that Ctrl-C ended."""


def console(*, is_quiet: bool) -> "Console":
    """What writes to stderr."""
    return kccl.screen.console(sys.stderr, is_quiet=is_quiet)


def tell(screen: "Console", text: str) -> None:
    """Prints a line, which only a terminal's window may break."""
    kccl.screen.say(screen, text, "dim")


def bound(engine: Engine, num_prompt: int, times: list[float]) -> str:
    """What the speed of an answer of several tokens is worth: its share of what the memory allows.
    If caches hold the weights, that says nothing, and their size is told. Collective: measures the
    memory, which takes longer than somebody waits who has typed Ctrl-C.

    Args:
        engine: What answered.
        num_prompt: Tokens of the prompt.
        times: When each token of the answer came.
    """
    weights, caches = engine.weight_bytes(), engine.cache_bytes()
    if weights <= caches:
        return f"with all weights ({weights / 1e6:.0f} MB) in the caches ({caches / 1e6:.0f} MB)"
    most = engine.bandwidth() / engine.bytes_per_token(num_prompt + len(times) // 2)
    return f"{_rate(times) / most:.0%} of what the memory allows"


def summary(
    engine: Engine,
    num_prompt: int,
    times: list[float],
    began: float,
    end: str,
    worth: str,
) -> str:
    """How much was answered, and how fast.

    Args:
        engine: What answered.
        num_prompt: Tokens of the prompt.
        times: When each token of the answer came.
        began: When the prompt was given; both by time.monotonic().
        end: As Piece.end, or INTERRUPTED.
        worth: By bound(); "" if that is not known.
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
    return "; ".join(parts)


def _rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


@contextmanager
def progress(screen: "Console") -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal while the weights are packed; nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    # Room is left for the ^C that the terminal may print behind it.
    words = "reading the model" if screen.width >= kccl.screen.NARROW else "reading"
    bar_width = max(1, min(40, screen.width - len(words) - _AROUND_BAR))
    columns = (TextColumn(words), BarColumn(bar_width), DownloadColumn())
    is_hidden = not kccl.screen.draws(screen)
    with Progress(*columns, console=screen, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("", total=None)

        def told(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield told
