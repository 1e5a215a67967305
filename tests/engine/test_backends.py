"""Engines on a GPU's code: the monokernel in the simulator behind the same interface."""

import numpy as np
import pytest
from long import long_after
from shapes import OF_MONOKERNEL

import kccl
from kccl.engine import Engine
from kccl.engine.diff import Diff
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.formats.table import MULTIPLIED
from kccl.engine.model.program import Program
from kccl.engine.monokernel.machine import Machine
from kccl.engine.monokernel.tuning import tuning_for

SMALL = {"hidden": 64, "head_dim": 16, "vocab_size": 128, "context": 64, "ffn": 128}
SMALL |= {"num_lanes": 4, "num_heads": 8, "num_kv_heads": 4, "num_layers": 2}
IDS = [5, 99, 17, 64]
# The KV cache is f16.
TOLERANCE = 1e-2


def checkpoint(model):
    fields = SMALL
    if model in ("tiny-laneformer", "tiny-gpt-oss"):
        fields = fields | {"window": 3, "window_layers": 1}
    if MODELS[model].experts is not None:
        fields = fields | {"num_layers": 1}
    return random_checkpoint(model, **fields)


@pytest.mark.parametrize(
    "model",
    long_after(
        0,
        [
            *("tiny-laneformer", "tiny-qwen2", "tiny-qwen3"),
            *("tiny-qwen3-moe", "tiny-gpt-oss"),
        ],
    ),
)
def test_every_op_equals_the_reference(model):
    """Within diff.LIMITS, and no single value is far off."""
    with Engine(checkpoint(model), "sim") as engine:
        differences = list(Diff(checkpoint(model), engine, IDS).all())
        assert [d.op.name for d in differences if not d.is_within(None)] == []
        assert [d.op.name for d in differences if d.relative > TOLERANCE] == []
        # Something was compared: attention reads an f16 cache.
        assert any(d.relative > 1e-5 for d in differences)


def test_answers_are_those_of_the_host():
    model = checkpoint("tiny-laneformer")
    with Engine(model, "sim") as engine, Engine(model, blocks=1) as host:
        wanted = host.generate(IDS, max_tokens=4)
        found = engine.generate(IDS, max_tokens=4)
        assert (found.ids, found.end) == (wanted.ids, "max_tokens")
        np.testing.assert_allclose(engine.logits(IDS), host.logits(IDS), atol=TOLERANCE)
        # An answer that is given up; the next one finds its beginning in the cache.
        pieces = engine.stream(IDS, max_tokens=4)
        first = [next(pieces).id, next(pieces).id]
        pieces.close()
        rest = engine.generate([*IDS, *first], max_tokens=3, stop_ids=(wanted.ids[3],))
        assert (first, rest.ids) == (wanted.ids[:2], wanted.ids[2:4])
        assert rest.end == "stop"
        assert engine.bandwidth() > 0
        assert engine.bytes_per_token(3) < host.bytes_per_token(3)


@pytest.mark.long
def test_the_end_of_the_context_ends_an_answer():
    model = random_checkpoint("tiny-llama", **SMALL)
    with Engine(model, "sim", context=16) as engine:
        answer = engine.generate([1] * 14, max_tokens=9)
        assert (answer.end, len(answer.ids)) == ("context", 2)


def test_the_host_has_no_executor_without_overlap():
    with (
        Engine(checkpoint("tiny-laneformer"), blocks=1) as engine,
        pytest.raises(kccl.InvalidArgument, match="overlaps is False, must be True on backend"),
    ):
        engine.timed(IDS, 2, overlaps=False)


def test_arguments_that_a_backend_does_not_take_are_refused():
    model = checkpoint("tiny-laneformer")
    for given, message in (
        ({"backend": "tpu"}, "backend is 'tpu', must be one of 'host', 'cuda', 'hip', 'sim'"),
        ({"backend": "sim", "ranks": 2}, "ranks is 2, must be 1"),
        ({"backend": "sim", "blocks": 3}, "blocks is 3, must be a multiple of the rank's 4"),
        ({"backend": "sim", "blocks": 64}, "blocks is 64"),
    ):
        with pytest.raises(kccl.InvalidArgument, match=message):
            Engine(model, **given)


