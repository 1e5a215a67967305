"""Requests that run at the same time have the tokens that they would have alone."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_jobs import run_job
from test_rope import checkpoint_of

import kccl
from kccl.engine import Drafts, Engine, Grammar
from kccl.engine.executors.batch import Batch
from kccl.engine.executors.host_requests import HostMember
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.serving.jobs import Score
from kccl.engine.serving.submission import CANCELLED, End
from kccl.engine.text.matcher import Matcher

CONTEXT = 96
SHARED = [(7 * i) % 64 for i in range(40)]


def told(pieces):
    """All that a caller sees of an answer but its times."""
    return [
        (each.id, each.text, np.float64(each.logprob).tobytes(), each.end, each.alternatives)
        for each in pieces
    ]


# An engine that answers three at a time, and the same model alone.
@pytest.fixture(
    scope="module",
    params=[("tiny-llama", 1, 1), ("tiny-laneformer", 2, 1), ("tiny-qwen3-moe", 1, 1)],
    ids=lambda param: f"{param[0]}-{param[1]}-{param[2]}",
)
def engines(request):
    model, ranks, blocks = request.param
    checkpoint = random_checkpoint(model, context=CONTEXT)
    how = {"ranks": ranks, "blocks": blocks}
    with Engine(checkpoint, **how) as alone, Engine(checkpoint, **how, slots=3, drafts=3) as some:
        yield some, alone


PROMPTS = st.one_of(
    st.lists(st.integers(0, 63), min_size=1, max_size=50),
    # Prompts that begin alike copy each other's keys and values.
    st.builds(lambda n, more: SHARED[:n] + more, st.integers(1, 40), st.just([1, 2, 3])),
)
WAYS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 30),
        "temperature": st.sampled_from([0.0, 0.0, 0.7]),
        "seed": st.integers(0, 3),
        "top_k": st.sampled_from([0, 5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "stop_ids": st.sampled_from([(), (1, 2, 3, 4, 5, 6)]),
        "top_logprobs": st.sampled_from([0, 2]),
        "logit_bias": st.sampled_from([{}, {3: 2.0}]),
    }
)


@settings(deadline=None, max_examples=12)
@given(
    requests=st.lists(st.tuples(PROMPTS, WAYS, st.integers(0, 40)), min_size=2, max_size=7),
    data=st.data(),
)
def test_answers_are_those_alone(engines, requests, data):
    some, alone = engines
    submissions = []
    for prompt, way, read in requests:
        way["logprobs"] = way["top_logprobs"] > 0
        submissions.append(some.submit(prompt, **way))
        # The next one joins after some tokens of this one, or at once.
        if data.draw(st.booleans()):
            _ = [piece for piece, _ in zip(submissions[-1], range(read % 7), strict=False)]
    for submission, (prompt, way, read) in zip(submissions, requests, strict=True):
        expected = told(alone.stream(prompt, **way))
        # Who asks for more than 30 tokens reads all.
        if read < 8:
            found = told([piece for piece, _ in zip(submission, range(read), strict=False)])
            submission.cancel()
            assert found == expected[:read]
            list(submission)
            assert told(submission)[: len(expected)] == expected[: len(told(submission))]
        else:
            assert told(submission) == expected


def test_streams_of_several_threads_run_together(engines):
    some, alone = engines
    ways = [{"max_tokens": 30, "temperature": 0.9, "seed": seed} for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda way: some.generate([1, 2, 3], **way), ways))
    assert [each.ids for each in found] == [alone.generate([1, 2, 3], **way).ids for way in ways]
    assert [each.params.seed for each in found] == list(range(6))
    pieces = some.stream([1, 2], max_tokens=60)
    first = next(pieces)
    pieces.close()
    assert first.id == next(alone.stream([1, 2], max_tokens=60)).id
    seed = some.generate([5], max_tokens=2, temperature=1.0).params.seed
    assert seed is not None


def test_what_runs_alone_takes_its_turn(engines):
    some, alone = engines
    before = some.submit(SHARED, max_tokens=40)
    score = some.sessions.submit(Score(SHARED, 2))
    behind = some.submit(SHARED, max_tokens=3)
    assert list(score) == list(alone.sessions.submit(Score(SHARED, 2)))
    assert before.end is not None and len(list(behind)) == 3
    assert (some.logits(SHARED) == alone.logits(SHARED)).all()


def test_a_prompt_that_another_request_has_is_copied(engines):
    some, _ = engines
    with some.submit(SHARED, max_tokens=50) as first:
        next(iter(first))
        second = some.submit([*SHARED, 1], max_tokens=2)
        list(second)
        assert second.num_cached == len(SHARED)
    # One of some equal prompts that come together is computed.
    prompt = SHARED[::-1] + SHARED
    together = [some.submit(prompt, max_tokens=3) for _ in range(3)]
    assert len({tuple(piece.id for piece in each) for each in together}) == 1
    assert sorted(each.num_cached for each in together)[1:] == [len(prompt) - 1] * 2


@pytest.fixture(scope="module")
def bundled():
    with Engine("bundled", blocks=1, context=256, slots=3, drafts=2) as engine:
        yield engine


PROMPT = "class Stack:\n"


def test_a_grammar_holds_up_nobody(bundled, monkeypatch):
    # The masks of the first request, from its second on, wait until the others have ended.
    rule, waits, goes = Grammar.regex("[ab]{10,20}"), threading.Event(), threading.Event()
    with Engine("bundled", blocks=1, context=256) as alone:
        expected = alone.generate(PROMPT, grammar=rule, max_tokens=40).text
        plain = alone.generate(PROMPT, max_tokens=8).ids
    mask, asked = Matcher.mask, []

    def late(self):
        asked.append(self)
        if len(asked) > 1:
            waits.set()
            assert goes.wait(30)
        return mask(self)

    monkeypatch.setattr(Matcher, "mask", late)
    masked = bundled.submit(PROMPT, grammar=rule, max_tokens=40)
    assert waits.wait(30)
    for _ in range(2):
        assert [piece.id for piece in bundled.submit(PROMPT, max_tokens=8)] == plain
    assert masked.end is None
    goes.set()
    assert "".join(piece.text for piece in masked) == expected


@pytest.mark.parametrize("way", [{}, {"temperature": 0.8, "seed": 3, "logprobs": True}], ids=str)
def test_requests_with_grammars_have_drafts(bundled, way):
    rules = [Grammar.regex(each) for each in ("(pop, push; ){3,6}", "[a-c]{20,30}")]
    ways = [{"grammar": each, "max_tokens": 40, **way} for each in (*rules, None)]
    with Engine("bundled", blocks=1, context=256) as alone:
        expected = [told(alone.stream(PROMPT, **each)) for each in ways]
    asked = [bundled.submit(PROMPT, **each) for each in ways]
    assert [told(each) for each in asked] == expected
    assert asked[0].drafted.accepted > 0
    # Alone in its batch it makes the drafts of a request that runs alone.
    one = bundled.submit(PROMPT, **ways[1])
    assert told(one) == expected[1]
    with Engine("bundled", blocks=1, context=256, drafts=2) as alone:
        assert told(alone.stream(PROMPT, **ways[1])) == expected[1]
        assert one.drafted == alone.drafted


def test_nothing_uses_a_member_that_has_left(bundled, monkeypatch):
    # The next request may be this member by then.
    rule, calls = Grammar.regex("[ab]{10,20}"), []
    text = bundled.generate(PROMPT, grammar=rule, max_tokens=40).text
    tokens, cancel, leave = HostMember.tokens, HostMember.cancel, HostMember.leave

    def read(self):
        try:
            yield from tokens(self)
        finally:
            calls.append("tokens")

    def end(self):
        calls.append("cancel")
        cancel(self)

    def go(self):
        leave(self)
        calls.append("leave")

    monkeypatch.setattr(HostMember, "tokens", read)
    monkeypatch.setattr(HostMember, "cancel", end)
    monkeypatch.setattr(HostMember, "leave", go)
    for stop in ((), (text[4:6],)):
        calls.clear()
        assert bundled.generate(PROMPT, grammar=rule, max_tokens=40, stop=stop).text in text
        assert set(calls) == {"tokens", "cancel", "leave"}
        assert calls.index("leave") == len(calls) - 1, calls


def test_who_waits_for_a_prompt_can_be_cancelled(bundled, monkeypatch):
    # The first mask, without which the prompt's request has no token, waits.
    joined, waits, goes, seen = threading.Event(), threading.Event(), threading.Event(), []
    first_mask, is_computed = Matcher.first_mask, Batch._is_computed

    def late(self):
        joined.set()
        assert goes.wait(20)
        return first_mask(self)

    def look(self, *args):
        found = is_computed(self, *args)
        seen.extend([found] if found else [])
        # The second look is that of the wait.
        if len(seen) == 2:
            waits.set()
        return found

    monkeypatch.setattr(Matcher, "first_mask", late)
    monkeypatch.setattr(Batch, "_is_computed", look)
    prompt = [*range(100, 164)]
    first = bundled.submit(prompt, grammar=Grammar.regex("[ab]{3}"), max_tokens=8)
    assert joined.wait(20)
    second = bundled.submit(prompt, max_tokens=8)
    assert waits.wait(20)
    second.cancel()
    assert list(second) == [] and second.end == End(CANCELLED)
    assert first.end is None
    goes.set()
    assert len(list(first)) > 0


def test_what_fails_fails_alone(bundled, monkeypatch):
    plain = bundled.generate(PROMPT, max_tokens=30).ids
    began, calls = time.monotonic(), []

    def fail(self):
        calls.append(self)
        raise kccl.InvalidArgument("the grammar is too complex")

    monkeypatch.setattr(Matcher, "mask", fail)
    others = [bundled.submit(PROMPT, max_tokens=30) for _ in range(2)]
    wrong = bundled.submit(PROMPT, grammar=Grammar.regex("[ab]{10,20}"), max_tokens=40)
    with pytest.raises(kccl.InvalidArgument, match="too complex"):
        list(wrong)
    assert calls and time.monotonic() - began < 30
    for each in others:
        assert [piece.id for piece in each] == plain


def test_stop_strings_end_their_request_only(bundled):
    whole = bundled.generate(PROMPT, max_tokens=40)
    stop = whole.text[20:23]
    one = bundled.submit(PROMPT, max_tokens=40, stop=(stop,))
    other = bundled.submit(PROMPT, max_tokens=40)
    assert "".join(piece.text for piece in one) == whole.text[: whole.text.index(stop)]
    assert [piece.id for piece in other] == whole.ids


def test_close_ends_all():
    def close(engine):
        # As soon as the third request and the stream wait.
        until = time.monotonic() + 30
        while engine.sessions.num_waiting < 2 and time.monotonic() < until:
            time.sleep(0.001)
        engine.close()

    with Engine(random_checkpoint("tiny-llama", context=4096), blocks=1, slots=2) as engine:
        running = [engine.submit([1, 2], max_tokens=4000) for _ in range(3)]
        next(iter(running[0]))
        with engine.submit([1], max_tokens=4000) as waiting:
            assert engine.sessions.num_waiting >= 1
        assert waiting.end == End(CANCELLED)
        pieces = engine.stream([1, 2, 3], max_tokens=4000)
        closer = threading.Thread(target=close, args=(engine,))
        closer.start()
        with pytest.raises(kccl.Error, match="closed"):
            list(pieces)
        closer.join()
    assert [each.end for each in running] == [End(CANCELLED)] * 3


def test_lengths_that_rotate_otherwise_do_not_run_together():
    # Positions of long requests are rotated by other frequencies.
    checkpoint = checkpoint_of("longrope")
    with (
        Engine(checkpoint, blocks=1) as alone,
        Engine(checkpoint, blocks=1, slots=3) as some,
    ):
        ways = [{"max_tokens": n} for n in (4, 25, 5, 26, 6)]
        expected = [alone.generate([1, 2, 3], **way).ids for way in ways]
        submissions = [some.submit([1, 2, 3], **way) for way in ways]
        assert [[piece.id for piece in each] for each in submissions] == expected


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"slots": 9}, "slots is 9, must be from 1 to 8"),
        ({"slots": 2, "backend": "hip"}, "slots is 2, must be 1 on backend 'hip', whose kernel"),
        ({"slots": 2, "backend": "sim", "drafts": 2}, "must be 1 with drafts on backend 'sim'"),
        ({"slots": 2, "drafts": Drafts(drafter=lambda ids, most: [])}, "must be 1 with a drafter"),
        ({"slots": 2, "drafts": Drafts(prediction=[1])}, "must be 1 with drafts of a prediction"),
    ],
)
def test_what_cannot_run_together_is_refused(how, error):
    with pytest.raises(kccl.InvalidArgument, match=error):
        Engine(random_checkpoint("tiny-llama"), **how)


def test_ranks_that_are_processes_run_a_batch():
    body = """
    from kccl.engine.serving.jobs import Score
    ways = [{"max_tokens": 20}, {"max_tokens": 300, "temperature": 0.8, "seed": 3},
            {"max_tokens": 30, "logit_bias": {3: 1.0}}]
    with Engine(checkpoint, blocks=1) as engine:
        expected = [engine.generate([1, 2, 3], **way).ids for way in ways]
    with Engine(checkpoint, blocks=1, slots=2) as engine:
        alone = engine.generate([1, 2, 3], **ways[0]).ids
        if engine.rank != 0:
            engine.follow()
        else:
            for _ in range(2):
                answers = [engine.submit([1, 2, 3], **way) for way in ways]
                score = engine.sessions.submit(Score([1, 2, 3], 0))
                found = [[piece.id for piece in each] for each in answers]
                assert found == expected and alone == expected[0]
                assert len(list(score)) == 2
                time.sleep(1.5)
            print("equal")
    """
    done = run_job(body)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
