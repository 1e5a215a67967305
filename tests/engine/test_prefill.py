"""Prompts that the monokernel reads in chunks: the same bits as position by position."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long import hunted
from numpy.typing import NDArray
from planted_bugs import hunt, plant
from test_monokernel import CONTEXT, SMALL, TUNING, answer, checkpoint

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.model.executor import Place
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.chunks import message_modules
from kccl.engine.monokernel.machine import Machine
from kccl.engine.monokernel.shape import Tuning
from kccl.engine.monokernel.task import new_task, split_off_prefill
from kccl.engine.monokernel.tuning import tuning_for

pytestmark = pytest.mark.takes(30)

# Two blocks share a lane's residual.
UNCHUNKED = replace(TUNING, blocks=8)
CHUNKED = replace(UNCHUNKED, chunk=4, chunk_warps=2, chunk_stages=3, chunk_steps=2)
# The blocks of a residual run two chunks beside each other.
IN_SQUADS = replace(CHUNKED, squads=2, squad_warps=2, squad_stages=3, squad_steps=2)
# The window of tiny-laneformer is 4: it begins in the chunk before.
IDS = [5, 99, 17, 64, 2, 120, 33, 7, 81]
NEW = 2

Array = NDArray[np.float32]


def last_logits(executor: DeviceExecutor, last: int, ids: list[int] = IDS) -> Array:
    """The logits after the last ids; the cache has the others from a prompt of one more."""
    first = len(ids) - last
    answer(executor, ids[: first + 1], SamplingParams(max_tokens=1))
    # A request for logits of these positions alone.
    executor._begin()
    executor._run_ids(ids, Place(num_cached=first), logits=executor._loaded.logits)
    executor.wait()
    return executor._scored(last)


def run(
    name: str,
    ranks: int = 1,
    tuning: Tuning = CHUNKED,
    lasts: tuple[int, ...] = (2,),
    max_tokens: int = NEW,
    **simulation: Any,
) -> tuple[list[Array], list[int]]:
    """For each of `lasts`, the logits after so many ids; and the tokens behind all ids."""

    def main(comm: kccl.Communicator) -> tuple[list[Array], list[int]]:
        executor = DeviceExecutor(
            checkpoint(name),
            comm,
            tuning=tuning,
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        logits = [last_logits(executor, last) for last in lasts]
        tokens = answer(executor, IDS, SamplingParams(max_tokens=max_tokens))
        return logits, [token.id for token in tokens]

    results = kccl.run_threads(main, ranks, backend="sim", **simulation)
    logits, tokens = results[0]
    assert all(each == tokens for _, each in results)
    return logits, tokens


@cache
def expected(model: str) -> tuple[Array, list[int]]:
    """Position by position."""
    (logits,), tokens = run(model, tuning=UNCHUNKED, lasts=(len(IDS),))
    return logits, tokens


def check(model: str, logits: list[Array], tokens: list[int]) -> None:
    wanted, wanted_tokens = expected(model)
    for each in logits:
        np.testing.assert_array_equal(each.view(np.uint32), wanted[-len(each) :].view(np.uint32))
    assert tokens == wanted_tokens


@pytest.mark.long
def test_chunks_change_no_bit():
    """On ranks with warps of 64, whose bits are those of 32."""
    check("tiny-laneformer", *run("tiny-laneformer", 2, seed=2, warp_size=64, model="gfx942"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "change"),
    [
        # A warp has several row tiles one after another; blocks have no rows of some products.
        ("tiny-llama", {"chunk": 8, "chunk_warps": 1, "chunk_steps": 4}),
        # One chunk is longer than the prompt.
        ("tiny-qwen3", {"chunk": 12, "chunk_warps": 4, "chunk_stages": 2}),
    ],
    ids=str,
)
def test_tuning_of_chunks_changes_no_bit(model, change):
    """Also chunks that are not full, and requests behind others."""
    check(model, *run(model, tuning=replace(CHUNKED, **change), lasts=(6, 2)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "change"),
    [
        # A warp has one row tile more than there are.
        ("tiny-laneformer", {"squad_rows": 3, "squad_steps": 4}),
        # Lanes are added in registers. Three squads leave two of eight blocks idle.
        ("tiny-llama", {"squads": 3}),
        # A warp of three has no row tiles in a product's second round.
        ("tiny-qwen3", {"squads": 4, "squad_warps": 3}),
    ],
    ids=str,
)
def test_squads_change_no_bit(model, change):
    check(model, *run(model, tuning=replace(IN_SQUADS, **change), lasts=(6, 2, 1)))


@pytest.mark.long
@pytest.mark.parametrize("warps", [2, 4])
def test_squads_run_several_passes(warps):
    """Two passes have two squads each, and the last one has one, whose chunk is not full. Vectors
    for four warps end with columns of zeros.
    """
    ids = [int(i) for i in np.random.default_rng(4).integers(0, 128, 20)]

    def logits(tuning: Tuning) -> Array:
        def main(comm: kccl.Communicator) -> Array:
            executor = DeviceExecutor(
                checkpoint("tiny-laneformer"), comm, tuning=tuning, context=CONTEXT
            )
            return last_logits(executor, 1, ids)

        return kccl.run_threads(main, 1, backend="sim")[0]

    found, wanted = (logits(replace(each, warps=warps)) for each in (IN_SQUADS, UNCHUNKED))
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.long
def test_squads_of_several_ranks_change_no_bit():
    simulation = {"seed": 2, "warp_size": 64, "model": "gfx942"}
    check("tiny-laneformer", *run("tiny-laneformer", 2, IN_SQUADS, **simulation))


@pytest.mark.long
def test_messages_take_the_place_of_earlier_ones(monkeypatch):
    """With messages that arrive a layer later, those of four modules are kept."""

    def checkpoint(name: str) -> Checkpoint:
        return random_checkpoint(name, num_layers=5, delay=1, **SMALL)

    monkeypatch.setattr(sys.modules[__name__], "checkpoint", checkpoint)
    program = Program(checkpoint("tiny-laneformer").config)
    assert message_modules(program, squads=2) == 4 < message_modules(program, squads=1) == 10
    (wanted,), tokens = run("tiny-laneformer", tuning=UNCHUNKED, lasts=(2,))
    (found,), found_tokens = run("tiny-laneformer", 2, IN_SQUADS, seed=1)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    assert found_tokens == tokens


@pytest.mark.long
def test_many_kv_strands_are_merged_in_two_turns():
    """KV strands change bits, so those without chunks are cut in the same way."""
    tuning = replace(TUNING, kv_strands=16, kv_splits=4)
    (wanted,), tokens = run("tiny-llama", tuning=tuning)
    chunked = replace(tuning, chunk=4, chunk_warps=4, chunk_stages=12, chunk_steps=4)
    (found,), found_tokens = run("tiny-llama", tuning=chunked)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    assert found_tokens == tokens


@pytest.mark.long
@pytest.mark.parametrize("warps", [1, 6])
def test_kv_strands_of_several_tiles_change_no_bit(warps):
    """With warps of 32, a chunk's queries are rows of the unit, and with warps of 64 its columns,
    as in decode. One warp has all KV strands, or six warps share them and the queries.
    """
    ids = [int(i) for i in np.random.default_rng(3).integers(0, 128, 39)]
    # A KV strand has two tiles, one, or none.
    kv_strands = 4 if warps == 1 else 2
    tuning = replace(CHUNKED, blocks=4, kv_strands=kv_strands, chunk=20, chunk_stages=8)
    tuning = replace(tuning, chunk_warps=warps)

    def logits(warp_size: int) -> Array:
        def main(comm: kccl.Communicator) -> Array:
            executor = DeviceExecutor(
                checkpoint("tiny-llama"),
                comm,
                tuning=tuning,
                context=CONTEXT,
                warp_size=warp_size,
            )
            return last_logits(executor, 2, ids)

        return kccl.run_threads(main, 1, backend="sim", warp_size=warp_size)[0]

    np.testing.assert_array_equal(logits(32).view(np.uint32), logits(64).view(np.uint32))


@pytest.mark.long
def test_a_request_may_be_given_up_within_its_prompt():
    """By any rank, and on all ranks behind the same chunk. The next request is whole."""

    def main(comm: kccl.Communicator) -> tuple[int, int, list[int]]:
        executor = DeviceExecutor(checkpoint("tiny-llama"), comm, tuning=CHUNKED, context=CONTEXT)

        def num_cached() -> int:
            data = executor._arena.read(executor._task.cache, executor._kernels.usual.sizes.cache)
            return int(np.count_nonzero(np.frombuffer(data, np.float16)))

        if comm.rank == 1:
            # As end() does, but before the request begins.
            executor._mailbox.cancelled = 1
        with pytest.raises(kccl.Error, match="another rank ended the request"):
            answer(executor, IDS, SamplingParams(max_tokens=NEW))
        executor.end()
        begun = num_cached()
        tokens = answer(executor, IDS, SamplingParams(max_tokens=NEW))
        return begun, num_cached(), [token.id for token in tokens]

    for begun, whole, tokens in kccl.run_threads(main, 2, backend="sim", seed=1):
        assert tokens == expected("tiny-llama")[1]
        # One of two chunks, and the position behind the prompt's; then all but the last token's.
        assert begun / (4 + 1) == pytest.approx(whole / (8 + NEW), rel=0.01)


# File -> text that is there once, and what takes its place: bugs that the simulator must find.
BUGS = {
    "a position sees itself in the cache": (
        "prefill_attend_warp.cuh",
        "seen >= first_seen(mine_[i]) && seen < mine_[i]",
        "seen >= first_seen(mine_[i]) && seen <= mine_[i]",
    ),
    "a window of one position more": (
        "prefill_attend_warp.cuh",
        "position - window_ + 1 : 0",
        "position - window_ : 0",
    ),
    "nobody waits for the cache": (
        "prefill.cuh",
        "return Walk::kIsOver;\n"
        "            producer.await_lane_group(C::number_of(chunk, layer, OP, Step::kHalf));\n",
        "return Walk::kIsOver;\n",
    ),
    "a block does not wait for messages": (
        "prefill.cuh",
        "            producer.await_row("
        "C::number_of_module(chunk, static_cast<uint32_t>(rule.receives)));\n",
        "",
    ),
    "no fence before a step": (
        "prefill_warps.cuh",
        "            mem::fence<mem::Order::kRelease, mem::Scope::kDevice>();\n",
        "",
    ),
    "no fence behind a wait": (
        "prefill_warps.cuh",
        "        mem::fence<mem::Order::kAcquire, SCOPE>();\n",
        "",
    ),
    "parts of the columns replace each other": (
        "prefill_product.cuh",
        "*total++ += sum;",
        "*total++ = sum;",
    ),
}
BUGS_OF_SQUADS = {
    "a squad does not wait for the others' keys": (
        "prefill.cuh",
        "producer.await_lane_group(C::number_of(chunk, layer, OP, Step::kHalf));",
        "producer.await_squad(C::number_of(chunk, layer, OP, Step::kHalf));",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS | BUGS_OF_SQUADS))
def test_the_simulator_finds_planted_bugs(bug, tmp_path: Path, monkeypatch):
    plant(tmp_path, monkeypatch, *(BUGS | BUGS_OF_SQUADS)[bug])
    wanted, _ = expected("tiny-laneformer")
    tuning = IN_SQUADS if bug in BUGS_OF_SQUADS else CHUNKED

    def is_right(seed: int) -> bool:
        (logits,), _ = run("tiny-laneformer", 1, tuning, lasts=(1,), max_tokens=1, seed=seed)
        return np.array_equal(logits.view(np.uint32), wanted[-1:].view(np.uint32))

    hunt(8, is_right)


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named():
    def main(comm: kccl.Communicator) -> None:
        executor = DeviceExecutor(
            checkpoint("tiny-laneformer"), comm, tuning=CHUNKED, context=CONTEXT
        )
        if comm.rank == 0:
            answer(executor, IDS, SamplingParams(max_tokens=1))

    with pytest.raises(kccl.Error, match="rank 1"):
        kccl.run_threads(main, 2, backend="sim")


def test_few_ids_of_a_mixture_run_one_by_one():
    """They are faster in the decode kernel than in a chunk. A dense model has chunks for any."""
    dense, mixture = (
        tuning_for(Program(MODELS[name]), 1, Machine(132)) for name in ("llama-1b", "gpt-oss-20b")
    )
    assert dense.chunk_least == 1 < mixture.chunk_least < mixture.chunk
    task = new_task()
    task.start, task.num_ids = 5, 5 + mixture.chunk_least
    assert split_off_prefill(task, mixture, 3) is None and task.start == 5
    task.num_ids += 1
    last = task.num_ids - 1
    prefill = split_off_prefill(task, mixture, 3)
    assert (prefill.start, prefill.num_ids, prefill.token_step, task.start) == (5, last, 3, last)
