"""What clang makes of the engine for gfx942 runs, on one rank and on several. No AMD GPU took part.

All that its kernels leave in memory has the simulator's bits, where that adds up as AMD's matrix
units do.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_engine import SHARED_BYTES, Decoder, simulated

from kccl.engine.executors.opening import formats_of_layers, read_for
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.shape import Tuning

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]
TUNING = Tuning(
    blocks=2,
    warps=2,
    weights_in_registers=True,
    stage_steps=2,
    kv_strands=2,
    kv_splits=1,
    shared_bytes=SHARED_BYTES,
    # A ring's alone.
    stages=1,
    in_flight=1,
)
CHUNKED = replace(TUNING, chunk=8, chunk_warps=2, chunk_stages=3, chunk_steps=2)
CONTEXT = 64
# More than a tile of the cache has positions.
IDS = [5, 99, 17, 64, 2, 120, 7, 33, 101, 56, 0, 127, 80, 45, 3, 71, 18, 90]
SHORT = IDS[:6]
NEW = 3
# The cache of keys and values is f16: 11 bits of values of about 1.
TOLERANCE = 3e-3
# With a seed, waves and accesses stop for long.
LIMIT = 40_000_000_000
SMALL = {"hidden": 64, "ffn": 64, "head_dim": 16, "vocab_size": 128, "context": CONTEXT}
MODELS = {
    # Two residuals, messages between them, and a window.
    "laneformer": partial(random_checkpoint, "tiny-tiles"),
    # One residual, norms of queries and keys, two query heads of a KV head.
    "qwen3": partial(
        random_checkpoint,
        "tiny-qwen3",
        dtype="float16",
        **{"num_layers": 2, "num_lanes": 4, "num_heads": 8, "num_kv_heads": 4, **SMALL},
    ),
}


def words(values):
    return values.view(np.uint32)


@pytest.mark.parametrize(
    ("model", "world_size", "tuning"),
    [("laneformer", 2, TUNING), ("qwen3", 1, replace(TUNING, kv_strands=4, kv_splits=2))],
    ids=MODELS,
)
def test_every_bit_is_the_simulators(model, world_size, tuning, tmp_path):
    """It compares packed weights, vectors of all ops, the cache, and logits."""
    setting = MODELS[model](), world_size, tuning, CONTEXT
    wanted = simulated(*setting, IDS, tmp_path)
    for seed in range(2):
        decoder = Decoder(*setting)
        answer = decoder.score(IDS, seed=seed, limit=LIMIT)
        assert answer.report.finding is None, f"seed {seed}: {answer.report.finding}"
        for rank, memory in enumerate(decoder.memory()):
            logits, of_rank = wanted[rank]
            for name, values in of_rank.items():
                np.testing.assert_array_equal(memory[name], values, f"{name} of rank {rank}")
            np.testing.assert_array_equal(words(answer.logits[rank]), words(logits))


@pytest.mark.parametrize("model", MODELS)
def test_the_tokens_are_the_references_on_any_number_of_ranks(model):
    """The logits have the same bits on one rank and on two, whatever the seed."""
    checkpoint = MODELS[model]()
    reference = Reference(checkpoint)
    logits = reference.logits(SHORT)
    params = SamplingParams(max_tokens=NEW)
    tokens = [token for token, _ in reference.generate(SHORT, params)]
    first = None
    for world_size in [size for size in (1, 2, 4) if size <= checkpoint.config.num_lanes]:
        decoder = Decoder(checkpoint, world_size, TUNING, CONTEXT)
        scored = decoder.score(SHORT, seed=world_size, limit=LIMIT)
        made = decoder.generate(SHORT, params, seed=world_size + 2, limit=LIMIT)
        assert scored.report.finding is None and made.report.finding is None
        assert made.tokens == [tokens] * world_size
        for each in scored.logits:
            first = each if first is None else first
            np.testing.assert_allclose(each, logits, atol=TOLERANCE)
            np.testing.assert_array_equal(words(each), words(first))


# A warp has 4 tiles of a residual's columns and of a lane's attention, and 8 of its MLP, all in
# strips of 4.
# The head is BF16, so a stage of it has half as many tiles as one of FP8, or a quarter.
WIDE = {"hidden": 128, "head_dim": 64, "ffn": 512, "vocab_size": 128, "context": CONTEXT}
WIDE |= {"num_lanes": 2, "num_heads": 4, "num_kv_heads": 2, "num_layers": 1}


MATRICES = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")


@pytest.mark.takes(60)
@pytest.mark.parametrize(
    ("form", "stored", "weights", "steps"),
    [("e4m3_128", None, "fp8", 8), ("int4_128", None, "int4", 16), ("nested4_32", "q4_1", None, 8)],
)
def test_the_tokens_of_weights_with_scales_are_the_references(form, stored, weights, steps):
    matrices = dict.fromkeys(MATRICES, stored) if stored else None
    drawn = random_checkpoint("tiny-llama", **WIDE, stored=matrices)
    checkpoint = read_for(drawn, "hip", None, weights)
    assert formats_of_layers(checkpoint) == [form]
    reference = Reference(checkpoint)
    params = SamplingParams(max_tokens=NEW)
    tokens = [token for token, _ in reference.generate(SHORT, params)]
    decoder = Decoder(checkpoint, 1, replace(CHUNKED, stage_steps=steps, strip_tiles=4), CONTEXT)
    scored = decoder.score(SHORT, seed=1, limit=LIMIT)
    made = decoder.generate(SHORT, params, seed=2, limit=LIMIT)
    assert scored.report.finding is None and made.report.finding is None
    assert made.tokens == [tokens]
    np.testing.assert_allclose(scored.logits[0], reference.logits(SHORT), atol=TOLERANCE)


def test_chunks_of_a_prompt_leave_the_same_cache():
    """As position by position."""
    params = SamplingParams(max_tokens=NEW)
    found = []
    for tuning in (TUNING, CHUNKED):
        decoder = Decoder(MODELS["laneformer"](), 2, tuning, CONTEXT)
        answer = decoder.generate(IDS, params, seed=1, limit=LIMIT, counted=["v_mfma"])
        assert answer.report.finding is None
        found.append((answer, np.stack([memory["cache"] for memory in decoder.memory()])))
    (one_by_one, wanted), (in_chunks, cache) = found
    assert in_chunks.tokens == one_by_one.tokens
    assert 2 * in_chunks.report.executed["v_mfma"] < one_by_one.report.executed["v_mfma"]
    np.testing.assert_array_equal(cache, wanted)
