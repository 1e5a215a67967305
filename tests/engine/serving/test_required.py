"""Answers that must be calls: the grammar of each format, followed token by token."""

import json

import chat_templates as templates
import openai
import pytest
from chat_templates import KINDS
from scripted import served, write_model

import kccl
from kccl.engine import Engine
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.serving.http.app import application
from kccl.engine.serving.http.service import Settings
from kccl.engine.serving.tools.events import CallBegins
from kccl.engine.serving.tools.formats import format_of
from kccl.engine.serving.tools.grammar import Functions, grammar_of_answer
from kccl.engine.text.matcher import Matchers

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARAMETERS = {"weather": CITY, "time": None}
USER = [{"role": "user", "content": "Hi"}]
F, G = '{"city": "Köln"}', "{}"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """tokenizers(kind): of a model with a template of that kind."""
    found = {}

    def get(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp("models") / kind
            write_model(folder, *KINDS[kind])
            with open_checkpoint(folder) as checkpoint:
                found[kind] = checkpoint.tokenizer()
        return found[kind]

    return get


def follows(tokenizer, grammar, text):
    """How much of a text a grammar allows, and whether it may end there."""
    matcher = Matchers(lambda: tokenizer, 300)(grammar)
    ids = tokenizer.encode(text, add_bos=False)
    for index, number in enumerate(ids):
        mask = matcher.mask()
        if matcher.has_ended or mask is None or not mask[number // 32] >> (number % 32) & 1:
            return index, False
        matcher.push(number)
    if matcher.has_ended:
        return len(ids), True
    mask = matcher.mask()
    return len(ids), bool(mask[0] >> tokenizer.eos_ids[0] & 1)


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def mistral(*calls):
    objects = (f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls)
    return f"[TOOL_CALLS][{', '.join(objects)}]"


def llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {arguments}}}'


@pytest.mark.parametrize(
    ("kind", "right", "several", "wrong"),
    [
        (
            "hermes",
            [
                hermes("weather", F),
                hermes("time", G),
                f"<think>\nhm</think>\n\n{hermes('time', G)}",
            ],
            f"{hermes('weather', F)}\n{hermes('time', G)}",
            ["Hi", hermes("x", G), hermes("weather", G), hermes("time", '{"a": 1}')],
        ),
        (
            "llama",
            [llama("weather", F), llama("time", G)],
            f"{llama('weather', F)}; {llama('time', G)}",
            [llama("weather", '{"city": 1}'), "{}"],
        ),
        (
            "mistral",
            [mistral(("weather", F)), mistral(("time", G))],
            mistral(("weather", F), ("time", G)),
            ["[TOOL_CALLS][]", '[{"name": "time", "arguments": {}}]'],
        ),
        (
            "mistral-11",
            [f"[TOOL_CALLS]weather[ARGS]{F}"],
            f"[TOOL_CALLS]weather[ARGS]{F}[TOOL_CALLS]time[ARGS]{G}",
            ["[TOOL_CALLS]weather{", "[TOOL_CALLS]x[ARGS]{}"],
        ),
        (
            "thinks-calls",
            [f"hm <tool_call></think>\n\n{hermes('weather', F)}"],
            f"</think>{hermes('time', G)}\n{hermes('time', G)}",
            [hermes("weather", F)],
        ),
    ],
)
def test_only_calls_are_allowed(tokenizers, kind, right, several, wrong):
    tokenizer = tokenizers(kind)
    ids, form = tokenizer.chat(USER, tools=[{"name": "f"}]), format_of(tokenizer)
    one, many = (
        grammar_of_answer(tokenizer, ids, Functions(form, PARAMETERS, each), None)
        for each in (False, True)
    )
    for text in right:
        length = len(tokenizer.encode(text, add_bos=False))
        assert follows(tokenizer, one, text) == follows(tokenizer, many, text) == (length, True)
        # What is allowed is read as a call.
        reader = form.reader(PARAMETERS, None)
        answer = text.rpartition("</think>")[2].lstrip()
        assert isinstance((reader.push(answer) + reader.finish())[0], CallBegins)
    length = len(tokenizer.encode(several, add_bos=False))
    assert follows(tokenizer, many, several) == (length, True)
    assert follows(tokenizer, one, several)[0] < length
    for text in wrong:
        assert not follows(tokenizer, many, text)[1]


