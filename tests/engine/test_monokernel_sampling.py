"""Sampling in the monokernel, in the simulator: sample.py chooses the same from its logits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from long import hunted, long_after
from numpy.typing import NDArray
from test_monokernel import CONTEXT, SMALL, TUNING, answer, kernels, logits_of

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import MODELS, RandomSource
from kccl.engine.formats.base import Stored
from kccl.engine.formats.bfloat16 import BFLOAT16
from kccl.engine.model.executor import Token
from kccl.engine.model.sample import SamplingParams, alternatives, gumbel, sample
from kccl.engine.monokernel.source import KERNELS

__all__ = ["kernels"]  # a fixture

IDS = [5, 99, 5]
CASES = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.3},
    "min_p": {"temperature": 1.3, "min_p": 0.4},
    "top_k and top_p": {"temperature": 2.0, "top_k": 10, "top_p": 0.5},
    "much of many": {"temperature": 0.4, "top_k": 100, "top_p": 0.97, "min_p": 1e-3},
    "penalty": {"repetition_penalty": 3.0},
    "penalty and temperature": {"temperature": 0.9, "repetition_penalty": 0.2},
    "logprobs": {"logprobs": True},
    "answer's penalties, biases, alternatives": {"temperature": 0.8, "top_k": 30, "top_p": 0.9}
    | {"presence_penalty": 0.7, "frequency_penalty": 1.5, "repetition_penalty": 1.2}
    | {"logit_bias": {5: 2.0, 100: 4.0, 31: -3.5, 64: 3.0}, "logprobs": True, "top_logprobs": 5},
    "bias alone": {"logit_bias": {3: 1e6, 99: 999999.5}},
    "presence alone": {"logit_bias": {3: 1e6}, "presence_penalty": 1e6},
    "frequency and temperature": {"temperature": 1.0, "frequency_penalty": -1e3},
    "bias and min_p": {"temperature": 1.3, "min_p": 0.4, "logit_bias": {7: 1.0, 8: -1e6}},
    "alternatives of all": {"logprobs": True, "top_logprobs": 20},
    "all": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "logprobs": True}
    | {"repetition_penalty": 1.3},
    # Hardly any id is kept of those that are about equally likely.
    "one of many": {"temperature": 50.0, "top_k": 1},
    "hardly any share": {"temperature": 50.0, "top_p": 1e-9},
    "only the likeliest": {"temperature": 50.0, "min_p": 1.0},
    "one of many, and its share": {"temperature": 50.0, "top_k": 1, "top_p": 0.5},
    "so hot that noise decides": {"temperature": 1e6, "top_k": 64, "top_p": 0.5},
    "so cold that scores are huge": {"temperature": 1e-6, "top_k": 3, "top_p": 0.9},
}
PARAMS = {
    name: SamplingParams(max_tokens=3, seed=i + (7 << 40), **changes)
    for i, (name, changes) in enumerate(CASES.items())
}


class Source(RandomSource):
    """Random weights, but the rows of the head as `head` says."""

    def __init__(self, head: str) -> None:
        super().__init__(
            replace(MODELS["tiny-llama"], num_layers=1, is_tied=False, **SMALL), 0, head
        )
        self._head = head

    def read(self, name: str, start: int, stop: int) -> Stored:
        rows = super().read(name, start, stop)
        if name != "head" or self._head == "random":
            return rows
        if self._head == "ties":
            # So every logit is there 8 times, all over the vocabulary.
            whole = super().read(name, 0, 16)
            return replace(whole, words=whole.words[np.arange(start, stop) * 5 % 16])
        value = {"equal": 0.0, "huge": 3e38}[self._head]
        return Stored(BFLOAT16, BFLOAT16.from_values(np.full(rows.shape, value)))


def run(
    head: str,
    names: Sequence[str],
    ranks: int = 1,
    blocks: int = TUNING.blocks,
    warp_size: int = 32,
    **simulation: Any,
) -> list[tuple[list[Token], NDArray[np.float32]]]:
    """Gives, for each case, the tokens, which all ranks agree on, and the logits before each."""

    def main(comm: kccl.Communicator) -> list[Any]:
        executor = DeviceExecutor(
            Checkpoint(Source(head)),
            comm,
            tuning=replace(TUNING, blocks=blocks),
            context=CONTEXT,
            warp_size=warp_size,
        )
        found = []
        for name in names:
            tokens = answer(executor, IDS, PARAMS[name])
            ids = [*IDS, *(token.id for token in tokens[:-1])]
            found.append((tokens, logits_of(executor, ids)[len(IDS) - 1 :]))
        return found

    results = kccl.run_threads(main, ranks, backend="sim", warp_size=warp_size, **simulation)
    cases = []
    for of_ranks in zip(*results, strict=True):
        assert len({str(chosen(tokens)) for tokens, _ in of_ranks}) == 1
        cases.append(of_ranks[0])
    return cases


def chosen(tokens: Sequence[Token]) -> list[tuple[Any, ...]]:
    return [(token.id, token.logprob, token.alternatives) for token in tokens]


def check(name: str, tokens: Sequence[Token], logits: NDArray[np.float32]) -> None:
    """The tokens are those that the oracle chooses from these logits."""
    params, history = PARAMS[name], list(IDS)
    assert len(tokens) == params.max_tokens
    assert [token.end for token in tokens] == ["", "", "max_tokens"]
    for token, row in zip(tokens, logits, strict=True):
        wanted, logprob = sample(row, params, len(history), history, len(IDS))
        assert token.id == wanted
        likeliest = alternatives(row, params.top_logprobs)
        assert [token for token, _ in token.alternatives] == [token for token, _ in likeliest]
        for (_, found), (_, logprob_of) in zip(token.alternatives, likeliest, strict=True):
            assert found == pytest.approx(logprob_of, rel=1e-6)
        if params.logprobs:
            assert token.logprob == pytest.approx(logprob, rel=1e-6)
        else:
            assert math.isnan(token.logprob)
        history.append(wanted)


@cache
def result(name: str) -> tuple[list[Token], NDArray[np.float32]]:
    (found,) = run("random", [name])
    return found


@pytest.mark.parametrize("name", long_after(1, CASES))
def test_tokens_are_the_oracles(name):
    tokens, logits = result(name)
    check(name, tokens, logits)
    # The reference's logits differ in the KV cache's rounding.
    wanted = Reference(Checkpoint(Source("random"))).generate(IDS, PARAMS[name])
    assert [token.id for token in tokens] == [token for token, _ in wanted]


@pytest.mark.long
@pytest.mark.parametrize(
    "machine",
    long_after(
        1,
        [
            {"ranks": 4, "blocks": 2},
            {"ranks": 2, "warp_size": 64, "model": "gfx942"},
        ],
    ),
    ids=str,
)
def test_any_number_of_ranks_and_blocks_chooses_the_same(machine):
    names = ["all", "top_k and top_p", "one of many", "answer's penalties, biases, alternatives"]
    names.append("temperature")
    for name, (tokens, _) in zip(names, run("random", names, seed=5, **machine), strict=True):
        assert str(chosen(tokens)) == str(chosen(result(name)[0])), name


@pytest.mark.long
@pytest.mark.parametrize("head", ["ties", "equal"])
def test_equal_logits(head):
    """top_k keeps all that are equal to the k-th; top_p of equal ones the lowest ids."""
    names = ["top_k", "top_p", "top_k and top_p", "all", "penalty", "one of many"]
    names += ["hardly any share", "one of many, and its share", "much of many", "temperature"]
    for name, (tokens, logits) in zip(names, run(head, names), strict=True):
        assert np.unique(logits[0]).size == {"ties": 16, "equal": 1}[head]
        check(name, tokens, logits)


@pytest.mark.parametrize("name", long_after(1, ["all", "temperature"]))
def test_logits_that_are_no_numbers_are_an_error(name):
    with pytest.raises(kccl.Error, match="the model's logits are NaN, or none is finite"):
        run("huge", [name])


@pytest.mark.long
def test_requests_that_sample_and_that_do_not_take_turns():
    """A request may be given up; exchanges and marks of one do not disturb the next."""

    def main(comm: kccl.Communicator) -> None:
        executor = DeviceExecutor(
            Checkpoint(Source("random")), comm, tuning=TUNING, context=CONTEXT
        )
        greedy = SamplingParams(max_tokens=2)
        first = [token.id for token in answer(executor, IDS, greedy)]
        for name in ("all", "penalty"):
            executor.start([64, 2, 17], PARAMS[name])
            next(executor.tokens())
            executor.end()
            assert [token.id for token in answer(executor, IDS, greedy)] == first
            tokens = answer(executor, IDS, PARAMS[name])
            assert str(chosen(list(tokens))) == str(chosen(result(name)[0]))
        stop = replace(PARAMS["all"], stop_ids=(result("all")[0][1].id,))
        tokens = answer(executor, IDS, stop)
        assert [token.end for token in tokens] == ["", "stop"]

    kccl.run_threads(main, 1, backend="sim")


# As in test_monokernel.py.
BUGS = {
    "one slot for the control words of all exchanges": (
        "exchange_buffer.cuh",
        "((exchange & 1u) * kNumControlWords + kind)",
        "((exchange & 0u) * kNumControlWords + kind)",
    ),
    "control words are sent before all warps have looked": (
        "choosers.cuh",
        "        if (!consumer_.meet()) return false;\n        send();\n",
        "        send();\n",
    ),
    "the other ranks' scores are not counted": (
        "choosers.cuh",
        "        constexpr uint32_t kBlocks = S::kWorldSize * S::kBlocks;",
        "        constexpr uint32_t kBlocks = S::kBlocks;",
    ),
    "counts outlive their request": (
        "scores.cuh",
        "    if (task.counts == 0) return;\n",
        "    return;\n",
    ),
    "a mark outlives its request": (
        "scores.cuh",
        "platform::bit_cast<uint32_t>(marks.value[i]) == task.number;",
        "platform::bit_cast<uint32_t>(marks.value[i]) != 0;",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_planted_bugs_are_found(bug, kernels, monkeypatch):
    # Ranks that choose different tokens may wait for each other: that shows the bug, too.
    monkeypatch.setenv("KCCL_TIMEOUT", "30")
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "30")
    name, right, wrong = BUGS[bug]
    text = (kernels / name).read_text()
    assert text.count(right) == 1
    (kernels / name).write_text(text.replace(right, wrong))
    names = ["all", "one of many", "penalty", "top_k and top_p", "all"]
    if "counts" in bug:
        names = ["presence alone"] * 2
    for seed in range(4):
        try:
            for each, (tokens, logits) in zip(
                names, run("random", names, ranks=2, seed=seed), strict=True
            ):
                check(each, tokens, logits)
        except (kccl.Error, AssertionError):
            return
    pytest.fail("4 seeds did not show it")


NOISE = """
#include "gumbel.cuh"

