"""`kccl chat`: turns in a terminal, lines of JSON, and files."""

import io
import json
import signal
import subprocess
import sys

import pytest
from terminal import Terminal

from kccl.engine import Engine
from kccl.engine.chat import _answer
from kccl.engine.commands import screen
from kccl.tools import cli


def chat(model, *options, given=""):
    command = [sys.executable, "-m", "kccl", "chat", "--model", str(model), "--blocks", "1"]
    return subprocess.run(
        [*command, *options], input=given, capture_output=True, text=True, timeout=60
    )


def test_lines_of_json_are_turns(chat_model):
    lines = [json.dumps({"content": "Hi"}), json.dumps("And you?")]
    done = chat(chat_model, "--json", "--max-tokens", "4", "--system", "Be", given="\n".join(lines))
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["role"] for each in answers] == ["assistant"] * 2
    assert all(each["tokens"] <= 4 and each["end"] for each in answers)


def test_a_file_or_standard_input_is_one_message(chat_model, tmp_path):
    (tmp_path / "message").write_text("Hi\nyou\n")
    by_file = chat(chat_model, "--file", str(tmp_path / "message"), "--max-tokens", "5")
    piped = chat(chat_model, "--max-tokens", "5", given="Hi\nyou\n")
    drafted = chat(chat_model, *("--max-tokens", "40", "--drafts", "3"), given="Hi\nyou\n")
    assert "drafts accepted" in drafted.stderr
    assert drafted.stdout.startswith(piped.stdout.rstrip("\n"))
    assert by_file.returncode == piped.returncode == 0, by_file.stderr
    assert by_file.stdout == piped.stdout != ""
    assert "tok/s" in piped.stderr


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (["--file", "/nothing"], "", "--file /nothing cannot be read"),
        (["--json"], "{", "a line of standard input is no JSON"),
        (["--json"], "[1]", 'must be as {"content": "Hi"}'),
        (
            ["--model", "/nothing", "--system", "\udcff"],
            "",
            "--system: the text is not valid UTF-8",
        ),
    ],
)
def test_what_is_wrong_is_said(chat_model, monkeypatch, capsys, options, given, message):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    code = cli.main(["chat", "--model", str(chat_model), "--blocks", "1", *options])
    told = capsys.readouterr().err
    assert (code, message in told) == (2, True), told


def test_a_conversation_on_a_terminal(chat_model, tmp_path):
    command = [sys.executable, "-m", "kccl", "chat", "--model", str(chat_model), "--blocks", "1"]
    kept = tmp_path / "talk.json"
    with Terminal([*command, "--max-tokens", "8"], cwd=tmp_path) as terminal:
        terminal.wait_for("\n>")
        terminal.type("Hi\n")
        terminal.wait_for("first token after")
        terminal.type(f"/save {kept}\n")
        terminal.wait_for("2 messages are in")
        # Ctrl-C drops a line, and ends nothing.
        terminal.type("not sent")
        terminal.wait_for("> not sent")
        terminal.interrupt()
        terminal.wait_for("> not sent\n>")
        terminal.type("/reset\n")
        terminal.wait_for("the conversation is forgotten")
        terminal.type("/nothing\n")
        terminal.wait_for("/nothing is no command")
        terminal.type("/save\n")
        terminal.wait_for("/save needs a file")
        terminal.type("/save ~nouser_x/y\n")
        terminal.wait_for("cannot write ~nouser_x/y")
        # A path is no command.
        terminal.type("/etc/hosts is what?\n")
        terminal.type("/save two\n")
        # A Ctrl-D that comes before the prompt can be lost.
        terminal.wait_for("2 messages are in two\n>")
        terminal.end_input()
        assert terminal.end() == 0
    (asked, _) = json.loads((tmp_path / "two").read_text())
    assert asked["content"] == "/etc/hosts is what?"
    assert [each["role"] for each in json.loads(kept.read_text())] == ["user", "assistant"]


def test_a_file_obeys_nothing(chat_model, tmp_path):
    (tmp_path / "message").write_text("/quit")
    command = [sys.executable, "-m", "kccl", "chat", "--model", str(chat_model), "--blocks", "1"]
    options = ["--file", "message", "--max-tokens", "4"]
    with Terminal([*command, *options], cwd=tmp_path) as terminal:
        terminal.wait_for("first token after")
        terminal.type("/quit\n")
        assert terminal.end() == 0


def test_ctrl_c_ends_the_answer_alone(chat_model, monkeypatch, capsys):
    """Behind its third token: the conversation has what came, and goes on."""
    with Engine(chat_model, blocks=1) as engine:
        talk = engine.conversation(max_tokens=2000, logit_bias={1: -100, 2: -100})
        write, left = sys.stdout.write, [3]

        def interrupted(text):
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
            return write(text)

        monkeypatch.setattr(sys.stdout, "write", interrupted)
        quiet = screen.console(is_quiet=True)
        assert _answer(engine, talk, "Hi", quiet) == screen.INTERRUPTED
        assert [each["role"] for each in talk.messages] == ["user", "assistant"]
        assert _answer(engine, talk, "And you?", quiet) == "context"
        assert engine.sessions.num_running == 0