def test_json_may_stand_in_place_of_calls_and_behind_thoughts(tokenizers):
    tokenizer = tokenizers("hermes")
    ids, form = tokenizer.chat(USER), format_of(tokenizer)
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    both = grammar_of_answer(tokenizer, ids, Functions(form, PARAMETERS, True), schema)
    alone = grammar_of_answer(tokenizer, ids, None, schema)
    assert follows(tokenizer, both, hermes("time", G))[1]
    assert not follows(tokenizer, alone, hermes("time", G))[1]
    for grammar in (both, alone):
        assert follows(tokenizer, grammar, '{"a":1}')[1]
        assert follows(tokenizer, grammar, '<think>\nhm\n</think>\n\n{"a":1}')[1]
        assert not follows(tokenizer, grammar, '{"a":"b"}')[1]
        # White space has a bound, or a model might write nothing else.
        assert follows(tokenizer, grammar, '{ "a":1}')[1]
        assert follows(tokenizer, grammar, '{     "a":1}') == (2, False)
    # Who asks for no thoughts gets none.
    ids = tokenizer.chat(USER, enable_thinking=False)
    grammar = grammar_of_answer(tokenizer, ids, None, schema)
    assert follows(tokenizer, grammar, '{"a":1}')[1]
    assert follows(tokenizer, grammar, "<think>") == (0, False)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"type": "array"}, "parameters of weather have type 'array', must have type 'object'"),
        ({"properties": {"a": {"type": "nothing"}}}, "schema is .*nothing"),
    ],
)
def test_schemas_that_are_wrong(tokenizers, parameters, told):
    tokenizer = tokenizers("hermes")
    functions = Functions(format_of(tokenizer), {"weather": parameters}, False)
    with pytest.raises(kccl.InvalidArgument, match=told):
        grammar_of_answer(tokenizer, tokenizer.chat(USER), functions, None)


def test_markers_that_are_control_tokens(tokenizers, tmp_path):
    """No other tokens spell them, and thoughts end at theirs."""
    names = [(name, True) for name, _ in templates.HERMES_TOKENS]
    write_model(tmp_path / "m", templates.HERMES, names)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    functions = Functions(format_of(tokenizer), PARAMETERS, True)
    grammar = grammar_of_answer(tokenizer, tokenizer.chat(USER), functions, None)
    for text in (hermes("weather", F), f"<think>\nhm\n</think>\n\n{hermes('time', G)}"):
        assert follows(tokenizer, grammar, text)[1]


@pytest.mark.parametrize("kind", ["hermes", "llama", "mistral", "mistral-11"])
def test_random_weights_call_what_they_must(tmp_path, kind):
    write_model(tmp_path / "m", *KINDS[kind])
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Köln"]}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    named = [{"name": "weather", "parameters": schema}, {"name": "time"}]
    tools = [{"type": "function", "function": each} for each in named]
    flat = [{"type": "function", **each} for each in named]
    with (
        Engine(tmp_path / "m", blocks=1, context=1024) as engine,
        served(application(engine, Settings(names=("tiny",)))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        # Random thoughts end nowhere.
        options = {"chat_template_kwargs": {"enable_thinking": False}} if kind == "hermes" else {}
        asked = {"model": "tiny", "temperature": 1.0, "seed": 2, "max_tokens": 400}
        asked["extra_body"] = options
        asked |= {"messages": USER, "tools": tools, "parallel_tool_calls": False}
        choice = {"type": "function", "function": {"name": "weather"}}
        (found,) = client.chat.completions.create(**asked, tool_choice=choice).choices
        (call,) = found.message.tool_calls
        assert (found.finish_reason, call.function.name) == ("tool_calls", "weather")
        assert json.loads(call.function.arguments)["city"] in ("Bonn", "Köln")
        (found,) = client.chat.completions.create(**asked, tool_choice="required").choices
        (call,) = found.message.tool_calls
        assert call.function.name in ("weather", "time")

        asked = {"model": "tiny", "input": "Hi", "max_output_tokens": 400, "tools": flat}
        asked["extra_body"] = options
        choice = {"type": "function", "name": "time"}
        made = client.responses.create(**asked, tool_choice=choice)
        call = made.output[-1]
        assert (call.type, call.name, call.arguments) == ("function_call", "time", "{}")
        asked.pop("tools")
        form = {"type": "json_schema", "name": "city", "strict": True, "schema": schema}
        made = client.responses.create(**asked, text={"format": form})
        assert json.loads(made.output_text)["city"] in ("Bonn", "Köln")
        assert made.text.format.type == "json_schema"
        form["schema"] = {"type": "nothing"}
        with pytest.raises(openai.BadRequestError, match=r"^.*text.format.schema") as told:
            client.responses.create(**asked, text={"format": form})
        assert told.value.param == "text.format.schema"
