"""Every command that README and engine/README name, as a person at a terminal sees it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from long import long_after
from smollm2 import find_smollm2
from source_tree import ROOT
from terminal import Terminal, check_ended_well

BIN = Path(sys.executable).parent
PATH = f"{BIN}:/usr/local/bin:/usr/bin:/bin"
# Words behind a command that make it short, and change nothing about what it draws.
SHORTER = {
    "bench": ["-e", "16", "--iterations", "5", "--repeats", "1"],
    "warm": ["-n", "1"],
    "generate": ["--max-tokens", "20"],
}
# What has another exit code than 0: it kills a rank on purpose.
CODES = {"examples/04_lost_rank.py": 137}


def commands():
    """The commands that need no GPU and no hour, as words."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).splitlines()
    lines += re.findall(r"^    (kccl .*)$", (ROOT / "engine/README.md").read_text(), re.MULTILINE)
    for line in dict.fromkeys(lines):
        words = shlex.split(line, comments=True)
        if words[:2] in (["kccl", "chat"], ["kccl", "serve"]) or words[:1] == ["curl"]:
            # They go on: tests/engine/serving.
            continue
        if words[:2] in (["kccl", "quantize"], ["kccl", "drafts"]):
            # They read a folder of the reader's own: test_quantize.py and test_ngrams.py in
            # tests/engine.
            continue
        if words and words[0] != "make" and "cuda" not in words and "--baselines" not in words:
            yield words


def shortened(words):
    for name, more in SHORTER.items():
        if name in words and words[words.index(name) - 1] == "kccl":
            return [*words, *more]
    return words


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_the_commands_are_found():
    named = {words[words.index("kccl") + 1] for words in commands()}
    assert named >= {"topo", "doctor", "plan", "warm", "bench", "run", "generate"}


@pytest.mark.long
@pytest.mark.parametrize("words", list(commands()), ids=shlex.join)
def test_a_command_on_a_terminal(words, folder):
    if "smollm2" in words:
        words = [str(find_smollm2()) if word == "smollm2" else word for word in words]
    with Terminal(shlex.join(shortened(words)), cwd=folder, PATH=PATH) as terminal:
        code = terminal.end(110)
        assert code == next((c for word, c in CODES.items() if word in words), 0), terminal.text
        check_ended_well(terminal)
        # A bar has gone when its work is done.
        assert "━" not in terminal.text
        assert len(terminal.lines) > 1


def demo():
    """The step of `make demo` that generates, from a pipe."""
    # Without a word about folders, which make says when another make has started it.
    command = ["make", "-n", "--no-print-directory", "demo"]
    done = subprocess.run(
        # make splits names at blanks, which the path of this folder may have.
        [*command, f"VENV={os.path.relpath(sys.prefix, ROOT)}", "PYTHON=python3"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": True},
    )
    (step,) = (
        line for line in done.stdout.replace("\\\n", " ").splitlines() if "kccl generate" in line
    )
    return f"cd {shlex.quote(str(ROOT))} && {step}"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("columns", long_after(1, [40, 80]))
def test_make_demo_generates(columns):
    line = demo()
    with Terminal(line, columns=columns) as terminal:
        assert terminal.end() == 0, terminal.text
        check_ended_well(terminal)
        # Caches hold the small model on many machines.
        share = r"\d+ tok/s, (\d+% of what the memory allows|with all weights .* in the caches)"
        assert re.search(share, terminal.words), terminal.text
        # The progress bar has gone, and has taken nothing of the prompt along.
        assert "━" not in terminal.text
        assert 'class Stack: """A stack of items' in terminal.words
        assert "def __init__(self):" in terminal.words
        assert "(stop)" in terminal.words or "(max_tokens)" in terminal.words
