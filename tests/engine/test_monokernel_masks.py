"""Masks of a grammar in the monokernel, in the simulator: sample.py chooses the same under them."""

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_monokernel import CONTEXT, SMALL, TUNING, answer, logits_of
from test_monokernel_sampling import IDS, Source, chosen

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.model.executor import EndedElsewhere, Token
from kccl.engine.model.grammar import Grammar
from kccl.engine.model.sample import SamplingParams, sample

pytestmark = pytest.mark.takes(30)

GREEDY = SamplingParams(max_tokens=3, grammar=Grammar.regex("(?s).*"))
FILTERED = replace(
    GREEDY, temperature=1.0, seed=3, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3
)
CASES = {
    "greedy": GREEDY,
    "filters": FILTERED,
    # More than may be chosen.
    "penalties": replace(
        FILTERED, top_k=100, frequency_penalty=1.5, logit_bias={5: 9.0}, logprobs=True
    ),
}


def mask_of(position: int, share: float = 0.3) -> NDArray[np.uint32]:
    """Some of the ids, others for each position."""
    allowed = np.random.default_rng(position).random(SMALL["vocab_size"]) < share
    allowed[position] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def made(comm: kccl.Communicator, blocks: int = TUNING.blocks, warp_size: int = 32) -> Any:
    return DeviceExecutor(
        Checkpoint(Source("random")),
        comm,
        tuning=replace(TUNING, blocks=blocks),
        context=CONTEXT,
        warp_size=warp_size,
    )


def masked_answer(executor: DeviceExecutor, params: SamplingParams) -> list[Token]:
    executor.prepare(params)
    executor.start(IDS, params)
    executor.post_mask(len(IDS), mask_of(len(IDS)))
    found = []
    for token in executor.tokens():
        found.append(token)
        if not token.end:
            position = len(IDS) + len(found)
            executor.post_mask(position, mask_of(position))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "machine",
    [{}, {"ranks": 2, "warp_size": 64, "model": "gfx942"}],
    ids=str,
)
def test_tokens_are_the_oracles(machine):
    machine = {"ranks": 1, "blocks": TUNING.blocks, "warp_size": 32} | machine
    ranks, blocks = machine.pop("ranks"), machine.pop("blocks")

    def main(comm: kccl.Communicator) -> list[Any]:
        executor, found = made(comm, blocks, machine["warp_size"]), []
        for params in CASES.values():
            tokens = masked_answer(executor, params)
            ids = [*IDS, *(token.id for token in tokens[:-1])]
            found.append((tokens, logits_of(executor, ids)[len(IDS) - 1 :]))
        return found

    results = kccl.run_threads(main, ranks, backend="sim", **machine)
    for params, *of_ranks in zip(CASES.values(), *results, strict=True):
        assert len({str(chosen(tokens)) for tokens, _ in of_ranks}) == 1
        (tokens, logits), history = of_ranks[0], list(IDS)
        for token, row in zip(tokens, logits, strict=True):
            position = len(history)
            wanted, logprob = sample(row, params, position, history, len(IDS), mask_of(position))
            assert token.id == wanted
            if params.logprobs:
                assert token.logprob == pytest.approx(logprob, rel=1e-6)
            history.append(wanted)


def cancel_waiting(executor: DeviceExecutor) -> None:
    while executor._mailbox.awaited != len(IDS):
        time.sleep(0.001)
    executor.cancel()


@pytest.mark.long
def test_a_wait_for_a_mask_is_cancelled_and_others_wait_for_nothing():
    def main(comm: kccl.Communicator) -> None:
        executor = made(comm)
        greedy = SamplingParams(max_tokens=2)
        first = [token.id for token in answer(executor, IDS, greedy)]
        assert executor._mailbox.awaited == 0
        executor.prepare(GREEDY)
        executor.start(IDS, GREEDY)
        threading.Thread(target=cancel_waiting, args=(executor,)).start()
        with pytest.raises(EndedElsewhere):
            list(executor.tokens())
        executor.end()
        # Nothing that was posted too late or too early counts.
        executor.post_mask(len(IDS), mask_of(len(IDS), 0))
        assert len(masked_answer(executor, GREEDY)) == 3
        assert [token.id for token in answer(executor, IDS, greedy)] == first
        assert executor._mailbox.awaited == 0

    kccl.run_threads(main, 1, backend="sim")


# Both files' tests need the same kernel. Other workers would wait for it.
@pytest.mark.long
@pytest.mark.xdist_group("test_monokernel_sampling")
def test_a_mask_without_ids_is_an_error():
    def main(comm: kccl.Communicator) -> None:
        executor = made(comm)
        executor.prepare(GREEDY)
        executor.start(IDS, GREEDY)
        executor.post_mask(len(IDS), np.zeros(SMALL["vocab_size"] // 32, np.uint32))
        with pytest.raises(kccl.Error, match="logits are NaN, or none"):
            list(executor.tokens())
        executor.end()

    kccl.run_threads(main, 1, backend="sim")


@pytest.mark.long
def test_a_mask_that_never_comes_is_named(monkeypatch):
    # In the simulator's time.
    monkeypatch.setenv("KCCL_TIMEOUT", "0.01")

    def main(comm: kccl.Communicator) -> None:
        executor = made(comm)
        executor.prepare(GREEDY)
        executor.start(IDS, GREEDY)
        list(executor.tokens())

    with pytest.raises(kccl.Timeout, match="the ids that a grammar allows"):
        kccl.run_threads(main, 1, backend="sim")
