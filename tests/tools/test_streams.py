"""Standard streams that are closed, full or cut off, and memory or libraries that are missing."""

import json
import shlex
import subprocess
import sys
import textwrap

import pytest
from long import long_beyond_each
from ranks import environment
from tiny_models import LLAMA, write_folder

KCCL = f"{shlex.quote(sys.executable)} -m kccl"
ANSWER = "generate --prompt 'def f(' --max-tokens 12"


def shell(line, **variables):
    return subprocess.run(
        ["bash", "-c", line],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


TOLD = {
    ">&-": "kccl: standard output is closed: redirect it, as in > /dev/null\n",
    "> /dev/full": "kccl: cannot write to standard output: No space left on device\n",
}


@pytest.mark.parametrize(
    ("command", "redirection"),
    long_beyond_each(["plan barrier", "topo", ANSWER, "--version", "plan --help"], TOLD),
)
def test_output_that_goes_nowhere_is_a_sentence(command, redirection):
    done = shell(f"{KCCL} {command} {redirection}")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    # The answer's speed may have been told before.
    assert done.stderr.endswith(TOLD[redirection]) and "Traceback" not in done.stderr


def test_other_streams_may_be_closed():
    for redirection in ("2>&-", "<&- 2>&-"):
        done = shell(f"{KCCL} {ANSWER} {redirection}")
        assert done.returncode == 0 and done.stdout, done.stderr
    assert shell(f"{KCCL} generate <&-").stderr.endswith("give --prompt, or pipe it\n")
    # `kccl run` has ranks that may have no output.
    assert shell(f"{KCCL} run -n 2 -- true >&- 2>&- <&-").returncode == 0


def test_a_reader_that_leaves_ends_an_answer_without_a_word():
    answer = "generate --prompt 'class Stack:' --max-tokens 900 --quiet"
    done = shell(f"{KCCL} {answer} | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")


def test_the_locale_c_without_utf8(tmp_path):
    """Prompts are UTF-8 there too, and files may have any names."""
    write_folder(tmp_path / "m\u00fc", LLAMA, with_tokenizer=True)
    only_ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    asked = f"--model {tmp_path}/m\u00fc --max-tokens 1"
    prompt = "--prompt Gr\u00fc\u00dfe --stop \u00e9 --echo"
    done = shell(f"{KCCL} generate {asked} {prompt}", **only_ascii)
    assert done.returncode == 0 and done.stdout.startswith("Gr??e"), done.stderr
    line = f"""echo '"\u00e9"' | {KCCL} chat {asked} --json"""
    done = shell(line, **only_ascii)
    assert done.returncode == 0 and json.loads(done.stdout)["tokens"] == 1, done.stderr


def test_characters_that_the_encoding_lacks_are_replaced():
    done = shell(f"{KCCL} topo --probe --cpus 2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "One-way latency" in done.stdout


def test_memory_that_runs_out_is_a_sentence():
    """A library that does not load, a file that cannot be mapped, and a model that is too large.

    The last two limits count from what the process has. No limit may be that of a thread's stack
    and a little more: the thread starts, has no memory left to say so, and CPython waits for it
    without end.
    """
    done = shell(f"ulimit -v 90000; {KCCL} {ANSWER} -n 2")
    assert done.returncode in (1, 2) and done.stdout == ""
    assert done.stderr.startswith(("kccl: ", "OpenBLAS")) and "Traceback" not in done.stderr
    program = """
    import resource, sys
    import gguf, safetensors.numpy
    import kccl.engine.generate
    from kccl.tools import cli
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (int(sys.argv[1]) << 20),) * 2)
    raise SystemExit(cli.main(["generate", "--prompt", "a", "-n", "2"]))
    """
    for left in ("2", "80"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), left],
            **{"env": environment(), "capture_output": True, "text": True, "timeout": 60},
        )
        assert done.returncode in (1, 2) and done.stdout == "", (left, done.stderr)
        assert done.stderr.startswith("kccl: ") and "Traceback" not in done.stderr, left
        assert "`ulimit -v" in done.stderr, left


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
