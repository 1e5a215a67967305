"""Drafts change how many passes an answer takes, and nothing else of it."""

import math
import re
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from drafting import knows, tokens_of, told
from hypothesis import given, settings
from hypothesis import strategies as st
from long import long_after

import kccl
from kccl.engine import Drafts, Engine, Grammar
from kccl.engine.executors.opening import BACKENDS, drafts_for
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.drafts import MOST_DRAFTS, OFF, drafts_of
from kccl.engine.model.sample import logprobs_of
from kccl.tools.cli import main

CONTEXT = 112
PROMPT = [3, 1, 4, 1, 5]
GREEDY = {"max_tokens": 40}
FILTERED = {
    **{"temperature": 0.9, "seed": 11, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    **{"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    **{"logit_bias": {7: 1.5, 9: -40.0}, "max_tokens": 40},
}
HOW = {
    "greedy": GREEDY,
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "max_tokens": 40},
    "sampled": {"temperature": 0.7, "seed": 5, "max_tokens": 40},
    "filtered": FILTERED,
}


# Threads of a rank share the residuals of several columns.
@pytest.fixture(
    scope="module",
    params=[("tiny-laneformer", 1, 1), ("tiny-laneformer", 2, 1), ("tiny-llama", 1, 2)],
    ids=lambda param: f"{param[0]}-{param[1]}-{param[2]}",
)
def engine(request):
    model, ranks, blocks = request.param
    with Engine(random_checkpoint(model, context=CONTEXT), ranks=ranks, blocks=blocks) as engine:
        yield engine


@pytest.fixture(scope="module")
def llama():
    with Engine(random_checkpoint("tiny-llama", context=320), blocks=1) as engine:
        yield engine


def nonsense(ids, most):
    # It depends on the text, so it is right now and then.
    return [(7 * len(ids) + 3 * i) % 64 for i in range(most)]


def num_passes(tokens):
    return tokens[-1].pass_number + 1


# ---- What an answer is -------------------------------------------------------------------------


@pytest.mark.parametrize("how", long_after(3, ["greedy", "penalties", "filtered", "sampled"]))
def test_answers_are_those_without_drafts(engine, how):
    given = HOW[how] | {"logprobs": True, "top_logprobs": 2}
    plain = tokens_of(engine, OFF, PROMPT, **given)
    ids = [each.id for each in plain]
    assert {(each.num_drafts, each.is_draft) for each in plain} == {(0, False)}
    assert num_passes(plain) == len(plain) == 40
    some = knows(PROMPT, ids, errors=range(0, 40, 5))
    for drafts in (
        Drafts(),
        Drafts(adapts=True),
        Drafts(drafter=knows(PROMPT, ids)),
        Drafts(5, drafter=some),
        Drafts(prediction=ids),
        Drafts(3, prediction=[each + (i % 6 == 2) for i, each in enumerate(ids[:25])]),
        Drafts(4, drafter=nonsense),
        Drafts(drafter=lambda ids, most: []),
        Drafts(drafter=lambda ids, most: iter(nonsense(ids, most))),
    ):
        found = tokens_of(engine, drafts, PROMPT, **given)
        assert told(found) == told(plain)
        drafted = engine.drafted
        assert drafted.accepted == sum(each.is_draft for each in found)
        # A pass gives the drafts that it accepts, and a token besides unless the answer ends.
        assert num_passes(found) == 40 - drafted.accepted + found[-1].is_draft


TEXTS = st.lists(st.integers(0, 63), min_size=1, max_size=40)


@settings(deadline=None, max_examples=30)
@given(
    prompt=TEXTS,
    errors=st.sets(st.integers(0, 40)),
    most=st.integers(1, MOST_DRAFTS),
    adapts=st.booleans(),
    has_drafter=st.booleans(),
    num_tokens=st.integers(1, 40),
    num_stops=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    top_k=st.sampled_from([0, 3]),
    penalty=st.sampled_from([0.0, 0.7]),
    data=st.data(),
)
def test_every_end_comes_at_its_token(
    llama,
    prompt,
    errors,
    most,
    adapts,
    has_drafter,
    num_tokens,
    num_stops,
    temperature,
    top_k,
    penalty,
    data,
):
    given = {"temperature": temperature, "top_k": top_k, "frequency_penalty": penalty}
    given |= {"seed": 1, "max_tokens": num_tokens, "logprobs": True}
    whole = tokens_of(llama, OFF, prompt, **given)
    ids = [each.id for each in whole]
    # Some stop ids are in the answer.
    given["stop_ids"] = data.draw(st.lists(st.sampled_from(ids), max_size=num_stops))
    plain = tokens_of(llama, OFF, prompt, **given)
    drafter = knows(prompt, ids, errors) if has_drafter else None
    found = tokens_of(llama, Drafts(most, adapts, drafter), prompt, **given)
    assert told(found) == told(plain)
    # No draft is made for which there is no room.
    assert all(each.num_drafts <= max(num_tokens - 1, 0) for each in found)


def test_an_answer_ends_where_the_context_does(engine):
    prompt = [i % 50 for i in range(CONTEXT - 13)]
    plain = tokens_of(engine, OFF, prompt, max_tokens=100, logprobs=True)
    ids = [each.id for each in plain]
    assert plain[-1].end == "context"
    for most in (1, 4, 6, MOST_DRAFTS):
        drafts = Drafts(most, drafter=lambda _, most: [0] * most)
        right = Drafts(most, drafter=knows(prompt, ids))
        for each in (drafts, right, Drafts(most)):
            assert told(tokens_of(engine, each, prompt, max_tokens=100, logprobs=True)) == told(
                plain
            )


def test_a_stop_string_ends_an_answer_within_accepted_drafts():
    with Engine("bundled", blocks=1, context=128, drafts=MOST_DRAFTS) as engine:
        prompt = "def mean(values):\n"
        given = {"max_tokens": 30, "temperature": 0}
        engine._runner.drafts = OFF
        whole = engine.generate(prompt, **given)
        # The stop string begins within one token and ends in the next.
        stop = whole.text[17:20]
        plain = engine.generate(prompt, **given, stop=stop)
        ids = engine.tokenizer.encode(prompt)
        engine._runner.drafts = Drafts(drafter=knows(ids, whole.ids))
        found = engine.generate(prompt, **given, stop=stop)
        assert engine.drafted.accepted > 0
        assert (found.text, found.ids, found.end) == (plain.text, plain.ids, plain.end)
        assert 0 < len(found.ids) < 30
        # A grammar's masks come for one position after the other.
        grammar = Grammar.regex("[a-f]{20,30}")
        engine._runner.drafts = OFF
        plain = engine.generate(prompt, **given, grammar=grammar)
        engine._runner.drafts = Drafts(drafter=knows(ids, plain.ids, errors={4}))
        found = engine.generate(prompt, **given, grammar=grammar)
        assert engine.drafted.accepted > 0
        assert (found.text, found.ids, found.end) == (plain.text, plain.ids, plain.end)


# ---- What the KV cache keeps -------------------------------------------------------------------


@pytest.mark.parametrize("num_read", [1, 9, 40])
def test_the_next_turn_reads_nothing_that_a_rejected_draft_left(engine, num_read):
    plain = [each.id for each in tokens_of(engine, OFF, PROMPT, **GREEDY)]
    # All drafts behind the first wrong one of a pass are rejected, and so are all behind the end.
    wrong = Drafts(drafter=knows(PROMPT, plain, errors=range(1, 40, 3)))
    engine._runner.drafts = wrong
    stream = engine.stream(PROMPT, **GREEDY)
    read = [next(stream).id for _ in range(num_read)]
    stream.close()
    assert read == plain[:num_read]
    turn = [*PROMPT, *read, 8, 8, 2]
    found = tokens_of(engine, wrong, turn, **GREEDY | {"logprobs": True})
    # All but the last token of the answer are still there.
    assert engine._runner.num_cached == len(PROMPT) + num_read - 1
    whole = [*turn, *(each.id for each in found)]
    rows = logprobs_of(engine.logits(whole))[len(turn) - 1 : -1]
    expected = rows[np.arange(len(found)), [each.id for each in found]]
    assert np.abs(expected - [each.logprob for each in found]).max() < 1e-12
    assert [each.id for each in found] == rows.argmax(-1).tolist()


# ---- How many passes it takes ------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3, 7])
def test_who_knows_the_answer_takes_the_fewest_passes(llama, most):
    answer = [each.id for each in tokens_of(llama, OFF, PROMPT, **GREEDY)]
    found = tokens_of(llama, Drafts(most, drafter=knows(PROMPT, answer)), PROMPT, **GREEDY)
    assert [each.id for each in found] == answer
    # The first token comes from the prompt's pass.
    assert num_passes(found) == 1 + math.ceil(39 / (most + 1))


def repeated(ids, most):
    """What drafts.h says of a text's n-grams."""
    best, start = 2, None
    for end in range(len(ids) - 1, 0, -1):
        alike = 0
        while alike < min(end, 16) and ids[end - 1 - alike] == ids[-1 - alike]:
            alike += 1
        if alike > best:
            best, start = alike, end
    if start is None:
        return []
    text = list(ids)
    for i in range(most):
        text.append(text[start + i])
    return text[len(ids) :]


def test_what_repeats_is_drafted(llama):
    # The tiny model repeats itself.
    prompt = [5, 6, 7, 8] * 4
    plain = tokens_of(llama, OFF, prompt, max_tokens=120)
    found = tokens_of(llama, Drafts(), prompt, max_tokens=120)
    assert [each.id for each in found] == [each.id for each in plain]
    assert num_passes(found) < 60
    assert llama.drafted.accepted > 60
    oracle = tokens_of(llama, Drafts(drafter=repeated), prompt, max_tokens=120)
    assert [each[5:] for each in found] == [each[5:] for each in oracle]


def test_tokens_of_a_pass_share_its_time(llama):
    answer = [each.id for each in tokens_of(llama, OFF, PROMPT, **GREEDY)]

    def draft(ids, most):
        time.sleep(0.004)
        return knows(PROMPT, answer)(ids, most)

    tokens = tokens_of(llama, Drafts(3, drafter=draft), PROMPT, **GREEDY)
    took_s = [now.time_s - before.time_s for before, now in pairwise(tokens)]
    # Each pass gives four tokens, and the last one three.
    assert min(took_s) > 0.0009
    for first in range(0, 39, 4):
        of_pass = took_s[first : first + 4]
        assert of_pass == pytest.approx([sum(of_pass) / len(of_pass)] * len(of_pass), rel=1e-3)


def drafts_of_passes(tokens):
    """The number of drafts of each pass."""
    return [each.num_drafts for each in {each.pass_number: each for each in tokens}.values()]


def test_auto_takes_as_many_drafts_as_are_accepted(llama):
    given = {"max_tokens": 300, "temperature": 1.0, "seed": 3}
    answer = [each.id for each in tokens_of(llama, OFF, PROMPT, **given)]
    wrong = Drafts(adapts=True, drafter=knows(PROMPT, answer, errors=range(300)))
    passes = drafts_of_passes(tokens_of(llama, wrong, PROMPT, **given))
    # drafts.h promises this of the passes behind the prompt's.
    assert passes[1:29] == [1] * 8 + [0] * 16 + [1] * 4
    assert sum(passes[1:261]) == 20
    right = Drafts(adapts=True, drafter=knows(PROMPT, answer))
    passes = drafts_of_passes(tokens_of(llama, right, PROMPT, **given))
    assert passes[1:11] == [1] * 8 + [7] * 2
    assert len(passes) < 50
    # Drafts that were right for a while, and then never again.
    passes = drafts_of_passes(
        tokens_of(
            llama, replace(right, drafter=knows(PROMPT, answer, range(100, 300))), PROMPT, **given
        )
    )
    assert passes[1:11] == [1] * 8 + [7] * 2
    assert sum(passes[40:]) < 20


def test_drafts_change_the_speed_and_not_the_answer(capsys):
    # The bundled model repeats itself here.
    arguments = ["generate", "--prompt", "def mean(values):", "--max-tokens", "60", "-n", "2"]
    assert main(arguments) == 0
    plain = capsys.readouterr()
    assert "drafts" not in plain.err
    assert main([*arguments, "--drafts", "3"]) == 0
    told = capsys.readouterr()
    assert told.out == plain.out
    accepted, proposed = map(int, re.search(r"(\d+) of (\d+) drafts accepted$", told.err).groups())
    assert 0 < accepted <= proposed


# ---- Who takes drafts --------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, 8, -1, "on", "3", None, 2.5, True])
def test_drafts_that_do_not_exist_are_refused(given):
    with pytest.raises(kccl.InvalidArgument, match="must be 'off', 'auto' or an integer from 1"):
        drafts_of(given)


def test_backends_that_take_no_drafts_refuse_them():
    assert drafts_for("host", 3) == Drafts(3)
    assert drafts_for("host", np.int64(3)) == Drafts(3)
    assert drafts_for("host", "auto").adapts
    assert {each for each in BACKENDS if not BACKENDS[each].takes_drafts} == {"hip"}
    assert drafts_for("hip", "off") == drafts_for("hip", "auto") == OFF
    with pytest.raises(kccl.InvalidArgument, match=r"drafts is 3.*on backend 'hip'"):
        drafts_for("hip", 3)
    for backend in sorted(BACKENDS.keys() - {"host"}):
        with pytest.raises(kccl.InvalidArgument, match=rf"a drafter.*not for backend '{backend}'"):
            drafts_for(backend, Drafts(drafter=nonsense))
