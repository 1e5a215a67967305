"""Several positions of a request in one token step of the monokernel, simulated."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from long import hunted
from test_monokernel import (
    CONTEXT,
    MERGING,
    SMALL,
    TOLERANCE,
    TUNING,
    Array,
    answer,
    kernels,
    logits_of,
)

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.limits import check
from kccl.engine.monokernel.shape import Tuning

__all__ = ["kernels"]

pytestmark = pytest.mark.takes(60)

# A tile of positions and the beginning of the next one. The last token step uses fewer columns than
# there are, and with 3 or 8 a token step has positions of both tiles.
IDS = np.random.default_rng(44).integers(SMALL["vocab_size"], size=20).tolist()
FEWER = IDS[:3] + IDS[10:15]
NEW = 2
LAYERS: dict[str, dict[str, Any]] = {
    # The messages of the first layer land in the third.
    "tiny-laneformer": {"num_layers": 3, "window": 4, "window_layers": 2},
    "tiny-llama": {"num_layers": 1},
}


@cache
def checkpoint(model: str) -> Checkpoint:
    return random_checkpoint(model, **SMALL | LAYERS[model])


def run(
    model: str, columns: int, ranks: int = 1, tuning: Tuning = TUNING, **simulation: Any
) -> tuple[Array, list[int], Array]:
    """The logits after IDS, tokens, and the logits after FEWER. Tokens are made by the kernel with
    one column, so the other one then finds old words in its columns.
    """

    def main(comm: kccl.Communicator) -> tuple[Array, list[int], Array]:
        executor = DeviceExecutor(
            checkpoint(model),
            comm,
            tuning=replace(tuning, columns=columns),
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        logits = logits_of(executor, IDS)
        tokens = answer(executor, IDS[:2], SamplingParams(max_tokens=NEW))
        return logits, [token.id for token in tokens], logits_of(executor, FEWER)

    found = kccl.run_threads(main, ranks, backend="sim", **{"seed": ranks} | simulation)
    for each in found:
        for mine, other in zip(each, found[0], strict=True):
            np.testing.assert_array_equal(mine, other)
    return found[0]


@cache
def in_one_column(model: str, tuning: Tuning) -> tuple[Array, list[int], Array]:
    found = run(model, 1, tuning=tuning)
    for ids, logits in ((IDS, found[0]), (FEWER, found[2])):
        expected = Reference(checkpoint(model)).logits(ids)
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
    return found


# Drafts need these bits. `make test` runs their test instead (test_monokernel_drafts.py).
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "columns", "ranks", "tuning"),
    [
        ("tiny-laneformer", 3, 2, replace(TUNING, kv_splits=2)),
        ("tiny-laneformer", 3, 1, TUNING),
        ("tiny-llama", 8, 1, MERGING),
    ],
)
def test_a_column_has_the_bits_that_it_has_alone(model, columns, ranks, tuning):
    one = in_one_column(model, tuning)
    found = run(model, columns, ranks, tuning)
    for mine, alone in zip(found, one, strict=True):
        np.testing.assert_array_equal(
            np.asarray(mine, np.float32).view(np.uint32),
            np.asarray(alone, np.float32).view(np.uint32),
        )


@pytest.mark.long
def test_columns_of_warps_of_64():
    found = run("tiny-laneformer", 3, warp_size=64)
    expected = Reference(checkpoint("tiny-laneformer")).logits(IDS)
    np.testing.assert_allclose(found[0], expected, atol=TOLERANCE)


# File -> text that is there once, and what takes its place: bugs that the simulator must find.
BUGS = {
    "a position sees the one behind it": (
        "attend_columns.cuh",
        "position < position_ + column;",
        "position <= position_ + column;",
    ),
    "a column publishes in another one's slots": (
        "exchange_buffer.cuh",
        "kFurther + (column - 1) * kControlWords + slot;",
        "kFurther + slot;",
    ),
    "all columns turn by one position": (
        "attend_columns.cuh",
        "const uint32_t at = column * (S::kHeadDim / 2);",
        "const uint32_t at = 0 * column;",
    ),
    "a column that is not used is counted": (
        "columns.cuh",
        "const uint32_t used = (1u << num) - 1;",
        "const uint32_t used = (1u << num | 7u) | 0u * num;",
    ),
    "merged results have the tags of one column": (
        "consumer_warp.cuh",
        "return tag(kHasOwnUse && column == 0 ? kMergedUse : column);",
        "return tag(column);",
    ),
    "all columns of a warp append the first one's key": (
        "attend_columns.cuh",
        "heads[i - 2] = heads[i];",
        "heads[i - 2] = heads[i - 2];",
    ),
    "the last column's keys are lost": (
        "attend_columns.cuh",
        "if ((mine & 1u) != 0) append_column(",
        "if ((mine & 1u) != 0 && column + 1 < consumer_.num_columns()) append_column(",
    ),
    "squares of one column for all": (
        "vectors.cuh",
        "return inverse_rms(consumer_, column * S::kNumResiduals);",
        "return inverse_rms(consumer_, 0 * column);",
    ),
    "messages of one column for all": (
        "residual.cuh",
        "landed[rows.column * kMostOfResidual<S> + rows.index4]",
        "landed[rows.index4]",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_the_simulator_finds_planted_bugs(bug, kernels):
    name, right, wrong = BUGS[bug]
    text = (kernels / name).read_text()
    assert text.count(right) == 1
    (kernels / name).write_text(text.replace(right, wrong))
    expected = Reference(checkpoint("tiny-laneformer"))
    for seed in range(24):
        try:
            first, _, second = run("tiny-laneformer", 3, seed=seed)
        except kccl.CompileError:
            raise
        except kccl.Error:
            return
        for ids, logits in ((IDS, first), (FEWER, second)):
            if not np.allclose(logits, expected.logits(ids), atol=TOLERANCE):
                return
    pytest.fail("24 seeds did not show it")


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("tiny-llama", {"columns": 9}, "columns is 9, must be from 1 to 8"),
        ("tiny-llama", {"columns": 0}, "columns is 0, must be from 1 to 8"),
        ("tiny-qwen3-moe", {}, "columns is 3, must be 1 for a mixture of experts"),
        ("tiny-llama", {"weights_in_registers": True}, "must be 1 for weights in registers"),
    ],
    ids=str,
)
def test_what_has_no_columns_is_refused(model, change, message):
    program = Program(random_checkpoint(model).config)
    with pytest.raises(kccl.InvalidArgument, match=message):
        check(program, 1, replace(TUNING, **{"columns": 3} | change))
