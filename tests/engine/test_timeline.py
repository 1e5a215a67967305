"""Kernels that trace or leave something out: on hand-made stamps, and in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from hand_made_timeline import STAMPS_NS, TOKEN_STEP_NS, made_stamps

import kccl
from kccl.engine import Engine
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.files.random_weights import random_checkpoint, shape_of
from kccl.engine.formats.table import MULTIPLIED
from kccl.engine.model.executor import BEGINNING, Place
from kccl.engine.model.experts import Experts
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.model.timeline import (
    ASKED,
    LANDED,
    LET_GO,
    NUM_STAMPS,
    Stamps,
    covered,
    level,
    timelines,
)
from kccl.engine.model.variant import TRACING, USUAL, parse
from kccl.engine.monokernel.other_tuning import with_variant
from kccl.engine.monokernel.shape import Tuning

pytestmark = pytest.mark.takes(16)

TUNING = Tuning(blocks=4, warps=2, stages=4, stage_steps=2, in_flight=2, kv_strands=2, kv_splits=1)
SMALL = {"hidden": 64, "head_dim": 16, "vocab_size": 128, "context": 64, "ffn": 128}
SMALL |= {"num_lanes": 4, "num_heads": 8, "num_kv_heads": 4, "num_layers": 2}
SMALL |= {"window": 3, "window_layers": 1}
IDS = [5, 99, 17, 64]
TOKEN_STEPS = 4

# ---- hand-made stamps --------------------------------------------------------------------------


@pytest.mark.parametrize("ns_per_tick", [1.0, 0.5])
def test_ticks_of_blocks_become_nanoseconds_of_one_clock(ns_per_tick):
    (found,) = timelines([made_stamps(ns_per_tick=ns_per_tick)])
    assert found.ns_per_tick == pytest.approx(ns_per_tick)
    assert found.clock_error_ns < 1
    # Three of five token steps are kept, and begin with the second.
    assert found.begins == pytest.approx(np.arange(4) * TOKEN_STEP_NS, abs=1)
    assert (found.num_token_steps, found.token_step_ns) == (3, pytest.approx(TOKEN_STEP_NS))
    for op in (0, 5):
        wanted = 2 * TOKEN_STEP_NS + op * 1000 + np.array(STAMPS_NS)
        for block in range(2):
            assert found.ops[2, op, :, block] == pytest.approx(wanted, abs=1)
    # What a block does not reach.
    assert np.isnan(found.ops[0, 1, :4, 1]).all()
    assert not np.isnan(found.ops[0, 1, :, 0]).any()


def test_a_clock_of_coarse_nanoseconds_is_told():
    stamps = made_stamps()
    stamps.values[:, -1] -= stamps.values[:, -1] % 32
    (found,) = timelines([stamps])
    assert 0 < found.clock_error_ns <= 32
    assert found.begins == pytest.approx(np.arange(4) * TOKEN_STEP_NS, abs=64)


def test_ranks_have_one_beginning():
    pair = [made_stamps(rank=rank, origin_ns=10**15 + 300 * rank) for rank in range(2)]
    first, second = timelines(pair)
    assert (first.rank, second.rank) == (0, 1)
    assert second.begins - first.begins == pytest.approx(300, abs=1)


def test_stages_are_those_of_all_traced_token_steps():
    (found,) = timelines([made_stamps()])
    times, nbytes, blocks = found.flat_stages()
    assert nbytes.tolist() == [2048] * (5 * 9)
    assert np.bincount(blocks).tolist() == [25, 20]
    assert times[LANDED] - times[ASKED] == pytest.approx(200, abs=1)
    assert times[LET_GO] - times[ASKED] == pytest.approx(900, abs=1)
    # One that landed long before it was noticed.
    (late,) = timelines([made_stamps(late_ns=5000)])
    times, _, blocks = late.flat_stages()
    assert times[LANDED, blocks == 0] == pytest.approx(times[LET_GO, blocks == 0])
    assert (times[LANDED, blocks == 1] < times[LET_GO, blocks == 1]).all()


def test_intervals():
    begins, ends = np.array([0.0, 8.0, 2.0]), np.array([4.0, 9.0, 3.0])
    assert level(begins, ends, np.array([-1, 0, 2.5, 3, 4, 8.5])).tolist() == [0, 1, 2, 1, 0, 1]
    assert covered(begins, ends, (0, 10)) == 5
    assert covered(begins, ends, (1, 8.5)) == 3.5


# ---- the simulator -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced():
    """Gives, for each of two ranks, the stamps of TOKEN_STEPS token steps behind IDS, the
    tokens that the usual kernel makes before and after, and the bytes of packed weights.
    """

    def main(comm):
        model = random_checkpoint("tiny-laneformer", **SMALL)
        executor = DeviceExecutor(model, comm, tuning=TUNING, context=64)
        found = []

        def generate():
            executor.start(IDS, SamplingParams(max_tokens=3))
            found.append([token.id for token in executor.tokens()])

        generate()
        out: list[Stamps] = []
        with pytest.raises(kccl.InvalidArgument, match="does not trace"):
            executor.start_timeline(IDS, BEGINNING, TOKEN_STEPS, out)
        executor.use(TRACING)
        executor.start_timeline(IDS, Place(num_cached=len(IDS) - 1), TOKEN_STEPS, out)
        executor.wait()
        executor.use(USUAL)
        generate()
        return out[0], found, executor.nbytes

    return kccl.run_threads(main, 2, backend="sim")


@pytest.mark.long
def test_tracing_changes_no_token(traced):
    (_, first, _), (_, second, _) = traced
    assert first[0] == first[1] == second[0] == second[1]


@pytest.mark.long
def test_every_stage_of_the_rank_is_stamped(traced):
    for stamps, _, nbytes in traced:
        layout = stamps.layout
        assert layout.stage_bytes.sum() == nbytes
        assert layout.ring_stages == TUNING.stages
        split = NUM_STAMPS * len(layout.ops)
        stages = stamps.values[:, split:-2].reshape(TOKEN_STEPS, -1, 3, TUNING.blocks)
        is_there = np.broadcast_to((layout.stage_ops >= 0)[None, :, None], stages.shape)
        assert ((stages != 0) == is_there).all()
        # A block multiplies them in their order.
        for block in range(TUNING.blocks):
            ops = layout.stage_ops[:, block]
            assert (np.diff(ops[ops >= 0]) >= 0).all()
            kinds = {layout.ops[op].kind for op in ops[ops >= 0]}
            assert kinds == {"qkv", "out", "gate_up", "down", "head"}


@pytest.mark.long
def test_stamps_are_in_their_order(traced):
    found = timelines([stamps for stamps, _, _ in traced])
    for timeline in found:
        assert timeline.num_token_steps == TOKEN_STEPS - 2
        assert (np.diff(timeline.begins) > 0).all()
        kinds = [op.kind for op in timeline.layout.ops]
        assert kinds == ["qkv", "attend", "out", "gate_up", "down"] * 2 + ["head", "end"]
        for block in range(TUNING.blocks):
            for of_token_step in timeline.ops[..., block]:
                reached = of_token_step[~np.isnan(of_token_step)]
                assert (np.diff(reached) >= 0).all()
                # The end has no "met". Blocks without a part of attention only end that op.
                missing = {
                    (op, stamp) for op, stamp in np.argwhere(np.isnan(of_token_step)).tolist()
                }
                attends = {(op, stamp) for op in (1, 6) for stamp in range(4)}
                assert missing - attends == {(len(kinds) - 1, 3)}
                assert missing & attends in (set(), attends)
        stages = np.moveaxis(timeline.stages, 2, -1)
        stages = stages[~np.isnan(stages).any(axis=-1)]
        assert (np.diff(stages, axis=-1) >= 0).all()
        # A block has a stage before it lets the stage go, and lets it go before it has multiplied.
        times, _, blocks = timeline.flat_stages()
        assert (
            np.bincount(blocks) == TOKEN_STEPS * (timeline.layout.stage_ops >= 0).sum(axis=0)
        ).all()
        assert (times[LET_GO] > times[ASKED]).all()
    _multiplied_what_they_let_go(found[0])


def _multiplied_what_they_let_go(timeline):
    """A block lets a stage go between the stamps "arrived" and "multiplied" of the stage's op. But
    the first stage of a layer's op may be let go before the vector has arrived.
    """
    for block in range(TUNING.blocks):
        last = -1
        for stage, op in enumerate(timeline.layout.stage_ops[:, block]):
            if op < 0:
                continue
            let_go = timeline.stages[1:-1, stage, LET_GO, block]
            began, arrived, multiplied = timeline.ops[:, op, :3, block].T
            may_be_early = op != last and timeline.layout.ops[op].kind != "head"
            assert (let_go >= (began if may_be_early else arrived)).all()
            assert (let_go <= multiplied).all()
            last = op


@pytest.mark.long
def test_a_mixtures_stages_are_numbered_in_the_order_of_their_use():
    """The next layer's first ones are copied before the experts'."""
    fields = {**SMALL, "window": 0, "window_layers": 0, "experts": Experts(num=8, chosen=2)}
    model = random_checkpoint("tiny-qwen3-moe", **fields)
    tuning = replace(TUNING, stages=6, parked=2)

    def main(comm):
        executor = DeviceExecutor(model, comm, tuning=tuning, context=64)
        executor.start(IDS, SamplingParams(max_tokens=3))
        list(executor.tokens())
        executor.use(TRACING)
        out: list[Stamps] = []
        executor.start_timeline(IDS, Place(num_cached=len(IDS) - 1), TOKEN_STEPS, out)
        executor.wait()
        return out[0]

    found = kccl.run_threads(main, 1, backend="sim")
    (timeline,) = timelines(found)
    layout = timeline.layout
    kinds = [op.kind for op in layout.ops]
    of_layer = ["qkv", "attend", "out", "router", "expert_gate_up", "expert_down"]
    assert kinds == of_layer * 2 + ["head", "end"]
    is_there = np.broadcast_to((layout.stage_ops >= 0)[None, :, None], timeline.stages.shape)
    assert (~np.isnan(timeline.stages) == is_there).all()
    _multiplied_what_they_let_go(timeline)
    for block in range(tuning.blocks):
        ops = layout.stage_ops[:, block]
        assert (np.diff(ops[ops >= 0]) >= 0).all()
        first = {op: np.flatnonzero(ops == op)[0] for op in set(ops[ops >= 0].tolist())}
        asked = timeline.stages[1:-1, :, ASKED, block]
        for experts, behind in ((4, 6), (10, 12)):
            assert (asked[:, first[behind] + 1] < asked[:, first[experts]]).all()
        assert (asked[:, first[6] + 2] > asked[:, first[4]]).all()


@pytest.mark.long
def test_what_is_left_out_shows_in_tokens_and_is_forgotten():
    """The cache has what the usual kernel made."""
    with Engine(random_checkpoint("tiny-tiles"), "sim") as engine:
        prompt = [5, 99, 17, 64, 31, 7]
        usual, _ = engine.timed(prompt, 4)
        with engine.using(parse("attention+weights")):
            wrong, _ = engine.timed(prompt, 4)
        assert (wrong, set(usual) != {0}) == ([0] * 4, True)
        # Now the prompt again, and one that begins as the wrong answer did.
        assert engine.timed(prompt, 4)[0] == usual
        (timeline,) = engine.timeline(prompt, 2)
        assert timeline.num_token_steps == 2
        assert engine.timed(prompt, 4)[0] == usual
        with pytest.raises(kccl.InvalidArgument, match="num_tokens is 57, must be from 1 to 56"):
            engine.timeline(prompt, 57)


# ---- variants ----------------------------------------------------------------------------------


def test_variants_by_name():
    assert parse("none") == USUAL
    usual, program = replace(TUNING, chunk=64), Program(shape_of("tiny-llama"))
    assert with_variant(program, usual, USUAL) == usual
    pinned = with_variant(program, usual, parse("weights+pin:head"))
    assert pinned == replace(usual, chunk=1, ablated=1 << 1 | 1 << 7)
    tuned = with_variant(program, usual, parse("in-flight=3+stage-steps=6"))
    assert tuned == replace(usual, chunk=1, in_flight=3, urgent_in_flight=3, stage_steps=6)
    assert parse("exchanges").has_races
    assert not parse("attention").has_races


def test_a_stage_has_whole_strips_of_each_product():
    """With 2 warps strips have 8 tiles, of a lane's attention 8, too. A stage of 8 tiles of 4 bits
    has 4 of 8 bits.
    """
    four, eight = MULTIPLIED["int4_128"], MULTIPLIED["int8_128"]
    formats = {"qkv": eight, "out": four, "gate_up": four, "down": four}
    shape = {"hidden": 256, "ffn": 512, "num_lanes": 2, "num_heads": 4, "num_kv_heads": 2}
    program = Program(replace(shape_of("tiny-llama"), **shape, head_dim=128), formats)
    tuning = replace(TUNING, strip_tiles=8, stage_steps=16)
    assert with_variant(program, tuning, parse("stage-steps=32")).stage_steps == 32
    with pytest.raises(
        kccl.InvalidArgument,
        match="stage-steps=8 gives a stage of qkv 4 tiles for each warp, must give a multiple of 8",
    ):
        with_variant(program, tuning, parse("stage-steps=8"))


@pytest.mark.parametrize(
    "name", ["", "weight", "pin:attend", "in-flight", "in-flight=0", "in-flight=x", "weights+none"]
)
def test_wrong_names_are_refused(name):
    with pytest.raises(kccl.InvalidArgument, match="must be one of none, exchanges, weights"):
        parse(name)


def test_the_host_has_no_kernel():
    with Engine(random_checkpoint("tiny-llama"), blocks=1) as engine:
        with pytest.raises(kccl.InvalidArgument, match="backend 'host' has no kernel"):
            engine.timeline([1, 2], 1)
        with (
            pytest.raises(kccl.InvalidArgument, match="backend 'host' has no kernel"),
            engine.using(parse("weights")),
        ):
            pass
        # It goes on.
        assert len(engine.timed([1, 2], 2)[0]) == 2
