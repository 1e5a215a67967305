"""Answers that follow a grammar: what they look like, and how they end."""

import json
import pickle
import re
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest
from long import long_after
from test_jobs import run_job

import kccl
from kccl.engine import Engine, Grammar, SamplingParams
from kccl.engine.base import extras
from kccl.engine.base.core import ffi, lib
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.executor import EndedElsewhere
from kccl.engine.model.sample import sample
from kccl.engine.serving.jobs import Generate, job_of
from kccl.engine.text.matcher import Matcher, Matchers

PROMPT = "class Stack:\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PAIR = {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "minItems": 2}
PAIRS = {"type": "array", "items": PAIR | {"items": False}, "minItems": 2, "maxItems": 4}
# Twelve tokens or more.
LONG = Grammar.regex("[ab]{40,80}")


def is_person(value):
    return (
        list(value) == ["name", "age", "tags"]
        and len(value["name"]) <= 12
        and value["age"] in range(151)
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
    )


def are_pairs(value):
    return 2 <= len(value) <= 4 and all(a == 1 and type(b) is bool for a, b in value)


def matches(rule):
    return lambda text: re.fullmatch(rule, text)


@pytest.fixture(scope="module", params=long_after(2, [1, 3, 2]))
def engine(request):
    with Engine("bundled", ranks=request.param, blocks=1) as engine:
        yield engine


# ---- What answers look like --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "is_right"),
    [
        (Grammar.json(PERSON), lambda text: is_person(json.loads(text))),
        (Grammar.json(PAIRS), lambda text: are_pairs(json.loads(text))),
        (Grammar.json({"enum": [None, 'é\n"']}), lambda text: json.loads(text) in (None, 'é\n"')),
        (Grammar.regex(r"[A-F]{3}-[0-9]{2,4}"), matches("[A-F]{3}-[0-9]{2,4}")),
        (Grammar.choice(["yes", 'a\n"x\\ é']), matches(r'yes|a\n"x\\ é')),
        (
            Grammar.lark('start: "(" [pair] ")"\npair: /[xy]/ "," /[xy]/'),
            matches(r"\(([xy],[xy])?\)"),
        ),
        (Grammar.gbnf('root ::= ("ab" | "cd") ("ab" | "cd")? "."'), matches(r"(ab|cd){1,2}\.")),
    ],
    ids=["object", "arrays", "enum", "regex", "choice", "lark", "gbnf"],
)
def test_answers_are_what_a_grammar_describes(engine, grammar, is_right):
    for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2)):
        given = {"temperature": temperature, "seed": seed, "max_tokens": 400}
        answer = engine.generate(PROMPT, grammar=grammar, **given)
        assert answer.end == "stop"
        assert is_right(answer.text), answer.text
        # Control tokens have no text, so they would not show.
        assert not set(answer.ids[:-1]) & engine.tokenizer.special_ids


@pytest.mark.parametrize("given", [{}, {"temperature": 0.9, "seed": 3, "top_k": 40, "top_p": 0.9}])
def test_a_grammar_that_allows_all_text_changes_no_bits(engine, given):
    given |= {"max_tokens": 40, "logprobs": True, "top_logprobs": 3}
    free = list(engine.stream(PROMPT, **given))
    bound = list(engine.stream(PROMPT, grammar=Grammar.regex("(?s).*"), **given))
    assert bound == free and len(free) > 5


def test_log_probabilities_are_those_of_all_logits(engine):
    piece, *_ = engine.stream(
        PROMPT, grammar=Grammar.regex("[0-9]{9}"), logprobs=True, top_logprobs=20
    )
    free, *_ = engine.stream(PROMPT, logprobs=True, top_logprobs=20)
    assert piece.alternatives == free.alternatives
    assert piece.logprob < free.logprob


