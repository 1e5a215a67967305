"""Drafts in the monokernel, simulated: the tokens without drafts, in fewer token steps."""

from collections.abc import Container
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drafting import LIKELY, FewIds, tokens_of, told
from long import hunted, long_after
from test_monokernel import CONTEXT, MERGING, SMALL, TUNING, kernels

import kccl
from kccl.engine import Engine, Grammar
from kccl.engine.executors import device, host_requests
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.ngrams import write_ngrams
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.model.drafts import GPU_PACE, HOST_PACE, OFF, Drafts, Pace
from kccl.engine.model.executor import Token
from kccl.engine.model.ngrams import Ngrams, build
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel import task as structs
from kccl.engine.monokernel.compiled import Kernels, used_drafts
from kccl.engine.monokernel.limits import most_drafts
from kccl.engine.monokernel.shape import Tuning

__all__ = ["kernels"]

pytestmark = pytest.mark.takes(60)

PROMPT = [5, 99, 17, 64, 5, 99, 17, 64, 5, 99, 17]
NEW = 24
SEEDS = {"tiny-laneformer": 2, "tiny-llama": 2}
LAYERS: dict[str, dict[str, Any]] = {
    # The messages of the first layer land in the third.
    "tiny-laneformer": {"num_layers": 3, "window": 4, "window_layers": 1},
    "tiny-llama": {"num_layers": 2},
}
GREEDY = {"max_tokens": NEW}
SAMPLED: dict[str, Any] = {
    **{"temperature": 0.5, "seed": 7, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.05},
    **{"frequency_penalty": 0.02, "logit_bias": dict.fromkeys(range(LIKELY), 3.0)},
    **{"logprobs": True, "top_logprobs": 2, "max_tokens": NEW},
}
# Tokens are found in the exchange that ends a token step (draw_at_end.cuh).
DRAWN: dict[str, Any] = {
    **{"temperature": 0.5, "seed": 7, "max_tokens": NEW},
    **{"logit_bias": dict.fromkeys(range(LIKELY), 3.0)},
}


@cache
def checkpoint(model: str) -> Checkpoint:
    config = replace(MODELS[model], is_tied=False, **SMALL, **LAYERS[model])
    return Checkpoint(FewIds(config, SEEDS[model], "few ids"))


def shown(tokens: list[Token]) -> list[Any]:
    return [(*told([each]), each.pass_number, each.num_drafts, each.is_draft) for each in tokens]


def answers(
    model: str,
    columns: int,
    asked: list[tuple[Drafts, dict[str, Any]]],
    ranks: int = 1,
    tuning: Tuning = TUNING,
    prompt: list[int] = PROMPT,
    ngrams: Ngrams | None = None,
    **simulation: Any,
) -> list[list[Token]]:
    """An answer for each of `asked`, one after the other."""

    def main(comm: kccl.Communicator) -> list[list[Token]]:
        executor = DeviceExecutor(
            checkpoint(model),
            comm,
            tuning=replace(tuning, columns=columns),
            context=CONTEXT,
            ngrams=ngrams,
            warp_size=simulation.get("warp_size", 32),
        )
        found = []
        for drafts, given in asked:
            executor.drafts = drafts
            executor.start(prompt, SamplingParams(**given))
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


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("tiny-laneformer", 3, 2, {}),
    ("tiny-llama", 8, 1, {"warp_size": 64}),
    ("tiny-llama", 3, 2, {"tuning": MERGING}),
    # The text has more ids than a block has threads, so each thread looks at several places.
    ("tiny-llama", 3, 1, {"tuning": replace(TUNING, warps=1, kv_strands=1), "prompt": 3 * PROMPT}),
]
IDS = ["messages", "warps of 64", "merging", "one warp"]


