"""Defines the arguments of `kccl generate`, and reads them."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

import kccl

from ..executors.opening import BACKENDS
from ..formats.table import DTYPES, ROUNDED
from ..model.sample import SamplingParams
from .grammars import add_grammar_arguments, grammar
from .prompts import add_prompt_arguments, typed

# Options that are fields of SamplingParams: (field, type, metavar, help).
_SAMPLING = (
    ("temperature", float, "X", "divides the logits; 0: always the likeliest token"),
    ("top_k", int, "K", "only the K likeliest tokens; 0: all"),
    ("top_p", float, "X", "only the likeliest tokens up to this probability"),
    ("min_p", float, "X", "only tokens at least this likely, relative to the likeliest"),
    ("repetition_penalty", float, "X", "divides logits of tokens that were there before"),
    ("seed", int, "N", "of the choice, if the temperature is above 0 (a random one, printed)"),
)
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[ntr\\\"'])")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Returns the parser of the command's arguments."""
    add_engine_arguments(parser)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument("--echo", action="store_true", help="print the prompt before the answer")
    parser.add_argument("--quiet", action="store_true", help="print the answer only")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that sampling() reads."""
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens (256)"
    )
    for name, kind, metavar, text in _SAMPLING:
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--stop",
        type=typed,
        action="append",
        default=[],
        metavar="TEXT",
        help=r"ends the answer; may name control tokens; repeatable; "
        r"knows \n, \t, \\, \x41, \u00e9",
    )
    parser.add_argument(
        "--stop-id",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="ends the answer, as the model's own end ids do; repeatable",
    )
    add_grammar_arguments(parser)
    parser.epilog = (
        "Where no option says how tokens are chosen, the model's generation_config.json does; "
        "without that file the likeliest token is taken."
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of all commands that open an engine."""
    parser.add_argument(
        "--model",
        default="bundled",
        metavar="M",
        help="bundled, smollm2, a folder in Hugging Face's layout, a GGUF file, or a repository "
        "in the hub's cache, as in Qwen/Qwen3-0.6B (bundled)",
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
        "--dtype",
        choices=DTYPES,
        help="of the weights (as stored; on the host bfloat16 where it cannot multiply that)",
    )
    add_weights_argument(parser)
    add_drafts_argument(parser)
    add_packed_cache_argument(parser)
    parser.add_argument(
        "--ngrams",
        metavar="F",
        help="with --drafts: file of `kccl drafts`, from which they come, too (the model's own, if "
        "it has one)",
    )


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument with which commands say Engine's `weights`."""
    parser.add_argument(
        "--weights",
        choices=ROUNDED,
        help="to which the matrices of layers are rounded while they are read; on AMD's GPUs, "
        "where all get one format (as stored)",
    )


def add_drafts_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument with which commands say Engine's `drafts`."""
    parser.add_argument(
        "--drafts",
        type=_drafts,
        default="off",
        metavar="N",
        help="tokens, 1 to 7, that are guessed from what was there before and checked together; "
        "auto: fewer where few are right; not on hip; the answer is the same (off)",
    )


def add_packed_cache_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument with which commands say Engine's `packed_cache`."""
    parser.add_argument(
        "--packed-cache",
        metavar="DIR",
        help="a folder that keeps packed weights, so that the next start only reads them; made if "
        "it does not exist (none)",
    )


def ngrams_in(args: argparse.Namespace) -> str | None:
    """Returns Engine's `ngrams`, as the arguments of add_engine_arguments() give it.

    Raises:
        InvalidArgument: There is a table, and no drafts that could come from it.
    """
    ngrams: str | None = args.ngrams
    if ngrams is not None and args.drafts == "off":
        raise kccl.InvalidArgument(f"--ngrams {ngrams} is of no use without --drafts")
    return ngrams


def _drafts(text: str) -> str | int:
    """Returns an argument of --drafts as Engine takes it."""
    return int(text) if text.isdecimal() else text


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of SamplingParams that the arguments give.

    Raises:
        InvalidArgument: One is wrong.
        kccl.Error: A file that one names cannot be read.
    """
    given = {name: getattr(args, name) for name, *_ in _SAMPLING}
    found = {name: value for name, value in given.items() if value is not None}
    found["max_tokens"] = args.max_tokens
    # The model's own stop strings count only if no --stop is given.
    if args.stop:
        found["stop"] = tuple(map(unescaped, args.stop))
    try:
        SamplingParams(**found)
    except kccl.InvalidArgument as error:
        # The error's text begins with the field's name.
        field, _, rest = str(error).partition(" ")
        raise kccl.InvalidArgument(f"--{field.replace('_', '-')} {rest}") from None
    return found | grammar(args)


def stop_ids(args: argparse.Namespace, ends: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Returns the field of SamplingParams for --stop-id; none if it is not given.

    Args:
        args: The arguments.
        ends: The ids that end an answer without it.
        vocab_size: The number of the model's ids.

    Raises:
        InvalidArgument: There is no such id.
    """
    for number in args.stop_id:
        if not 0 <= number < vocab_size:
            raise kccl.InvalidArgument(
                f"--stop-id is {number}, must be an id of the model, from 0 to {vocab_size - 1}"
            )
    return {"stop_ids": (*ends, *args.stop_id)} if args.stop_id else {}


def unescaped(text: str) -> str:
    r"""Returns the text that an argument of --stop means: \n, \t, \r, \\, \", \', \xNN, \uNNNN,
    \UNNNNNNNN.

    Raises:
        InvalidArgument: The text has another escape, or one that is cut off.
    """
    parts, at = [], 0
    while (found := text.find("\\", at)) >= 0:
        escape = _ESCAPE.match(text, found)
        if escape is None and found == len(text) - 1:
            raise kccl.InvalidArgument(
                f"--stop {text!r} ends in a single backslash: write \\\\ for one"
            )
        if escape is None:
            raise kccl.InvalidArgument(
                f"--stop {text!r} has the escape {text[found : found + 2]!r} at character {found}, "
                r"must be \n, \t, \r, \\, \xNN, \uNNNN or \UNNNNNNNN"
            )
        parts += [text[at:found], _character(text, escape[1])]
        at = escape.end()
    return "".join([*parts, text[at:]])


def _character(text: str, escape: str) -> str:
    if escape in _SIMPLE_ESCAPES:
        return _SIMPLE_ESCAPES[escape]
    number = int(escape[1:], 16)
    # A surrogate is no character, and neither is a number beyond the last code point.
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        raise kccl.InvalidArgument(
            f"--stop {text!r} has the escape \\{escape}, which is no character of Unicode"
        )
    return chr(number)