def test_the_end_of_a_grammar_ends_the_answer(engine):
    """Whether or not there are end ids; so do the limits, and stop strings."""
    grammar = Grammar.regex("[0-9]{4}")
    for stop_ids in ((), engine.tokenizer.eos_ids):
        answer = engine.generate(PROMPT, grammar=grammar, stop_ids=stop_ids)
        assert re.fullmatch("[0-9]{4}", answer.text) and answer.end == "stop"
    cut = engine.generate(PROMPT, grammar=grammar, max_tokens=2)
    assert (cut.end, len(cut.ids)) == ("max_tokens", 2)
    stopped = engine.generate(PROMPT, grammar=Grammar.regex("[ab]{9}"), stop=["a", "b"])
    assert (stopped.end, stopped.text) == ("stop", "")
    # Here only an end id may come.
    empty = engine.generate(PROMPT, grammar=Grammar.regex(""))
    assert (empty.end, empty.text, len(empty.ids)) == ("stop", "", 1)
    # Nothing of it is left.
    assert engine.generate(PROMPT, max_tokens=9).ids == engine.generate(PROMPT, max_tokens=9).ids


def test_requests_with_and_without_a_grammar_follow_each_other(engine):
    alone = engine.generate(PROMPT, max_tokens=20).ids
    first = engine.generate(PROMPT, grammar=LONG).text
    submissions = [
        engine.submit(PROMPT, max_tokens=20),
        engine.submit(PROMPT, grammar=LONG),
        engine.submit(PROMPT, grammar=Grammar.choice(["yes"])),
        engine.submit(PROMPT, max_tokens=20),
    ]
    found = [list(each) for each in submissions]
    assert [[piece.id for piece in found[i]] for i in (0, 3)] == [alone, alone]
    assert ["".join(piece.text for piece in found[i]) for i in (1, 2)] == [first, "yes"]


def test_processes_give_the_same_answer():
    """Each rank follows the grammar, whether all make the call or rank 0 submits."""
    body = """
    from kccl.engine import Grammar
    grammar = Grammar.regex("[a-c]{5}x")
    with Engine("bundled", blocks=1) as engine:
        text = engine.generate("def", grammar=grammar, temperature=1.0, seed=1).text
        assert engine.of_rank_0(text) == text and text[5:] == "x", text
        if engine.rank == 1:
            engine.follow()
        else:
            for _ in range(2):
                one = engine.submit("def", grammar=grammar, temperature=1.0, seed=1)
                assert "".join(piece.text for piece in one) == text
            print("equal")
    """
    done = run_job(body)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


# ---- Ends of the wait for a mask ---------------------------------------------------------------


@pytest.fixture
def pair():
    with Engine("bundled", ranks=2, blocks=1) as engine:
        yield engine


def start(engine):
    for each in engine._ranks.mine:
        each.start([1, 2, 3], SamplingParams(grammar=LONG))
    return engine._ranks.mine[0]


def test_a_wait_for_a_mask_is_cancelled(pair):
    expected = pair.generate([1, 2, 3], max_tokens=5).ids
    rank = start(pair)
    threading.Timer(0.1, rank.cancel).start()
    with pytest.raises(EndedElsewhere):
        next(rank.tokens())
    for each in pair._ranks.mine:
        each.end()
    assert pair.generate([1, 2, 3], max_tokens=5).ids == expected


def test_a_wait_for_a_mask_ends_with_the_engine_and_with_the_answer(pair):
    pieces = pair.stream(PROMPT, grammar=LONG)
    next(pieces)
    pieces.close()
    submission = pair.submit(PROMPT, grammar=LONG)
    next(iter(submission))
    submission.cancel()
    list(submission)
    assert pair.generate(PROMPT, grammar=Grammar.choice(["no"])).text == "no"
    start(pair)
    pair.close()
    assert not [each for each in threading.enumerate() if each.name == "kccl grammar"]


def test_a_wait_for_a_mask_has_a_limit():
    # Where there are several ranks, another one may be the first to give up.
    with Engine("bundled", blocks=1) as engine:
        rank = start(engine)
        rank._comm.timeout = 0.2
        with pytest.raises(kccl.Timeout, match=r"ids that a grammar allows.*, of 3 wanted"):
            next(rank.tokens())


