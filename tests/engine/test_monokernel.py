"""The monokernel in the simulator: the logits of the reference, and no bug of its protocols."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_copies import copy_kernels
from long import hunted, long_after
from numpy.typing import NDArray
from planted_bugs import hunt, plant

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.executor import Token
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel import launching
from kccl.engine.monokernel.shape import Tuning

pytestmark = pytest.mark.takes(30)

TUNING = Tuning(blocks=4, warps=2, stages=4, stage_steps=2, in_flight=2, kv_strands=2, kv_splits=1)
MERGING = replace(TUNING, kv_splits=2, merges_first=True)
CONTEXT = 64
SMALL = {"hidden": 64, "head_dim": 16, "vocab_size": 128, "context": CONTEXT, "ffn": 128}
SMALL |= {"num_lanes": 4, "num_heads": 8, "num_kv_heads": 4}
IDS = [5, 99, 17, 64, 2, 120]
NEW = 3
# The KV cache is f16: 11 bits of keys and values whose products are about 1.
TOLERANCE = 3e-3

Array = NDArray[np.float32]


@cache
def checkpoint(model: str) -> Checkpoint:
    # The window ends within the ids, and the messages of five layers land in three.
    layers = {"window": 4, "window_layers": 3} if model == "tiny-laneformer" else {}
    num_layers = 5 if model == "tiny-laneformer" else 2
    return random_checkpoint(model, num_layers=num_layers, **SMALL, **layers)


@cache
def expected(model: str) -> tuple[Array, list[int]]:
    reference = Reference(checkpoint(model))
    tokens = reference.generate(IDS, SamplingParams(max_tokens=NEW))
    return reference.logits(IDS), [token for token, _ in tokens]


def generate(executor: DeviceExecutor, num: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """Tokens after IDS."""
    params = SamplingParams(max_tokens=num, stop_ids=stop_ids)
    return [token.id for token in answer(executor, IDS, params)]


def answer(executor: DeviceExecutor, ids: list[int], params: SamplingParams) -> list[Token]:
    executor.start(ids, params)
    return list(executor.tokens())


def logits_of(executor: DeviceExecutor, ids: list[int]) -> Array:
    out = np.empty((len(ids), SMALL["vocab_size"]), np.float32)
    executor.start_scoring(ids, out, writes_shared=True)
    executor.wait()
    return out


def run(name: str, ranks: int = 1, tuning: Tuning = TUNING, **simulation: Any) -> tuple[Array, Any]:
    """The logits after IDS, which all ranks have, and the new tokens of each rank."""

    def main(comm: kccl.Communicator) -> tuple[Array, list[int]]:
        executor = DeviceExecutor(
            checkpoint(name),
            comm,
            tuning=tuning,
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        return logits_of(executor, IDS), generate(executor, NEW)

    results = kccl.run_threads(main, ranks, backend="sim", **simulation)
    for logits, _ in results:
        np.testing.assert_array_equal(logits, results[0][0])
    return results[0][0], [tokens for _, tokens in results]


@cache
def on_one_rank(name: str, tuning: Tuning = TUNING) -> tuple[Array, Any]:
    return run(name, tuning=tuning)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "tuning", "numbers"),
    # Blocks have several units of attention.
    long_after(
        1,
        [
            ("tiny-laneformer", TUNING, (4,)),
            ("tiny-llama", MERGING, (4,)),
            ("tiny-qwen3", TUNING, (2,)),
        ],
    ),
)
def test_equals_the_reference_on_any_number_of_ranks(model, tuning, numbers):
    wanted, tokens = expected(model)
    one, found = on_one_rank(model, tuning)
    np.testing.assert_allclose(one, wanted, atol=TOLERANCE)
    assert found == [tokens]
    for ranks in numbers:
        more, found = run(model, ranks, tuning, seed=ranks)
        np.testing.assert_array_equal(more.view(np.uint32), one.view(np.uint32))
        assert found == [tokens] * ranks


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "change"),
    [
        # The head's rows are multiplied in two parts; a stage has several row tiles.
        ("tiny-laneformer", {"kv_splits": 2, "in_flight": 1, "stages": 2, "stage_steps": 4}),
        # Blocks have different numbers of rows, and two have no attention. Those with rows of the
        # residual are the last ones and the first ones.
        ("tiny-llama", {"blocks": 6, "merges_first": True, "urgent_in_flight": 3}),
    ],
    ids=str,
)
def test_tuning_changes_no_bit(model, change):
    one, _ = on_one_rank(model)
    other, _ = run(model, tuning=replace(TUNING, **change))
    np.testing.assert_array_equal(other.view(np.uint32), one.view(np.uint32))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "tuning"),
    [
        # A tile of the cache is not loaded ahead.
        ({"head_dim": 80}, TUNING),
        # A warp adds up its rows' lanes in two turns.
        ({}, replace(TUNING, blocks=1, warps=1)),
    ],
    ids=["wide heads", "one warp"],
)
def test_other_sizes_equal_the_reference(fields, tuning):
    model = random_checkpoint("tiny-llama", num_layers=2, **SMALL | fields)

    def main(comm: kccl.Communicator) -> Array:
        return logits_of(DeviceExecutor(model, comm, tuning=tuning, context=CONTEXT), IDS)

    (found,) = kccl.run_threads(main, 1, backend="sim")
    np.testing.assert_allclose(found, Reference(model).logits(IDS), atol=TOLERANCE)


@pytest.mark.long
def test_warps_of_64():
    wanted, tokens = expected("tiny-laneformer")
    tuning = replace(MERGING, weights_in_registers=True)
    machine = {"model": "gfx942", "warp_size": 64}
    logits, found = run("tiny-laneformer", 2, tuning, seed=1, **machine)
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)
    assert found == [tokens] * 2


@pytest.mark.long
def test_a_request_may_be_given_up(monkeypatch):
    """The next request has the token steps of the first one behind it."""
    _, tokens = expected("tiny-laneformer")

    def main(comm: kccl.Communicator) -> list[list[int]]:
        executor = DeviceExecutor(
            checkpoint("tiny-laneformer"), comm, tuning=TUNING, context=CONTEXT
        )
        executor.start(IDS, SamplingParams(max_tokens=NEW))
        begun = [next(executor.tokens()).id]
        executor.end()
        stopped = generate(executor, NEW, stop_ids=(tokens[1],))
        return [begun, stopped, generate(executor, NEW)]

    (found,) = kccl.run_threads(main, 1, backend="sim")
    assert found == [tokens[:1], tokens[:2], tokens]


# File -> text that is there once, and what takes its place: bugs that the simulator must find.
BUGS = {
    "sums of two ops in one area": ("consumer_warp.cuh", " op_ ^= 1u;", ""),
    "messages are not awaited": (
        "residual.cuh",
        "    if (receives) consumer.await_landed();\n",
        "",
    ),
    "warps do not meet": ("decode.cuh", "        if (!consumer.meet()) return false;\n", ""),
    "one slot for the words of all token steps": (
        "exchange_buffer.cuh",
        "((token_step & 1u) * S::kWorldSize + rank)",
        "((token_step & 0u) * S::kWorldSize + rank)",
    ),
    "scores are read before all are there": (
        "kv_strand.cuh",
        "        warp().sync();\n        // Each thread handles",
        "        // Each thread handles",
    ),
    "nobody asks whether a product's first stage is there": (
        "product.cuh",
        "    if (!first->is_loaded) return;\n",
        "",
    ),
    "a product's first stage is not let go": (
        "product.cuh",
        "    consumer.weights().has_copied();\n",
        "",
    ),
    "a tag that never changes": (
        "exchange_buffer.cuh",
        "return (token_step & 1u) ^ 1u;",
        "return token_step | 1u;",
    ),
    "what has not come is not awaited again": (
        "watch.cuh",
        "kWeightsInRegisters) missing = left;\n",
        "kWeightsInRegisters) missing = 0;\n",
    ),
    "no fence at the end of a token step": (
        "finish.cuh",
        "            mem::fence<mem::Order::kRelease, ConsumerWarp<S>::kReach>();\n",
        "",
    ),
}


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels that the executor compiles."""
    folder = copy_kernels(tmp_path)
    monkeypatch.setattr(launching, "KERNELS", folder)
    yield folder


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_the_simulator_finds_planted_bugs(bug, tmp_path, monkeypatch):
    plant(tmp_path, monkeypatch, *BUGS[bug])
    wanted, _ = expected("tiny-laneformer")

    def is_right(seed: int) -> bool:
        logits, _ = run("tiny-laneformer", seed=seed)
        return np.allclose(logits, wanted, atol=TOLERANCE)

    hunt(24, is_right)


