"""Narrow windows, terminals that can do little, and pipes."""

import re
import signal
import subprocess
import sys
import textwrap

import pytest
from long import long_after, long_beyond_each
from ranks import environment
from source_tree import ROOT
from terminal import Terminal, check_ended_well

KCCL = [sys.executable, "-m", "kccl"]
PLAN = ["plan", "all_reduce", "--bytes", "8K", "-n", "2"]
ANSWER = ["generate", "--prompt", "def f(", "--max-tokens", "12"]
# The doctor draws as topo does, and takes seconds.
COMMANDS = (PLAN, ["topo"], ANSWER)
NAMES = ("plan", "topo", "generate")
OF_EACH = [
    pytest.param(each, id=name, marks=[pytest.mark.long] * (name != "generate"))
    for each, name in zip(COMMANDS, NAMES, strict=True)
]
# What a terminal is told beside text: colours and the like, and where to write.
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
ESCAPE = b"\x1b"


def through_a_pipe(arguments):
    done = subprocess.run(
        [*KCCL, *arguments],
        **{"capture_output": True, "timeout": 60, "env": environment(TERM="xterm-256color")},
    )
    assert done.returncode == 0, done.stderr
    return done


def on_a_terminal(arguments, **given):
    with Terminal([*KCCL, *arguments], **given) as terminal:
        assert terminal.end() == 0, terminal.text
        check_ended_well(terminal)
        return terminal


def plain(text):
    """Its words; a list of choices is as many words."""
    return text.replace(",", ", ").split()


def test_a_plan_in_a_narrow_window_breaks_no_word():
    narrow = on_a_terminal(PLAN, columns=40)
    assert narrow.words.split() == through_a_pipe(PLAN).stdout.decode().split()
    # A pipe gets a line for each algorithm, whatever its length.
    assert max(map(len, through_a_pipe(PLAN).stdout.splitlines())) > 100


@pytest.mark.long
@pytest.mark.parametrize(
    "command", ["", "plan", "bench", "bench decode", "generate", "run", "topo"]
)
def test_help_in_a_narrow_window_breaks_no_word(command):
    arguments = [*command.split(), "--help"]
    narrow, wide = (on_a_terminal(arguments, columns=columns) for columns in (40, 300))
    strange = set(plain(narrow.words)) - set(plain(wide.words)) - {"[options]"}
    assert not strange, narrow.text
    assert narrow.text.startswith(f"usage: kccl{' ' if command else ''}{command} ")


@pytest.mark.parametrize("arguments", long_after(1, [["topo"], ["doctor"]]), ids=["topo", "doctor"])
def test_tables_in_a_narrow_window_break_no_word(arguments):
    narrow, wide = (on_a_terminal(arguments, columns=columns) for columns in (40, 300))
    # The values of variables may be longer than the window, as paths are.
    found = narrow.text.partition("\n variable ")[0].split()
    known = set(wide.words.split())
    # Numbers differ from call to call. A path may be longer than the window.
    paths = " ".join(word for word in known if "/" in word)
    strange = [word for word in found if word not in known and not re.search(r"[\d/.─]", word)]
    broken = [word for word in strange if word not in paths]
    assert not broken, narrow.text
    assert "…" not in narrow.text


def test_a_complaint_in_a_narrow_window_breaks_no_word():
    with Terminal([*KCCL, "topo", "--nonsense"], columns=40) as terminal:
        assert terminal.end() == 2
        assert terminal.words == "kccl: unrecognized arguments: --nonsense; see `kccl topo --help`"


@pytest.mark.parametrize("arguments", OF_EACH)
def test_a_dumb_terminal_gets_text_only(arguments):
    terminal = on_a_terminal(arguments, columns=40, TERM="dumb")
    assert ESCAPE not in terminal.raw
    assert "…" not in terminal.text


