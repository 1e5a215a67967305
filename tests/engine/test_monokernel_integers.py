"""Weights of 8 and 4 bits with scales and zero points in the monokernel, in the simulator."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from long import long_after
from test_monokernel_fp8 import CHUNKS, IDS, NEW, SMALL, TOLERANCE, grown, run
from test_monokernel_fp8 import TUNING as OF_FP8

from kccl.engine.executors.opening import read_for
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.layout import products_of

# Each form that a tile and its scales have is one product's. Strips have 4 tiles, 2 where a group
# has 32 columns, and those of the MLP's output 8.
MIXED = {
    "some": {
        **dict.fromkeys(("wq", "wk", "wv"), "int8_128"),
        "wo": "q8_0",
        **dict.fromkeys(("w1", "w3"), "int4_zeros_64"),
        "w2": "e4m3_128",
    },
    "others": {
        **dict.fromkeys(("wq", "wk", "wv"), "int4_128"),
        "wo": "int8_zeros_32",
        **dict.fromkeys(("w1", "w3"), "q4_0"),
        "w2": "int4_zeros_128",
        "embedding": "int8_128",
    },
}

# A stage has 16 tiles of 4 bits, 8 of 8 bits, and 4 of 16 bits.
TUNING = replace(OF_FP8, stage_steps=16)

# They compile kernels of five formats, which is long on a busy machine.
pytestmark = pytest.mark.takes(25)


@cache
def mixed(which: str) -> Checkpoint:
    return read_for(random_checkpoint("tiny-llama", **SMALL, stored=MIXED[which]), "sim", None)


@cache
def on_one_rank(which: str):
    return run(mixed(which), tuning=TUNING, seed=0)


@pytest.mark.parametrize("which", long_after(1, list(MIXED)))
def test_logits_are_the_references(which):
    checkpoint = mixed(which)
    kinds = {"qkv": "wq", "out": "wo", "gate_up": "w1", "down": "w2"}
    formats = {kind: each.name for kind, each in checkpoint.formats.items()}
    assert {kind: formats[kind] for kind in kinds} == {
        kind: MIXED[which][name] for kind, name in kinds.items()
    }
    reference = Reference(checkpoint)
    tokens = [token for token, _ in reference.generate(IDS, SamplingParams(max_tokens=NEW))]
    found, of_ranks = on_one_rank(which)
    np.testing.assert_allclose(found, reference.logits(IDS), atol=TOLERANCE)
    assert of_ranks == [tokens]


@pytest.mark.long
def test_stages_and_chunks_change_no_bit():
    """A stage of 24 tiles of 4 bits, and of 12 of 8 bits, divides no product's."""
    one, tokens = on_one_rank("others")
    found, others = run(
        mixed("others"), tuning=replace(TUNING, stage_steps=24, **CHUNKS), warp_size=64, seed=1
    )
    np.testing.assert_array_equal(found.view(np.uint32), one.view(np.uint32))
    assert others == tokens


@pytest.mark.long
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_vectors_of_a_million_are_no_range_error(weights):
    """As in test_monokernel_fp8.py, with 16-bit weights that are rounded when they are read."""
    checkpoint = grown(weights)
    assert checkpoint.formats["down"].name == f"{weights}_128"
    found, _ = run(checkpoint, tuning=TUNING, seed=0)
    np.testing.assert_allclose(found, Reference(checkpoint).logits(IDS), atol=TOLERANCE)


@pytest.mark.long
def test_warps_may_have_strips_of_zeros():
    """Each of three warps has whole strips of the MLP's output. So the last one has 8 of a lane's
    40 tiles, where it has room for 16.
    """
    changes = SMALL | {"ffn": 1280}
    made = random_checkpoint("tiny-llama", **changes, stored=MIXED["others"])
    checkpoint = read_for(made, "sim", None)
    tuning = replace(TUNING, warps=3)
    program = Program(checkpoint.config, checkpoint.formats)
    strips = {
        each.kind: (each.steps(3, 8), each.strip_tiles(3, 8)) for each in products_of(program, 2)
    }
    assert (strips["qkv"], strips["down"]) == ((3, 1), (16, 8))
    found, tokens = run(checkpoint, tuning=tuning, seed=0)
    np.testing.assert_allclose(found, Reference(checkpoint).logits(IDS), atol=TOLERANCE)
    again, others = run(
        checkpoint, tuning=replace(tuning, stage_steps=24, **CHUNKS), warp_size=64, seed=1
    )
    np.testing.assert_array_equal(again.view(np.uint32), found.view(np.uint32))
    assert others == tokens
