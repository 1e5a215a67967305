"""Runs one command of the Makefile behind one line on the screen.

    python3 .ci/step.py [--show] "compiling the core" "core compiled" COMMAND ...

The line says what is being done and for how many seconds; at the end, what was done. What the
command prints is shown if it fails. With --show its standard output is shown if it succeeds, too.
COLUMNS then tells the command how wide the terminal is, for its tables, and longer lines are broken
between words. Steps may run at the same time: one of them has the line, the others wait for it.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from typing import IO

_REFRESH_S = 0.2
_ERASE = "\r\033[K"


def main() -> int:
    """Returns the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the command's standard output")
    parser.add_argument("doing", help="as in 'compiling the core'")
    parser.add_argument("done", help="as in 'core compiled'")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    is_terminal = sys.stdout.isatty()
    began = time.monotonic()
    # Why "r+" for a file that only serves as the lock: NFS locks what is open for writing.
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        open(__file__, "r+") as me,
    ):
        stderr, env = err if args.show else subprocess.STDOUT, dict(os.environ)
        if args.show and is_terminal:
            env["COLUMNS"] = str(shutil.get_terminal_size().columns)
        process = subprocess.Popen(
            args.command, stdin=subprocess.DEVNULL, stdout=out, stderr=stderr, env=env
        )
        shown = ""
        while process.poll() is None:
            text = f"{args.doing} ... {time.monotonic() - began:.0f} s"
            if is_terminal and text != shown and _has_line(me):
                # A line that the window breaks, also with a ^C behind it, could not be erased.
                width = shutil.get_terminal_size().columns - 3
                _write(_ERASE + (text if len(text) <= width else f"...{text[3 - width :]}"))
                shown = text
            with suppress(subprocess.TimeoutExpired):
                process.wait(_REFRESH_S)
        code = process.returncode
        what = args.done if code == 0 else f"FAILED: {args.doing}"
        _write(f"{_ERASE if is_terminal else ''}{what}, {time.monotonic() - began:.0f} s\n")
        if code or args.show:
            text = _text(out)
            _write(_broken(text, int(env["COLUMNS"])) if args.show and is_terminal else text)
        if code:
            _write(_text(err))
    return code


def _has_line(lock: IO[str]) -> bool:
    """Whether this step, of those that run now, is the one that has the line."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _broken(text: str, width: int) -> str:
    """Returns the text with its long lines broken between words. Tables stay as they are."""
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    lines = text.split("\n")
    return "\n".join(
        wrapper.fill(line) if len(line) > width and line.isascii() else line for line in lines
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            # Behind the terminal's ^C.
            _write("\n")
        sys.exit(130)
