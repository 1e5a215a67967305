"""The options --schema and --regex, which say what form an answer must have."""

import argparse
from pathlib import Path

import kccl

from ..base.fields import read_json
from ..model.grammar import Grammar
from .prompts import typed


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that grammar() reads."""
    parser.add_argument(
        "--schema", type=Path, metavar="F", help="a JSON schema, which the answer follows"
    )
    parser.add_argument(
        "--regex",
        type=typed,
        metavar="R",
        help="a regular expression, which the whole answer matches",
    )


def grammar(args: argparse.Namespace) -> dict[str, Grammar]:
    """Returns the field `grammar` of SamplingParams by its name. Returns {} if neither option is
    given.

    Raises:
        InvalidArgument: Both options are given, or a schema or expression is wrong.
        kccl.Error: The file cannot be read.
    """
    if args.schema is not None and args.regex is not None:
        raise kccl.InvalidArgument("--schema and --regex are given, must be one of them")
    option = "--schema" if args.schema is not None else "--regex"
    try:
        if args.schema is not None:
            return {"grammar": Grammar.json(read_json(args.schema))}
        if args.regex is not None:
            return {"grammar": Grammar.regex(args.regex)}
    except kccl.InvalidArgument as error:
        # The error's first word is the name of Grammar's argument. The user must see the option's
        # name instead.
        raise kccl.InvalidArgument(f"{option} {str(error).partition(' ')[2]}") from None
    return {}