KCCL_KERNEL void noise(double* out, const double* in, uint64_t num) {
    for (uint64_t i = threadIdx.x; i < num; i += blockDim.x) {
        out[i] = kccl::decode::exponential(in[i]);
        out[num + i] = kccl::decode::logarithm(in[num + i]);
        const auto words = kccl::decode::philox(5 + (uint64_t{3} << 32), i / 4, 7);
        out[2 * num + i] = kccl::decode::gumbel(words.word[i % 4]);
        out[3 * num + i] = kccl::decode::gumbel(i == 0 ? 0u : ~0u);
        // Words beside powers of 2, and random ones.
        const uint32_t word = i < 96 ? (1u << i / 3) + i % 3 - 1 : words.word[i % 4];
        out[4 * num + i] = kccl::decode::most_noise(word) - kccl::decode::gumbel(word);
    }
}
"""


def test_noise_and_its_functions_are_as_exact_as_numpys():
    num = 4000
    random = np.random.default_rng(3)
    below = -np.concatenate([[0.0, 1e-17, 700.0], random.uniform(0, 700, num - 3)])
    positive = np.concatenate(
        [[1.0, 2.0**-33, 1 - 2.0**-33, 2**0.5], np.exp(random.uniform(-30, 30, num - 4))]
    )
    out = np.empty((5, num))
    given = np.stack([below, positive])

    def main(comm: kccl.Communicator) -> None:
        module = kccl.compile(NOISE, ["noise"], target="sim", include_dirs=[KERNELS])
        module.kernel("noise")(comm, out.ctypes.data, given.ctypes.data, num, grid=1, block=32)

    kccl.run_threads(main, 1, backend="sim")
    np.testing.assert_allclose(out[0], np.exp(below), rtol=4e-16)
    np.testing.assert_allclose(out[1], np.log(positive), rtol=7e-16)
    np.testing.assert_allclose(out[2], gumbel(5 + (3 << 32), 7, np.arange(num)), rtol=0, atol=8e-15)
    ends = [-np.log(-np.log1p(-u / 2**32)) for u in (0.5, 2**32 - 0.5)]
    np.testing.assert_allclose(out[3, :2], ends, rtol=1e-15)
    assert out[4].min() >= 0
    # Where noise is large, the limit is close.
    assert np.median(out[4][out[2] > 1]) < 1
