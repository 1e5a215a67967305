"""What `make setup` and `make demo` print for their steps."""

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

STEP = [sys.executable, str(Path(__file__).resolve().parents[2] / ".ci" / "step.py")]
NOISY = "echo figures; echo 'WARNING: no harm' >&2"


def step(*arguments):
    return subprocess.run([*STEP, *arguments], capture_output=True, text=True, timeout=60)


def test_a_step_is_one_line_without_the_tools_words():
    done = step("working", "worked", "sh", "-c", NOISY)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"worked, \d+ s\n", done.stdout)


def test_show_prints_what_was_asked_for_and_no_warning():
    done = step("--show", "working", "worked", "sh", "-c", NOISY)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"worked, \d+ s\nfigures\n", done.stdout)


def test_what_is_shown_fits_the_terminal():
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 47))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    shows = 'echo "$COLUMNS wide, and words that do not fit into one line"'
    words = [*STEP, "--show", "working", "worked", "sh", "-c", shows]
    assert (
        subprocess.run(words, stdin=terminal, stdout=terminal, env=env, timeout=60).returncode == 0
    )
    assert (
        "47 wide, and words that do not fit into one\r\n  line" in os.read(screen, 1 << 16).decode()
    )
    for file in (screen, terminal):
        os.close(file)


def test_a_step_that_fails_shows_everything_and_its_code():
    for options in ((), ("--show",)):
        done = step(*options, "working", "worked", "sh", "-c", f"{NOISY}; exit 7")
        assert done.returncode == 7
        assert re.match(r"FAILED: working, \d+ s\n", done.stdout)
        assert "figures" in done.stdout and "WARNING: no harm" in done.stdout
        assert "worked" not in done.stdout


def test_steps_share_one_line_of_a_terminal():
    screen, terminal = pty.openpty()
    long = subprocess.Popen([*STEP, "compiling", "compiled", "sleep", "2"], stdout=terminal)
    short = subprocess.Popen([*STEP, "fetching", "fetched", "sleep", "1"], stdout=terminal)
    assert (short.wait(60), long.wait(60)) == (0, 0)
    drawn = os.read(screen, 1 << 16).decode()
    for file in (screen, terminal):
        os.close(file)
    lines = drawn.split("\r\n")
    # Two lines stay. All others are overwritten.
    stay = [re.sub(r".*\033\[K", "", line) for line in lines]
    assert re.fullmatch(r"fetched, \d+ s,compiled, \d+ s,", ",".join(stay))
    # One of the two draws until it has ended.
    first = set(re.findall(r"\033\[K(\w+) \.\.\. \d+ s", lines[0]))
    assert len(first) == 1 and first < {"compiling", "fetching"}
    assert "compiling ... " in lines[1] and "fetching" not in lines[1]
