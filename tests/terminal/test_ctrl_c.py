"""Ctrl-C at a terminal, within each command that lasts."""

import re
import sys
import textwrap

import pytest
from long import long_after
from terminal import Terminal, check_ended_well

KCCL = [sys.executable, "-m", "kccl"]
GENERATE = [*KCCL, "generate"]
LONG = ["--prompt", "class Stack:", "--max-tokens", "1900", "--temperature", "1", "--seed", "8"]


def interrupted(terminal, *codes):
    """Types Ctrl-C, and checks the command's end. Its exit code is 130, or one of `codes`."""
    terminal.interrupt()
    assert terminal.end() in (130, *codes), terminal.text
    check_ended_well(terminal)


@pytest.mark.parametrize("columns", long_after(1, [40, 80]))
def test_while_a_model_is_read(columns):
    # However fast the machine is, the model is being read until the ranks are aborted. Each rank
    # has a thread. Its first reads are those of 13 norms, which move no bar.
    program = """
    import collections, sys, threading
    import kccl
    from kccl.engine.files.hf import FolderSource
    from kccl.tools import cli

    is_aborted, reads = threading.Event(), collections.Counter()
    read, abort = FolderSource.read, kccl.Communicator.abort

    def read_slowly(*arguments):
        rank = threading.get_ident()
        reads[rank] += 1
        if reads[rank] > 20:
            is_aborted.wait(60)
        return read(*arguments)

    def aborted(comm):
        abort(comm)
        is_aborted.set()

    FolderSource.read, kccl.Communicator.abort = read_slowly, aborted
    sys.exit(cli.main(["generate", "--prompt", "Hi", "-n", "2", "--blocks", "1"]))
    """
    with Terminal([sys.executable, "-c", textwrap.dedent(program)], columns=columns) as terminal:
        terminal.wait_for("MB")
        interrupted(terminal)
        # The bar is gone.
        assert not terminal.words.replace("^C", "")


def test_while_a_prompt_is_awaited():
    with Terminal(GENERATE) as terminal:
        terminal.wait_for("type the prompt, then Enter and Ctrl-D")
        interrupted(terminal)


@pytest.mark.parametrize("ranks", long_after(1, [2, 1, 3]))
def test_a_job_that_lacks_a_prompt(ranks):
    """The ranks are no foreground processes of the terminal, so nobody can type to them."""
    with Terminal([*KCCL, "run", "-n", str(ranks), "--", *GENERATE]) as terminal:
        assert terminal.end() == 2, terminal.text
        check_ended_well(terminal)
        assert terminal.words.count("give --prompt, or pipe it") == 1


def test_a_prompt_that_is_typed():
    with Terminal([*GENERATE, "--max-tokens", "8"]) as terminal:
        terminal.wait_for("Ctrl-D")
        terminal.type("def mean(values):\n")
        terminal.end_input()
        assert terminal.end() == 0, terminal.text
        check_ended_well(terminal)
        assert "7 tokens of prompt, 8 of answer" in terminal.words


@pytest.mark.parametrize(
    "job", long_after(1, [[], ["-n", "2"], [*KCCL, "run", "-n", "2", "--"]]), ids=len
)
def test_within_an_answer(job):
    command = [*job, *GENERATE, *LONG] if job[:1] == KCCL[:1] else [*GENERATE, *LONG, *job]
    with Terminal(command) as terminal:
        terminal.wait_for("def ")
        # On a busy machine the whole answer may come before the key does.
        interrupted(terminal, 0)
        # On a line of its own, behind what was generated.
        (line,) = [line for line in terminal.lines if line.startswith("6 tokens of prompt, ")]
        ends = r"\((interrupted|max_tokens)\)"
        assert re.search(rf", \d+ of answer {ends}, \d ranks?; seed 8; first", line)


def test_a_quiet_answer_ends_with_a_new_line():
    with Terminal([*GENERATE, *LONG, "--quiet"]) as terminal:
        terminal.wait_for("def ")
        interrupted(terminal, 0)
        assert "interrupted" not in terminal.text
        assert terminal.screen.cursor.x == 0


def test_within_a_probe():
    program = """
    import sys, time
    from kccl.tools import cli, probe
    probe.core_to_core_us = lambda a, b: time.sleep(30)
    sys.exit(cli.main(["topo", "--probe"]))
    """
    with Terminal([sys.executable, "-c", textwrap.dedent(program)]) as terminal:
        terminal.wait_for("core to core")
        interrupted(terminal)


@pytest.mark.parametrize(
    ("command", "shown"),
    long_after(
        1,
        [
            # A shell that waits for a child can miss a signal while it starts the child.
            (["run", "-n", "2", "--", "sh", "-c", "echo started; exec sleep 60"], "started"),
            (
                ["bench", "all_reduce", "--backend", "sim", "-n", "4", "--repeats", "99"],
                "# kccl bench",
            ),
            (
                ["run", "-n", "2", "--", *KCCL, "bench", "all_reduce", "--repeats", "999"],
                "# kccl bench",
            ),
        ],
    ),
    ids=["run", "bench", "bench in a job"],
)
def test_within_a_command(command, shown):
    with Terminal([*KCCL, *command]) as terminal:
        terminal.wait_for(shown)
        interrupted(terminal)


def test_within_the_doctor():
    with Terminal([*KCCL, "doctor"]) as terminal:
        terminal.wait_for("checking: ")
        terminal.wait_for_child()
        interrupted(terminal)
        assert "checking" not in terminal.text
