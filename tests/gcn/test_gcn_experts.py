"""Mixtures of experts, as clang compiles them for gfx942: the router, its exchange, the choice, and
the products of the chosen experts in BF16 and MXFP4. No AMD GPU took part.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_engine import Decoder, simulated
from test_gcn_engine import CHUNKED, CONTEXT, IDS, LIMIT, NEW, SHORT, SMALL, TOLERANCE, TUNING

from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.experts import Experts
from kccl.engine.model.sample import SamplingParams

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(60),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]

# The router has rows of zeros up to whole tiles.
QWEN3 = SMALL | {"num_layers": 2, "num_lanes": 4, "num_heads": 8, "num_kv_heads": 4}
QWEN3 |= {"experts": Experts(num=20, chosen=3)}
# Biases, sinks, clamped gates, and a window.
GPT_OSS = QWEN3 | {"num_lanes": 2, "window": 4, "window_layers": (0,)}
# Experts in MXFP4 beside matrices in BF16.
STORED = GPT_OSS | {"stored": dict.fromkeys(("w1", "w3", "w2"), "mxfp4")}
# Name -> shape, its fields, and those of the tuning that differ. The area of a chunk's experts lies
# in the ring of vectors.
MODELS = {
    "qwen3-moe": ("tiny-qwen3-moe", QWEN3, {"chunk_stages": 6}),
    "gpt-oss": ("tiny-gpt-oss", GPT_OSS, {"chunk_stages": 6}),
    "gpt-oss in MXFP4": (
        "tiny-gpt-oss",
        STORED,
        {"chunk_stages": 6, "stage_steps": 8, "strip_tiles": 8},
    ),
}


@cache
def checkpoint(model):
    shape, fields, _ = MODELS[model]
    return random_checkpoint(shape, **fields).as_stored(is_alike=True)


def decoder_of(model, world_size, tuning):
    return Decoder(checkpoint(model), world_size, replace(tuning, **MODELS[model][2]), CONTEXT)


def test_every_bit_is_the_simulators(tmp_path):
    """It compares weights, the router's logits, vectors of all ops, the cache, and logits."""
    model, world_size = "gpt-oss", 2
    tuning = replace(TUNING, **MODELS[model][2])
    wanted = simulated(checkpoint(model), world_size, tuning, CONTEXT, SHORT, tmp_path)
    decoder = decoder_of(model, world_size, TUNING)
    answer = decoder.score(SHORT, seed=1, limit=LIMIT)
    assert answer.report.finding is None
    for rank, memory in enumerate(decoder.memory()):
        logits, of_rank = wanted[rank]
        assert of_rank["routed"].any() and of_rank["acts"].any()
        for name, values in of_rank.items():
            np.testing.assert_array_equal(memory[name], values, f"{name} of rank {rank}")
        np.testing.assert_array_equal(answer.logits[rank].view(np.uint32), logits.view(np.uint32))


@pytest.mark.parametrize(("model", "world_size"), [("gpt-oss in MXFP4", 1), ("qwen3-moe", 2)])
def test_chunks_of_a_prompt_leave_the_same_cache(model, world_size):
    """As position by position; and tokens and logits are the reference's."""
    params = SamplingParams(max_tokens=NEW)
    reference = Reference(checkpoint(model))
    wanted = [token for token, _ in reference.generate(IDS, params)]
    found = []
    for tuning in (TUNING, CHUNKED):
        decoder = decoder_of(model, world_size, tuning)
        answer = decoder.generate(IDS, params, seed=1, limit=LIMIT)
        assert answer.report.finding is None
        assert answer.tokens == [wanted] * world_size
        found.append(np.stack([memory["cache"] for memory in decoder.memory()]))
    np.testing.assert_array_equal(*found)
    scored = decoder.score(SHORT, seed=2, limit=LIMIT)
    assert scored.report.finding is None
    np.testing.assert_allclose(scored.logits[0], reference.logits(SHORT), atol=TOLERANCE)
