"""The command `kccl generate`: a model's answer, streamed, and how fast it came."""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import kccl

from .api import Engine
from .backends import BACKENDS
from .checkpoint import DTYPES
from .prompts import add_prompt_arguments, check_prompt_arguments, given_ids, prompt_of
from .sample import SamplingParams
from .tokenizer import check_utf8

if TYPE_CHECKING:
    from rich.console import Console

# Options that are fields of SamplingParams: (field, type, help).
_SAMPLING = (
    ("temperature", float, "divides the logits; 0: always the likeliest token (0)"),
    ("top_k", int, "only the k likeliest tokens; 0: all (0)"),
    ("top_p", float, "only the likeliest tokens up to this probability (1)"),
    ("min_p", float, "only tokens at least this likely, relative to the likeliest (0)"),
    ("repetition_penalty", float, "divides logits of tokens that were there before (1)"),
    ("seed", int, "of the choice, if the temperature is above 0 (0)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--model",
        default="bundled",
        metavar="M",
        help="bundled, smollm2, a folder in Hugging Face's layout, a GGUF file, or a repository "
        "in the hub's cache, as in Qwen/Qwen3-0.6B (bundled)",
    )
    add_prompt_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens (256)"
    )
    for name, kind, text in _SAMPLING:
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=kind, metavar="X", help=text)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable"
    )
    parser.add_argument(
        "--backend", default="host", choices=BACKENDS, help="what runs the model (host)"
    )
    parser.add_argument(
        "-n", type=int, metavar="RANKS", help="ranks as threads; in a job its processes (1)"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        metavar="N",
        help="threads of each rank, or blocks on its GPU (all cores)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens to make room for (the model's, at most 4096)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (as stored; on the host bfloat16)"
    )
    parser.add_argument("--quiet", action="store_true", help="print the answer only")


def main(args: argparse.Namespace) -> int:
    """Runs the command on every rank. Rank 0 prints: the answer to stdout, all else to stderr."""
    from rich.console import Console

    screen = Console(stderr=True, highlight=False, quiet=args.quiet)
    given = {name: getattr(args, name) for name, _, _ in _SAMPLING}
    params = {name: value for name, value in given.items() if value is not None}
    params |= {"max_tokens": args.max_tokens, "stop": tuple(args.stop)}
    # A wrong option is told before the model is read.
    SamplingParams(**params)
    check_prompt_arguments(args)
    ids = None if args.ids is None else given_ids(args.ids)
    prompt = args.prompt
    if ids is None and prompt is None and kccl.launched_rank() is None:
        prompt = _standard_input()
    if prompt is not None:
        _check_prompt(prompt)
    with _progress(screen) as tell:
        engine = Engine(
            args.model,
            args.backend,
            args.n,
            blocks=args.blocks,
            context=args.context,
            dtype=args.dtype,
            tokenizer=ids is None,
            progress=tell,
        )
    with engine:
        screen.quiet |= engine.rank != 0
        if ids is None and prompt is None:
            # The launcher gives its standard input to rank 0 only. All ranks refuse it together:
            # the others would wait in MPI's start for a rank 0 that has ended.
            prompt = engine.of_rank_0(None if engine.rank else _standard_input())
            _check_prompt(prompt)
        _tell_rounding(screen, engine)
        is_text = ids is None
        if ids is None:
            ids = prompt_of(engine.tokenizer, prompt, args)
        began = time.monotonic()
        times: list[float] = []
        end = ""
        for piece in engine.stream(ids, **params):
            times.append(time.monotonic())
            end = piece.end
            _write(engine, piece.text if is_text else f"{' ' if len(times) > 1 else ''}{piece.id}")
        _write(engine, "\n")
        summary = _summary(engine, ids, times, began, end)
        screen.print(summary, style="dim", soft_wrap=True)
    return 0


def _tell_rounding(screen: "Console", engine: Engine) -> None:
    """Says so if the weights are not used as they are stored."""
    names = {"float16": "F16", "bfloat16": "BF16"}
    if engine.stored != (names[engine.dtype],):
        stored = ", ".join(engine.stored)
        screen.print(f"weights are rounded from {stored} to {engine.dtype}", style="dim")


def _standard_input() -> str:
    """Bytes that are no UTF-8 become characters that it cannot encode, as in an argument."""
    return sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")


def _check_prompt(prompt: str) -> None:
    if not prompt:
        raise kccl.InvalidArgument("the prompt is empty")
    check_utf8(prompt)


def _write(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


def _summary(engine: Engine, ids: list[int], times: list[float], began: float, end: str) -> str:
    ranks = f"{engine.world_size} rank{'s' if engine.world_size > 1 else ''}"
    parts = [f"{len(ids)} tokens of prompt, {len(times)} of answer ({end}), {ranks}"]
    if times:
        parts.append(f"first token after {times[0] - began:.3g} s")
    if len(times) > 1:
        rate = (len(times) - 1) / (times[-1] - times[0])
        middle = len(ids) + len(times) // 2
        bound = engine.bandwidth() / engine.bytes_per_token(middle)
        parts.append(f"{rate:.0f} tok/s, {rate / bound:.0%} of what the memory allows")
    return "; ".join(parts)


@contextmanager
def _progress(screen: "Console") -> Iterator[Any]:
    """A bar on a terminal while the weights are packed; nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("reading the model"), BarColumn(), DownloadColumn())
    is_shown = screen.is_terminal and not screen.quiet
    with Progress(*columns, console=screen, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("", total=math.inf)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield tell
