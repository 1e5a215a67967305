"""What a request may cost before it is refused."""

import json
import re
import threading

import pytest
from asking import ask
from chat_templates import KINDS
from pydantic import ValidationError
from scripted import write_model

from kccl.engine import Engine
from kccl.engine.serving.http import bodies, readings, response_bodies

SAID = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "hermes"
    write_model(folder, *KINDS["hermes"])
    with Engine(folder, blocks=1, context=512) as engine:
        yield engine


def refused(engine, path, body):
    """The error of a body that is refused."""
    content = json.dumps(body).encode()
    found = ask(engine, "POST", path, content=content, most_body=8 << 20)
    assert found.status_code == 400, found.text
    return found.json()["error"]


def tool(number, length):
    parameters = {"description": "x" * length}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


LONG = "x" * 70000
# llguidance finds that it has too many items when it computes the first mask.
DEEP = 'a: "x"\nstart: ' + "a? " * 17000


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        (
            {"guided_choice": [str(i) for i in range(60000)]},
            "guided_choice",
            "guided_choice has 60000 choices, must have at most 2000",
        ),
        (
            {"guided_choice": ["x" * 40000, "y" * 40000]},
            "guided_choice",
            "characters, must have at most 65536",
        ),
        ({"guided_regex": LONG}, "guided_regex", "has 70000 characters, must have at most 65536"),
        ({"guided_json": {"const": LONG}}, "guided_json", "must have at most 65536"),
        ({"grammar": f'root ::= "{LONG}"'}, "grammar", "must have at most 65536"),
        (
            {"response_format": {"type": "json_object", "schema": {"const": LONG}}},
            "response_format.schema",
            "must have at most 65536",
        ),
        ({"guided_grammar": DEEP}, "guided_grammar", "cannot be followed: .*Too many items"),
    ],
    ids=lambda each: each if isinstance(each, str) and len(each) < 30 else "",
)
def test_grammars_that_take_long_are_refused(engine, given, param, told):
    error = refused(engine, "/v1/chat/completions", SAID | given)
    assert error["param"] == param
    assert re.search(told, error["message"])


def test_the_parameters_of_all_tools_are_counted(engine, monkeypatch):
    monkeypatch.setattr(readings, "_MOST_CHARACTERS", 200)
    given = {"tools": [tool(i, 60) for i in range(3)], "tool_choice": "required"}
    error = refused(engine, "/v1/chat/completions", SAID | given)
    assert (error["param"], "characters, must have at most 200" in error["message"]) == (
        "tools",
        True,
    )


@pytest.mark.parametrize(
    "given", [{"guided_regex": "a"}, {"tools": [tool(1, 5)], "tool_choice": "required"}]
)
def test_grammars_have_threads_of_their_own(engine, given, monkeypatch):
    """Texts are made ids, and answers are cancelled, while a grammar is compiled."""
    threads, matcher = [], engine.matcher

    def compiled(grammar):
        threads.append(threading.current_thread().name)
        return matcher(grammar)

    monkeypatch.setitem(vars(engine), "matcher", compiled)
    content = json.dumps(SAID | given).encode()
    assert ask(engine, "POST", "/v1/chat/completions", content=content).status_code == 200
    assert threads and all(each.startswith("kccl compiler") for each in threads)


WRONG = {"logit_bias": {str(i): "x" for i in range(100000)}}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (bodies.Completion, {"prompt": [[]] * 300000}),
        (bodies.Completion, {"prompt": ["a", *[1] * 300000]}),
        (bodies.Completion, {"prompt": "a", "stop": [1] * 300000}),
        (bodies.Completion, {"prompt": "a"} | WRONG),
        (bodies.Completion, {"prompt": "a", "guided_choice": [1] * 300000}),
        (bodies.Completion, {"prompt": "a", "structured_outputs": {"choice": [1] * 300000}}),
        (bodies.Chat, {"messages": [{}] * 300000}),
        (bodies.Chat, {"messages": [{"role": "user", "content": [{}] * 300000}]}),
        (bodies.Chat, {"messages": [{"role": "user", "tool_calls": [{}] * 300000}]}),
        (bodies.Chat, SAID | {"tools": [{}] * 300000}),
        (bodies.Tokenize, {"messages": [{}] * 300000}),
        (bodies.Detokenize, {"tokens": [""] * 300000}),
        (response_bodies.ResponseBody, {"input": [1] * 300000}),
        (response_bodies.ResponseBody, {"input": "a", "tools": [{}] * 300000}),
        (response_bodies.MessageItem, {"role": "user", "content": [{}] * 300000}),
        (response_bodies.CallOutputItem, {"call_id": "a", "output": [{}] * 300000}),
        (response_bodies.ReasoningItem, {"content": [{}] * 300000}),
    ],
)
def test_a_long_list_of_what_is_wrong_makes_few_errors(kind, body):
    """Each error takes long to make, while nobody else is answered."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 8


def test_what_is_wrong_in_a_long_list_is_named(engine):
    body = {"prompt": [[1], *[[]] * 200000]}
    assert refused(engine, "/v1/completions", body)["param"].startswith("prompt")
    told = refused(engine, "/v1/completions", {"prompt": "a"} | WRONG)
    assert told["param"] == "logit_bias"
    assert told["message"].endswith("has 100000 ids, must have at most 4096")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_only_json_goes_with_tools(engine, choice):
    given = {"tools": [tool(1, 5)], "tool_choice": choice, "guided_regex": "a"}
    told = refused(engine, "/v1/chat/completions", SAID | given)["message"]
    assert told == "response_format and tools are given: only JSON goes with tools"


@pytest.mark.parametrize("more", [{}, {"echo": True, "max_tokens": 0}, {"n": 2}])
def test_prompts_that_the_queue_has_no_room_for_are_not_encoded(engine, more, monkeypatch):
    encoded = []
    monkeypatch.setitem(vars(engine.tokenizer), "encode", lambda *_, **__: encoded.append(1) or [5])
    told = refused(engine, "/v1/completions", {"prompt": ["a"] * 66, "max_tokens": 1} | more)
    assert (told["param"], "must ask for at most 65" in told["message"]) == ("prompt", True)
    assert not encoded


def test_detokenize_takes_so_many_ids_and_holds_nobody_up(engine, monkeypatch):
    told = refused(engine, "/detokenize", {"tokens": [5] * ((1 << 17) + 1)})
    assert told["message"] == "tokens has 131073 ids, must have at most 131072"
    threads, decode = [], engine.tokenizer.decode

    def decoded(ids):
        threads.append(threading.current_thread())
        return decode(ids)

    monkeypatch.setitem(vars(engine.tokenizer), "decode", decoded)
    assert ask(engine, "POST", "/detokenize", json={"tokens": [5] * 9}).status_code == 200
    assert threads != [threading.current_thread()] and len(threads) == 1
