"""The command `kccl generate`: a model's answer, streamed, and how fast it came."""

import argparse
import os
import sys
import time
from contextlib import closing

import kccl

from . import screen
from .api import Engine
from .executors.executor import EndedElsewhere
from .options import add_arguments, sampling
from .prompts import check_prompt_arguments, given_ids, prompt_of
from .tokenizer import check_utf8

__all__ = ["add_arguments", "main"]

# As a shell says of a command that Ctrl-C ended.
_INTERRUPTED = 130
# Those of the command `kccl` where standard output fails.
_FAILED, _BROKEN_PIPE = 1, 141


def main(args: argparse.Namespace) -> int:
    """Runs the command on every rank. Rank 0 prints: the answer to stdout, all else to stderr.

    Returns:
        The exit code: 130 after Ctrl-C.
    """
    # Ranks other than 0 draw no bar either.
    console = screen.console(is_quiet=args.quiet or bool(kccl.launched_rank()))
    # A wrong option is told before the model is read.
    params = sampling(args)
    check_prompt_arguments(args)
    ids = None if args.ids is None else given_ids(args.ids)
    prompt = args.prompt
    if ids is None and prompt is None and not kccl.launched_rank():
        _tell_what_is_awaited()
    if ids is None and prompt is None and kccl.launched_rank() is None:
        prompt = _standard_input()
    if prompt is not None:
        _check_prompt(prompt)
    with screen.progress(console) as tell:
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
        console.quiet |= engine.rank != 0
        if ids is None and prompt is None:
            # The launcher gives its standard input to rank 0 only. All ranks refuse it together:
            # the others would wait in MPI's start for a rank 0 that has ended.
            prompt = engine.of_rank_0(None if engine.rank else _standard_input())
            _check_prompt(prompt)
        for notice in engine.notices:
            screen.tell(console, notice)
        is_text = ids is None
        if ids is None:
            ids = prompt_of(engine.tokenizer, prompt, args)
        began = time.monotonic()
        times: list[float] = []
        end = ""
        failed: OSError | None = None
        try:
            with closing(engine.stream(ids, **params)) as pieces:
                for piece in pieces:
                    between = " " if times else ""
                    times.append(time.monotonic())
                    end = piece.end
                    _write(engine, piece.text if is_text else f"{between}{piece.id}")
        except KeyboardInterrupt:
            end = screen.INTERRUPTED
        except EndedElsewhere:
            # Rank 0 tells below why it did.
            if engine.rank == 0:
                raise
        except OSError as error:
            if isinstance(error, kccl.Error):
                raise
            failed = error
        is_interrupted, share = end == screen.INTERRUPTED, None
        try:
            if failed is None:
                try:
                    _write(engine, "\n")
                except OSError as error:
                    failed = error
            if not is_interrupted:
                code = _BROKEN_PIPE if isinstance(failed, BrokenPipeError) else _FAILED
                # Where rank 0 cannot write, the others end without a word.
                if (code := engine.of_rank_0(code if failed else 0)) and engine.rank != 0:
                    return int(code)
            # All ranks measure, or none.
            if failed is None and len(times) > 1 and not is_interrupted and not args.quiet:
                share = screen.share_of_bound(engine, len(ids), times)
        except KeyboardInterrupt:
            # The answer is there: its line follows all the same.
            is_interrupted = True
        if failed is not None:
            raise failed
        screen.tell(console, screen.summary(engine, len(ids), times, began, end, share))
    return _INTERRUPTED if is_interrupted else 0


def _tell_what_is_awaited() -> None:
    """Says on a terminal that the command waits for somebody to type."""
    if os.isatty(0):
        sys.stderr.write("type the prompt, then Enter and Ctrl-D\n")
        sys.stderr.flush()


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
