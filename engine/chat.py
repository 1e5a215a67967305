"""The command `kccl chat`: a conversation with a chat model, in a terminal or by lines of JSON."""

import argparse
import codecs
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kccl

from .api import Engine
from .commands import screen
from .commands.options import (
    add_engine_arguments,
    add_sampling_arguments,
    ngrams_in,
    sampling,
    stop_ids,
)
from .commands.prompts import chat_options, typed
from .commands.thoughts import Thoughts
from .serving.conversation import Conversation
from .text.pieces import Piece
from .text.tokenizer import check_utf8

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_arguments", "main"]

_INTERRUPTED = 130
_QUIT = ("/quit", "/exit")
_HELP = "/reset forgets the conversation, /save FILE keeps it as JSON, /quit or Ctrl-D ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument("--system", type=typed, metavar="TEXT", help="the system's message")
    parser.add_argument(
        "--file", type=Path, metavar="F", help="a file whose text is the first message"
    )
    parser.add_argument(
        "--chat-option",
        type=typed,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a variable of the chat template, as in enable_thinking=false; repeatable",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help='reads lines as in {"content": "Hi"}, and answers each with a line of JSON',
    )
    parser.add_argument("--quiet", action="store_true", help="print the answers only")


def main(args: argparse.Namespace) -> int:
    """Runs the command on every rank: rank 0 talks, and the others follow.

    Returns:
        The exit code.
    """
    is_first = not kccl.launched_rank()
    console = screen.console(is_quiet=args.quiet or not is_first)
    params, variables = sampling(args), chat_options(args.chat_option)
    first = None if args.file is None else _text_of(args.file)
    if args.system is not None:
        _check_system(args.system)
    with screen.progress(console) as tell:
        engine = Engine(
            args.model,
            args.backend,
            args.n,
            blocks=args.blocks,
            context=args.context,
            dtype=args.dtype,
            weights=args.weights,
            drafts=args.drafts,
            packed_cache=args.packed_cache,
            ngrams=ngrams_in(args),
            progress=tell,
        )
    with engine:
        if not engine.tokenizer.has_chat_template:
            raise kccl.InvalidArgument(
                f"--model {args.model} has no chat template: kccl generate continues text"
            )
        if not is_first:
            # Ctrl-C may reach all ranks. At rank 0 it may end only an answer, not the command. So
            # the other ranks ignore it, and end when rank 0 does.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            engine.sessions.follow()
            return 0
        for notice in engine.notices:
            screen.tell(console, notice)
        params |= stop_ids(args, engine.params_for().stop_ids, engine.config.vocab_size)
        engine.sessions.start()
        with engine.conversation(args.system, variables=variables, **params) as chat:
            if args.json:
                return _answer_lines(chat, first)
            return _talk(engine, chat, first, console)


def _check_system(text: str) -> None:
    """Raises InvalidArgument if UTF-8 cannot encode the text of --system. main() calls this before
    it opens the model, so that the error comes at once.
    """
    try:
        check_utf8(text)
    except kccl.InvalidArgument as error:
        raise kccl.InvalidArgument(f"--system: {error}") from None


