"""Answers that must look like something, as OpenAI's own client asks for them."""

import json
import re
import signal

import openai
import pytest
from test_openai import TALK, start

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "year": {"type": "integer", "maximum": 99}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(chat_model):
    server, url = start(chat_model, "--blocks", "1", "-n", "2")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0
    server.stderr.close()


def chat(client, **given):
    extra = {name: given.pop(name) for name in list(given) if name not in ("response_format", "n")}
    model = client.models.list().data[0].id
    given = {"model": model, "messages": TALK, "extra_body": extra} | given
    return client.chat.completions.create(**given)


def is_place(text):
    place = json.loads(text)
    return list(place) == ["city", "year"] and place["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_follow_a_schema(client, temperature):
    found = chat(client, response_format=FORMAT, temperature=temperature, n=3, seed=1)
    for choice in found.choices:
        assert is_place(choice.message.content) and choice.finish_reason == "stop"
    free = chat(client, response_format={"type": "text"}, max_tokens=5)
    assert free.choices[0].finish_reason == "length"


def test_streams_follow_a_schema(client):
    chunks = list(
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=TALK,
            response_format=FORMAT,
            stream=True,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert is_place(text) and chunks[-1].choices[0].finish_reason == "stop"


def test_the_client_makes_its_own_classes_of_answers(client):
    from pydantic import BaseModel, ConfigDict

    class Place(BaseModel):
        model_config = ConfigDict(extra="forbid")
        is_far: bool

    found = client.chat.completions.parse(
        model=client.models.list().data[0].id, messages=TALK, response_format=Place
    )
    assert found.choices[0].message.parsed.is_far in (True, False)


def test_any_object_and_answers_that_are_cut(client):
    found = chat(client, response_format={"type": "json_object"}, temperature=0, max_tokens=200)
    (choice,) = found.choices
    if choice.finish_reason == "stop":
        assert type(json.loads(choice.message.content)) is dict
    assert choice.message.content.startswith("{")
    cut = chat(client, response_format=FORMAT, max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"guided_json": {"enum": [[1], [2]]}}, r"\[\s*[12]\s*\]"),
        ({"guided_json": '{"const": "a"}'}, '"a"'),
        ({"guided_regex": "[xyz]{3}"}, "[xyz]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" | "b"'}, "[ab]"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "[ab]"),
        ({"grammar": 'root ::= [cd] "!"'}, "[cd]!"),
        ({"structured_outputs": {"json": {"const": 5}}}, "5"),
        ({"structured_outputs": {"regex": "[xyz]{3}"}}, "[xyz]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "a"),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
    ],
)
def test_other_servers_fields(client, given, rule):
    """In completions as in chats."""
    found = chat(client, **given)
    assert re.fullmatch(rule, found.choices[0].message.content), found
    model = client.models.list().data[0].id
    again = client.completions.create(model=model, prompt="Hi", max_tokens=50, extra_body=given)
    assert re.fullmatch(rule, again.choices[0].text), again


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format.json_schema.schema",
            "schema is .*, must be a JSON schema: Invalid type: x",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
            "is '5', must be a JSON schema: schema must be an object or boolean",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "is None, must be a JSON schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is None"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 5}}},
            "response_format.json_schema.name",
            "name is 5",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "type is 'xml'"),
        ({"response_format": "json"}, "response_format", "response_format is 'json'"),
        ({"guided_regex": "("}, "guided_regex", r"guided_regex is '\(', must be .* unclosed group"),
        ({"guided_choice": []}, "guided_choice", "must be strings, at least one"),
        ({"guided_choice": [1]}, "guided_choice[0]", "is 1"),
        ({"grammar": "root ::= ("}, "grammar", "must be a grammar in GBNF"),
        ({"grammar": "start: <[999999]>"}, "grammar", "grammar cannot be followed"),
        ({"guided_json": {"not": {}}}, "guided_json", "Unimplemented keys"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format and guided_regex are given, only one may be",
        ),
    ],
)
def test_wrong_fields_are_named(client, given, param, message):
    body = {"model": client.models.list().data[0].id, "messages": TALK} | given
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.body["param"] == param
    assert re.search(message, caught.value.body["message"]), caught.value.body["message"]
    assert "\n" not in caught.value.body["message"]
