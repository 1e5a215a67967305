"""FP8 weights in the monokernel, multiplied as they are stored, in the simulator."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from kernel_copies import copy_kernels
from long import hunted
from numpy.typing import NDArray

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.opening import read_for
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.formats.base import Stored
from kccl.engine.formats.table import MULTIPLIED
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel import launching
from kccl.engine.monokernel.layout import least_tile_bytes
from kccl.engine.monokernel.machine import Machine
from kccl.engine.monokernel.shape import Tuning
from kccl.engine.monokernel.tuning import tuning_for

# A warp has 4 tiles of a residual's columns, 2 of a lane's attention, 8 of its MLP: these are
# strips, and the last one has two chains. A stage has 8 tiles, and of the head, which is BF16, 4.
TUNING = Tuning(blocks=4, warps=2, stages=4, stage_steps=8, in_flight=2, kv_strands=2, kv_splits=1)
TUNING = replace(TUNING, strip_tiles=8)
SMALL = {"hidden": 128, "head_dim": 32, "vocab_size": 128, "context": 32, "ffn": 512}
SMALL |= {"num_lanes": 2, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}
WINDOW = {"window": 4, "window_layers": 1}
IDS, NEW = [5, 99, 17, 64], 2
# As in test_monokernel.py: the KV cache is f16.
TOLERANCE = 3e-3

Array = NDArray[np.float32]

# They compile kernels of two formats, which is long on a busy machine.
pytestmark = pytest.mark.takes(20)


@cache
def rounded(name: str) -> Checkpoint:
    more = WINDOW if name == "tiny-laneformer" else {}
    return read_for(random_checkpoint(name, **SMALL, **more), "sim", None, "fp8")


@cache
def expected(name: str) -> tuple[Array, list[int]]:
    reference = Reference(rounded(name))
    tokens = reference.generate(IDS, SamplingParams(max_tokens=NEW))
    return reference.logits(IDS), [token for token, _ in tokens]


def run(
    checkpoint: Checkpoint, ranks: int = 1, tuning: Tuning = TUNING, **simulation: Any
) -> tuple[Array, list[list[int]]]:
    """The logits after IDS, which all ranks have, and the new tokens of each rank."""

    def main(comm: kccl.Communicator) -> tuple[Array, list[int]]:
        size = simulation.get("warp_size", 32)
        executor = DeviceExecutor(checkpoint, comm, tuning=tuning, context=32, warp_size=size)
        out = np.empty((len(IDS), SMALL["vocab_size"]), np.float32)
        executor.start_scoring(IDS, out, writes_shared=True)
        executor.wait()
        executor.start(IDS, SamplingParams(max_tokens=NEW))
        return out, [token.id for token in executor.tokens()]

    results = kccl.run_threads(main, ranks, backend="sim", **simulation)
    for logits, _ in results:
        np.testing.assert_array_equal(logits, results[0][0])
    return results[0][0], [tokens for _, tokens in results]


@cache
def on_one_rank(name: str) -> tuple[Array, list[list[int]]]:
    return run(rounded(name), seed=0)


# `make test` runs FP8 in a product of test_monokernel_integers.py.
@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-laneformer"])
def test_logits_are_the_references(name):
    formats = {kind: each.name for kind, each in rounded(name).formats.items()}
    assert {each for kind, each in formats.items() if kind in ("qkv", "gate_up", "down")} == {
        "e4m3_128"
    }
    assert formats["out"] == "e4m3_32" and formats["head"] == formats["embed"] == "bfloat16"
    wanted, tokens = expected(name)
    found, of_ranks = on_one_rank(name)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    assert of_ranks == [tokens]


# A prompt in chunks: a run is a strip or a part of one, and a chain or a part of one.
CHUNKS = {"chunk": 8, "chunk_warps": 3, "chunk_steps": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "change", "warp_size"),
    [
        ("tiny-laneformer", 2, {"stage_steps": 16, "chunk": 8, "chunk_warps": 4}, 64),
        # A stage of 24 tiles neither divides the 16 of the MLP's lanes nor is divided by them.
        ("tiny-llama", 1, {"stage_steps": 24} | CHUNKS, 32),
    ],
    ids=str,
)
def test_ranks_stages_and_chunks_change_no_bit(name, ranks, change, warp_size):
    one, (tokens,) = on_one_rank(name)
    found, of_ranks = run(
        rounded(name), ranks, replace(TUNING, **change), warp_size=warp_size, seed=1
    )
    np.testing.assert_array_equal(found.view(np.uint32), one.view(np.uint32))
    assert of_ranks == [tokens] * ranks


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 2])
def test_a_prompts_run_has_both_tiles_of_a_strip_or_one(steps):
    """Words of MXFP4's two tiles take turns."""
    checkpoint = read_for(random_checkpoint("tiny-llama", **SMALL), "sim", None, "mxfp4")
    plain = replace(TUNING, strip_tiles=2)
    wanted, tokens = run(checkpoint, tuning=plain, seed=0)
    chunks = replace(plain, **CHUNKS | {"chunk_steps": steps})
    found, of_chunks = run(checkpoint, tuning=chunks, seed=0)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    assert of_chunks == tokens


