"""`kccl bench decode`: the arguments, and the run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import kccl
from kccl.engine import Checkpoint, Engine, open_checkpoint
from kccl.engine.config import ModelConfig
from kccl.engine.models import find_model
from kccl.engine.random_weights import MODELS, random_checkpoint

from ..harness.document import document
from ..harness.measure import REPEATS
from ..harness.progress import progress
from ..harness.report import console
from .measure import Request, measure
from .report import print_rows, write_csv
from .tokens import LENGTH

_POSITIONS = (128, 1024, 4000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("decode", choices=("decode",), help="what to measure")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        default="bundled",
        metavar="M",
        help="bundled, smollm2, a folder in Hugging Face's layout, or a GGUF file (bundled)",
    )
    model.add_argument(
        "--random-weights", metavar="SHAPE", help=f"instead of a model: {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--positions",
        type=int,
        nargs="+",
        metavar="P",
        help="tokens before the first timed one (128 1024 4000, where the context has room)",
    )
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", help="of a run (as many as take 0.8 s, at most 64)"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"number of runs ({REPEATS})")
    parser.add_argument(
        "-n", "--ranks", type=int, metavar="RANKS", help="ranks as threads; not in a job (1)"
    )
    parser.add_argument(
        "--backend", default="host", choices=("host", "cuda"), help="what runs the model (host)"
    )
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="also measure other engines on the same weights in BF16",
    )
    parser.add_argument(
        "--json", action="store_true", help="end with one JSON document as the last line"
    )
    parser.add_argument("--csv", type=Path, metavar="F", help="write the rows as CSV")


def main(args: argparse.Namespace, command: Sequence[str] | None = None) -> int:
    """Runs the benchmark on every rank of a job; rank 0 prints.

    Args:
        args: The parsed arguments of add_arguments().
        command: See document().

    Returns:
        0; 1 if a token of KCCL was wrong.

    Raises:
        InvalidArgument: An argument is wrong.
        kccl.Error: The model cannot be read.
    """
    _check_outputs(args)
    with _checkpoint(args) as checkpoint:
        request = Request(
            checkpoint=checkpoint,
            name=args.random_weights or _name_of(args.model),
            positions=_positions(args, checkpoint.config),
            new_tokens=args.new_tokens,
            repeats=args.repeats,
            ranks=args.ranks,
            has_baselines=args.baselines,
        )
        with Engine(checkpoint, args.backend, args.ranks, context=request.context) as engine:
            tables = sys.stderr if args.json else sys.stdout
            out = console(tables)
            out.quiet = engine.rank != 0
            ranks = f"{engine.world_size} rank{'s' if engine.world_size > 1 else ''}"
            out.print(f"# kccl bench decode: {request.name}, bfloat16, {ranks}")
            with progress(engine.rank == 0, 2 + len(request.positions), tables) as show:
                result = measure(engine, request, show)
            is_right = bool(engine.of_rank_0(result.is_right))
            world_size = engine.world_size
            is_first = engine.rank == 0
            facts = {"peers": result.versions, "notes": result.notes} | result.facts
    if is_first:
        made = document(result.rows, world_size, facts, command)
        print_rows(out, result.rows)
        for note in result.notes:
            out.print(f"# {note}", soft_wrap=True)
        if args.csv:
            write_csv(result.rows, args.csv)
        if args.json:
            print(json.dumps(made), flush=True)
    return int(not is_right)


@contextmanager
def _checkpoint(args: argparse.Namespace) -> Iterator[Checkpoint]:
    if args.random_weights is None:
        opened = open_checkpoint(find_model(args.model))
    else:
        opened = random_checkpoint(args.random_weights)
    with opened:
        yield opened


def _name_of(model: str) -> str:
    """A model's name in rows, which are published: without its folder."""
    return Path(model).name


def _positions(args: argparse.Namespace, config: ModelConfig) -> list[int]:
    if args.repeats < 1:
        raise kccl.InvalidArgument(f"--repeats is {args.repeats}, must be at least 1")
    if args.new_tokens is not None and args.new_tokens < 1:
        raise kccl.InvalidArgument(f"--new-tokens is {args.new_tokens}, must be at least 1")
    if config.context < 2 * LENGTH:
        raise kccl.InvalidArgument(
            f"the model's context is {config.context}, must be at least {2 * LENGTH} for the check"
        )
    last = config.context - (args.new_tokens or 1) - 1
    if args.positions is None:
        return [each for each in _POSITIONS if each <= last] or [last // 2]
    for position in args.positions:
        if not 1 <= position <= last:
            raise kccl.InvalidArgument(
                f"--positions has {position}, must be from 1 to {last}, because the model's "
                f"context has {config.context} tokens"
            )
    return sorted(set(args.positions))


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises InvalidArgument, before a long run, for a file that could not be written after it."""
    if args.csv is not None:
        folder = Path(args.csv).resolve().parent
        if not os.access(folder, os.W_OK):
            raise kccl.InvalidArgument(f"--csv {args.csv}: {folder} is not a writable folder")
