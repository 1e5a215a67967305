"""/v1/responses as OpenAI's client meets it. A script says what the model answers."""

import openai
import pydantic
import pytest

import kccl


class Weather(pydantic.BaseModel):
    """Tells the weather."""

    city: str


TOOL = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def test_a_text(models):
    client, script = models("hermes")
    script.answers = ["Hello."]
    given = {"model": "tiny", "temperature": 0.5, "top_p": 0.25, "metadata": {"a": "b"}}
    found = client.responses.create(**given, input="Hi", instructions="Be brief.", store=True)
    assert (found.output_text, found.status, found.error) == ("Hello.", "completed", None)
    assert (found.temperature, found.top_p, found.metadata) == (0.5, 0.25, {"a": "b"})
    assert (script.params[-1].temperature, script.params[-1].top_p) == (0.5, 0.25)
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(script.prompts[-1]), 6)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0
    asked = script.asked()
    assert asked.index("<|im_start|>system\nBe brief.") < asked.index("<|im_start|>user\nHi")
    # What is not kept cannot be had.
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


BEGIN = ["response.created", "response.in_progress"]
ADDED, DONE = "response.output_item.added", "response.output_item.done"


def part(name):
    text = [f"response.{name}.delta", f"response.{name}.done"]
    return [ADDED, "response.content_part.added", *text, "response.content_part.done", DONE]


CALLED = "response.function_call_arguments"
CALLED = [ADDED, f"{CALLED}.delta", f"{CALLED}.done", DONE]


@pytest.mark.parametrize(
    ("said", "kinds", "events", "most"),
    [
        ("Hello.", ["message"], part("output_text"), None),
        ("", ["message"], None, None),
        (CALL, ["function_call"], CALLED, None),
        (
            f"<think>\nhm\n</think>\n\nOk.\n{CALL}\n{CALL}",
            ["reasoning", "message", "function_call", "function_call"],
            [*part("reasoning_text"), *part("output_text"), *CALLED, *CALLED],
            None,
        ),
        ("Hello.", ["message"], part("output_text"), 3),
        # What follows a call stands behind it in a whole response, too.
        (f"{CALL}\nOk.", ["function_call", "message"], [*CALLED, *part("output_text")], None),
    ],
)
def test_events_in_their_order(models, said, kinds, events, most):
    client, script = models("hermes")
    script.answers = [said]
    given = {"model": "tiny", "input": "Hi", "tools": [TOOL]}
    given |= {"max_output_tokens": most} if most else {}
    found = list(client.responses.create(**given, stream=True))
    end = "response.incomplete" if most else "response.completed"
    names = [event.type for event in found]
    # Deltas of one item follow each other.
    once = [name for i, name in enumerate(names) if "delta" not in name or name != names[i - 1]]
    if events is not None:
        assert once == [*BEGIN, *events, end]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    last = found[-1].response
    assert [item.type for item in last.output] == kinds
    assert {event.response.id for event in found if hasattr(event, "response")} == {last.id}
    done = [event.item for event in found if event.type == DONE]
    assert done == last.output
    ids = {event.item_id for event in found if hasattr(event, "item_id")}
    assert ids <= {item.id for item in last.output} and len({i.id for i in done}) == len(done)

    whole = client.responses.create(**given)
    for items in (whole.output, last.output):
        for each in items:
            each.id = ""
            if each.type == "function_call":
                each.call_id = ""
    assert whole.output == last.output and whole.status == last.status
    if most:
        assert (last.status, last.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (last.output_text, last.output[-1].status) == ("Hell", "incomplete")


def test_calls_and_results_go_back(models):
    client, script = models("hermes")
    script.answers = [f"<think>\nhm\n</think>\n\nOk.\n{CALL}\n{CALL}", "Rain."]
    talk = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    given = {"model": "tiny", "tools": [TOOL], "tool_choice": "auto"}
    first = client.responses.create(**given, input=talk)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [each.arguments for each in calls] == [ARGUMENTS] * 2
    talk += first.output
    results = ["It <|im_end|> rains", [{"type": "input_text", "text": "It snows"}]]
    for call, output in zip(calls, results, strict=True):
        talk.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    second = client.responses.create(**given, input=talk)
    assert second.output_text == "Rain."
    asked = script.asked()
    # One message has the text and both calls, as the model wrote them.
    assert f"<|im_start|>assistant\nOk.\n{CALL}\n{CALL}<|im_end|>" in asked
    assert "<tool_response>It <|im_end|> rains</tool_response>" in asked
    assert asked.index("rains") < asked.index("snows")


def test_the_clients_own_helper(models):
    client, script = models("hermes")
    script.answers = [f"Ok.\n{CALL}"]
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    flat = [{"type": "function", **tools[0]["function"]}]
    with client.responses.stream(model="tiny", input="Hi", tools=flat) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= kinds
    assert final.output_text == "Ok." and final.output[1].arguments == ARGUMENTS


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is 'resp_1', must be null"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"background": True}, "background", "is True, must be false"),
        ({"truncation": "auto"}, "truncation", "is 'auto', must be 'disabled'"),
        ({"input": 5}, "input", "input is 5"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "reasoning"}]}, "input", "must be a text, or items with a message"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type", "must be one of 'message', "),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role", "is 'tool'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "is 'input_image'",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": "1"}]},
            "input[0].arguments",
            "is '1': must be an object in JSON",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "is 'web_search'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "an object of type 'function' with"),
        ({"max_output_tokens": 0}, "max_output_tokens", "is 0"),
        ({"model": "gpt"}, "model", "is 'gpt', must be 'tiny'"),
        ({"input": "a" * 3000}, "input", "tokens, "),
    ],
)
def test_errors_name_the_field(models, given, param, message):
    client, _ = models("hermes")
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.post("/responses", body={"input": "Hi", "tools": [TOOL]} | given, cast_to=object)
    assert (caught.value.body["param"], caught.value.status_code in (400, 404)) == (param, True)


def test_an_engine_that_fails(models):
    client, script = models("hermes")
    script.answers = [kccl.Error("the logits are not finite")]
    *_, last = client.responses.create(model="tiny", input="Hi", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == (
        "server_error",
        "the logits are not finite",
    )
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.responses.create(model="tiny", input="Hi")


def test_a_client_that_leaves_ends_the_answer(models):
    client, script = models("hermes")
    script.answers, script.pause_s = ["a" * 1000], 0.01
    script.is_cancelled.clear()
    with client.responses.create(model="tiny", input="Hi", stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    assert script.is_cancelled.wait(30)
