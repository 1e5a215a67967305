"""Weights of 8 and 4 bits with scales and zero points in the monokernel, in the simulator."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from kernel_copies import copy_kernels
from long import hunted, long_after
from quantized_folders import MODEL, tensors_of, write_folder
from test_monokernel_fp8 import CHUNKS, IDS, NEW, SMALL, TOLERANCE, grown, run
from test_monokernel_fp8 import TUNING as OF_FP8
from tiny_models import gguf_shapes, write_gguf

from kccl.engine import Engine
from kccl.engine.executors.opening import BACKENDS, read_for
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint, open_checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.table import MULTIPLIED
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel import launching
from kccl.engine.monokernel.layout import products_of, total_bytes

# Each form that a tile and its scales have is one product's. Strips have 4 tiles, 2 where a group
# has 32 columns, and those of the MLP's output 8.
MIXED = {
    "some": {
        **dict.fromkeys(("wq", "wk", "wv"), "int8_128"),
        "wo": "q8_0",
        **dict.fromkeys(("w1", "w3"), "int4_zeros_64"),
        "w2": "nvfp4_128",
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
def test_vectors_of_a_million_are_no_range_error():
    """As in test_monokernel_fp8.py, with 16-bit weights that are rounded when they are read."""
    checkpoint = grown("int4")
    assert checkpoint.formats["down"].name == "int4_128"
    found, _ = run(checkpoint, tuning=TUNING, seed=0)
    np.testing.assert_allclose(found, Reference(checkpoint).logits(IDS), atol=TOLERANCE)


@pytest.mark.long
def test_warps_may_have_strips_of_zeros():
    """Each of three warps has whole strips of the MLP's output. So the last one has 8 of a lane's
    40 tiles, where it has room for 16. And a stage of 24 tiles of 4 bits, and of 12 of 8 bits,
    divides no product's: neither that nor chunks change a bit.
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


# All matrices of the layers have zero points. A lane has 64 columns of attention.
ZEROS = dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "w2"), "int4_zeros_128")
ZEROS |= {"wo": "int4_zeros_64"}


@pytest.mark.long
@pytest.mark.takes(36)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # With biases.
        ("tiny-qwen2", {}),
        # One rank has two lanes, and the other one.
        ("tiny-llama", {"num_lanes": 3, "num_heads": 6, "num_kv_heads": 3, "ffn": 768}),
    ],
    ids=["biases", "uneven lanes"],
)
def test_ranks_change_no_bit(name, changes):
    made = random_checkpoint(name, **SMALL | changes, stored=ZEROS)
    checkpoint = read_for(made, "sim", None)
    formats = {kind: checkpoint.formats[kind].name for kind in ("qkv", "out", "gate_up", "down")}
    assert formats == dict.fromkeys(formats, "int4_zeros_128") | {"out": "int4_zeros_64"}
    one, (tokens,) = run(checkpoint, tuning=TUNING, seed=0)
    np.testing.assert_allclose(one, Reference(checkpoint).logits(IDS), atol=TOLERANCE)
    found, of_ranks = run(checkpoint, 2, TUNING, seed=1)
    np.testing.assert_array_equal(found.view(np.uint32), one.view(np.uint32))
    assert of_ranks == [tokens] * 2


# Twelve warps have 2 of the 24 tiles of a residual's columns, and of a lane's.
WIDE = {"hidden": 384, "ffn": 768, "head_dim": 96, "num_heads": 8, "num_kv_heads": 2}


@pytest.mark.long
@pytest.mark.takes(36)
def test_twelve_warps_may_have_a_ring_of_three_stages():
    """A stage has several row tiles."""
    stored = dict.fromkeys(("wq", "wk", "wv", "wo", "w1", "w3", "w2"), "int4_128")
    made = random_checkpoint("tiny-llama", **SMALL | WIDE | {"num_layers": 1}, stored=stored)
    checkpoint = read_for(made, "sim", None)
    changes = {"blocks": 2, "warps": 12, "stages": 3, "stage_steps": 8, "in_flight": 1}
    tuning = replace(TUNING, urgent_in_flight=3, **changes)
    found, _ = run(checkpoint, tuning=tuning, seed=0)
    np.testing.assert_allclose(found, Reference(checkpoint).logits(IDS), atol=TOLERANCE)


def write_q4_0(path: Path) -> None:
    """Writes a GGUF file whose layers are in Q4_0, and whose logits are near 1 in size."""
    shape = {"hidden": 384, "ffn": 384, "head_dim": 96, "heads": 8, "kv_heads": 2}
    shape |= {"layers": 1, "vocab": 304}
    noise, code = np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_0
    tensors = {}
    for name, size in gguf_shapes(shape, "llama").items():
        values = np.ones(size, np.float32)
        if len(size) > 1:
            values = noise.standard_normal(size, np.float32) * np.float32(size[-1] ** -0.5)
        is_rounded = name.startswith("blk.") and len(size) > 1
        words = MULTIPLIED["q4_0"].from_values(values) if is_rounded else values
        tensors[name] = (words, code) if is_rounded else values
    write_gguf(path, tensors=tensors, **shape)


@pytest.mark.long
@pytest.mark.takes(36)
@pytest.mark.parametrize(
    ("name", "form"),
    [("awq 32", "int4_zeros_32"), ("gptq 64", "int4_zeros_64"), ("Q4_0", "q4_0")],
)
def test_files_are_multiplied_as_they_are_stored(tmp_path, name, form):
    """By the tuning that the simulator has for them."""
    path, ids = tmp_path / "m", [5, 41, 17]
    if name == "Q4_0":
        path = tmp_path / "m.gguf"
        write_q4_0(path)
    else:
        config = {"hidden_size": 384, "intermediate_size": 384, "head_dim": 96}
        config = MODEL | config | {"num_attention_heads": 8, "num_hidden_layers": 1}
        write_folder(path, name, tensors_of(name, config)[0], config)
    with open_checkpoint(path) as checkpoint:
        read = read_for(checkpoint, "sim", None)
        assert {read.formats[kind].name for kind in ("qkv", "out", "gate_up", "down")} == {form}
        program = Program(read.config, read.formats)
        with Engine(checkpoint, "sim", context=16) as engine:
            found = engine.logits(ids)
            # What the check of memory counts.
            assert BACKENDS["sim"].held(program, 0, 1) == engine.nbytes
            assert engine.nbytes >= total_bytes(program, 0, 1)
        wanted = Reference(read).logits(ids)
    # The weights of folders are larger than those of random checkpoints.
    np.testing.assert_allclose(found, wanted, atol=3 * TOLERANCE)


# Text of formats/groups.cuh that is there once, and what takes its place.
ZERO = "num != 0 ? zero_of(group)"
BUGS = {
    "all rows of a tile have the zero point of its first one": (
        ZERO,
        "num != 0 ? zero_of(group_of(rows, row, first, columns))",
    ),
    "all strips of a row have the zero point of its first group": (
        ZERO,
        "num != 0 ? zero_of(group_of(rows, row + at, 0, columns))",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_planted_bugs_are_found(bug, tmp_path, monkeypatch):
    folder = copy_kernels(tmp_path)
    monkeypatch.setattr(launching, "KERNELS", folder)
    path = folder / "formats/groups.cuh"
    (right, wrong), text = BUGS[bug], path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    found, _ = run(mixed("others"), tuning=TUNING, seed=0)
    assert not np.allclose(found, Reference(mixed("others")).logits(IDS), atol=TOLERANCE)
