"""RoPE's scalings by their formulas, and requests whose frequencies depend on their length.
tests/parity/test_rope_scaling.py has transformers' logits.
"""

import math

import numpy as np
import pytest

import kccl
from kccl.engine import Engine, SamplingParams
from kccl.engine.diff import Diff, Incremental
from kccl.engine.executors.host import HostExecutor
from kccl.engine.executors.reference import Cache, Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.program import Program
from kccl.engine.model.rope import LinearScaling, Rope, TableScaling
from kccl.engine.model.rope_scaling import (
    ChainedScaling,
    DynamicScaling,
    LongRopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

ORIGINAL = 16
KINDS = {
    "dynamic": DynamicScaling(3.0, ORIGINAL),
    "longrope": LongRopeScaling((1.0,) * 8, tuple(np.linspace(2, 9, 8)), ORIGINAL),
    "yarn": YarnScaling(4.0, ORIGINAL, beta_fast=2.0),
}
BY_LENGTH = ("dynamic", "longrope")
IDS = np.random.default_rng(2).integers(128, size=40).tolist()


def checkpoint_of(kind, model="tiny-llama", **changes):
    shape = {"num_layers": 2, "hidden": 64, "ffn": 64, "head_dim": 16, "vocab_size": 128}
    shape |= {"num_heads": 4, "num_kv_heads": 2, "num_lanes": 2, "context": 64}
    shape["rope"] = Rope(scaling=KINDS[kind], attention_factor=1.2)
    return random_checkpoint(model, **shape | changes)


# ---- Formulas ----------------------------------------------------------------------------------


def test_yarn_of_gpt_oss():
    """Published numbers: where its ramp begins and ends, and what multiplies cosines."""
    scaling = YarnScaling(32.0, 4096, truncate=False)
    assert scaling.ramp(64, 150_000.0) == pytest.approx((8.0928, 17.3980), abs=1e-4)
    assert YarnScaling(32.0, 4096).ramp(64, 150_000.0) == (8, 18)
    assert yarn_attention_factor(32.0) == pytest.approx(1.34657, abs=1e-5)
    unscaled = Rope(theta=150_000.0).frequencies(64)
    ratios = Rope(theta=150_000.0, scaling=scaling).frequencies(64) / unscaled
    assert (ratios[:9] == 1).all() and ratios[18:] == pytest.approx(1 / 32)
    share = (12 - 8.0928) / (17.3980 - 8.0928)
    assert ratios[12] == pytest.approx(1 - share + share / 32, rel=1e-4)


def test_dynamic_raises_theta_beyond_the_original_context():
    rope = Rope(theta=1e4, scaling=DynamicScaling(2.0, 100))
    assert (rope.frequencies(8, 100) == Rope(theta=1e4).frequencies(8)).all()
    # theta x (factor x 3 - (factor - 1)) ** (8 / 6)
    raised = Rope(theta=1e4 * 5 ** (8 / 6)).frequencies(8)
    np.testing.assert_allclose(rope.frequencies(8, 300), raised, rtol=1e-12)


def test_longrope_has_a_table_for_short_and_one_for_long_requests():
    rope = Rope(scaling=LongRopeScaling((1.0, 2.0), (4.0, 8.0), 10))
    plain = Rope().frequencies(4)
    assert (rope.frequencies(4, 10) == plain / [1, 2]).all()
    assert (rope.frequencies(4, 11) == plain / [4, 8]).all()


def test_scalings_one_after_the_other():
    table, yarn = TableScaling((1.0, 2.0, 3.0, 4.0)), YarnScaling(4.0, 64)
    rope = Rope(scaling=ChainedScaling((table, yarn)))
    ratios = Rope(scaling=yarn).frequencies(8) / Rope().frequencies(8)
    np.testing.assert_allclose(
        rope.frequencies(8), Rope().frequencies(8) / [1, 2, 3, 4] * ratios, rtol=1e-12
    )


@pytest.mark.parametrize(
    ("scaling", "reaches", "longest"),
    [
        (None, [50, 50, 50], 50),
        (LinearScaling(4.0), [50, 50, 50], 200),
        (LinearScaling(0.5), [50, 50, 50], 50),
        (DynamicScaling(2.0, 20), [20, 20, 21], 2**31 - 1),
        (YarnScaling(4.0, 20), [50, 50, 50], 80),
        (YarnScaling(2.0, 20), [50, 50, 50], 50),
        (LongRopeScaling((1.0,), (2.0,), 20), [20, 20, 50], 50),
        (
            ChainedScaling((LongRopeScaling((1.0,), (2.0,), 20), LinearScaling(2.0))),
            [20, 20, 50],
            100,
        ),
    ],
)
def test_which_requests_share_their_frequencies(scaling, reaches, longest):
    rope = Rope(scaling=scaling)
    assert [rope.reach(length, 50) for length in (1, 20, 21)] == reaches
    assert rope.longest(50) == longest


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: YarnScaling(4.0, 16, beta_fast=0), "beta_fast of the RoPE scaling is 0, must be"),
        (lambda: DynamicScaling(math.nan, 16), "factor of the RoPE scaling is nan, must be"),
        (lambda: LongRopeScaling((1.0,), (0.0,), 16), "a factor of the RoPE scaling is 0.0, must"),
        (lambda: Rope(attention_factor=0.0), "attention_factor of RoPE is 0.0, must be"),
        (
            lambda: checkpoint_of("longrope", head_dim=32),
            "the RoPE scaling has 8 factors, must have one for each of 16 pairs",
        ),
        (
            lambda: checkpoint_of("dynamic", head_dim=2),
            "'dynamic' has 1 pair, must have at least 2",
        ),
        (
            lambda: Rope(theta=1.0, scaling=YarnScaling(4.0, 16)).frequencies(8),
            "theta of RoPE is 1.0, must be above 1 for the RoPE scaling 'yarn'",
        ),
    ],
)
def test_what_does_not_suit_is_refused(make, told):
    with pytest.raises(kccl.InvalidArgument, match=told):
        make()


