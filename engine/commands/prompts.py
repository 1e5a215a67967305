"""The options of commands that give a prompt: as text, as a chat's message, or as ids."""

import argparse
import json
import os
import reprlib
from typing import Any

import kccl

from ..text.tokenizer import Tokenizer

# Variables of a chat template that the command itself sets.
_OWN = ("messages",)
# The most digits of an id: ids are below 2**31. Longer words are refused before int() sees them,
# because int() raises ValueError for thousands of digits.
_MOST_DIGITS = 10


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that check_prompt_arguments() and prompt_of() read."""
    parser.add_argument(
        "--prompt", type=typed, metavar="TEXT", help="what to continue (standard input)"
    )
    parser.add_argument(
        "--ids",
        metavar="IDS",
        help='ids to continue, as in "1 15 7", without a tokenizer; the answer is ids, too',
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a message to a chat model"
    )
    parser.add_argument(
        "--system", type=typed, metavar="TEXT", help="with --chat: the system's message"
    )
    parser.add_argument(
        "--chat-option",
        type=typed,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="with --chat: a variable of the template, as in enable_thinking=false; repeatable",
    )


def typed(text: str) -> str:
    """Decodes a typed text or an argument as UTF-8, whatever the locale's encoding is. Leaves bytes
    that are not UTF-8 as surrogates, which are refused later.
    """
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        return text


def check_prompt_arguments(args: argparse.Namespace) -> None:
    """Checks the options that give a prompt. Must be called before a model is read, which takes
    long, so that a wrong option is reported at once.

    Raises:
        InvalidArgument: Two options exclude each other, or one is wrong.
    """
    if args.ids is not None:
        for name, value in (
            ("--prompt", args.prompt),
            ("--chat", args.chat or None),
            ("--system", args.system),
            ("--stop", args.stop or None),
            ("--schema", args.schema),
            ("--regex", args.regex),
        ):
            if value is not None:
                raise kccl.InvalidArgument(f"--ids and {name} are given, must be one of them")
    for name, value in (("--system", args.system), ("--chat-option", args.chat_option or None)):
        if value is not None and not args.chat:
            raise kccl.InvalidArgument(f"{name} is given, which needs --chat")
    if args.chat and args.echo:
        raise kccl.InvalidArgument("--chat and --echo are given, must be one of them")
    if args.ids is not None:
        given_ids(args.ids)
    chat_options(args.chat_option)


def given_ids(text: str) -> list[int]:
    """Returns the ids of --ids: numbers with spaces or commas between them.

    Raises:
        InvalidArgument: There are no ids, or one is no number.
    """
    words = text.replace(",", " ").split()
    wrong = [
        word
        for word in words
        if not (word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS)
    ]
    if wrong or not words:
        told = f"has {reprlib.repr(wrong[0])}" if wrong else "is empty"
        raise kccl.InvalidArgument(f'--ids {told}, must be ids, as in "1 15 7"')
    return [int(word) for word in words]


def chat_options(given: list[str]) -> dict[str, Any]:
    """Returns the variables of --chat-option by name.

    Raises:
        InvalidArgument: An option has no name, or its value is no JSON.
    """
    found: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier() or name in _OWN:
            raise kccl.InvalidArgument(
                f"--chat-option is {option!r}, must be a variable of the chat template and its "
                "value, as in enable_thinking=false"
            )
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            raise kccl.InvalidArgument(
                f"--chat-option {name} is {value!r}, must be JSON: a text has quotation marks, as "
                f"in {name}='\"text\"'"
            ) from None
    return found


def prompt_of(tokenizer: Tokenizer, prompt: str, args: argparse.Namespace) -> list[int]:
    """Returns the ids of a text, or of a chat whose last message is the text."""
    if not args.chat:
        return tokenizer.encode(prompt)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    return tokenizer.chat(messages, **chat_options(args.chat_option))
