"""Drafts in the monokernel, simulated: the tokens without drafts, in fewer token steps."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from drafting import tokens_of, told
from long import hunted, long_after
from test_monokernel import CONTEXT, MERGING, SMALL, TUNING, kernels

import kccl
from kccl.engine import Engine, Grammar
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import MODELS, RandomSource
from kccl.engine.formats.base import Stored
from kccl.engine.model.drafts import OFF, Drafts
from kccl.engine.model.executor import Token
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.compiled import used_drafts
from kccl.engine.monokernel.shape import Tuning

__all__ = ["kernels"]

pytestmark = pytest.mark.takes(60)

PROMPT = [5, 99, 17, 64, 5, 99, 17, 64, 5, 99, 17]
NEW = 24
LIKELY = 5
SEEDS = {"tiny-laneformer": 5, "tiny-llama": 2}
GREEDY = {"max_tokens": NEW}
SAMPLED: dict[str, Any] = {
    **{"temperature": 0.5, "seed": 7, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.05},
    **{"frequency_penalty": 0.02, "logit_bias": dict.fromkeys(range(LIKELY), 3.0)},
    **{"logprobs": True, "top_logprobs": 2, "max_tokens": NEW},
}


class FewIds(RandomSource):
    """Random weights. Few ids have a logit that is not 0, so texts repeat themselves."""

    def read(self, name: str, start: int, stop: int) -> Stored:
        rows = super().read(name, start, stop)
        if name != "head":
            return rows
        is_likely = np.arange(start, stop) < LIKELY
        return replace(rows, words=rows.words * is_likely[:, None].astype(rows.words.dtype))


@cache
def checkpoint(model: str) -> Checkpoint:
    layers = {"window": 4, "window_layers": 1} if model == "tiny-laneformer" else {}
    config = replace(MODELS[model], num_layers=2, is_tied=False, **SMALL, **layers)
    return Checkpoint(FewIds(config, SEEDS[model], "few ids"))


def shown(tokens: list[Token]) -> list[Any]:
    return [(*told([each]), each.pass_number, each.num_drafts, each.is_draft) for each in tokens]


def answers(
    model: str,
    columns: int,
    asked: list[tuple[Drafts, dict[str, Any]]],
    ranks: int = 1,
    tuning: Tuning = TUNING,
    **simulation: Any,
) -> list[list[Token]]:
    """An answer for each of `asked`, one after the other."""

    def main(comm: kccl.Communicator) -> list[list[Token]]:
        executor = DeviceExecutor(
            checkpoint(model),
            comm,
            tuning=replace(tuning, columns=columns),
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        found = []
        for drafts, given in asked:
            executor.drafts = drafts
            executor.start(PROMPT, SamplingParams(**given))
            found.append(list(executor.tokens()))
        return found

    results = kccl.run_threads(main, ranks, backend="sim", **{"seed": ranks} | simulation)
    for each in results:
        assert [*map(shown, each)] == [*map(shown, results[0])]
    return results[0]


def check(plain: list[Token], found: list[Token]) -> tuple[int, int]:
    """Compares an answer with that without drafts. The drafts that were right, and the others."""
    assert told(found) == told(plain)
    accepted = sum(each.is_draft for each in found)
    proposed = sum(
        each.num_drafts
        for number, each in enumerate(found)
        if number == 0 or not found[number - 1].is_draft
    )
    assert found[-1].pass_number + 1 == len(found) - accepted + found[-1].is_draft
    return accepted, proposed - accepted


@pytest.mark.parametrize(
    ("model", "columns", "ranks", "how"),
    long_after(
        1,
        [
            ("tiny-laneformer", 3, 2, {}),
            ("tiny-llama", 8, 1, {"warp_size": 64}),
            ("tiny-llama", 3, 2, {"tuning": MERGING}),
        ],
    ),
    ids=str,
)
def test_answers_are_those_without_drafts(model, columns, ranks, how):
    most = columns - 1
    asked = [
        *((OFF, given) for given in (GREEDY, SAMPLED)),
        *((Drafts(most, adapts), SAMPLED) for adapts in (False, True)),
        (Drafts(most), GREEDY),
        # Kernels with one column find words and cached keys of the others, and the other way round.
        (OFF, GREEDY),
        (Drafts(1), GREEDY),
    ]
    plain, sampled, *others = answers(model, columns, asked, ranks, **how)
    assert told(others.pop(3)) == told(plain)
    right, wrong = check(sampled, others[0])
    assert right > 0 and wrong > 0
    check(sampled, others[1])
    assert check(plain, others[2])[0] > check(plain, others[3])[0] > 0


def test_drafts_and_ends_are_those_of_the_host():
    (whole,) = answers("tiny-llama", 3, [(OFF, GREEDY)])
    stop = whole[17].id
    asked = [
        (Drafts(2), GREEDY),
        (Drafts(2, adapts=True), GREEDY),
        (Drafts(2), GREEDY | {"stop_ids": [stop]}),
        *((Drafts(2), {"max_tokens": num}) for num in (1, 11, 12, 13)),
        (Drafts(2), {"max_tokens": 2 * CONTEXT}),
    ]
    found = answers("tiny-llama", 3, asked)
    assert found[2][-1].end == "stop" and found[-1][-1].end == "context"
    with Engine(checkpoint("tiny-llama"), blocks=1, context=CONTEXT) as engine:
        for (drafts, given), tokens in zip(asked, found, strict=True):
            on_host = tokens_of(engine, drafts, PROMPT, **given)
            assert [*map(passes, tokens)] == [*map(passes, on_host)]


def passes(token: Token) -> tuple[Any, ...]:
    return token.id, token.end, token.pass_number, token.num_drafts, token.is_draft


# File -> text that is there once, and what takes its place: bugs that the simulator must find.
BUGS = {
    "a rejected draft's keys stay": (
        "attend_columns.cuh",
        "                append_column(column);\n",
        "                if (column != 0 || position_ < consumer_.task().num_ids)\n"
        "                    append_column(column);\n",
    ),
    "an accepted draft's keys are lost": (
        "attend_columns.cuh",
        "                append_column(column);\n",
        "                if (column == 0) append_column(column);\n",
    ),
    "an accepted draft is run again": (
        "finish.cuh",
        "consumer.end_columns(column + 1,",
        "consumer.end_columns(1,",
    ),
    "a wrong draft is accepted": (
        "finish.cuh",
        "consumer.draft_of(column + 1) == chosen.id;",
        "consumer.draft_of(column + 1) >= 0;",
    ),
    "all columns have one count of control words": (
        "consumer_warp.cuh",
        "return (uses_.low >> column & 1u) | (uses_.high >> column & 1u) << 1;",
        "return token_step_ + 0 * column;",
    ),
    "noise of one position for all columns": (
        "finish.cuh",
        "Sampler<S> sampler(consumer, position + column + 1, all.best.score, column);",
        "Sampler<S> sampler(consumer, position + 1, all.best.score, column);",
    ),
    "logits of one column for all": (
        "head.cuh",
        "return task.own_logits + uint64_t{column} * own_logits",
        "return task.own_logits + 0 * uint64_t{column} * own_logits",
    ),
    "drafts that come from a text without its newest ids": (
        "drafts.cuh",
        "i < old_ ? ids_ + i : tokens_ + (i - position_ - 1)",
        "i < num_ ? ids_ + i : tokens_ + (i - position_ - 1)",
    ),
    "the collecting warp does not wait for the number of columns": (
        "collect.cuh",
        "!mem::has_completed_now(&shared.begun, begun_parity)",
        "begun_parity > 1",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_the_simulator_finds_planted_bugs(bug, kernels):
    name, right, wrong = BUGS[bug]
    text = (kernels / name).read_text()
    assert text.count(right) == 1
    (kernels / name).write_text(text.replace(right, wrong))
    asked = [(OFF, SAMPLED), (Drafts(2), SAMPLED), (Drafts(2), SAMPLED | {"seed": 8})]
    asked.append((OFF, SAMPLED | {"seed": 8}))
    for seed in range(24):
        try:
            plain, found, others_drafted, others = answers("tiny-laneformer", 3, asked, seed=seed)
        except kccl.CompileError:
            raise
        except (kccl.Error, AssertionError):
            return
        if told(found) != told(plain) or told(others_drafted) != told(others):
            return
    pytest.fail("24 seeds did not show it")


@pytest.mark.parametrize(
    ("drafts", "given", "columns", "message"),
    [
        (Drafts(3), {}, 3, "drafts is 3, must be at most 2"),
        (Drafts(1), {}, 1, "drafts is 1, must be at most 0"),
        (Drafts(drafter=lambda ids, most: []), {}, 8, "no drafts from a drafter in Python"),
        (Drafts(1), {"grammar": Grammar.regex("a")}, 8, "no drafts from a request with a grammar"),
    ],
    ids=str,
)
def test_drafts_that_the_kernel_does_not_make_are_refused(drafts, given, columns, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        used_drafts(drafts, SamplingParams(**given), columns)


def test_drafts_that_are_left_to_the_engine_are_as_many_as_fit():
    adapting = Drafts(adapts=True)
    assert used_drafts(adapting, SamplingParams(), 4) == Drafts(3, adapts=True)
    assert used_drafts(adapting, SamplingParams(), 1) == Drafts(0, adapts=True)
    assert used_drafts(adapting, SamplingParams(grammar=Grammar.regex("a")), 4) == OFF
