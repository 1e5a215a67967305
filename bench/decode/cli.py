"""Implements `kccl bench decode`: its arguments, and the run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import kccl
from kccl.engine import Checkpoint, Engine, open_checkpoint
from kccl.engine.commands.options import (
    add_drafts_argument,
    add_packed_cache_argument,
    add_weights_argument,
)
from kccl.engine.executors.opening import BACKENDS
from kccl.engine.files.models import find_model
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.formats.table import DTYPES
from kccl.engine.model.config import ModelConfig
from kccl.engine.model.variant import PINS, Variant

from ..arguments import whole_number
from ..harness.document import Document, document, machine
from ..harness.interrupts import Interrupts
from ..harness.measure import REPEATS
from ..harness.outputs import silence, try_file, try_stdout, write, write_csv
from ..harness.progress import progress
from ..harness.report import console
from ..names import dtype_name
from . import perfetto, picture
from .measure import measure
from .report import COLUMNS, Screen, is_ablated
from .request import Request, Result
from .timeline import print_summary, summary_of
from .tokens import LENGTH
from .variants import print_variants, variants_of

if TYPE_CHECKING:
    from rich.console import Console

_POSITIONS = (128, 1024, 4000)
_TRACED_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.add_argument("decode", choices=("decode",), help="what to measure")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        default="bundled",
        metavar="M",
        help="bundled, smollm2, a folder in Hugging Face's layout, or a GGUF file (bundled)",
    )
    model.add_argument(
        "--random-weights",
        metavar="SHAPE",
        help=f"instead of a model: {', '.join(MODELS)}; :2 behind it leaves 2 layers",
    )
    parser.add_argument(
        "--positions",
        type=whole_number,
        nargs="+",
        metavar="P",
        help="tokens before the first timed one (128 1024 4000, where the context has room)",
    )
    parser.add_argument(
        "--new-tokens",
        type=whole_number,
        metavar="N",
        help="of a run (as many as take 0.8 s, at most 64)",
    )
    parser.add_argument(
        "--repeats", type=whole_number, default=REPEATS, help=f"number of runs ({REPEATS})"
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=whole_number,
        metavar="RANKS",
        help="ranks as threads; not in a job (1)",
    )
    parser.add_argument(
        "--backend",
        default="host",
        choices=BACKENDS,
        help="what runs the model; sim, one simulated rank, measures no machine (host)",
    )
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="also measure other engines on the same weights",
    )
    parser.add_argument(
        "-d",
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        help="of the weights (as stored; on the host bfloat16)",
    )
    add_weights_argument(parser)
    add_drafts_argument(parser)
    add_packed_cache_argument(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="F",
        help="write what each block does, for ui.perfetto.dev, and beside it a picture (.png)",
    )
    parser.add_argument(
        "--traced-tokens",
        type=whole_number,
        metavar="N",
        help=f"of --trace, at the first position ({_TRACED_TOKENS})",
    )
    parser.add_argument(
        "--ablate",
        action="append",
        default=[],
        metavar="V[,V]",
        help="also time kernels without: exchanges, weights, attention; with a product's weights "
        f"from the cache: {', '.join(PINS)}; or changed: "
        "in-flight=N, stage-steps=N; several at once: exchanges+weights",
    )
    parser.add_argument(
        "--json", action="store_true", help="end with one JSON document as the last line"
    )
    parser.add_argument("--csv", type=Path, metavar="F", help="write the rows as CSV")


def main(args: argparse.Namespace, command: Sequence[str] | None = None) -> int:
    """Runs the benchmark on every rank of a job; rank 0 prints.

    Args:
        args: The parsed arguments of add_arguments().
        command: Arguments of `kccl` that repeat the run, for the document; see document().

    Returns:
        0; 1 if a token of KCCL was wrong.

    Raises:
        InvalidArgument: An argument is wrong.
        kccl.Error: The model cannot be read.
    """
    _check_outputs(args)
    variants = variants_of(args.ablate)
    _check_kernel(args, variants)
    with _checkpoint(args) as checkpoint:
        request = Request(
            checkpoint=checkpoint,
            name=args.random_weights or _name_of(args.model),
            positions=_positions(args, checkpoint.config),
            new_tokens=args.new_tokens,
            repeats=args.repeats,
            ranks=args.ranks,
            has_baselines=args.baselines,
            variants=variants,
            traced_tokens=args.traced_tokens if args.trace else 0,
            drafts=args.drafts,
            weights=args.weights,
        )
        with Engine(
            checkpoint,
            args.backend,
            args.ranks,
            context=request.context,
            dtype=args.dtype,
            weights=args.weights,
            drafts=args.drafts,
            packed_cache=args.packed_cache,
        ) as engine:
            # The reference and the peers get the weights as the engine has rounded them, so that
            # tokens can be compared.
            checkpoint = checkpoint.as_dtype(engine.dtype)
            if args.weights is not None:
                checkpoint = checkpoint.as_weights(args.weights)
            request = replace(request, checkpoint=checkpoint)
            tables = sys.stderr if args.json else sys.stdout
            out = console(tables)
            out.quiet = engine.rank != 0
            ranks = f"{engine.world_size} rank{'s' if engine.world_size > 1 else ''}"
            kind = request.kind_of(engine)
            kccl.screen.say(out, f"# kccl bench decode: {request.name}, {kind}, {ranks}")
            result, screen = Result(), Screen(out)

            def finish(ended: str | None) -> None:
                facts = {"peers": result.versions, "notes": result.notes} | result.facts
                facts |= {"timelines": [asdict(summary_of(each)) for each in result.timelines]}
                made = document(result.rows, machine(engine.world_size) | facts, command)
                if ended:
                    made["interrupted"] = ended
                _finish(out, args, request, result, screen, made)

            with Interrupts() as interrupts:
                try:
                    try:
                        with progress(engine.rank == 0, 2 + len(request.positions), out) as show:
                            measure(engine, request, show, result, screen.add)
                    finally:
                        interrupts.hold()
                except BaseException as error:
                    if engine.rank == 0:
                        if isinstance(error, OSError) and not isinstance(error, kccl.Error):
                            silence(out.file)
                        finish(_ended(error, interrupts, result, request))
                    if interrupts.number is not None:
                        raise KeyboardInterrupt from None
                    raise
                is_right = bool(engine.of_rank_0(result.is_right))
                if engine.rank == 0:
                    finish(None)
    return int(not is_right)


def _ended(error: BaseException, interrupts: Interrupts, result: Result, request: Request) -> str:
    """Returns a sentence that says why and after how many positions a run ended early."""
    done = len({row["position"] for row in result.rows})
    is_interrupt = interrupts.number is not None or isinstance(error, KeyboardInterrupt)
    why = "interrupted" if is_interrupt else f"interrupted by {type(error).__name__}"
    return f"{why} after {done} of {len(request.positions)} positions"


def _finish(
    out: Console,
    args: argparse.Namespace,
    request: Request,
    result: Result,
    screen: Screen,
    made: Document,
) -> None:
    """Prints the end of the table and writes the files.

    Raises:
        kccl.Error: A file cannot be written. The other files have been written.
    """
    failures: list[str] = []
    screen.end(result.rows)
    ablated = [row for row in result.rows if is_ablated(row)]
    if ablated:
        print_variants(out, ablated)
    if result.timelines:
        print_summary(out, result.timelines, result.stream_bytes_per_s)
        try:
            for line in _write_timelines(args.trace, request, result, made["commit"]):
                kccl.screen.say(out, f"# {line}")
        except OSError as error:
            failures.append(f"{args.trace} could not be written: {error.strerror or error}")
    if args.backend == "sim":
        kccl.screen.say(out, "# simulated GPUs: no time here measures a machine")
    for note in result.notes:
        kccl.screen.say(out, f"# {note}")
    if "interrupted" in made:
        kccl.screen.say(out, f"# {made['interrupted']}")
    if args.csv:
        write(args.csv, lambda path: write_csv(result.rows, COLUMNS, path), failures)
    if args.json:
        try:
            print(json.dumps(made), flush=True)
        except OSError as error:
            silence(sys.stdout)
            failures.append(f"stdout cannot be written: {error.strerror or error}")
    if failures:
        raise kccl.Error("; ".join(failures))


def _write_timelines(path: Path, request: Request, result: Result, commit: str) -> Iterator[str]:
    """Writes the file and the picture of `--trace`. Yields a line of text about each."""
    first, gpus = request.positions[0], result.facts.get("gpus")
    ranks = f"{len(result.timelines)} rank{'s' if len(result.timelines) > 1 else ''}"
    where = f"{ranks} on {gpus[0]}" if gpus else ranks
    facts = {"model": request.name, "position": first, "where": where, "commit": commit}
    num = perfetto.write(path, result.timelines, facts)
    tokens = f"{num} token{'s' if num > 1 else ''} behind position {first}"
    yield f"{path}: {tokens}, for https://ui.perfetto.dev"
    if len(result.timelines) > 1:
        yield "the ranks' clocks are compared by their GPUs' nanoseconds alone"
    drawn = path.with_suffix(".png")
    title = f"{request.name}, {where}: one token behind position {first}"
    picture.draw(drawn, result.timelines, title, result.stream_bytes_per_s)
    yield f"{drawn}: a few layers of the first of them"


@contextmanager
def _checkpoint(args: argparse.Namespace) -> Iterator[Checkpoint]:
    if args.random_weights is None:
        opened = open_checkpoint(find_model(args.model))
    else:
        opened = random_checkpoint(args.random_weights, dtype=args.dtype or "bfloat16")
    with opened:
        yield opened


def _name_of(model: str) -> str:
    """Returns a model's name for rows. It has no folder, because rows are published."""
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
    traced = args.traced_tokens + 1 if args.trace else 1
    last = config.context - max(args.new_tokens or 1, traced) - 1
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
    """Raises InvalidArgument for a file that cannot be written, before a long run is wasted."""
    try:
        if args.csv is not None:
            try_file("--csv", args.csv)
        if args.trace is not None:
            try_file("--trace", args.trace)
            if args.trace.suffix == ".png":
                raise ValueError(f"--trace {args.trace} is the name of its picture: name a .json")
        try_stdout()
    except ValueError as error:
        raise kccl.InvalidArgument(str(error)) from error
    except OSError as error:
        silence(sys.stdout)
        raise kccl.Error(f"stdout cannot be written: {error.strerror or error}") from error