def test_a_rank_that_does_not_come_is_named():
    def main(comm: kccl.Communicator) -> None:
        executor = DeviceExecutor(
            checkpoint("tiny-laneformer"), comm, tuning=TUNING, context=CONTEXT
        )
        if comm.rank == 0:
            logits_of(executor, IDS)

    with pytest.raises(kccl.Error, match="rank 1"):
        kccl.run_threads(main, 2, backend="sim")


@pytest.mark.long
@pytest.mark.timeout(60)
def test_a_rank_may_come_seconds_later():
    """After 3 s the simulator moves rank 1 alone. While rank 1 waits, it lets rank 0 in."""
    _, tokens = expected("tiny-laneformer")

    def main(comm: kccl.Communicator) -> list[int]:
        executor = DeviceExecutor(
            checkpoint("tiny-laneformer"), comm, tuning=TUNING, context=CONTEXT
        )
        # No rank is to compile while the other one sleeps.
        first = generate(executor, NEW)
        if comm.rank == 0:
            time.sleep(3.5)
        assert generate(executor, NEW) == first
        return first

    assert kccl.run_threads(main, 2, backend="sim") == [tokens] * 2


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"head_dim": 8}, 1, "head_dim is 8, must be a multiple of 16"),
        ({"ffn": 96}, 1, "ffn / num_lanes is 24, must be a multiple of 16"),
        (
            {"lm_head": "vocab_parallel", "vocab_size": 160},
            1,
            "vocab_size / 4 lanes is 40, must be a multiple of 16",
        ),
        ({"num_heads": 64}, 1, "num_heads / num_kv_heads is 16, must be at most 8"),
        ({}, 5, "world_size is 5, must be at most the model's 4 lanes"),
        ({}, 3, "world_size is 3, must divide the 4 lanes of a Laneformer"),
        ({"vocab_size": 160}, 4, "vocab_size / 4 ranks is 40, must be a multiple of 16"),
    ],
    ids=str,
)
def test_models_that_do_not_fit_are_refused(changes, ranks, message):
    model = random_checkpoint("tiny-laneformer", **SMALL | {"vocab_size": 240} | changes)

    def main(comm: kccl.Communicator) -> None:
        DeviceExecutor(model, comm, tuning=TUNING, context=CONTEXT)

    with pytest.raises(kccl.InvalidArgument, match=message):
        kccl.run_threads(main, ranks, backend="sim")


@pytest.mark.long
def test_wrong_requests_are_refused():
    def main(comm: kccl.Communicator) -> None:
        executor = DeviceExecutor(
            checkpoint("tiny-laneformer"), comm, tuning=TUNING, context=CONTEXT
        )
        for ids in ([], [1] * CONTEXT):
            with pytest.raises(kccl.InvalidArgument, match=f"ids has {len(ids)} tokens"):
                executor.start(ids, SamplingParams(max_tokens=NEW))
        with pytest.raises(kccl.InvalidArgument, match="stop_ids has 65 ids"):
            generate(executor, NEW, stop_ids=(1,) * 65)
        with pytest.raises(kccl.InvalidArgument, match="ids has 65 tokens"):
            logits_of(executor, [1] * (CONTEXT + 1))

    kccl.run_threads(main, 1, backend="sim")
