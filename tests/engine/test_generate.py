"""The command `kccl generate`, as a person runs it."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from long import long_after
from tiny_models import write_gguf

import kccl
from kccl.engine import Checkpoint, Engine
from kccl.engine.commands import screen
from kccl.tools.cli import main

BEGINNING = "def mean(values):"
EMPTY = "the prompt is empty: give --prompt, or pipe it"


def generate(*arguments, text=None, ranks=0):
    """Runs the command, on several processes if `ranks` is given."""
    job = ["run", "-n", str(ranks), "--", sys.executable, "-m", "kccl"] if ranks else []
    return subprocess.run(
        [sys.executable, "-m", "kccl", *job, "generate", *arguments],
        input=text,
        capture_output=True,
        timeout=60,
        env=os.environ | {"KCCL_TIMEOUT": "5"},
    )


class Standard:
    """Stands in for sys.stdin."""

    def __init__(self, content):
        self.buffer = io.BytesIO(content)


@pytest.fixture
def tiny(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    return str(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def expected():
    with Engine("bundled", blocks=1) as engine:
        return engine.generate(BEGINNING, max_tokens=12).text


def test_the_answer_alone_is_on_stdout(expected, capsys, monkeypatch):
    monkeypatch.setattr(Engine, "cache_bytes", lambda engine: 0)
    arguments = ["generate", "--prompt", BEGINNING, "--max-tokens", "12"]
    for ranks in ([], ["-n", "2"]):
        assert main([*arguments, *ranks]) == 0
        told = capsys.readouterr()
        assert told.out == expected + "\n"
        number = "2 ranks" if ranks else "1 rank"
        assert f"7 tokens of prompt, 12 of answer (max_tokens), {number}; first token" in told.err
        assert "of what the memory allows" in told.err
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == (expected + "\n", "")


def test_the_prompt_stands_before_the_answer(expected, capsys, monkeypatch):
    arguments = ["generate", "--max-tokens", "12", "--echo", "--quiet"]
    assert main([*arguments, "--prompt", BEGINNING]) == 0
    assert capsys.readouterr().out == f"{BEGINNING}{expected}\n"
    assert main([*arguments, "--ids", "1 15,7", "--max-tokens", "2"]) == 0
    assert re.fullmatch(r"1 15,7 \d+ \d+\n", capsys.readouterr().out)
    assert main([*arguments, "--prompt", BEGINNING, "--chat"]) == 2
    assert "--chat and --echo are given, must be one of them" in capsys.readouterr().err


def test_what_the_memory_allows_is_not_told_of_weights_in_caches(capsys, monkeypatch):
    caches = 0

    def cache_bytes(engine):
        nonlocal caches
        # As many bytes as there are weights are enough.
        caches = engine.weight_bytes()
        return caches

    def bandwidth(engine):
        raise AssertionError("the memory is measured")

    monkeypatch.setattr(Engine, "cache_bytes", cache_bytes)
    monkeypatch.setattr(Engine, "bandwidth", bandwidth)
    assert main(["generate", "--prompt", BEGINNING, "--max-tokens", "3", "-n", "2"]) == 0
    told = capsys.readouterr().err
    size = f"{caches / 1e6:.0f} MB"
    assert told.endswith(f" tok/s, with all weights ({size}) in the caches ({size})\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_caches_are_those_of_the_cores_of_all_ranks(ranks, monkeypatch):
    machine = kccl.topology.Machine
    monkeypatch.setattr(machine, "cache_bytes", lambda _, cpus: sum(1 << cpu for cpu in cpus))
    allowed = os.sched_getaffinity(0)
    with Engine("bundled", ranks=ranks, blocks=len(allowed) // ranks or 1) as engine:
        assert engine.cache_bytes() == sum(1 << cpu for cpu in allowed)


def test_a_ctrl_c_behind_the_last_token_leaves_the_summary(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(screen, "bound", interrupted)
    arguments = ["generate", "--prompt", BEGINNING, "--max-tokens", "3", "--temperature", "1"]
    assert main([*arguments, "--seed", "8"]) == 130
    told = capsys.readouterr().err
    assert "3 of answer (max_tokens), 1 rank; seed 8; first token after" in told
    assert told.endswith(" tok/s\n")
    # Nobody reads the share, so nothing is measured.
    assert main([*arguments, "--quiet"]) == 0


@pytest.mark.parametrize(("rank", "is_quiet"), [(None, False), (0, False), (1, True)])
def test_only_rank_0_draws_a_bar(rank, is_quiet, monkeypatch):
    consoles = []

    def progress(console):
        consoles.append(console)
        raise kccl.Error("enough")

    monkeypatch.setattr(kccl, "launched_rank", lambda: rank)
    monkeypatch.setattr(screen, "progress", progress)
    assert main(["generate", "--prompt", "x"]) != 0
    assert [console.quiet for console in consoles] == [is_quiet]


def test_the_prompt_may_come_from_standard_input(expected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Standard(f"{BEGINNING}\n".encode()))
    assert main(["generate", "--max-tokens", "12", "--quiet"]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_standard_input_that_is_not_utf8_is_told_before_the_model_is_read(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Standard(b"def \xff():"))
    assert main(["generate", "--model", "no/such/model"]) != 0
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.strip().endswith("the text is not valid UTF-8: character 4 is '\\udcff'")
    assert told.err.count("\n") == 1


def test_an_empty_standard_input_is_told_before_the_model_is_read(capsys, monkeypatch):
    for content in (b"", b"\n"):
        monkeypatch.setattr(sys, "stdin", Standard(content))
        assert main(["generate", "--model", "no/such/model"]) != 0
        assert capsys.readouterr().err.endswith(f"{EMPTY}\n")


def test_rounding_of_weights_is_told(tiny, capsys):
    for model, is_told in ((tiny, True), ("bundled", False)):
        assert main(["generate", "--model", model, "--prompt", "Hi", "--max-tokens", "1"]) == 0
        told = capsys.readouterr().err
        assert ("weights are rounded from F32 to bfloat16\n" in told) is is_told


def test_a_chat_goes_through_the_template(tiny, capsys):
    with Engine(tiny, blocks=1) as engine:
        messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
        ids = engine.tokenizer.chat(messages)
        answer = engine.generate(ids, max_tokens=9)
    arguments = ["--model", tiny, "--chat", "--system", "Be", "--prompt", "Hi"]
    assert main(["generate", *arguments, "--max-tokens", "9"]) == 0
    told = capsys.readouterr()
    assert told.out == answer.text + "\n"
    assert f"{len(ids)} tokens of prompt, {len(answer.ids)} of answer" in told.err


def test_options_of_a_chat_reach_the_template(tiny, tmp_path, capsys):
    source = "{{ messages[0].content }}{{ enable_thinking }}{{ style }}{{ tools }}"
    write_gguf(tmp_path / "m.gguf", change=lambda writer: writer.add_chat_template(source))
    arguments = ["--model", tiny, "--chat", "--prompt", "Hi", "--max-tokens", "1"]
    arguments += ["--chat-option", "enable_thinking=false", "--chat-option", 'style="a=b"']
    assert main(["generate", *arguments, "--chat-option", "tools=[{}]"]) == 0
    # A token for each byte.
    count = len("HiFalsea=b[{}]")
    assert f"{count} tokens of prompt" in capsys.readouterr().err
    for wrong in ("enable_thinkng=false", "self=1"):
        assert main(["generate", *arguments, "--chat-option", wrong]) != 0
        told = f"{wrong.split('=')[0]} is no variable of the chat template, which has enable_th"
        assert told in capsys.readouterr().err


def test_ids_in_and_ids_out(tiny, tmp_path, capsys):
    with Engine(tiny, blocks=1) as engine:
        wanted = engine.generate([5, 6, 7], max_tokens=6, stop_ids=()).ids
    # The tokenizer of this one is of an unknown kind.
    write_gguf(tmp_path / "m.gguf", change=lambda writer: writer.add_tokenizer_pre("other"))
    for text in ("5 6 7", "5,6, 7"):
        arguments = ["--model", tiny, "--ids", text, "--max-tokens", "6"]
        assert main(["generate", *arguments]) == 0
        told = capsys.readouterr()
        assert told.out == " ".join(map(str, wanted)) + "\n"
        assert "3 tokens of prompt, 6 of answer" in told.err
    assert main(["generate", *arguments, "--stop-id", "299", "--stop-id", str(wanted[0])]) == 0
    assert capsys.readouterr().out == f"{wanted[0]}\n"
    assert main(["generate", "--model", tiny, "--prompt", "x"]) != 0
    assert "tokenizer.ggml.pre is 'other', must be one of" in capsys.readouterr().err


def test_ids_end_where_the_files_say_so(tiny, tmp_path, capsys):
    """Also where the tokenizer is of an unknown kind."""
    with Engine(tiny, blocks=1) as engine:
        ids = engine.generate([5, 6, 7], max_tokens=6, stop_ids=()).ids
    last = next(number for number, each in enumerate(ids) if each != ids[0])

    def change(writer):
        writer.add_tokenizer_pre("other")
        writer.add_eot_token_id(ids[last])

    write_gguf(tmp_path / "m.gguf", change=change)
    assert main(["generate", "--model", tiny, "--ids", "5 6 7", "--max-tokens", "6"]) == 0
    told = capsys.readouterr()
    assert told.out == " ".join(map(str, ids[: last + 1])) + "\n"
    assert f"{last + 1} of answer (stop)" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "2"], "--top-p is 2.0, must be above 0 and at most 1"),
        (["--max-tokens", str(2**32)], "--max-tokens is 4294967296, must be an integer from 1 to"),
        (["--model", "no/such/model"], "model 'no/such/model' is neither"),
        (["--system", "Be"], "--system is given, which needs --chat"),
        (["--chat-option", "a=1"], "--chat-option is given, which needs --chat"),
        (["--chat", "--chat-option", "a"], "--chat-option is 'a', must be a variable of the chat"),
        (["--chat", "--chat-option", "a=b"], "--chat-option a is 'b', must be JSON: a text has"),
        (["--chat", "--chat-option", "messages=[]"], "--chat-option is 'messages=[]', must be a"),
        (["--ids", "1 2"], "--ids and --prompt are given, must be one of them"),
        (["--prompt", ""], EMPTY),
        (["--prompt", "\udcff"], "the text is not valid UTF-8: character 0 is '\\udcff'"),
        (["--prompt", "x" * 3000], "tokens, must have at most 2047 in a context of 2048"),
        (["--chat"], "has no chat template: give text, on the command line leave out --chat"),
        (["--model", ""], "model '' is neither"),
        (["-n", "9"], "ranks is 9, must be from 1 to 8"),
        (["--blocks", "65"], "blocks is 65, must be from 1 to 64"),
        (["--dtype", "float16"], "dtype is 'float16', must be 'bfloat16' on backend 'host'"),
        (["--context", "0"], "context is 0, must be from 1 to the model's, 2048"),
        (["--stop", ""], "--stop is ('',), must be a string that is not empty"),
        (["--stop-id", "99999"], "--stop-id is 99999, must be an id of the model, from 0 to "),
        (["--stop", "\udcff"], "--stop is ('\\udcff',), must be a string"),
        (["--stop", r"a\q"], r"--stop 'a\\q' has the escape '\\q' at character 1, must be \n, "),
        (["--stop", "a\\"], r"--stop 'a\\' ends in a single backslash: write \\ for one"),
        (["--stop", r"\u12"], r"has the escape '\\u' at character 0"),
        (["--stop", r"\ud800"], r"has the escape \ud800, which is no character of Unicode"),
        (["--temperature", "1e-310"], "--temperature is 1e-310, must be 0, or 1e-06 or more"),
        (["--regex", "("], "--regex is '(', must be a regular expression: unclosed group"),
        (["--schema", "no/such"], "cannot read no/such: No such file or directory"),
        (["--schema", "x", "--regex", "x"], "--schema and --regex are given, must be one of them"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(["generate", "--prompt", "x", *arguments]) != 0
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1


def test_without_its_tokenizer_a_model_does_not_lack_one(tiny):
    with Engine(tiny, blocks=1, tokenizer=False, context=8) as engine:
        with pytest.raises(kccl.InvalidArgument, match="was opened without its tokenizer"):
            engine.generate([1], stop="x")
        # There may be more context than was asked for.
        with pytest.raises(kccl.InvalidArgument, match=r"context \(--context\), at most 64$"):
            engine.generate([1] * 9)


def test_an_answer_follows_a_schema_or_a_regular_expression(tmp_path, capsys):
    (tmp_path / "right.json").write_text('{"type": "array", "items": {"const": 7}, "maxItems": 3}')
    (tmp_path / "wrong.json").write_text('{"type": "frob"}')
    (tmp_path / "no.json").write_text("{")
    arguments = ["generate", "--prompt", BEGINNING, "--quiet"]
    assert main([*arguments, "--regex", "[0-9]{4}", "-n", "2"]) == 0
    assert re.fullmatch("[0-9]{4}\n", capsys.readouterr().out)
    assert main([*arguments, "--schema", str(tmp_path / "right.json")]) == 0
    assert set(json.loads(capsys.readouterr().out)) <= {7}
    for name, told in (
        (
            "wrong.json",
            '--schema is \'{"type": "frob"}\', must be a JSON schema: Invalid type: frob',
        ),
        ("no.json", "no.json is not JSON"),
    ):
        assert main([*arguments, "--schema", str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "other", [["--stop", "x"], ["--chat"], ["--system", "x"], ["--regex", "x"]]
)
def test_ids_have_no_text_beside_them(other, capsys):
    assert main(["generate", "--model", "no/such/model", "--ids", "1", *other]) != 0
    assert f"--ids and {other[0]} are given, must be one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12345678901", "--ids has '12345678901', must be ids"),
        ("1" * 5000, "--ids has '11111"),
        ("", '--ids is empty, must be ids, as in "1 15 7"'),
        ("1 x", "--ids has 'x', must be ids"),
        ("-1", "--ids has '-1', must be ids"),
        ("99999", "the prompt has id 99999, must be from 0 to"),
    ],
)
def test_wrong_ids_are_one_line(tiny, text, message, capsys):
    assert main(["generate", "--model", tiny, f"--ids={text}"]) != 0
    told = capsys.readouterr()
    assert told.out == "" and message in told.err


def test_a_job_prints_one_answer(expected):
    done = generate("--max-tokens", "12", "--quiet", text=BEGINNING.encode(), ranks=2)
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n"), done.stderr


@pytest.mark.parametrize("kind", long_after(1, ["full", "closed"]))
def test_a_job_whose_output_fails_says_so_once(kind):
    if kind == "full":
        output, code = os.open("/dev/full", os.O_WRONLY), 1
    else:
        (reader, output), code = os.pipe(), 141
        os.close(reader)
    command = [sys.executable, "-m", "kccl"]
    job = [*command, "run", "-n", "2", "--", *command]
    done = subprocess.run(
        [*job, "generate", "--prompt", BEGINNING, "--max-tokens", "200"],
        **{"stdout": output, "stderr": subprocess.PIPE, "text": True, "timeout": 60},
    )
    os.close(output)
    assert done.returncode == code
    assert "another rank" not in done.stderr and "rank 1:" not in done.stderr, done.stderr
    assert done.stderr.count("cannot write to standard output") == (kind == "full")


@pytest.mark.parametrize(
    ("arguments", "text", "told"),
    long_after(
        1,
        [
            (["--chat"], b"Hi", b"has no chat template"),
            ([], b"\n", EMPTY.encode()),
            ([], b"\xff", b"the text is not valid UTF-8"),
            (["--prompt", ""], None, EMPTY.encode()),
            (["--model", "no/such/model"], b"Hi", b"model 'no/such/model' is neither"),
            (["--dtype", "float16"], b"Hi", b"dtype is 'float16', must be 'bfloat16'"),
        ],
    ),
)
@pytest.mark.parametrize("ranks", long_after(1, [2, 1]))
def test_a_job_refuses_what_is_wrong_once_and_on_all_ranks(arguments, text, told, ranks):
    # A rank 0 that ended by itself would leave the others in MPI_Init.
    done = generate(*arguments, text=text, ranks=ranks)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.count(told) == 1 and b"rank 1: " not in done.stderr, done.stderr
    assert done.stderr.count(b"ended with exit code 2") == ranks


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--chat"], "has no chat template"),
        (["--prompt", "x" * 3000], "tokens, must have at most 2047"),
        (["--ids", "99999"], "the prompt has id 99999"),
        (["--drafts", "8"], "drafts is 8, must be 'off', 'auto' or an integer from 1 to 7"),
        (["--drafts", "on"], "drafts is 'on', must be"),
        (["--drafts", "2", "--backend", "hip"], "must be 'off' or 'auto' on backend 'hip'"),
    ],
)
def test_what_is_wrong_is_told_before_the_weights_are_read(arguments, told, capsys, monkeypatch):
    def read(*_):
        raise AssertionError("a weight is read")

    monkeypatch.setattr(Checkpoint, "tensor", read)
    monkeypatch.setattr(Checkpoint, "rows", read)
    prompt = [] if "--ids" in arguments else ["--prompt", "x"]
    assert main(["generate", *prompt, *arguments]) == 2
    assert told in capsys.readouterr().err
