"""Biases, windows in some layers, and many query heads in the monokernel, simulated."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from long import long_after
from numpy.typing import NDArray
from test_monokernel import CONTEXT, SMALL, TOLERANCE, logits_of
from test_prefill import CHUNKED, last_logits

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.monokernel.shape import Tuning

# A chunk that is full, one that is not, and the last id, which decodes.
IDS = [5, 99, 17, 64, 2, 120]
# Three tiles of 16 positions, the last one not full.
LONG = np.random.default_rng(1).integers(SMALL["vocab_size"], size=38).tolist()
SMALLER = SMALL | {"num_layers": 2, "hidden": 32, "ffn": 64, "num_lanes": 2}
SMALLER |= {"num_heads": 4, "num_kv_heads": 2}
TUNING = replace(CHUNKED, blocks=4)
# Prefill has the parts of attention where the stages are.
MERGING = replace(TUNING, kv_strands=4, kv_splits=2, merges_first=True, chunk_stages=8)

# Several compilations and simulations each.
pytestmark = pytest.mark.takes(30)

Array = NDArray[np.float32]


def run(opened: Checkpoint, ranks: int, tuning: Tuning, ids: list[int], **simulation: Any) -> Array:
    """The logits after all ids, position by position. Those after the last one are the same bits
    behind prefill in chunks, and all are on all ranks.
    """

    def main(comm: kccl.Communicator) -> tuple[Array, Array]:
        executor = DeviceExecutor(
            opened,
            comm,
            tuning=tuning,
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        return logits_of(executor, ids), last_logits(executor, 1, ids)

    results = kccl.run_threads(main, ranks, backend="sim", **simulation)
    for logits, behind in results:
        np.testing.assert_array_equal(logits, results[0][0])
        np.testing.assert_array_equal(behind.view(np.uint32), logits[-1:].view(np.uint32))
    return results[0][0]


MODELS = {
    # The ranks of two have 1 and 2 lanes, and so many blocks different numbers of rows.
    "all biases": (
        "tiny-llama",
        {
            **{"biases": ("qkv", "out", "gate_up", "down"), "num_lanes": 3, "ffn": 96},
            **{"num_heads": 6, "num_kv_heads": 3},
        },
        replace(TUNING, blocks=5, stage_steps=1),
        (2,),
    ),
    "biases and norms of heads": (
        "tiny-qwen3",
        {"biases": ("qkv", "out"), "num_lanes": 4, "num_kv_heads": 4},
        TUNING,
        (4,),
    ),
    "seven query heads": ("tiny-qwen2", {"num_heads": 14}, MERGING, (2,)),
}


@pytest.mark.long
@pytest.mark.parametrize("case", long_after(1, MODELS))
def test_logits_are_the_references_on_any_number_of_ranks(case):
    name, fields, tuning, numbers = MODELS[case]
    model = random_checkpoint(name, **SMALLER | fields)
    one = run(model, 1, tuning, IDS)
    np.testing.assert_allclose(one, Reference(model).logits(IDS), atol=TOLERANCE)
    for ranks in numbers:
        more = run(model, ranks, tuning, IDS, seed=ranks)
        np.testing.assert_array_equal(more.view(np.uint32), one.view(np.uint32))


@pytest.mark.long
def test_eight_query_heads_and_biases_with_warps_of_64():
    eight = {"num_lanes": 1, "num_heads": 8, "num_kv_heads": 1}
    model = random_checkpoint("tiny-qwen2", **SMALLER | eight)
    found = run(model, 1, MERGING, IDS, warp_size=64, model="gfx942")
    np.testing.assert_allclose(found, Reference(model).logits(IDS), atol=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("window", "layers"),
    [
        (1, (0, 1)),
        # Within the tile before, which another split has.
        (19, (0,)),
    ],
)
def test_windows_in_some_layers(window, layers):
    windows = {"window": window, "window_layers": layers}
    model = random_checkpoint("tiny-mistral", **SMALLER | windows)
    found = run(model, 1, MERGING, LONG)
    np.testing.assert_allclose(found, Reference(model).logits(LONG), atol=TOLERANCE)
