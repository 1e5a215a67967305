"""Biases, windows in some layers, and many query heads in the monokernel, simulated."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_monokernel import CONTEXT, SMALL, TOLERANCE, answer, logits_of
from test_prefill import CHUNKED, last_logits

import kccl
from kccl.engine.checkpoint import Checkpoint
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.monokernel.shape import Tuning
from kccl.engine.random_weights import random_checkpoint
from kccl.engine.reference import Reference
from kccl.engine.sample import SamplingParams

# A chunk that is full, one that is not, and the last id, which decodes.
IDS = [5, 99, 17, 64, 2, 120]
# Three tiles of 16 positions, the last one not full.
LONG = np.random.default_rng(1).integers(SMALL["vocab_size"], size=38).tolist()
# Of models that run for so many positions.
SMALLER = {"hidden": 32, "ffn": 64, "num_lanes": 2, "num_heads": 4, "num_kv_heads": 2}
NEW = 2
ALL = ("qkv", "out", "gate_up", "down")
# Prefill has the parts of attention where the stages are.
MERGING = replace(CHUNKED, strands=4, splits=2, merges_first=True, chunk_stages=8)

Array = NDArray[np.float32]


def run(
    opened: Checkpoint, ranks: int, tuning: Tuning, ids: list[int], last: int, **simulation: Any
) -> tuple[Array, Array, list[int]]:
    """The logits after all ids, position by position; those after the last ids, behind prefill in
    chunks; and the new tokens.
    """

    def main(comm: kccl.Communicator) -> tuple[Array, Array, list[int]]:
        executor = DeviceExecutor(
            opened,
            comm,
            tuning=tuning,
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        logits = logits_of(executor, ids)
        behind = last_logits(executor, last, ids)
        tokens = answer(executor, ids, SamplingParams(max_tokens=NEW))
        return logits, behind, [token.id for token in tokens]

    results = kccl.run_threads(main, ranks, backend="sim", **simulation)
    for logits, behind, tokens in results:
        np.testing.assert_array_equal(logits, results[0][0])
        np.testing.assert_array_equal(behind.view(np.uint32), logits[-last:].view(np.uint32))
        assert tokens == results[0][2]
    return results[0]


def check(model: Checkpoint, found: tuple[Array, Array, list[int]], ids: list[int]) -> None:
    reference = Reference(model)
    np.testing.assert_allclose(found[0], reference.logits(ids), atol=TOLERANCE)
    wanted = reference.generate(ids, SamplingParams(max_tokens=NEW))
    assert found[2] == [token for token, _ in wanted]


MODELS = {
    # The ranks of two have 1 and 2 lanes, and so many blocks different numbers of rows.
    "all biases": (
        "tiny-llama",
        {"biases": ALL, "num_lanes": 3, "num_heads": 12, "num_kv_heads": 3, "ffn": 192},
        replace(CHUNKED, blocks=6),
        (2,),
    ),
    "biases and norms of heads": ("tiny-qwen3", {"biases": ("qkv", "out")}, CHUNKED, (4,)),
    "seven query heads": (
        "tiny-qwen2",
        {"num_lanes": 2, "num_heads": 14, "num_kv_heads": 2},
        MERGING,
        (2,),
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_logits_are_the_references_on_any_number_of_ranks(case):
    name, fields, tuning, numbers = MODELS[case]
    model = random_checkpoint(name, num_layers=2, **SMALL | fields)
    one = run(model, 1, tuning, IDS, 2)
    check(model, one, IDS)
    for ranks in numbers:
        more = run(model, ranks, tuning, IDS, 2, seed=ranks)
        np.testing.assert_array_equal(more[0].view(np.uint32), one[0].view(np.uint32))
        assert more[2] == one[2]


def test_eight_query_heads_and_biases_with_warps_of_64():
    model = random_checkpoint(
        "tiny-qwen2", num_layers=2, **SMALL | {"num_lanes": 1, "num_kv_heads": 1}
    )
    found = run(model, 1, MERGING, IDS, 2, warp_size=64, model="gfx942")
    check(model, found, IDS)


@pytest.mark.parametrize(
    ("window", "layers"),
    [
        (1, (0, 1)),
        # It ends within a chunk of the prompt.
        (6, (1,)),
        # Within the tile before, which another split has.
        (19, (0,)),
    ],
)
def test_windows_in_some_layers(window, layers):
    windows = {"window": window, "window_layers": layers}
    model = random_checkpoint("tiny-mistral", num_layers=2, **SMALL | SMALLER | windows)
    found = run(model, 1, replace(MERGING, blocks=4), LONG, 3)
    check(model, found, LONG)
