from dataclasses import replace
from math import prod, sqrt

import numpy as np
import pytest

from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.formats.float32 import FLOAT32
from kccl.engine.model.config import is_vector
from kccl.engine.model.ops import IN_LAYER, layer_of
from kccl.engine.model.program import Program

# 5 layers are modules 0 to 9; with a delay of 2 layers a message lands 4 modules later.
LANEFORMER = replace(MODELS["tiny-laneformer"], num_layers=5)
N = None
OWN = sqrt(LANEFORMER.num_lanes)


def modules_of(**changes):
    config = replace(LANEFORMER, **changes)
    return [op for op in Program(config).ops if op.kind in ("out", "down")]


@pytest.mark.parametrize(
    ("changes", "own_scale", "blocking", "sends", "receives"),
    [
        ({}, [OWN] * 4 + [1] * 6, "", "012345", [N] * 4 + [0, 1, 2, 3, 4, 5]),
        ({"early_comm": True}, [1] * 10, "0123", "012345", [N] * 4 + [0, 1, 2, 3, 4, 5]),
        (
            {"early_messages": False},
            [OWN] * 4 + [1] * 6,
            "",
            "45",
            [N] * 8 + [4, 5],
        ),
        (
            {"attention_comm": False},
            [OWN] * 4 + [OWN, 1] * 3,
            "",
            "135",
            [N] * 4 + [N, 1, N, 3, N, 5],
        ),
        ({"mlp_comm": False}, [OWN] * 4 + [1, OWN] * 3, "", "024", [N] * 4 + [0, N, 2, N, 4, N]),
        ({"delay": 1}, [OWN] * 2 + [1] * 8, "", "01234567", [N, N, *range(8)]),
        ({"delay": 3}, [OWN] * 6 + [1] * 4, "", "0123", [N] * 6 + [0, 1, 2, 3]),
        ({"delay": 5}, [OWN] * 10, "", "", [N] * 10),
        ({"delay": 0}, [1] * 10, "0123456789", "", [N] * 10),
        ({"num_lanes": 1}, [1] * 10, "", "", [N] * 10),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_rule_of_delayed_tensor_parallelism(changes, own_scale, blocking, sends, receives):
    modules = modules_of(**changes)
    assert [op.module for op in modules] == list(range(10))
    assert [op.own_scale for op in modules] == own_scale
    assert "".join(str(op.module) for op in modules if op.is_blocking) == blocking
    assert "".join(str(op.module) for op in modules if op.sends) == sends
    assert [op.receives for op in modules] == receives


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
@pytest.mark.parametrize("early_comm", [False, True])
def test_each_message_lands_once(delay, early_comm):
    modules = modules_of(delay=delay, early_comm=early_comm)
    received = [op.receives for op in modules if op.receives is not None]
    assert received == [op.module for op in modules if op.sends]


@pytest.mark.parametrize("model", MODELS)
def test_ops_are_numbered_named_and_read_all_weights_once(model):
    config = MODELS[model]
    program = Program(config)
    in_layer = len(layer_of(config))
    assert [op.index for op in program.ops] == list(range(in_layer * config.num_layers + 3))
    assert [program.by_name[op.name] for op in program.ops] == list(program.ops)
    read = [name for op in program.ops for name in (*op.weights, *op.biases)]
    assert set(read) == set(config.shapes())
    # The router reads the norm before the experts, too.
    again = config.num_layers if config.experts else 0
    assert len(read) == len(set(read)) + config.is_tied + again


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tiny-laneformer", {}),
        ("tiny-laneformer", {"delay": 0}),
        ("tiny-laneformer", {"lm_head": "vocab_parallel"}),
        ("tiny-llama", {}),
        ("tiny-qwen3", {}),
        ("tiny-qwen3-moe", {}),
        ("tiny-gpt-oss", {}),
        ("tiny-llama", {"biases": ("qkv", "out", "gate_up", "down")}),
    ],
)
def test_outputs_have_the_shapes_that_ops_tell(model, changes):
    reference = Reference(random_checkpoint(model, **changes))
    for op, output in reference.steps([3, 1, 4]):
        assert output.dtype == np.float32
        assert output.shape == (op.shape[0], 3, op.shape[1]), op.name


def test_windows_belong_to_the_first_layers():
    windows = [op.window for op in Program(MODELS["laneformer-2b"]).ops if op.kind == "attend"]
    assert windows == [2048] * 10 + [0] * 5


def test_rotations_are_rounded_once():
    cos, sin = Program(MODELS["llama-1b"]).rotations(9)
    frequencies = MODELS["llama-1b"].rope.frequencies(64)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (9, 32)
    assert (cos[8] == np.cos(8 * frequencies).astype(np.float32)).all()
    assert (sin[8] == np.sin(8 * frequencies).astype(np.float32)).all()


def test_a_token_reads_weights_as_they_are_stored():
    program = Program(MODELS["laneformer-2b"])
    matrices = program.streamed_bytes() - 4 * (2 * 15 + 1) * 3072
    assert matrices == 4_443_531_264 - 2 * (2 * 15 + 1) * 3072
    small = MODELS["tiny-llama"]
    tied, untied = (Program(replace(small, is_tied=is_tied)) for is_tied in (True, False))
    assert tied.streamed_bytes() == untied.streamed_bytes()
    biased = replace(small, biases=tuple(kind.name for kind in IN_LAYER if kind.biases))
    more = biased.num_parameters() - small.num_parameters()
    assert Program(biased).streamed_bytes() - Program(small).streamed_bytes() == 4 * more


def test_a_token_reads_the_experts_that_it_passes():
    config = MODELS["gpt-oss-120b"]
    experts, layers, d = config.experts, config.num_layers, config.hidden
    one = 3 * d * config.ffn * 2 + 4 * (2 * config.ffn + d)
    stored = 2 * config.num_parameters() - 2 * config.vocab_size * d
    # Vectors are in FP32, and two ops read the norm before the experts.
    vectors = sum(prod(shape) for name, shape in config.shapes().items() if is_vector(name))
    stored += 2 * vectors + 4 * d * layers
    unread = layers * (experts.num - experts.chosen) * one
    assert Program(config).streamed_bytes() == stored - unread


def test_a_format_changes_what_a_token_reads():
    small = MODELS["tiny-llama"]
    usual, wide = Program(small), Program(small, {"head": FLOAT32})
    assert wide.streamed_bytes() - usual.streamed_bytes() == 2 * small.vocab_size * small.hidden