def test_eight_ranks_do_not_use_all_multiprocessors():
    with pytest.raises(kccl.InvalidArgument, match="at most 128: the rank has 132"):
        tuning_for(Program(MODELS["laneformer-2b"]), 8, Machine(132), blocks=132)


def test_every_block_has_a_row():
    with pytest.raises(kccl.InvalidArgument, match="longest product has 12 tiles of 16 rows"):
        tuning_for(Program(MODELS["tiny-llama"]), 1, Machine(132), blocks=13)


@pytest.mark.parametrize("model", OF_MONOKERNEL)
def test_a_tuning_fits_the_kernel(model):
    """On H200: the warps are the same on any number of ranks, because they change bits."""
    program = Program(MODELS[model])
    by_ranks = {
        ranks: tuning_for(program, ranks, Machine(132))
        for ranks in range(1, program.config.num_lanes + 1)
        if program.num_residuals == 1 or program.config.num_lanes % ranks == 0
    }
    assert len({(t.warps, t.kv_strands) for t in by_ranks.values()}) == 1
    for ranks, tuning in by_ranks.items():
        # A thread waits for a word of each 32nd block of all ranks, of which it tells 32 apart.
        assert ranks * tuning.blocks <= 32 * 32
        assert 64 <= tuning.blocks <= 132 or model == "smollm2"
        stage = tuning.stage_steps * tuning.warps * 512
        assert 16 << 10 <= tuning.in_flight * stage <= 80 << 10


@pytest.mark.parametrize(
    ("model", "ranks", "in_flight"),
    # Stages of SmolLM2 on two ranks have 6 KB, all others 16 to 24.
    [
        ("smollm2", 1, 1),
        ("smollm2", 2, 3),
        ("qwen3-0.6b", 1, 1),
        ("llama-1b", 1, 2),
        ("laneformer-2b", 1, 2),
        ("laneformer-2b", 8, 2),
    ],
)
def test_ordinary_models_of_short_layers_copy_less_at_a_time(model, ranks, in_flight):
    assert tuning_for(Program(MODELS[model]), ranks, Machine(132)).in_flight == in_flight


@pytest.mark.parametrize(
    ("model", "ranks", "kv_splits", "merges_first"),
    [
        ("laneformer-2b", 1, 8, False),
        ("laneformer-2b", 2, 8, True),
        # Two residuals on a rank.
        ("laneformer-2b", 4, 8, False),
        ("llama-1b", 1, 16, True),
        ("qwen3-0.6b", 1, 16, True),
        ("smollm2", 1, 16, True),
    ],
)
def test_attention_is_merged_first_where_some_blocks_have_none(
    model, ranks, kv_splits, merges_first
):
    tuning = tuning_for(Program(MODELS[model]), ranks, Machine(132))
    assert (tuning.kv_splits, tuning.merges_first) == (kv_splits, merges_first)


@pytest.mark.parametrize(
    ("ranks", "in_flight", "kv_splits", "begin_together"),
    [(1, 2, 8, False), (2, 2, 8, True), (4, 1, 8, True)],
)
def test_ranks_with_scales_are_tuned_for_their_exchanges(
    ranks, in_flight, kv_splits, begin_together
):
    formats = dict.fromkeys(("qkv", "out", "gate_up", "down"), MULTIPLIED["e4m3_128"])
    program = Program(MODELS["laneformer-2b"], formats)
    tuning = tuning_for(program, ranks, Machine(132))
    assert (tuning.in_flight, tuning.kv_splits) == (in_flight, kv_splits)
    assert (tuning.stagger_ns == 0) is begin_together