def _text_of(path: Path) -> str:
    """Returns the text of the file that --file names.

    Raises:
        InvalidArgument: The file cannot be read, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise kccl.InvalidArgument(f"--file {path} cannot be read: {error}") from error
    if not text:
        raise kccl.InvalidArgument(f"--file {path} is empty, must have a message")
    return text


# ---- people --------------------------------------------------------------------------------------


def _talk(engine: Engine, chat: Conversation, first: str | None, console: "Console") -> int:
    is_terminal = os.isatty(0)
    if is_terminal:
        screen.tell(console, _HELP)
    for text, is_typed in _messages(first, is_terminal=is_terminal):
        name = text.split(maxsplit=1)[0] if is_typed else ""
        if name in _QUIT:
            break
        # Only a single word is a command, because a message may begin with a path.
        if re.fullmatch(r"/\w*", name):
            _obey(chat, text, console)
            continue
        end = _answer(engine, chat, text, console)
        if end == screen.INTERRUPTED and not is_terminal:
            return _INTERRUPTED
    return 0


def _messages(first: str | None, *, is_terminal: bool) -> Iterator[tuple[str, bool]]:
    """Yields the user's messages, beginning with `first`, the text of --file. At a terminal each
    line is a message. Otherwise all of standard input is one, unless `first` is given. Each message
    comes with whether it was typed, because only a typed line may be a command.
    """
    if first is not None:
        yield first, False
    if not is_terminal:
        if first is None and (text := sys.stdin.buffer.read().decode(errors="surrogateescape")):
            yield text.strip(), False
        return
    # Importing readline lets input() edit lines and recall earlier ones. Bracketed paste makes one
    # message of a pasted text of several lines.
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            text = typed(input("> ")).strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            # Ctrl-C drops the line that is being typed.
            sys.stdout.write("\n")
            continue
        if text:
            yield text, True


def _obey(chat: Conversation, text: str, console: "Console") -> None:
    """Runs a command of the conversation, as in "/reset"."""
    name, _, argument = text.partition(" ")
    if name == "/reset":
        chat.reset()
        screen.tell(console, "the conversation is forgotten")
    elif name == "/save" and argument.strip():
        path = Path(argument.strip())
        try:
            path = path.expanduser()
            path.write_text(json.dumps(chat.messages, ensure_ascii=False, indent=2) + "\n", "utf-8")
            screen.tell(console, f"{len(chat.messages)} messages are in {path}")
        except (OSError, RuntimeError, ValueError) as error:
            # expanduser() raises RuntimeError if the user in "~name" does not exist. write_text()
            # raises ValueError if the name contains a NUL character.
            why = getattr(error, "strerror", None) or error
            screen.tell(console, f"cannot write {path}: {why}")
    elif name == "/save":
        screen.tell(console, "/save needs a file, as in /save talk.json")
    else:
        screen.tell(console, f"{name} is no command: {_HELP}")


def _answer(engine: Engine, chat: Conversation, text: str, console: "Console") -> str:
    """Prints the answer to a message, and how fast it came. Returns the reason for which the answer
    ended.
    """
    began, times, end = time.monotonic(), list[float](), ""
    thoughts: Thoughts | None = None
    try:
        check_utf8(text)
        with closing(chat.stream(text)) as pieces:
            for piece in pieces:
                times.append(piece.time_s)
                end = piece.end
                # Thoughts needs all ids of the prompt. chat.ids has them only once the first piece
                # came.
                if thoughts is None:
                    is_terminal = sys.stdout.isatty()
                    thoughts = Thoughts(chat.tokenizer, chat.ids, is_terminal=is_terminal)
                sys.stdout.write(thoughts.shown(piece.text, is_last=bool(end)))
                sys.stdout.flush()
    except KeyboardInterrupt:
        end = screen.INTERRUPTED
    except kccl.InvalidArgument as error:
        # The command goes on after an error of an answer: if the conversation is longer than the
        # context, the user can type /reset.
        screen.tell(console, str(error))
        return ""
    sys.stdout.write("\n")
    sys.stdout.flush()
    told = f"{len(times)} tokens ({end})"
    if times:
        told += f"; first token after {times[0] - began:.3g} s"
    if len(times) > 1:
        rate = (len(times) - 1) / (times[-1] - times[0])
        told += f"; {rate:.0f} tok/s" if rate >= 10 else f"; {rate:.2g} tok/s"
    if times and (accepted := screen.accepted(engine)):
        told += f"; {accepted}"
    screen.tell(console, told)
    return end


# ---- scripts -------------------------------------------------------------------------------------


def _answer_lines(chat: Conversation, first: str | None) -> int:
    """Answers each message with one line of JSON: first the text of --file, if given, then each
    line of standard input.
    """
    if first is not None:
        _print(_json_answer(chat, first))
    for line in sys.stdin.buffer:
        if line.strip():
            _print(_json_answer(chat, _content(line)))
    return 0


def _content(line: bytes) -> str:
    """Returns the message in a line of JSON, which is an object with "content" or a string.

    Raises:
        InvalidArgument: The line is no JSON, or has no content.
    """
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise kccl.InvalidArgument(f"a line of standard input is no JSON: {error}") from None
    content = given.get("content") if isinstance(given, dict) else given
    if not isinstance(content, str) or not content:
        raise kccl.InvalidArgument(
            f'a line of standard input is {line[:100]!r}, must be as {{"content": "Hi"}}'
        )
    return content


def _json_answer(chat: Conversation, text: str) -> dict[str, Any]:
    began = time.monotonic()
    pieces: list[Piece] = list(chat.stream(text))
    took = pieces[-1].time_s - pieces[0].time_s
    return {
        **chat.messages[-1],
        "end": pieces[-1].end,
        "tokens": len(pieces),
        "first_token_s": round(pieces[0].time_s - began, 6),
        "tokens_per_s": round((len(pieces) - 1) / took, 2) if took > 0 else None,
    }


def _print(told: dict[str, Any]) -> None:
    # Escapes non-ASCII characters unless stdout is UTF-8, because other encodings may lack some.
    has_all = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
    sys.stdout.write(json.dumps(told, ensure_ascii=not has_all) + "\n")
    sys.stdout.flush()