@pytest.mark.long
@pytest.mark.parametrize(("model", "columns", "ranks", "how"), CASES[:2], ids=IDS[:2])
def test_sampled_answers_are_those_without_drafts(model, columns, ranks, how):
    # The first answer finds no keys that the others have left in the cache.
    drafts = Drafts(columns - 1), OFF, Drafts(columns - 1, adapts=True)
    asked = [(each, given) for given in (SAMPLED, DRAWN) for each in drafts]
    found = answers(model, columns, asked, ranks, **how)
    for first, plain, last in (found[:3], found[3:]):
        right, wrong = check(plain, first)
        assert right > 0 and wrong > 0
        check(plain, last)


@pytest.mark.long
@pytest.mark.parametrize(("model", "columns", "ranks", "how"), CASES[2:], ids=IDS[2:])
def test_likeliest_tokens_are_those_without_drafts(model, columns, ranks, how):
    # Kernels with one column find words and cached keys of the others, and the other way round.
    drafts = Drafts(columns - 1), OFF, Drafts(1), OFF
    asked = [(each, GREEDY) for each in drafts]
    many, plain, few, again = answers(model, columns, asked, ranks, **how)
    assert told(again) == told(plain)
    assert check(plain, many)[0] > check(plain, few)[0] > 0


@pytest.mark.long
def test_drafts_and_ends_are_those_of_the_host(kernels, monkeypatch):
    # On the host drafts begin with a shorter match.
    path = kernels / "leaving.cuh"
    text = path.read_text()
    assert text.count("kFewestToLeave = 5;") == 1
    path.write_text(text.replace("kFewestToLeave = 5;", "kFewestToLeave = kFewestAlike;"))
    (whole,) = answers("tiny-llama", 3, [(OFF, GREEDY)])
    stop = whole[17].id
    monkeypatch.setattr(structs, "GPU_PACE", HOST_PACE)
    asked = [
        (Drafts(2), GREEDY),
        (Drafts(2, adapts=True), GREEDY),
        (Drafts(2), GREEDY | {"stop_ids": [stop]}),
        *((Drafts(2), {"max_tokens": num}) for num in (1, 12)),
        (Drafts(2), {"max_tokens": 2 * CONTEXT}),
    ]
    found = answers("tiny-llama", 3, asked)
    assert found[2][-1].end == "stop" and found[-1][-1].end == "context"
    with Engine(checkpoint("tiny-llama"), blocks=1, context=CONTEXT) as engine:
        for (drafts, given), tokens in zip(asked, found, strict=True):
            on_host = tokens_of(engine, drafts, PROMPT, **given)
            assert [*map(passes, tokens)] == [*map(passes, on_host)]
        plain = [each.id for each in found[0]]
        # A trial that fails, one that is right, and one with a wrong draft.
        drafts = Drafts(2, adapts=True, prediction=predicted(plain, {*range(7), 20}))
        for pace in (GPU_PACE, Pace(first=1, shares={3: 9}, least=2)):
            monkeypatch.setattr(structs, "GPU_PACE", pace)
            monkeypatch.setattr(host_requests, "HOST_PACE", pace)
            (tokens,) = answers("tiny-llama", 3, [(drafts, GREEDY)])
            on_host = tokens_of(engine, drafts, PROMPT, **GREEDY)
            assert [*map(passes, tokens)] == [*map(passes, on_host)]