def test_a_lost_rank_ends_a_wait_for_a_mask(pair):
    rank = start(pair)
    pair._ranks.mine[1]._comm.abort()
    with pytest.raises(kccl.PeerLost):
        next(rank.tokens())


@pytest.mark.parametrize("error", [kccl.InvalidArgument, MemoryError])
def test_what_a_matcher_raises_ends_the_answer(pair, monkeypatch, error):
    push, count = Matcher.push, 0

    def fails(matcher, number):
        nonlocal count
        count += 1
        if count == 3:
            raise error("told")
        push(matcher, number)

    monkeypatch.setattr(Matcher, "push", fails)
    with pytest.raises(error, match="told"):
        pair.generate(PROMPT, grammar=LONG)
    assert pair.generate(PROMPT, grammar=Grammar.choice(["no"])).text == "no"


def test_a_slow_reader_holds_no_executor(pair):
    """The masks come while nobody reads, so nothing waits longer than ranks may."""
    pieces = pair.stream(PROMPT, grammar=LONG)
    next(pieces)
    other, deadline = ffi.new("KcclEngineToken *"), time.monotonic() + 60
    while lib.kccl_engine_next(pair._ranks.mine[1]._engine, other, 0) != -1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list(pieces)[-1].end == "stop"


def test_a_slow_matcher_is_waited_for(pair, monkeypatch):
    expected = pair.generate(PROMPT, grammar=LONG).ids
    mask = Matcher.mask

    def slowly(matcher):
        time.sleep(0.02)
        return mask(matcher)

    monkeypatch.setattr(Matcher, "mask", slowly)
    assert pair.generate(PROMPT, grammar=LONG).ids == expected


# ---- What is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Grammar.json({"type": "frob"}), "schema is .*frob.*Invalid type: frob"),
        (lambda: Grammar.json({"$ref": "#/no"}), "schema is .*Pointer '/no' does not exist"),
        (lambda: Grammar.json("{"), "schema is '{', must be a JSON schema: EOF"),
        (lambda: Grammar.json(5), "schema is '5', must be a JSON schema: schema must be an object"),
        (lambda: Grammar.json(False), "Unsatisfiable"),
        (
            lambda: Grammar.json({"a": object()}),
            "schema is .*must be JSON: .*not JSON serializable",
        ),
        (lambda: Grammar.json({"a": float("nan")}), "schema is .*must be JSON"),
        (lambda: Grammar.regex("("), r"pattern is '\(', must be .*: unclosed group"),
        (lambda: Grammar.regex("(?=a)"), "look-around"),
        (lambda: Grammar.regex("\ud800"), "pattern is .*UTF-8"),
        (lambda: Grammar.regex(5), "pattern is 5"),
        (lambda: Grammar.lark(""), "text is '', must be a grammar in Lark's form: Empty grammar"),
        (lambda: Grammar.lark("start: x"), 'unknown name: "x"'),
        (lambda: Grammar.gbnf("root ::= ("), "text is .*must be a grammar in GBNF"),
        (lambda: Grammar.choice([]), r"choices is \[\], must be strings, at least one"),
        (lambda: Grammar.choice("abc"), "choices is 'abc', must be strings"),
        (lambda: Grammar("x", "y"), "kind is 'x', must be one of 'json', 'regex'"),
        (lambda: SamplingParams(grammar="{}"), "grammar is '{}', must be a Grammar"),
    ],
)
def test_wrong_grammars_are_refused_at_once(make, told):
    with pytest.raises(kccl.InvalidArgument, match=told) as caught:
        make()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_grammars_that_no_answer_can_follow_are_refused(pair):
    for grammar, told in (
        (Grammar.lark("start: <[999999]>"), "grammar cannot be followed: .*999999"),
        (Grammar.lark('start: start "a"'), "grammar cannot be followed"),
    ):
        with pytest.raises(kccl.InvalidArgument, match=told):
            pair.generate(PROMPT, grammar=grammar)
    assert pair.generate(PROMPT, grammar=Grammar.choice(["no"])).text == "no"


