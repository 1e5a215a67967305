"""Whatever a body says of tools, calls and items, the server does not fail."""

import json

import pytest
from asking import ask
from chat_templates import KINDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import write_model
from test_http_fuzz import VALUES

from kccl.engine import Engine
from kccl.engine.serving.http import bodies, response_bodies

SCHEMAS = st.none() | st.sampled_from(
    [
        {},
        {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]},
        {"type": "array"},
        {"properties": {"a": {"$ref": "#/nothing"}}},
        {"properties": 1},
    ]
)
FUNCTIONS = st.fixed_dictionaries({"name": st.sampled_from(["f", "g", "", "</s>"])}) | VALUES
TOOL = {"type": "function", "name": "f"}
CALLS = st.fixed_dictionaries({"function": FUNCTIONS, "id": VALUES})
CHOICES = st.sampled_from(["none", "auto", "required"]) | VALUES
TALKS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "x"])},
    optional={
        "content": st.none() | st.text(max_size=4) | VALUES,
        "tool_calls": st.lists(CALLS, max_size=2),
        "reasoning_content": st.text(max_size=3),
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]),
        **{name: st.text(max_size=3) for name in ("name", "arguments", "call_id", "output")},
    },
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "hermes"
    write_model(folder, *KINDS["hermes"])
    with Engine(folder, blocks=1, context=512) as engine:
        yield engine


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(FUNCTIONS, max_size=2), SCHEMAS, CHOICES, st.lists(TALKS, max_size=3), VALUES)
def test_no_tool_makes_the_server_fail(caller, functions, schema, choice, talk, form):
    for each in functions:
        if isinstance(each, dict) and schema is not None:
            each["parameters"] = schema
    talk = [{"role": "user", "content": "Hi"}, *talk]
    given = {"tool_choice": choice, "max_tokens": 3, "max_output_tokens": 3}
    given |= {"stop": None, "response_format": form, "text": form}
    chat = [{"type": "function", "function": each} for each in functions]
    flat = [each | {"type": "function"} for each in functions if isinstance(each, dict)]
    for path, more in (
        ("chat/completions", {"messages": talk, "tools": chat}),
        ("responses", {"input": talk, "tools": flat}),
    ):
        found = ask(caller, "POST", f"/v1/{path}", content=json.dumps(given | more).encode())
        assert found.status_code in (200, 400), found.text
        assert found.status_code == 200 or found.json()["error"]["message"]


NAN, HALF = float("nan"), "\ud800"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"metadata": {"a": NAN}}, "metadata"),
        ({"metadata": {"a": HALF}}, "metadata"),
        ({"tools": [TOOL | {"more": HALF}], "tool_choice": "none"}, "tools"),
        ({"tools": [TOOL | {"parameters": {"a": NAN}}], "tool_choice": "none"}, "tools"),
        ({"text": {"format": {"type": "text", "more": NAN}}}, "text"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "more": HALF}},
            "tool_choice",
        ),
        ({"user": HALF}, "user"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_response_cannot_repeat_is_refused(caller, given, param, stream):
    body = {"input": "Hi", "max_output_tokens": 3, "stream": stream} | given
    found = ask(caller, "POST", "/v1/responses", content=json.dumps(body).encode())
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("role", "part", "status"),
    [
        ("assistant", {"type": "refusal", "refusal": "No"}, 200),
        ("user", {"type": "refusal", "refusal": "No"}, 400),
        ("assistant", {"type": "refusal", "text": "No"}, 400),
        ("assistant", {"type": "text", "refusal": "No"}, 400),
    ],
)
def test_an_assistant_may_have_refused(caller, role, part, status):
    talk = [{"role": role, "content": [part]}, {"role": "user", "content": "Why?"}]
    for path, more in (("chat/completions", {"messages": talk}), ("responses", {"input": talk})):
        body = {"max_tokens": 1, "max_output_tokens": 1} | more
        found = ask(caller, "POST", f"/v1/{path}", content=json.dumps(body).encode())
        assert found.status_code == status, found.text


def test_a_refusal_is_what_was_said():
    part = {"type": "refusal", "refusal": "No"}
    message = bodies.Message(role="assistant", content=[part])
    assert message.given()["content"] == "No"
    item = {"role": "assistant", "content": [part]}
    (message,) = response_bodies.ResponseBody(input=[item]).messages()
    assert message.given()["content"] == "No"
