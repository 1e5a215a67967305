"""GGUF's blocks of 4 to 6 bits with scales of two levels in the monokernel, in the simulator."""

from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import pytest
from kernel_copies import copy_kernels
from long import hunted, long_after
from numpy.typing import NDArray
from test_monokernel_fp8 import CHUNKS, IDS, NEW, SMALL, TOLERANCE, run
from test_monokernel_fp8 import TUNING as OF_FP8
from tiny_models import gguf_shapes, write_gguf

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.opening import read_for, rounding
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint, open_checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.base import Stored
from kccl.engine.formats.table import IN_FILES, forms_of
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel import launching

# Files of Q4_K_M have such queries, keys and values. All forms but those of quarters: strips of 8,
# 4 and 2 tiles.
SIZES = SMALL | {"hidden": 256, "head_dim": 32, "num_layers": 1}
MIXED = {
    "K": (
        {"wq": "q4_k", "wk": "q4_k", "wv": "q6_k", "wo": "q5_0", "w1": "q4_k", "w3": "q4_k"}
        | {"w2": "q5_k"},
        {"qkv": "nested6_256", "out": "nested6_32", "gate_up": "nested4_256"}
        | {"down": "nested6_256"},
    ),
    "32": (
        dict.fromkeys(("wq", "wk"), "q4_0")
        | {"wv": "q4_1", "wo": "q4_1", "w1": "q5_1", "w3": "q4_0", "w2": "q4_k"}
        | {"embedding": "q6_k"},
        {"qkv": "nested4_32", "out": "nested4_32", "gate_up": "nested6_32"}
        | {"down": "nested4_256", "embed": "nested6_256"},
    ),
}
# A stage has 16 tiles of 4 bits, 8 of 6 bits, and 4 of 16 bits.
TUNING = replace(OF_FP8, stage_steps=16)

pytestmark = pytest.mark.takes(25)


@cache
def mixed(which: str) -> Checkpoint:
    made = random_checkpoint("tiny-llama", **SIZES, stored=MIXED[which][0])
    return read_for(made, "sim", None)


@cache
def on_one_rank(which: str):
    return run(mixed(which), tuning=TUNING, seed=0)


NUM_FORMS = {"Q4_0": 2, "Q4_1": 2, "Q5_0": 1, "Q5_1": 1, "Q4_K": 6, "Q5_K": 3, "Q6_K": 3}


@pytest.mark.parametrize("name", NUM_FORMS)
def test_no_number_is_rounded(name):
    stored_in = IN_FILES[name]
    random = np.random.default_rng(0)
    blocks = random.integers(256, size=(6, stored_in.words)).astype(np.uint8)
    for at in getattr(stored_in, "halves_at", (0, 2) if name.endswith("_1") else (0,)):
        halves = random.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    stored = Stored(stored_in, blocks.reshape(2, -1))
    assert len(forms_of(stored_in)) == NUM_FORMS[name]
    for form in forms_of(stored_in):
        found = stored.turned_into(form)
        np.testing.assert_array_equal(found.to_float32(), stored.to_float32())
        assert found.shape == stored.shape and form.is_finite(found.words)
        found.words[0, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
        assert not form.is_finite(found.words)


def test_layers_of_several_formats_have_one_form(tmp_path):
    """As in files of Q4_K_M. A lane's columns of attention are half a block."""
    shape = {"hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 304}
    shape |= {"layers": 2}
    tensors, random = {}, np.random.default_rng(0)
    for name, size in gguf_shapes(shape, "llama").items():
        has_more = name.startswith("blk.1") and ("attn_v" in name or "ffn_down" in name)
        words = IN_FILES["Q6_K" if has_more else "Q4_K"]
        if len(size) > 1:
            values = words.from_values(random.standard_normal(size, np.float32))
            tensors[name] = values, gguf.GGMLQuantizationType[words.in_files]
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors=tensors, **shape)
    with open_checkpoint(path) as checkpoint:
        read, on_host = (read_for(checkpoint, backend, None) for backend in ("cuda", "host"))
        assert {kind: each.name for kind, each in read.formats.items()} == {
            "embed": "nested4_256",
            "head": "nested4_256",
            "qkv": "nested6_256",
            "out": "nested4_64",
            "gate_up": "nested4_256",
            "down": "nested6_256",
        }
        assert rounding(read) == rounding(on_host) == []
        for name in ("wq", "wv", "wo", "w3", "w2"):
            for layer in range(2):
                one, other = (
                    each.read(f"layers.{layer}.{name}").to_float32() for each in (read, on_host)
                )
                np.testing.assert_array_equal(one, other)


def test_experts_take_16_bits_and_a_notice_says_so():
    stored = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), "q4_k") | {"w2": "q8_0"}
    sizes = {"hidden": 256, "ffn": 256, "head_dim": 32}
    read = read_for(random_checkpoint("tiny-qwen3-moe", **sizes, stored=stored), "cuda", None)
    kinds = ("qkv", "expert_gate_up", "expert_down")
    assert [read.formats[kind].name for kind in kinds] == ["nested4_256", "bfloat16", "q8_0"]
    told = "Q4_K takes 16 bits a weight: on GPUs it is not multiplied in experts, as in "
    assert read.expanded == (f"{told}layers.0.experts.0.w1",)
    assert f"{told}layers.0.experts.0.w1" in rounding(read)