def test_a_grammar_needs_a_tokenizer():
    with (
        Engine(random_checkpoint("tiny-llama"), blocks=1) as engine,
        pytest.raises(
            kccl.InvalidArgument, match=r"grammar is given, must be None: .*no tokenizer"
        ),
    ):
        engine.generate([1], grammar=LONG)


def test_the_extra_is_named_where_llguidance_is_missing(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(kccl.Error, match=r"needs llguidance.* pip install .*llguidance"):
        Grammar.json()


# ---- As data -----------------------------------------------------------------------------------


class PanicException(BaseException):
    """What a panic in Rust becomes."""


def test_a_panic_of_llguidance_ends_the_answer_only(monkeypatch):
    def panic(*_):
        raise PanicException("index out of range\nnote: run with RUST_BACKTRACE=1")

    with Engine("bundled", blocks=1) as engine:
        with monkeypatch.context() as patch:
            llguidance = Mock(is_error=lambda: False, consume_token=panic)
            patch.setattr(
                Matchers, "__call__", lambda *_: Matcher(llguidance, engine.config.vocab_size)
            )
            patch.setattr(Matcher, "mask", lambda each: np.full_like(each._words, 2**32 - 1))
            wrong = engine.submit(PROMPT, max_tokens=3, grammar=LONG)
            with pytest.raises(kccl.InvalidArgument, match=r"^grammar cannot .* failed: index out"):
                list(wrong)
        assert engine.sessions.failure is None
        other = engine.submit(PROMPT, max_tokens=3, grammar=LONG)
        assert re.fullmatch("[ab]+", "".join(piece.text for piece in other))


def test_a_grammar_is_compiled_once(monkeypatch):
    library = extras.library("llguidance", "serve")
    made, make = [], library.LLMatcher
    monkeypatch.setattr(
        library, "LLMatcher", lambda *args, **more: made.append(1) or make(*args, **more)
    )
    monkeypatch.setattr(Grammar, "__post_init__", lambda _: None)
    monkeypatch.setattr(Grammar, "compiled", lambda each: make.grammar_from_regex(each.text))
    with Engine("bundled", blocks=1) as engine:
        answers = [
            engine.generate(PROMPT, max_tokens=9, grammar=Grammar.regex(each)).text
            for each in ("[ab]{4}", "[cd]{4}", "[ab]{4}", "[cd]{4}")
        ]
    assert answers[:2] == answers[2:] and re.fullmatch("[ab]{4}", answers[0])
    assert len(made) == 2


def test_grammars_are_data():
    one = Grammar.json(PERSON)
    assert one == Grammar.json(json.dumps(PERSON)) != Grammar.json()
    assert pickle.loads(pickle.dumps(one)) == one and len({one, Grammar.json(PERSON)}) == 1
    params = SamplingParams(grammar=one, stop=["x"])
    order = json.loads(json.dumps(Generate([1, 2], params).order()))
    assert job_of(order) == Generate([1, 2], params)


def test_the_oracle_masks_before_everything_else():
    logits = np.array([3, 2, 1, -np.inf], np.float32)
    words = np.array([0b1100], np.uint32)
    for given in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 1, "top_k": 1}):
        params = SamplingParams(logit_bias={0: 99.0, 3: 99.0}, **given)
        token, logprob = sample(logits, params, 5, [0, 1], mask=words)
        assert token == 2
        assert logprob == pytest.approx(1 - np.log(np.exp([3.0, 2.0, 1.0]).sum()))
    with pytest.raises(kccl.Error, match="none of an id that may be chosen"):
        sample(logits, SamplingParams(), 5, [], mask=np.array([0b1000], np.uint32))