def _check_kernel(args: argparse.Namespace, variants: Sequence[Variant]) -> None:
    """Raises InvalidArgument for options of the kernel that contradict each other or that the
    backend does not have. Sets the default of --traced-tokens.
    """
    if args.traced_tokens is not None and args.trace is None:
        raise kccl.InvalidArgument("--traced-tokens says how long --trace is: add --trace F")
    if args.traced_tokens is None:
        args.traced_tokens = _TRACED_TOKENS
    if args.traced_tokens < 1:
        raise kccl.InvalidArgument(f"--traced-tokens is {args.traced_tokens}, must be at least 1")
    for option, is_given in (("--trace", args.trace), ("--ablate", variants)):
        if is_given and args.backend == "host":
            raise kccl.InvalidArgument(
                f"{option} needs --backend cuda, hip or sim: host has no kernel"
            )
    if args.weights is not None and args.baselines and args.backend == "host":
        raise kccl.InvalidArgument(
            "--baselines: on CPUs no other engine has the rounding of --weights"
        )
    if args.backend == "sim" and args.baselines:
        raise kccl.InvalidArgument("--baselines: no other engine runs on simulated GPUs")
    if args.backend == "sim" and any(variant.has_races for variant in variants):
        raise kccl.InvalidArgument("--ablate exchanges has races, which the simulator refuses")
    if args.trace and kccl.launched_rank() is not None:
        raise kccl.InvalidArgument("--trace needs ranks that are threads: -n, without a launcher")
