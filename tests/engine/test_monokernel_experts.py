"""Mixtures of experts in the monokernel, simulated."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from long import hunted
from numpy.typing import NDArray
from planted_bugs import hunt, plant
from test_monokernel import CONTEXT, IDS, NEW, TOLERANCE, TUNING, generate, logits_of

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.opening import read_for
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.experts import Experts
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel import layout
from kccl.engine.monokernel.limits import check
from kccl.engine.monokernel.shape import Tuning

pytestmark = pytest.mark.takes(30)

Array = NDArray[np.float32]

SMALL: dict[str, Any] = {"hidden": 64, "head_dim": 16, "vocab_size": 128, "context": CONTEXT}
SMALL |= {"num_layers": 2, "ffn": 64, "num_lanes": 4, "num_heads": 8, "num_kv_heads": 4}
# The router has rows of zeros up to whole tiles.
QWEN3 = SMALL | {"experts": Experts(num=20, chosen=3)}
# Biases, sinks, clamped gates, and a window that ends within the ids.
GPT_OSS = QWEN3 | {"window": 4, "window_layers": (0,)}
# Experts in MXFP4, of which a lane has whole blocks; all other products in BF16.
STORED = GPT_OSS | {"num_lanes": 2, "stored": dict.fromkeys(("w1", "w3", "w2"), "mxfp4")}
PARKED = replace(TUNING, stages=6, parked=2)
# As on AMD's GPUs.
REGISTERS = replace(PARKED, weights_in_registers=True)
# The stages of both formats have as many bytes. One of experts has weights of several.
OF_STORED = replace(PARKED, stage_steps=8, strip_tiles=8)
# The router is in BF16. Groups of 128 make matrices large, so experts are few.
FP8 = QWEN3 | {"hidden": 128, "ffn": 512, "stored": dict.fromkeys(("w1", "w3", "w2"), "e4m3_128")}
FP8 |= {"experts": Experts(num=5, chosen=3)}
# Name -> shape, its fields, the tuning, and numbers of ranks.
MODELS: dict[str, tuple[str, dict[str, Any], Tuning, tuple[int, ...]]] = {
    "qwen3-moe": ("tiny-qwen3-moe", QWEN3, PARKED, (4,)),
    "qwen3-moe in FP8": ("tiny-qwen3-moe", FP8, OF_STORED, (2,)),
    # Ranks have it in MXFP4.
    "gpt-oss": ("tiny-gpt-oss", GPT_OSS, PARKED, ()),
    "gpt-oss in MXFP4": ("tiny-gpt-oss", STORED, OF_STORED, (2,)),
}


@cache
def checkpoint(name: str) -> Checkpoint:
    shape, fields, _, _ = MODELS[name]
    return random_checkpoint(shape, **fields).as_stored(is_alike=True)


@cache
def expected(name: str) -> tuple[Array, list[int]]:
    reference = Reference(checkpoint(name))
    tokens = reference.generate(IDS, SamplingParams(max_tokens=NEW))
    return reference.logits(IDS), [token for token, _ in tokens]


def run(
    name: str, ranks: int, tuning: Tuning | None = None, **simulation: Any
) -> tuple[Array, Any]:
    """The logits after IDS, which all ranks have, and the new tokens of each rank."""
    tuning = MODELS[name][2] if tuning is None else tuning

    def main(comm: kccl.Communicator) -> tuple[Array, list[int]]:
        executor = DeviceExecutor(
            checkpoint(name),
            comm,
            tuning=tuning,
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        program, where = executor.program, (comm.rank, comm.world_size)
        packed = layout.packed_bytes(program, *where, tuning.warps, tuning.strip_tiles)
        assert executor.nbytes == packed
        return logits_of(executor, IDS), generate(executor, NEW)

    results = kccl.run_threads(main, ranks, backend="sim", **simulation)
    for logits, _ in results:
        np.testing.assert_array_equal(logits, results[0][0])
    return results[0][0], [tokens for _, tokens in results]


@cache
def on_one_rank(name: str) -> Array:
    wanted, tokens = expected(name)
    one, found = run(name, 1)
    np.testing.assert_allclose(one, wanted, atol=TOLERANCE)
    assert found == [tokens]
    return one


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks"), [(name, num) for name, model in MODELS.items() for num in model[3]]
)
def test_equals_the_reference_on_any_number_of_ranks(name, ranks):
    one = on_one_rank(name)
    more, found = run(name, ranks, seed=ranks)
    np.testing.assert_array_equal(more.view(np.uint32), one.view(np.uint32))
    assert found == [expected(name)[1]] * ranks


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        # Nothing is parked. A stage has weights of several experts, and pieces of two of them.
        {"parked": 0, "stages": 2, "stage_steps": 6, "blocks": 3},
        # All slots but one are parked. Blocks have different numbers of rows, and some have none of
        # the router.
        {
            **{"parked": 4, "stages": 5, "in_flight": 5, "urgent_in_flight": 4},
            **{"blocks": 7, "kv_splits": 2, "merges_first": True},
        },
        # Weights are in registers. Some blocks have no row of one product of experts.
        {"weights_in_registers": True, "stage_steps": 6, "blocks": 30},
    ],
    ids=str,
)
def test_tuning_changes_no_bit(change):
    one = on_one_rank("qwen3-moe")
    other, _ = run("qwen3-moe", 1, replace(PARKED, **change))
    np.testing.assert_array_equal(other.view(np.uint32), one.view(np.uint32))


def test_experts_may_have_another_format_on_amds_gpus():
    """The layers' other products must have one: where they do not, all but the experts' expand."""
    drawn = random_checkpoint("tiny-gpt-oss", **STORED)
    assert read_for(drawn, "hip", None).formats["expert_gate_up"].name == "mxfp4"
    of_attention = dict.fromkeys(("wq", "wk", "wv", "wo"), "q8_0")
    mixed = random_checkpoint(
        "tiny-gpt-oss", **STORED | {"stored": STORED["stored"] | of_attention}
    )
    formats = {
        backend: {kind: each.name for kind, each in read_for(mixed, backend, None).formats.items()}
        for backend in ("hip", "cuda")
    }
    # The router has 16 bits.
    assert formats["cuda"]["qkv"] != formats["hip"]["qkv"] == "bfloat16"
    assert formats["hip"]["expert_down"] == "mxfp4"
    in_fp8 = random_checkpoint("tiny-qwen3-moe", **FP8)
    assert read_for(in_fp8, "hip", None).formats["expert_down"].name == "e4m3_128"
    # All but the router in one format: attention expands, experts do not.
    all_fp8 = dict.fromkeys(("wq", "wk", "wv", "wo"), "e4m3_128")
    in_fp8 = random_checkpoint("tiny-qwen3-moe", **FP8 | {"stored": FP8["stored"] | all_fp8})
    found = read_for(in_fp8, "hip", None).formats
    assert (found["qkv"].name, found["expert_down"].name) == ("bfloat16", "e4m3_128")
    assert not any("." in kind for kind in found)


@pytest.mark.parametrize("kind", ["expert_gate_up", "expert_down"])
def test_biases_of_one_product_of_experts_are_refused(kind):
    program = Program(replace(checkpoint("gpt-oss").config, biases=(kind,)))
    with pytest.raises(kccl.InvalidArgument, match=f"biases has '{kind}' alone, must have both"):
        check(program, 1)


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), [("gpt-oss", 2), ("gpt-oss in MXFP4", 1)])
def test_warps_of_64(name, ranks):
    tuning = replace(MODELS[name][2], weights_in_registers=True)
    found, tokens = run(name, ranks, tuning, seed=3, warp_size=64, model="gfx942")
    np.testing.assert_allclose(found, expected(name)[0], atol=TOLERANCE)
    assert tokens == [expected(name)[1]] * ranks


@pytest.mark.long
def test_weights_are_read_alone():
    """Nothing is routed then."""

    def main(comm: kccl.Communicator) -> list[int]:
        executor = DeviceExecutor(checkpoint("qwen3-moe"), comm, tuning=PARKED, context=CONTEXT)
        executor.start_streaming(2)
        executor.wait()
        return generate(executor, NEW)

    assert kccl.run_threads(main, 1, backend="sim") == [expected("qwen3-moe")[1]]


@pytest.mark.long
def test_logits_that_never_come_are_named(tmp_path, monkeypatch):
    """Four of the router's are lost. All waits end, those for the experts' weights too."""
    plant(tmp_path, monkeypatch, "experts.cuh", PUBLISHED, f"        if (row != 0){PUBLISHED[7:]}")
    # In the simulator's time.
    monkeypatch.setenv("KCCL_TIMEOUT", "0.01")
    told = r"decoding on rank 0: block \d of rank 0 did not arrive; .* step seen 0, wanted 1"
    with pytest.raises(kccl.Timeout, match=told):
        run("qwen3-moe", 1, REGISTERS)


@pytest.mark.long
def test_the_tokens_are_the_same_without_overlap():
    def main(comm: kccl.Communicator) -> list[int]:
        executor = DeviceExecutor(checkpoint("qwen3-moe"), comm, tuning=PARKED, context=CONTEXT)
        params = SamplingParams(max_tokens=NEW)
        executor.prepare(params, overlaps=False)
        comm.barrier()
        executor.start(IDS, params, overlaps=False)
        return [token.id for token in executor.tokens()]

    found = kccl.run_threads(main, 2, backend="sim")
    assert found == [expected("qwen3-moe")[1]] * 2


PUBLISHED = "        consumer.publish(Slots<S>::routed(layer) + row, logits);\n"
IN_REGISTERS, BIASES = "weights_registers_experts.cuh", "expert_biases.cuh"
# File -> text that is there once, and what takes its place: bugs that the simulator must find.
BUGS = {
    "weights of the last layer's choice": (
        "stream_experts.cuh",
        "        chosen_parity_ ^= 1u;\n",
        "",
    ),
    "weights of the neighbour's expert": (
        "stream_experts.cuh",
        "shuffle_word(chosen_, piece.place)",
        "shuffle_word(chosen_, (piece.place + 1) % S::kPlaces)",
    ),
    "a slot is used again while its stage is parked": (
        "pool_order.cuh",
        "        if (slot_ == skipped_) slot_ = behind_skipped_;\n",
        "",
    ),
    "the parked stages' slots are taken for the experts'": (
        "weights_pool.cuh",
        "order_.begin_experts(num_parked<S>(block, layer, has_head_));",
        "order_.begin_experts(0);",
    ),
    "the last reading of a choice is not awaited": (
        "stream_experts.cuh",
        "whose end the consumers await.\n        warp().sync();\n",
        "whose end the consumers await.\n",
    ),
    "a copy begins before the last use of its slot": (
        "pool_producer.cuh",
        "        if (!has_ended<MAY_SUSPEND>(ring_.empty, order_.slot())) return false;\n",
        "",
    ),
    "logits are taken of another layer": (
        "routing.cuh",
        "Slots<S>::routed(layer)",
        "Slots<S>::routed(layer == 0 ? 0 : layer - 1)",
    ),
    "shares are not applied": (
        "experts.cuh",
        "        for (float& value : float4s[k].value) value = rounded_product(value, share);\n",
        "",
    ),
    "biases of experts are added before they have come": (
        BIASES,
        "        while (platform::warp_any(!mem::has_completed(have_biases, parity))) "
        "mem::poll_pause();\n",
        "",
    ),
    "weights are loaded before the block has chosen": (
        IN_REGISTERS,
        "        if (is_first) await_choice();\n",
        "",
    ),
    "the wait for a choice is that for the last layer's": (
        IN_REGISTERS,
        "        if (product == Product<S>::kExpertGateUp) chosen_parity_ ^= 1u;\n",
        "",
    ),
    "the next layer multiplies weights of experts": (
        IN_REGISTERS,
        "        if constexpr (S::kOverlaps) Base::load();\n",
        "",
    ),
    "all weights are of the first expert": (
        IN_REGISTERS,
        "choice.expert[place]",
        "choice.expert[0]",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS, lambda bug: BUGS[bug][0] == IN_REGISTERS))
def test_the_simulator_finds_planted_bugs(bug, tmp_path, monkeypatch):
    plant(tmp_path, monkeypatch, *BUGS[bug])
    tuning = REGISTERS if BUGS[bug][0] == IN_REGISTERS else PARKED
    name = "gpt-oss" if BUGS[bug][0] == BIASES else "qwen3-moe"
    wanted, _ = expected(name)

    def is_right(seed: int) -> bool:
        logits, _ = run(name, 1, tuning, seed=seed)
        return np.allclose(logits, wanted, atol=TOLERANCE)

    hunt(24, is_right)
