"""Ctrl-C at a terminal, within each command that lasts."""

import json
import re
import struct
import sys
import textwrap
from math import prod

import pytest
from terminal import Terminal, check_ended_well
from tiny_models import ordinary_shapes, write_tokenizer

KCCL = [sys.executable, "-m", "kccl"]
GENERATE = [*KCCL, "generate"]
LONG = ["--prompt", "class Stack:", "--max-tokens", "1900", "--temperature", "1", "--seed", "8"]


def interrupted(terminal, code=130):
    terminal.interrupt()
    assert terminal.end() == code, terminal.text
    check_ended_well(terminal)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder with a model of 2 GB, of holes, which takes seconds to read."""
    folder = tmp_path_factory.mktemp("large")
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048},
        **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 8192, "vocab_size": 512, "max_position_embeddings": 64},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True},
        **{"hidden_act": "silu", "head_dim": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in ordinary_shapes(config).items():
        end = at + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("columns", [80, 40])
def test_while_a_model_is_read(large, columns):
    command = [*GENERATE, "--model", str(large), "--prompt", "Hi", "-n", "2"]
    with Terminal(command, columns=columns) as terminal:
        terminal.wait_for("GB")
        interrupted(terminal)
        # The bar is gone.
        assert not terminal.words.replace("^C", "")


def test_while_a_prompt_is_awaited():
    with Terminal(GENERATE) as terminal:
        terminal.wait_for("type the prompt, then Enter and Ctrl-D")
        interrupted(terminal)


def test_a_prompt_that_is_typed():
    with Terminal([*GENERATE, "--max-tokens", "8"]) as terminal:
        terminal.wait_for("Ctrl-D")
        terminal.type("def mean(values):\n")
        terminal.end_input()
        assert terminal.end() == 0, terminal.text
        check_ended_well(terminal)
        assert "7 tokens of prompt, 8 of answer" in terminal.words


@pytest.mark.parametrize("job", [[], ["-n", "2"], [*KCCL, "run", "-n", "2", "--"]], ids=len)
def test_within_an_answer(job):
    command = [*job, *GENERATE, *LONG] if job[:1] == KCCL[:1] else [*GENERATE, *LONG, *job]
    with Terminal(command) as terminal:
        terminal.wait_for("def ")
        interrupted(terminal)
        # On a line of its own, behind what was generated.
        (line,) = [line for line in terminal.lines if line.startswith("6 tokens of prompt, ")]
        assert re.search(r", \d+ of answer \(interrupted\), \d ranks?; seed 8; first", line)


def test_a_quiet_answer_ends_with_a_new_line():
    with Terminal([*GENERATE, *LONG, "--quiet"]) as terminal:
        terminal.wait_for("def ")
        interrupted(terminal)
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
    [
        (["run", "-n", "2", "--", "sh", "-c", "echo started; sleep 60"], "started"),
        (["bench", "all_reduce", "--backend", "sim", "-n", "4", "--repeats", "99"], "# kccl bench"),
        (
            ["run", "-n", "2", "--", *KCCL, "bench", "all_reduce", "--repeats", "999"],
            "# kccl bench",
        ),
    ],
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