# ---- Requests ----------------------------------------------------------------------------------


def test_the_attention_factor_multiplies_cosines_and_sines():
    plain, scaled = (
        np.stack(Program(checkpoint_of("yarn", rope=rope).config).rotations(9))
        for rope in (Rope(), Rope(attention_factor=1.25))
    )
    np.testing.assert_allclose(scaled, 1.25 * plain, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_decodes_as_it_reads_a_prompt(kind):
    checkpoint = checkpoint_of(kind, "tiny-qwen3")
    differences = Diff(checkpoint, Incremental(checkpoint), IDS[:20]).all()
    assert max(each.relative for each in differences) < 1e-5


def test_a_cache_that_does_not_know_its_request():
    checkpoint = checkpoint_of("dynamic")
    reference, cache = Reference(checkpoint), Cache()
    parts = [reference.logits(IDS[:10], cache), reference.logits(IDS[10:16], cache)]
    assert np.abs(np.concatenate(parts) - reference.logits(IDS[:16])).max() < 1e-4
    with pytest.raises(kccl.InvalidArgument, match="differ between requests of 16 and 17 pos"):
        reference.logits(IDS[16:17], cache)
    with pytest.raises(kccl.InvalidArgument, match="position 9, must be within the cache's requ"):
        reference.logits(IDS[:9], Cache(8))


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_op_of_the_host_is_the_references(kind, model):
    checkpoint = checkpoint_of(kind, model)
    with Engine(checkpoint, ranks=2, blocks=1) as engine:
        # Shorter than the original context, longer, and shorter again.
        for length in (ORIGINAL, ORIGINAL + 1, 40, 9):
            differences = Diff(checkpoint, engine, IDS[:length]).all()
            assert max(each.relative for each in differences) < 1e-4


# The host makes the table of each kind, and the kernel is the same.
@pytest.mark.long
def test_every_op_of_the_monokernel_is_the_references():
    checkpoint = checkpoint_of("dynamic", "tiny-qwen3", num_layers=1)
    with Engine(checkpoint, "sim", context=32) as engine:
        for length in (ORIGINAL + 4, 3):
            diff = Diff(checkpoint, engine, IDS[:length])
            ops = [diff.reference.program.by_name[name] for name in ("layers.0.qkv", "head")]
            assert all(diff.at(op).is_within(None) for op in ops)
        # A prompt of several chunks, and an answer.
        found = engine.generate(IDS[:12], max_tokens=6).ids
    wanted = Reference(checkpoint).generate(IDS[:12], SamplingParams(max_tokens=6))
    assert found == [token for token, _ in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_frequencies_of_prompt_and_answer(kind):
    """Each token is what a run over prompt and whole answer has there."""
    checkpoint = checkpoint_of(kind)
    prompt, num = IDS[:10], 20
    reference = Reference(checkpoint)
    with Engine(checkpoint, ranks=1, blocks=1) as engine:
        answer = engine.generate(prompt, max_tokens=num).ids
        whole = reference.logits([*prompt, *answer])
        assert answer == whole[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert np.abs(engine.logits([*prompt, *answer]) - whole).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_used_again_only_with_the_same_frequencies(kind, monkeypatch):
    checkpoint, cached = checkpoint_of(kind), []
    start = HostExecutor.start

    def watch(executor, ids, params, *, place, overlaps=True):
        cached.append(place.num_cached)
        start(executor, ids, params, place=place, overlaps=overlaps)

    monkeypatch.setattr(HostExecutor, "start", watch)
    reference = Reference(checkpoint)
    with Engine(checkpoint, ranks=1, blocks=1) as engine:
        for length, num in ((8, 4), (10, 6), (10, 7), (12, 8), (13, 7), (8, 4)):
            ids = IDS[:length]
            wanted = reference.generate(ids, SamplingParams(max_tokens=num))
            assert engine.generate(ids, max_tokens=num).ids == [token for token, _ in wanted]
        engine.logits(IDS)
        engine.generate(IDS[:8], max_tokens=4)
    # Requests of 12, 16, 17, 20, 20 and 12 positions.
    reused = {"yarn": [0, 8, 9, 10, 12, 7], "longrope": [0, 8, 0, 10, 12, 0]}
    reused["dynamic"] = [0, 8, 0, 0, 12, 0]
    # Logits keep what they have computed, of a request that has 13 positions or more.
    assert cached == [*reused[kind], 7 if kind == "yarn" else 0]


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_a_request_that_is_refused_leaves_the_cache_as_it_was(kind):
    checkpoint = checkpoint_of(kind)
    with Engine(checkpoint, ranks=1, blocks=1) as engine:
        pieces = engine.stream(IDS[:8], max_tokens=4)
        next(pieces)
        with pytest.raises(kccl.InvalidArgument, match="is answering another request"):
            engine.generate(IDS[:9], max_tokens=20)
        answer = [piece.id for piece in pieces]
        longer = [*IDS[:8], *answer]
        found = engine.generate(longer, max_tokens=20).ids
    wanted = Reference(checkpoint).generate(longer, SamplingParams(max_tokens=20))
    assert found == [token for token, _ in wanted]


def test_the_context_ends_the_request_of_which_the_length_counts():
    """More tokens than fit do not make a request longer."""
    checkpoint = checkpoint_of("dynamic")
    with Engine(checkpoint, ranks=1, blocks=1, context=20) as engine:
        found = engine.generate(IDS[:10], max_tokens=1000).ids
    wanted = Reference(checkpoint).generate(IDS[:10], SamplingParams(max_tokens=10))
    assert found == [token for token, _ in wanted]


def test_a_context_beyond_the_models():
    """Where RoPE's scaling permits it."""
    checkpoint = checkpoint_of("dynamic", context=ORIGINAL)
    with Engine(checkpoint, ranks=1, blocks=1) as engine:
        assert engine.context == ORIGINAL
        with pytest.raises(kccl.InvalidArgument, match="at most 16 in a context of 16"):
            engine.logits(IDS)
    with Engine(checkpoint, ranks=1, blocks=1, context=40) as engine:
        assert np.abs(engine.logits(IDS) - Reference(checkpoint).logits(IDS)).max() < 1e-4
    yarn = checkpoint_of("yarn", context=ORIGINAL)
    Engine(yarn, ranks=1, blocks=1, context=64).close()
    for other, most in ((yarn, 64), (checkpoint_of("longrope", context=20), 20)):
        with pytest.raises(kccl.InvalidArgument, match=f"must be from 1 to the model's, {most}"):
            Engine(other, ranks=1, blocks=1, context=most + 1)
