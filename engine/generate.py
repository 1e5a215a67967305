"""The command `kccl generate`: a model's answer, streamed, and how fast it came."""

import argparse
import sys
import time
from contextlib import closing

import kccl

from .api import Engine
from .commands import screen
from .commands.asked import ask
from .commands.options import add_arguments, ngrams_in, stop_ids
from .commands.thoughts import Thoughts
from .model.executor import EndedElsewhere

__all__ = ["add_arguments", "main"]

# The exit code that a shell gives to a command that Ctrl-C ended.
_INTERRUPTED = 130
# The exit codes of the command `kccl` for other failures, for a standard output that fails, and for
# a wrong argument.
_FAILED, _BROKEN_PIPE, _USAGE_ERROR = 1, 141, 2


def main(args: argparse.Namespace) -> int:
    """Runs the command; every rank calls it. Rank 0 prints the answer to stdout, and all else to
    stderr.

    Returns:
        The exit code: 130 after Ctrl-C.
    """
    # Only rank 0 draws a progress bar.
    console = screen.console(is_quiet=args.quiet or bool(kccl.launched_rank()))
    asked = ask(args)
    if asked is None:
        # Rank 0 prints the reason.
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
            weights=args.weights,
            tokenizer=is_text,
            drafts=args.drafts,
            packed_cache=args.packed_cache,
            ngrams=ngrams_in(args),
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
        thoughts = None
        if is_text and args.chat:
            thoughts = Thoughts(engine.tokenizer, ids, is_terminal=sys.stdout.isatty())
        # The prompt, if it is printed before the answer. A prompt of ids is followed by a space.
        echoed = asked.prompt if args.echo else ""
        try:
            _write(engine, echoed)
            controls = thoughts.controls if thoughts is not None else ()
            ends = stop_ids(args, engine.params_for().stop_ids, engine.config.vocab_size)
            with closing(engine.stream(ids, shown=controls, **asked.params, **ends)) as pieces:
                for piece in pieces:
                    between = " " if times or echoed else ""
                    times.append(time.monotonic())
                    end = piece.end
                    told = piece.text if is_text else f"{between}{piece.id}"
                    if thoughts is not None:
                        told = thoughts.shown(piece.text, is_last=bool(end))
                    _write(engine, told)
        except KeyboardInterrupt:
            end = screen.INTERRUPTED
        except EndedElsewhere:
            # Rank 0 prints the reason below.
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
                # If rank 0 cannot write, the other ranks end without a message.
                if (code := engine.of_rank_0(code if failed else 0)) and engine.rank != 0:
                    return int(code)
            # All ranks must decide alike whether to measure, because the measurement is collective.
            if failed is None and len(times) > 1 and not is_interrupted and not args.quiet:
                worth = screen.bound(engine, len(ids), times)
        except KeyboardInterrupt:
            # The answer is complete here. So after Ctrl-C the summary is still printed, without the
            # bound that was being measured.
            is_interrupted = True
        if failed is not None:
            raise failed
        screen.tell(console, screen.summary(engine, len(ids), times, began, end, worth))
    return _INTERRUPTED if is_interrupted else 0


def _write(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()