@pytest.mark.parametrize(
    ("model", "ranks", "num", "how"),
    long_after(0, [("tiny-llama", 1, 9, {}), ("tiny-laneformer", 2, NEW, {"warp_size": 64})]),
)
def test_a_table_of_ngrams_proposes_as_on_the_host(model, ranks, num, how, tmp_path, monkeypatch):
    monkeypatch.setattr(host_requests, "MOST_OF_TABLE", 2)
    prompt, given = [5, 99, 17, 64], GREEDY | {"max_tokens": num}
    with Engine(checkpoint(model), blocks=1, context=CONTEXT) as engine:
        plain = tokens_of(engine, OFF, prompt, **given)
    # The table has the answer up to a place where it goes on otherwise.
    ids = prompt + predicted([each.id for each in plain], {num // 2})
    table = build([np.array(ids, np.int32)] * 3, checkpoint(model).config.vocab_size, 8)
    write_ngrams(tmp_path / "table", table)
    asked = [(each, given) for each in (Drafts(2), Drafts(2, uses_ngrams=False))]
    found, copied = answers(model, 3, asked, ranks, prompt=prompt, ngrams=table, **how)
    assert check(plain, found)[0] > check(plain, copied)[0]
    table_file = tmp_path / "table"
    with Engine(checkpoint(model), blocks=1, context=CONTEXT, ngrams=table_file) as engine:
        for (drafts, _), tokens in zip(asked, (found, copied), strict=True):
            on_host = tokens_of(engine, drafts, prompt, **given)
            assert [*map(passes, tokens)] == [*map(passes, on_host)]


def predicted(ids: list[int], errors: Container[int] = ()) -> list[int]:
    """An answer's ids, with those whose numbers are in `errors` changed."""
    return [(each + 1) % LIKELY if i in errors else each for i, each in enumerate(ids)]


@pytest.mark.parametrize(
    ("model", "ranks", "num"),
    long_after(1, [("tiny-llama", 1, 9), ("tiny-llama", 2, NEW), ("tiny-laneformer", 4, NEW)]),
)
def test_predicted_ids_are_drafts_as_on_the_host(model, ranks, num):
    given = GREEDY | {"max_tokens": num}
    with Engine(checkpoint(model), blocks=1, context=CONTEXT) as engine:
        plain = tokens_of(engine, OFF, PROMPT, **given)
        # One is wrong, and the prediction ends before the answer does.
        prediction = predicted([each.id for each in plain], {4})[: num - 2]
        drafts = Drafts(2, prediction=prediction)
        on_host = tokens_of(engine, drafts, PROMPT, **given)
    accepted, rejected = check(plain, on_host)
    assert accepted > 2 and rejected > 0
    # Ids that a text repeats are drafts, too.
    asked = [(each, given) for each in (drafts, Drafts(2))]
    tokens, repeated = answers(model, 3, asked, ranks)
    assert [*map(passes, tokens)] == [*map(passes, on_host)]
    assert any(each.is_draft for each in repeated)
    assert [each.id for each in repeated] == [each.id for each in plain]


@pytest.mark.long
def test_an_engine_makes_drafts_in_the_simulator():
    with Engine(checkpoint("tiny-llama"), "sim", context=CONTEXT, drafts="auto") as engine:
        drafted = tokens_of(engine, Drafts(adapts=True), PROMPT, **GREEDY)
        assert engine.drafted.accepted > 0
        assert told(tokens_of(engine, OFF, PROMPT, **GREEDY)) == told(drafted)
        with pytest.raises(kccl.InvalidArgument, match="drafts is 4, must be at most 3"):
            tokens_of(engine, Drafts(4), PROMPT, **GREEDY)


def passes(token: Token) -> tuple[Any, ...]:
    return token.id, token.end, token.pass_number, token.num_drafts, token.is_draft


# File -> text that is there once, and what takes its place: bugs that the simulator must find.
BUGS = {
    "no token step writes the keys of its first position": (
        "attend_columns.cuh",
        "if ((mine & 1u) != 0) append_column(",
        "if ((mine & 1u) != 0 && (column != 0 || position_ < consumer_.task().num_ids))\n"
        "                append_column(",
    ),
    "an accepted draft's keys are lost": (
        "attend_columns.cuh",
        "if ((mine & 1u) != 0) append_column(",
        "if ((mine & 1u) != 0 && column == 0) append_column(",
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
        "Sampler<S, AllWarps> sampler(consumer, position + column + 1,",
        "Sampler<S, AllWarps> sampler(consumer, position + 1,",
    ),
    "noise of one position for all drawn columns": (
        "draw_at_end.cuh",
        "draw_part<S>(consumer, position + column + 1,",
        "draw_part<S>(consumer, position + 1,",
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
    "predicted ids of one place later": (
        "drafts.cuh",
        "mem::load_plain(predicted + num_ids + i)",
        "mem::load_plain(predicted + num_ids + i + 1)",
    ),
    "predicted ids for which there is no room": (
        "drafts.cuh",
        "least_of(room, task.num_predicted - num_ids)",
        "task.num_predicted - num_ids",
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
    # The first answer finds no keys that the other has left in the cache.
    given = DRAWN if name == "draw_at_end.cuh" else SAMPLED
    asked = [(Drafts(2), given), (OFF, given)]
    found, plain = answers("tiny-laneformer", 3, asked, seed=0)
    assert told(found) == told(plain)
    # A prediction that ends before the answer does: two passes have two drafts.
    ids = [each.id for each in plain]
    asked.append((Drafts(2, prediction=ids[:6]), SAMPLED | {"max_tokens": 9}))
    (kernels / name).write_text(text.replace(right, wrong))
    for seed in range(24):
        try:
            found, plain, known = answers("tiny-laneformer", 3, asked, seed=seed)
            assert [each.id for each in known] == ids[:9]
            assert sum(each.is_draft for each in known) == 4
        except (kccl.CompileError, kccl.InvalidArgument):
            raise
        except (kccl.Error, AssertionError):
            return
        if told(found) != told(plain):
            return
    pytest.fail("24 seeds did not show it")


@pytest.mark.parametrize(
    ("drafts", "columns", "message"),
    [
        (Drafts(3), 3, "drafts is 3, must be at most 2"),
        (Drafts(1), 1, "drafts is 1, must be 'off' or 'auto'.*one position here"),
        (Drafts(drafter=lambda ids, most: []), 8, "no drafts from a drafter in Python"),
    ],
    ids=["too many", "one column", "in Python"],
)
def test_drafts_that_the_kernel_does_not_make_are_refused(drafts, columns, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        used_drafts(drafts, SamplingParams(), columns)


def test_all_ranks_have_the_columns_that_fit_on_each(monkeypatch):
    class Uneven(Kernels):
        """Kernels of ranks whose blocks have different room. Nothing is compiled: the number of
        columns is all that is asked of them.
        """

        def get(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(sizes=SimpleNamespace(most_columns=3 - self._comm.rank))

    monkeypatch.setattr(device, "Kernels", Uneven)
    tuning = replace(TUNING, columns=3)

    def main(comm: kccl.Communicator) -> str:
        # Rank 0 alone would have room for these drafts. It refuses them before it loads weights.
        with pytest.raises(kccl.InvalidArgument) as refused:
            DeviceExecutor(
                checkpoint("tiny-llama"), comm, tuning=tuning, context=CONTEXT, drafts=Drafts(2)
            )
        return str(refused.value)

    for message in kccl.run_threads(main, 2, backend="sim"):
        assert "drafts is 2, must be at most 1" in message


def test_drafts_that_are_left_to_the_engine_are_as_many_as_fit():
    adapting, grammar = Drafts(adapts=True), SamplingParams(grammar=Grammar.regex("a"))
    assert used_drafts(adapting, SamplingParams(), 4) == Drafts(3, adapts=True)
    assert used_drafts(adapting, SamplingParams(), 1) == Drafts(0, adapts=True)
    assert used_drafts(adapting, grammar, 4) == used_drafts(Drafts(3), grammar, 4) == OFF


def test_what_has_one_column_has_no_drafts():
    mixture = Program(random_checkpoint("tiny-qwen3-moe").config)
    model = Program(random_checkpoint("tiny-llama").config)
    with pytest.raises(kccl.InvalidArgument, match=r"drafts is 3.*for a mixture of experts"):
        most_drafts(mixture, TUNING, Drafts(3))
    with pytest.raises(kccl.InvalidArgument, match=r"drafts is 1.*for weights in registers"):
        most_drafts(model, replace(TUNING, weights_in_registers=True), Drafts(1))
    assert most_drafts(mixture, TUNING, Drafts(adapts=True)) == 0
    assert most_drafts(model, TUNING, Drafts(adapts=True)) == 3
    assert most_drafts(model, TUNING, Drafts(5)) == 5
