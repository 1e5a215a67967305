"""The command `kccl quantize`: writes a model with fewer bits a weight, and measures by how much
that changes the perplexity.
"""

import argparse
import math
from pathlib import Path

import numpy as np

import kccl

from ..api import Engine
from ..files.checkpoint import open_checkpoint
from ..files.models import find_model
from ..files.quantize import KINDS, write_quantized
from . import screen
from .sample import SAMPLE

_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "model", help="a folder in Hugging Face's layout, of 16 or 32 bits a weight"
    )
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument(
        "--weights", required=True, choices=KINDS, help="to which the layers' matrices are rounded"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=_TOKENS,
        metavar="N",
        help=f"of the text whose perplexity is measured before and afterwards, 0: none ({_TOKENS})",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="F",
        help="a file with that text (a fixed one, prose and Python)",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def main(args: argparse.Namespace) -> int:
    """Writes the folder and prints its size and the perplexities.

    Returns:
        The exit code.

    Raises:
        InvalidArgument: An argument is wrong, or the model cannot be quantised.
        kccl.Error: A file cannot be read or written.
    """
    if args.tokens < 0 or args.tokens == 1:
        raise kccl.InvalidArgument(f"--tokens is {args.tokens}, must be 0 or at least 2")
    text = SAMPLE if args.text is None else _read(args.text)
    console = screen.console(is_quiet=args.quiet)
    model = find_model(args.model)
    ids = _ids(model, text, args.tokens)
    with screen.progress(console) as tell:
        before, after = write_quantized(model, args.out, args.weights, tell)
    screen.tell(
        console,
        f"{args.out}: {after / 1e6:.1f} MB in {args.weights}, {before / 1e6:.1f} MB before",
    )
    if args.tokens and not args.quiet:
        screen.tell(console, _cost(model, args.out, ids))
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise kccl.Error(f"cannot read {path}: {error}") from error


def _ids(model: Path, text: str, tokens: int) -> list[int] | None:
    """Returns the first `tokens` ids of a text. Returns None if `tokens` is 0, or the model has no
    tokenizer.
    """
    if tokens == 0:
        return None
    with open_checkpoint(model) as checkpoint:
        if not checkpoint.has_tokenizer:
            return None
        ids = checkpoint.tokenizer().encode(text)[: min(tokens, checkpoint.config.context)]
    _check_length(ids)
    return ids


def _check_length(ids: list[int]) -> None:
    if len(ids) < 2:
        held = "1 token" if ids else "no tokens"
        raise kccl.InvalidArgument(f"the text has {held}, must have at least 2")


def _cost(model: Path, out: Path, ids: list[int] | None) -> str:
    """Returns a sentence: the perplexity of a text by both models, or why it is not measured."""
    if ids is None:
        return "the perplexity is not measured, because the model has no tokenizer"
    if kccl.launched_rank() is not None:
        return "the perplexity is not measured under a launcher"
    found = []
    for each in (out, model):
        with Engine(each, ranks=1) as engine:
            found.append(perplexity(engine, ids))
    after, before = found
    return (
        f"perplexity of {len(ids)} tokens: {after:.4g}, {before:.4g} before "
        f"({after / before - 1:+.1%})"
    )


def perplexity(engine: Engine, ids: list[int]) -> float:
    """Returns the perplexity of a text: the exponential of the mean of -log p over all tokens but
    the first, where p is a token's probability after all tokens before it.

    Args:
        engine: The model.
        ids: The text, at least 2 tokens.

    Raises:
        InvalidArgument: There are fewer than 2 tokens, or more than the context has room for.
    """
    _check_length(ids)
    logits = engine.logits(ids)[:-1].astype(np.float64)
    most = logits.max(axis=1)
    of_all = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
    chosen = logits[np.arange(len(logits)), ids[1:]]
    return math.exp(float((of_all - chosen).mean()))
