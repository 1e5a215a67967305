"""The command `kccl generate`: a model's answer, streamed, and how fast it came."""

import argparse
import sys
import time
from contextlib import closing

import kccl

from .api import Engine
from .commands import screen
from .commands.asked import ask
from .commands.options import add_arguments
from .model.executor import EndedElsewhere

__all__ = ["add_arguments", "main"]

# As a shell says of a command that Ctrl-C ended.
_INTERRUPTED = 130
# Those of the command `kccl` where standard output fails, and where an argument is wrong.
_FAILED, _BROKEN_PIPE, _USAGE_ERROR = 1, 141, 2


def main(args: argparse.Namespace) -> int:
    """Runs the command on every rank. Rank 0 prints: the answer to stdout, all else to stderr.

    Returns:
        The exit code: 130 after Ctrl-C.
    """
    # Ranks other than 0 draw no bar either.
    console = screen.console(is_quiet=args.quiet or bool(kccl.launched_rank()))
    asked = ask(args)
    if asked is None:
        # Rank 0 says why.
        return _USAGE_ERROR
    ids, is_text = asked.ids, asked.is_text
    with asked.checkpoint as checkpoint, screen.progress(console) as tell:
        engine = Engine(
            checkpoint,
            args.backend,
            args.n,
            blocks=args.blocks,
            context=args.context,
            dtype=args.dtype,
            tokenizer=is_text,
            progress=tell,
        )
    with engine:
        console.quiet |= engine.rank != 0
        for notice in engine.notices:
            screen.tell(console, notice)
        began = time.monotonic()
        times: list[float] = []
        end = ""
        failed: OSError | None = None
        try:
            with closing(engine.stream(ids, **asked.params)) as pieces:
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
        is_interrupted, worth = end == screen.INTERRUPTED, ""
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
                worth = screen.bound(engine, len(ids), times)
        except KeyboardInterrupt:
            # The answer is there: its line follows all the same.
            is_interrupted = True
        if failed is not None:
            raise failed
        screen.tell(console, screen.summary(engine, len(ids), times, began, end, worth))
    return _INTERRUPTED if is_interrupted else 0


def _write(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()
