"""Parses the command line. Help texts fit the terminal's width, and errors are one line."""

import argparse
import copy
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from .screen import NARROW, fitted, width_of, wrapped

USAGE_ERROR = 2
# The width in columns of a help text that goes to a file or a pipe.
_USUAL = 80
_LEAST_WIDTH = 20


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the sub-command.

    It breaks its texts only between words, even in a narrow window.
    """

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Help} | given)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses as argparse does, but the sub-command's parser reports unknown arguments.

        It is set by set_defaults(parser=...). So the error points to the help of the sub-command.
        """
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: Parser = getattr(parsed, "parser", self)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own method ignores an OSError, as from a full disk.
        if message:
            (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from ..bench.names import did_you_mean

            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        """Prints one line, and ends the process with exit code 2."""
        complain(f"{message}; see `{self.prog} --help`")
        raise SystemExit(USAGE_ERROR)


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        columns = width_of(sys.stdout, _USUAL)
        # In a narrow window help texts are printed below their options, and the usage is short.
        self._is_narrow = columns < NARROW
        super().__init__(
            prog,
            max_help_position=8 if self._is_narrow else 24,
            width=max(columns - 2, _LEAST_WIDTH),
        )

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None,
    ) -> str:
        if usage is None:
            # Leaves out the choices of a positional argument: the list of arguments shows them.
            actions = [each if each.option_strings else _named(each) for each in actions]
            if not self._is_narrow:
                return super()._format_usage(usage, actions, groups, prefix)
            names = [
                self._format_args(each, each.dest) for each in actions if not each.option_strings
            ]
            usage = " ".join([self._prog, "[options]", *names])
        text = ("usage: " if prefix is None else prefix) + usage % {"prog": self._prog}
        return wrapped(text, self._width, hanging=7) + "\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        whole, width = super()._format_action_invocation(action), self._width - self._current_indent
        if len(whole) > width:
            whole = whole.replace(",", ", ").replace(",  ", ", ")
        return wrapped(whole, width, hanging=4)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(" ".join(text.split()), width).splitlines()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = wrapped(" ".join(text.split()), width - len(indent)).splitlines()
        return "\n".join(indent + line for line in lines)


def _named(action: argparse.Action) -> argparse.Action:
    """Returns a copy of the argument whose usage shows its name and not its choices."""
    if action.metavar is not None:
        return action
    named = copy.copy(action)
    named.metavar = action.dest
    return named


def complain(message: str) -> None:
    """Prints an error message to stderr as one line, which is wrapped on a terminal."""
    # Makes one write, so that the output of several ranks is not mixed. print() would make another
    # write for the line's end.
    sys.stderr.write(fitted(f"kccl: {message}", sys.stderr, hanging=2) + "\n")
    sys.stderr.flush()
