"""Prompts of mixtures of experts that the monokernel reads in chunks, grouped by expert."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long import hunted
from numpy.typing import NDArray
from planted_bugs import hunt, plant
from test_monokernel import CONTEXT, TOLERANCE, answer
from test_monokernel_experts import GPT_OSS, MODELS, PARKED, checkpoint
from test_prefill import IDS, last_logits

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import RandomSource, random_checkpoint
from kccl.engine.formats.base import Stored
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.shape import Tuning

pytestmark = pytest.mark.takes(36)

Array = NDArray[np.float32]


def chunked(tuning: Tuning, **change: int) -> Tuning:
    usual = {"chunk": 4, "chunk_warps": 2, "chunk_stages": 8, "chunk_steps": 2}
    return replace(tuning, **usual | change)


def run(
    mixture: Checkpoint,
    tuning: Tuning,
    ranks: int = 1,
    lasts: tuple[int, ...] = (2,),
    ids: list[int] = IDS,
    **simulation: Any,
) -> list[Array]:
    """For each of `lasts`, the logits after so many ids; the cache has the others from a prompt."""

    def main(comm: kccl.Communicator) -> list[Array]:
        executor = DeviceExecutor(
            mixture,
            comm,
            tuning=tuning,
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        return [last_logits(executor, last, ids) for last in lasts]

    results = kccl.run_threads(main, ranks, backend="sim", **simulation)
    for each in results[1:]:
        for one, other in zip(results[0], each, strict=True):
            np.testing.assert_array_equal(one, other)
    return results[0]


@cache
def by_positions(name: str) -> Array:
    """The logits after all ids, without chunks."""

    def main(comm: kccl.Communicator) -> Array:
        executor = DeviceExecutor(checkpoint(name), comm, tuning=MODELS[name][2], context=CONTEXT)
        answer(executor, IDS[:1], SamplingParams(max_tokens=1))
        return last_logits(executor, len(IDS))

    return kccl.run_threads(main, 1, backend="sim")[0]


def test_a_prompt_in_chunks_equals_the_reference():
    """MXFP4, biases, sinks, a window that begins in the chunk before, a chunk that is not full."""
    name = "gpt-oss in MXFP4"
    (logits,) = run(checkpoint(name), chunked(MODELS[name][2]))
    wanted = Reference(checkpoint(name)).logits(IDS)[-2:]
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "change", "simulation"),
    [
        ("gpt-oss in MXFP4", 2, {}, {"seed": 2}),
        ("qwen3-moe", 2, {}, {"seed": 3, "warp_size": 64, "model": "gfx942"}),
        ("qwen3-moe in FP8", 1, {}, {}),
        # One chunk is longer than the prompt. Some experts have positions in one share of it only.
        ("gpt-oss", 1, {"chunk": 8, "chunk_warps": 4, "chunk_shares": 2}, {}),
    ],
)
def test_chunks_change_no_bit(name, ranks, change, simulation):
    """Also requests behind others."""
    tuning = chunked(MODELS[name][2], **change)
    for each in run(checkpoint(name), tuning, ranks, lasts=(6, 2), **simulation):
        wanted = by_positions(name)[-len(each) :]
        np.testing.assert_array_equal(each.view(np.uint32), wanted.view(np.uint32))


class Skewed(RandomSource):
    """A mixture in which all positions pass experts 3, 7 and 8. Expert 9 has the logits of 7 and 8.
    No position passes another one.
    """

    def read(self, name: str, start: int, stop: int) -> Stored:
        drawn = super().read(name, start, stop)
        part = name.rpartition(".")[2]
        if part == "router":
            drawn.words[[8, 9]] = drawn.words[7]
        if part == "router_bias":
            biases = np.full(stop - start, -20.0, np.float32)
            biases[[3, 7, 8, 9]] = 30.0, 20.0, 20.0, 20.0
            return Stored(drawn.format, drawn.format.from_values(biases))
        return drawn


@pytest.mark.long
def test_all_positions_pass_the_same_experts():
    """They are more than a warp multiplies at a time, in two shares. Of equal logits the lower
    number's counts.
    """
    config = random_checkpoint("tiny-gpt-oss", **GPT_OSS).config
    model = Checkpoint(Skewed(config, 0, "skewed routers")).as_stored(is_alike=True)
    ids = [*IDS, *IDS, *IDS[:4]]
    tuning = chunked(PARKED, chunk=24, chunk_warps=4, chunk_stages=12, chunk_shares=2)
    (logits,) = run(model, tuning, lasts=(2,), ids=ids)
    wanted = Reference(model).logits(ids)[-2:]
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)


# File, text that is there once, and what takes its place: bugs that the simulator must find. Some
# need another tuning, or two ranks.
DOWN, GATE_UP, CHOICE = "prefill_experts.cuh", "prefill_gate_up.cuh", "prefill_choice.cuh"
BUGS = {
    "the last position of an expert is lost": (
        GATE_UP,
        "in_list < positions) {",
        "in_list + 1 < positions) {",
    ),
    "a position has the row of another expert": (
        DOWN,
        "S::kPlaces + listed.place();",
        "S::kPlaces + (listed.place() + 1) % S::kPlaces;",
    ),
    "a position is listed for the next expert": (
        CHOICE,
        "        begin += num;\n",
        "        begin += num + (before + 1 == list ? 1 : 0);\n",
    ),
    "parts of the columns replace each other": (GATE_UP, "*total++ += sum;", "*total++ = sum;"),
    "an expert's sums replace those of the one before": (
        DOWN,
        "lane_.template load_sums<typename Batch::Sums>(sums_at);",
        "typename Batch::Sums{};",
    ),
    "nobody waits for what experts give": (
        "prefill.cuh",
        "            producer.await_squad(C::number_of(chunk, layer, OP, Step::kHalf));\n"
        "            if (!producer.let_go()) return Walk::kFailed;\n            if constexpr (S",
        "            if (!producer.let_go()) return Walk::kFailed;\n            if constexpr (S",
    ),
    "nobody waits for other ranks' experts": (
        "prefill.cuh",
        "                producer.await_row(C::number_of(chunk, layer, OP, Step::kSent));\n",
        "",
        {},
        2,
    ),
    "an empty list keeps the vectors of the list before": (
        DOWN,
        "        if (list.num == 0) Batch::load(inputs, lane_, gather_next, C::kStripe);\n",
        "",
        {"chunk": 8, "chunk_shares": 2},
        1,
    ),
    "choices are made before the last ones are used": (
        CHOICE,
        "    consumer.meet();\n    for (uint32_t i = consumer.warp_index(); i < kLists; i += S::"
        "kChunkWarps) {\n        const auto nothing",
        "    for (uint32_t i = consumer.warp_index(); i < kLists; i += S::"
        "kChunkWarps) {\n        const auto nothing",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_the_simulator_finds_planted_bugs(bug, tmp_path: Path, monkeypatch):
    name, right, wrong, *others = BUGS[bug]
    plant(tmp_path, monkeypatch, name, right, wrong)
    change, ranks = others or ({}, 1)
    model = checkpoint("qwen3-moe")
    wanted = Reference(model).logits(IDS)[-1:]

    def is_right(seed: int) -> bool:
        (logits,) = run(model, chunked(PARKED, **change), ranks, lasts=(1,), seed=seed)
        return np.allclose(logits, wanted, atol=TOLERANCE)

    hunt(8, is_right)
