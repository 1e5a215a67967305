"""Standard streams that are closed, full or cut off, and memory or libraries that are missing."""

import subprocess
import sys
import textwrap

import pytest
from ranks import environment

KCCL = f"{sys.executable} -m kccl"
ANSWER = "generate --prompt 'def f(' --max-tokens 12"


def shell(line, **variables):
    return subprocess.run(
        ["bash", "-c", line],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("command", ["plan barrier", "topo", ANSWER, "--version", "plan --help"])
@pytest.mark.parametrize(
    ("redirection", "told"),
    [
        (">&-", "kccl: standard output is closed: redirect it, as in > /dev/null\n"),
        ("> /dev/full", "kccl: cannot write to standard output: No space left on device\n"),
    ],
    ids=["closed", "full"],
)
def test_output_that_goes_nowhere_is_a_sentence(command, redirection, told):
    done = shell(f"{KCCL} {command} {redirection}")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    # The answer's speed may have been told before.
    assert done.stderr.endswith(told) and "Traceback" not in done.stderr


def test_other_streams_may_be_closed():
    for redirection in ("<&-", "2>&-", "<&- 2>&-"):
        done = shell(f"{KCCL} {ANSWER} {redirection}")
        assert done.returncode == 0 and done.stdout, done.stderr
    assert shell(f"{KCCL} generate <&-").stderr.endswith("give --prompt, or pipe it\n")
    # `kccl run` has ranks that may have no output.
    assert shell(f"{KCCL} run -n 2 -- true >&- 2>&- <&-").returncode == 0


def test_a_reader_that_leaves_ends_an_answer_without_a_word():
    answer = "generate --prompt 'class Stack:' --max-tokens 900 --quiet"
    done = shell(f"{KCCL} {answer} | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")


def test_characters_that_the_encoding_lacks_are_replaced():
    done = shell(f"{KCCL} topo --probe --cpus 2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "One-way latency" in done.stdout


def test_memory_that_runs_out_is_a_sentence():
    """Whatever fails first: a library that does not load, a thread, a mapping, the model's size."""
    for kilobytes in (170_000, 190_000, 230_000, 270_000, 330_000):
        done = shell(f"ulimit -v {kilobytes}; {KCCL} {ANSWER} -n 2")
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (1, 2) and done.stdout == "", kilobytes
        assert done.stderr.startswith(("kccl: ", "OpenBLAS")), done.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("MemoryError('2 GiB')", "there is not enough memory: 2 GiB"),
        ('RuntimeError("can\'t start new thread")', "cannot start a thread: raise ulimit -u"),
        ("ImportError('libz.so.1: no such file', name='numpy')", "kccl needs numpy, which cannot"),
    ],
)
def test_shortages_are_one_line(error, told):
    program = f"""
    from kccl.tools import cli
    def fail(args): raise {error}
    cli._COMMANDS["plan"] = cli.Command("", lambda parser: None, fail)
    raise SystemExit(cli.main(["plan"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"kccl: {told}") and done.stderr.count("\n") == 1