def test_columns_that_are_no_blocks_of_a_form_are_told():
    """A lane has 16 columns of "wo"."""
    made = random_checkpoint("tiny-llama", hidden=64, head_dim=16, stored={"wo": "q5_0"})
    read = read_for(made, "cuda", None)
    assert read.formats["out"].name == "bfloat16"
    (told,) = read.expanded
    assert "columns are no whole blocks of 32, as in layers.0.wo" in told


# `make test` multiplies by these forms in test_packed_formats.py.
@pytest.mark.long
@pytest.mark.parametrize("which", list(MIXED))
def test_logits_are_the_references(which):
    checkpoint, forms = mixed(which), MIXED[which][1]
    assert {kind: checkpoint.formats[kind].name for kind in forms} == forms
    assert not any("rounded" in notice or "16 bits" in notice for notice in rounding(checkpoint))
    reference = Reference(checkpoint)
    tokens = [token for token, _ in reference.generate(IDS, SamplingParams(max_tokens=NEW))]
    found, of_ranks = on_one_rank(which)
    np.testing.assert_allclose(found, reference.logits(IDS), atol=TOLERANCE)
    assert of_ranks == [tokens]


@pytest.mark.long
@pytest.mark.takes(36)
@pytest.mark.parametrize(
    ("which", "ranks", "changes"),
    [("K", 2, {}), ("K", 1, {"stage_steps": 32} | CHUNKS), ("32", 1, {"stage_steps": 32} | CHUNKS)],
    ids=["ranks", "chunks", "chunks of short blocks"],
)
def test_ranks_stages_and_chunks_change_no_bit(which, ranks, changes):
    one, (tokens,) = on_one_rank(which)
    found, of_ranks = run(mixed(which), ranks, replace(TUNING, **changes), warp_size=64, seed=1)
    np.testing.assert_array_equal(found.view(np.uint32), one.view(np.uint32))
    assert of_ranks == [tokens] * ranks


# Six positions take two turns of the matrix unit.
@pytest.mark.parametrize(("which", "columns"), long_after(1, [("32", 8), ("K", 3)]))
def test_a_column_has_the_bits_that_it_has_alone(which, columns):
    ids = [*IDS, 3, 8]

    def main(comm: kccl.Communicator) -> list[NDArray[np.float32]]:
        found = []
        for each in (1, columns):
            tuning = replace(TUNING, columns=each)
            executor = DeviceExecutor(mixed(which), comm, tuning=tuning, context=32)
            out = np.empty((len(ids), SMALL["vocab_size"]), np.float32)
            executor.start_scoring(ids, out, writes_shared=True)
            executor.wait()
            found.append(out)
        return found

    ((alone, found),) = kccl.run_threads(main, 1, backend="sim", seed=columns)
    np.testing.assert_array_equal(found.view(np.uint32), alone.view(np.uint32))
    np.testing.assert_allclose(found, Reference(mixed(which)).logits(ids), atol=TOLERANCE)


# A file of kernels/, its text that is there once, and what takes its place.
BUGS = {
    "minimums are added": (
        "formats/nested.cuh",
        "half_at(block + 2) ^ kSign",
        "half_at(block + 2)",
    ),
    "all scales of a strip are its first one": (
        "formats/nested.cuh",
        "Unit::scaled(scales.factor, scales.scales, i)",
        "Unit::scaled(scales.factor, scales.scales, 0 * i)",
    ),
    "scales lie in the block's first columns": (
        "formats/nested.cuh",
        "block + kScalesOfBlock + within / SCALED",
        "block + kScalesOfBlock",
    ),
    "all minimums of a part have the sum of its first columns": (
        "known_sums.cuh",
        "first + Unit::kParts * i)",
        "first + Unit::kParts * 0 * i)",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_planted_bugs_are_found(bug, tmp_path, monkeypatch):
    folder = copy_kernels(tmp_path)
    monkeypatch.setattr(launching, "KERNELS", folder)
    name, right, wrong = BUGS[bug]
    path = folder / name
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    found, _ = run(mixed("K"), tuning=TUNING, seed=0)
    assert not np.allclose(found, Reference(mixed("K")).logits(IDS), atol=TOLERANCE)
