"""Tools, and thoughts, as OpenAI's client meets them. A script says what the model answers."""

import json

import openai
import pydantic
import pytest


class Weather(pydantic.BaseModel):
    """Tells the weather."""

    city: str


def tool(name="weather", **more):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


GIVEN = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool()]}
ARGUMENTS = '{"city": "Köln"}'
SAID = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>",
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}


@pytest.mark.parametrize("kind", SAID)
def test_a_call_and_its_result(models, kind):
    """Both ways, and then the tool's result: the template gets back what the model wrote."""
    client, script = models(kind)
    script.answers = [SAID[kind], SAID[kind], "Rain."]
    (choice,) = client.chat.completions.create(**GIVEN).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert '"properties"' in script.asked()

    chunks = list(client.chat.completions.create(**GIVEN, stream=True))
    found = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    first, *others = found
    assert (first.index, first.type, first.function.name) == (0, "function", "weather")
    assert first.id and first.function.arguments == "" and len(others) > 5
    assert {(each.index, each.id, each.function.name) for each in others} == {(0, None, None)}
    assert "".join(each.function.arguments for each in others) == ARGUMENTS
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert ends == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)

    talk = [*GIVEN["messages"], choice.message, {"role": "tool", "content": "It <|im_end|> rains"}]
    talk[-1]["tool_call_id"] = call.id
    (choice,) = client.chat.completions.create(**GIVEN | {"messages": talk}).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "Rain.")
    assert choice.message.tool_calls is None
    assert ARGUMENTS in script.asked() and "It <|im_end|> rains" in script.asked()


def test_control_tokens_in_tools_and_messages_stay_text(models):
    client, script = models("hermes")
    talk = [{"role": "user", "content": "<|im_end|>"}]
    tools = [tool("f", description="<|im_end|>é")]
    client.chat.completions.create(model="tiny", messages=talk, tools=tools)
    end = script.id_of("<|im_end|>")
    assert script.prompts[-1].count(end) == 2
    assert script.asked().count("<|im_end|>") == 4


def test_the_clients_own_helper_puts_a_stream_together(models):
    client, script = models("hermes")
    script.answers = [f"Let me see.\n\n{SAID['hermes']}\n{SAID['hermes']}"]
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    with client.chat.completions.stream(**GIVEN | {"tools": tools}) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds
    assert message.content == "Let me see."
    assert [c.function.parsed_arguments for c in message.tool_calls] == [Weather(city="Köln")] * 2
    once = client.chat.completions.create(**GIVEN, parallel_tool_calls=False)
    assert len(once.choices[0].message.tool_calls) == 1


def test_without_a_choice_there_is_no_call(models):
    client, script = models("hermes")
    script.answers = [SAID["hermes"]]
    (choice,) = client.chat.completions.create(**GIVEN, tool_choice="none").choices
    assert (choice.finish_reason, choice.message.content) == ("stop", SAID["hermes"])
    assert "properties" not in script.asked()
    # What is no call is text, and a call that the length ends is none.
    for said, end, more in (
        ("<tool_call>Köln</tool_call>", "stop", {}),
        (SAID["hermes"][:40], "length", {"max_tokens": 25}),
    ):
        script.answers = [said]
        (choice,) = client.chat.completions.create(**GIVEN, **more).choices
        assert (choice.finish_reason, choice.message.tool_calls) == (end, None)
        assert said.startswith(choice.message.content) and len(choice.message.content) > 20


CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}


@pytest.mark.parametrize(
    ("kind", "given", "param", "message"),
    [
        ("unknown", {}, "tools", "must be empty: .* in none of the formats that are read: Mistral"),
        ("none", {}, "tools", r"tools is \['weather'\], must be empty: .* takes no tools"),
        ("hermes", {"tools": [{"type": "web_search"}]}, "tools[0].type", "is 'web_search'"),
        ("hermes", {"tools": [tool("a b")]}, "tools[0].function.name", "is 'a b'"),
        ("hermes", {"tools": [tool(), tool()]}, "tools", "of different names"),
        ("hermes", {"tools": [tool(str(i)) for i in range(129)]}, "tools", "has 129 tools, must"),
        ("hermes", {"tool_choice": "always"}, "tool_choice", "is 'always', must be 'none', 'auto'"),
        (
            "hermes",
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_choice is 'x', must be a function that tools has: 'weather'",
        ),
        ("hermes", {"tools": [], "tool_choice": "required"}, "tool_choice", "without tools"),
        (
            "hermes",
            {
                "messages": [
                    CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            r"is '\[': must be an object in JSON",
        ),
        (
            "mistral",
            {"messages": [CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
            "messages",
            "the chat template fails",
        ),
        ("hermes", {"parallel_tool_calls": "no"}, "parallel_tool_calls", "is 'no'"),
    ],
)
def test_errors_name_the_field(models, kind, given, param, message):
    client, _ = models(kind)
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.post("/chat/completions", body=GIVEN | given, cast_to=object)
    assert caught.value.param == param


@pytest.mark.parametrize("levels", [190, 300, 960])
def test_bodies_that_nest_deeply(models, levels):
    client, _ = models("hermes")
    deep = '{"a":' * levels + "1" + "}" * levels
    tool = f'[{{"type": "function", "name": "f", "parameters": {deep}}}]'
    call = (
        f'{{"type": "function_call", "call_id": "1", "name": "f", "arguments": {json.dumps(deep)}}}'
    )
    for given in (
        f'"tools": {tool}, "tool_choice": "none", "input": "Hi"',
        f'"tools": {tool}, "input": "Hi"',
        f'"metadata": {deep}, "input": "Hi"',
        f'"input": [{call}]',
    ):
        body = f"{{{given}}}".encode()
        found = client._client.post("responses", content=body)
        assert (found.status_code == 200) == (levels < 200), found.text
        assert found.status_code in (200, 400)


@pytest.mark.parametrize(
    ("kind", "said"), [("hermes", "<think>\nhm\n</think>\n\nHi"), ("thinks", "hm\n</think>\n\nHi")]
)
def test_thoughts_are_told_apart(models, kind, said):
    client, script = models(kind)
    script.answers = [said]
    given = {name: value for name, value in GIVEN.items() if name != "tools"}
    whole = client.chat.completions.create(**given)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "Hi")
    assert whole.usage.completion_tokens_details.reasoning_tokens in (3, 4, 5)
    chunks = [
        each.choices[0].delta for each in client.chat.completions.create(**given, stream=True)
    ]
    thoughts = [getattr(each, "reasoning_content", None) or "" for each in chunks]
    assert "".join(thoughts) == "hm"
    assert "".join(each.content or "" for each in chunks) == "Hi"
    talk = [*given["messages"], message.model_dump(exclude_none=True)]
    client.chat.completions.create(**given | {"messages": talk})
    assert ("<think>hm</think>" in script.asked()) == (kind == "hermes")


def test_a_variable_of_the_template_ends_thoughts(models):
    client, script = models("hermes")
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(**GIVEN, extra_body=options)
    assert script.asked().endswith("<think>\n\n</think>\n\n")


def test_a_client_that_leaves_ends_a_call(models):
    client, script = models("hermes")
    script.answers, script.pause_s = [SAID["hermes"] * 20], 0.01
    script.is_cancelled.clear()
    with client.chat.completions.create(**GIVEN, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.tool_calls:
                break
    assert script.is_cancelled.wait(30)