@pytest.mark.parametrize("arguments", OF_EACH)
def test_no_color(arguments):
    terminal = on_a_terminal(arguments, NO_COLOR="1")
    codes = {code for found in COLOUR.findall(terminal.raw) for code in found[2:-1].split(b";")}
    # Bold and dim are no colours.
    assert codes <= {b"", b"0", b"1", b"2"}


@pytest.mark.parametrize("arguments", COMMANDS, ids=NAMES)
def test_a_pipe_gets_text_only(arguments):
    done = through_a_pipe(arguments)
    assert ESCAPE not in done.stdout + done.stderr
    assert b"\r" not in done.stdout + done.stderr


def test_the_bar_goes_away_and_never_hides_the_cursor():
    """A command that is killed could not show it again."""
    program = """
    import os, sys, time
    from kccl.tools import cli
    from kccl.engine import generate
    make = generate.Engine
    def slow(*args, progress, **given):
        def tell(done, total):
            progress(done, total)
            time.sleep(0.2)
        return make(*args, progress=tell, **given)
    generate.Engine = slow
    sys.exit(cli.main(["generate", "--prompt", "def f(", "--max-tokens", "12"]))
    """
    with Terminal([sys.executable, "-c", textwrap.dedent(program)], columns=40) as terminal:
        terminal.wait_for("MB")
        assert "reading" in terminal.text
        terminal.kill(signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM
        assert not terminal.hides_cursor
    terminal = on_a_terminal(ANSWER, columns=40)
    assert "reading" not in terminal.text and b"\x1b[?25l" not in terminal.raw


BENCH = ["bench", "all_reduce", "-e", "16", "--iterations", "5", "--repeats", "1"]


def test_a_bench_in_a_narrow_window_breaks_no_word():
    terminal = on_a_terminal(["run", "-n", "2", "--", *KCCL, *BENCH], columns=40)
    lines = terminal.lines
    assert max(map(len, lines)) <= 40
    assert {"prepared", "--verbose", "algorithm", "float32"} < set(terminal.words.split())
    # What belongs to the line above begins further right; a table's lines have no such.
    (begin,) = [number for number, line in enumerate(lines) if line.startswith("# KCCL: op()")]
    assert lines[begin + 1].startswith("  ") and lines[begin + 2].startswith("# floor: ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "ranks"),
    long_beyond_each([BENCH, ANSWER], [2, 1]),
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_several_ranks_draw_no_bar(command, ranks):
    """They write to one terminal, whose lines a bar would overwrite."""
    terminal = on_a_terminal(["run", "-n", str(ranks), "--", *KCCL, *command])
    assert (b"\x1b[2K" in terminal.raw) is (ranks == 1)
    assert b"\x1b[?25l" not in terminal.raw


@pytest.mark.parametrize("columns", long_after(1, [40, 80]))
def test_a_step_of_the_makefile(columns, tmp_path):
    """Its line is erased, also where the window is narrower than the line."""
    step = [sys.executable, str(ROOT / ".ci/step.py")]
    words = ["measuring all_reduce beside MPICH and Open MPI", "measured"]
    # A busy machine may show no 1 s, but 11 s.
    until_told = ["sh", "-c", 'until test -e "$0"; do sleep 0.1; done', str(tmp_path / "told")]
    with Terminal([*step, *words, *until_told], columns=columns) as terminal:
        terminal.wait_for("1 s")
        (tmp_path / "told").touch()
        assert terminal.end() == 0
        assert re.fullmatch(r"measured, \d+ s", terminal.text)
    with Terminal([*step, *words, "sh", "-c", "echo out; exit 3"], columns=columns) as terminal:
        assert terminal.end() == 3
        assert terminal.words.startswith("FAILED: measuring all_reduce")
        assert terminal.lines[-1] == "out"
    with Terminal([*step, *words, "sleep", "60"], columns=columns) as terminal:
        terminal.wait_for("0 s")
        terminal.interrupt()
        assert terminal.end() == 130
        check_ended_well(terminal)