@pytest.mark.long
@pytest.mark.parametrize("weights", ["fp8", "int8", "int4", "mxfp4"])
def test_positions_that_share_weights_have_the_bits_of_one(weights):
    """Several positions multiply stages part by part (product_in_place.cuh)."""
    checkpoint = read_for(random_checkpoint("tiny-llama", **SMALL), "sim", None, weights)
    one, several = (
        run(checkpoint, tuning=replace(TUNING, strip_tiles=2, columns=columns), seed=0)[0]
        for columns in (1, 3)
    )
    np.testing.assert_array_equal(several.view(np.uint32), one.view(np.uint32))


@pytest.mark.long
def test_products_of_the_residual_may_have_stages_of_different_lengths():
    """Neither the steps of a stage nor the 5 of the residual divide the others. In BF16 a stage has
    half as many as in FP8.
    """
    changes = SMALL | {"hidden": 160}
    made = random_checkpoint("tiny-llama", **changes, stored={"w1": "e4m3_32", "w3": "e4m3_32"})
    checkpoint = read_for(made, "sim", None)
    found, _ = run(checkpoint, tuning=replace(TUNING, stage_steps=7), seed=0)
    np.testing.assert_allclose(found, Reference(checkpoint).logits(IDS), atol=TOLERANCE)


@pytest.mark.long
def test_a_model_may_have_formats_of_its_own():
    """The embedding, which is the head, and one product are FP8, the other products are BF16."""
    stored = {"embedding": "e4m3_128", "w2": "e4m3_32"}
    made = random_checkpoint("tiny-llama", **SMALL, stored=stored)
    checkpoint = read_for(made, "sim", None)
    assert {kind: each.name for kind, each in checkpoint.formats.items()} == {
        **dict.fromkeys(("embed", "head"), "e4m3_128"),
        **dict.fromkeys(("qkv", "out", "gate_up"), "bfloat16"),
        "down": "e4m3_32",
    }
    found, _ = run(checkpoint, tuning=replace(TUNING, strip_tiles=2), seed=0)
    np.testing.assert_allclose(found, Reference(checkpoint).logits(IDS), atol=TOLERANCE)


def grown(weights: str) -> Checkpoint:
    """A model with vectors that FP16 does not hold: a norm makes that of gate and up so large, and
    the features are.
    """
    made = random_checkpoint("tiny-llama", **SMALL)
    source = made._source
    assert source is not None
    read, factors = source.read, {"ffn_norm": 1e6, "w3": 1e-6, "w2": 1e-6}

    def scaled(name: str, start: int, stop: int) -> Stored:
        stored = read(name, start, stop)
        factor = factors.get(name.rpartition(".")[2], 1.0)
        values = stored.to_float32() * np.float32(factor)
        return Stored(stored.format, stored.format.from_values(values))

    source.read = scaled  # type: ignore[method-assign]
    return read_for(made, "sim", None, weights)


@pytest.mark.long
def test_vectors_of_a_million_are_no_range_error():
    """FP16 ends at 65504."""
    checkpoint = grown("fp8")
    found, _ = run(checkpoint, seed=0)
    np.testing.assert_allclose(found, Reference(checkpoint).logits(IDS), atol=TOLERANCE)


# What the file has once, and what takes its place.
BUGS = {
    "all strips of a row have the scale of its first group": (
        "formats/groups.cuh",
        "group_of(rows, row + at, first, columns)",
        "group_of(rows, row + at, 0, columns)",
    ),
    "the low parts of a vector have the factor of the high ones": (
        "targets/mma_loop.cuh",
        "Parts<T>::kLow * lows[i]",
        "Parts<T>::kHigh * lows[i]",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_planted_bugs_are_found(bug, tmp_path, monkeypatch):
    folder = copy_kernels(tmp_path)
    monkeypatch.setattr(launching, "KERNELS", folder)
    name, right, wrong = BUGS[bug]
    text = (folder / name).read_text()
    assert text.count(right) == 1
    (folder / name).write_text(text.replace(right, wrong))
    wanted, _ = expected("tiny-llama")
    found, _ = run(rounded("tiny-llama"), seed=0)
    assert not np.allclose(found, wanted, atol=TOLERANCE)


MIXED = dict.fromkeys(("out", "gate_up", "down"), "int4_128") | {"qkv": "int8_128"}


@pytest.mark.parametrize(
    ("model", "stored", "warps", "steps"),
    [
        ("laneformer-2b", "e4m3_128", 6, 16),
        ("llama-1b", "e4m3_128", 8, 8),
        ("llama-8b", "e4m3_128", 8, 8),
        # Where all products of the layers have 4 bits, twelve warps share columns that they divide.
        ("laneformer-2b", "int4_128", 12, 16),
        ("llama-8b", "int4_128", 8, 16),
        ("laneformer-2b", MIXED, 8, 16),
    ],
    ids=str,
)
def test_tunings_have_many_warps_and_long_stages(model, stored, warps, steps):
    """Copies are as long as those of 16 bits, and few scales are no reason for fewer warps."""
    if isinstance(stored, str):
        stored = dict.fromkeys(("qkv", "out", "gate_up", "down"), stored)
    formats = {kind: MULTIPLIED[name] for kind, name in stored.items()}
    program = Program(MODELS[model], formats)
    tuning = tuning_for(program, 1, Machine(132))
    assert (tuning.warps, tuning.stage_steps) == (warps, steps)
    assert steps * warps * least_tile_bytes(program) >= 16 << 10
