"""Harmony's channels, in `serve`, `chat` and `generate`. A script says what the model answers."""

import io
import json
import sys

import chat_templates as templates
import openai
import pytest
import saying
from scripted import Script, write_model
from terminal import Terminal, check_ended_well

import kccl
from kccl.engine import Engine
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.serving.reading import Reader
from kccl.engine.serving.tools.formats import format_of
from kccl.engine.serving.tools.grammar import Functions, grammar_of_answer
from kccl.engine.text.harmony import Harmony
from kccl.engine.text.matcher import Matchers
from kccl.tools import cli

PROMPT, NEXT = "<|start|>assistant", "<|end|><|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ARGUMENTS = '{"city": "Köln"}'
THINKS = f"{ANALYSIS}Hm.{NEXT}{FINAL}Hi<|return|>"
CALLS = f"{ANALYSIS}Hm.{NEXT}{PREAMBLE}Plan{NEXT}{CALL}{ARGUMENTS}<|call|>"
USER = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": PARAMETERS}
GIVEN = {"model": "tiny", "messages": USER}
TOOLS = [{"type": "function", "function": WEATHER}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "harmony"
    write_model(folder, templates.HARMONY, templates.HARMONY_TOKENS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    with open_checkpoint(model) as checkpoint:
        return checkpoint.tokenizer()


# ---- serve ---------------------------------------------------------------------------------------


def test_channels_are_told_apart(models):
    client, script = models("harmony")
    script.answers = [THINKS]
    whole = client.chat.completions.create(**GIVEN)
    (choice,) = whole.choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Hi")
    assert choice.finish_reason == "stop"
    assert whole.usage.completion_tokens_details.reasoning_tokens == 4
    assert script.asked().endswith(f"<|message|>Hi<|end|>{PROMPT}")
    chunks = list(client.chat.completions.create(**GIVEN, stream=True))
    deltas = [each.choices[0].delta for each in chunks]
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == "Hm."
    assert "".join(each.content or "" for each in deltas) == "Hi"
    assert chunks[-1].choices[0].finish_reason == "stop"
    # The template leaves earlier thoughts out.
    talk = [*USER, choice.message.model_dump(exclude_none=True), *USER]
    client.chat.completions.create(**GIVEN | {"messages": talk})
    assert f"{PROMPT}{FINAL}Hi<|end|><|start|>user" in script.asked()
    assert "Hm." not in script.asked()


def test_a_call_goes_with_thoughts_and_a_preamble(models):
    client, script = models("harmony")
    script.answers = [CALLS, CALLS, f"{FINAL}Rain.<|return|>"]
    given = GIVEN | {"tools": TOOLS}
    (choice,) = client.chat.completions.create(**given).choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "Plan")
    assert message.reasoning_content == "Hm."
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)

    chunks = list(client.chat.completions.create(**given, stream=True))
    deltas = [each.choices[0].delta for each in chunks]
    assert "".join(each.content or "" for each in deltas) == "Plan"
    told = [each.tool_calls[0].function for each in deltas if each.tool_calls]
    assert told[0].name == "weather"
    assert "".join(each.arguments for each in told) == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    # The template refuses a content beside thoughts: the thoughts then have both.
    result = {"role": "tool", "content": "rain", "tool_call_id": call.id}
    talk = [*USER, message.model_dump(exclude_none=True), result]
    (choice,) = client.chat.completions.create(**given | {"messages": talk}).choices
    assert choice.message.content == "Rain."
    assert f"{ANALYSIS}Hm.\n\nPlan{NEXT} to=functions.weather" in script.asked()


@pytest.mark.parametrize(
    ("said", "content", "more"),
    [
        ("Hi there", "Hi there", {}),
        ("<|channel|>none<|message|>Hi", "<|channel|>none<|message|>Hi", {}),
        (f"{ANALYSIS}Hm.<|end|>Hi", "Hi", {}),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Hi", "", {"max_tokens": 20}),
        # Without tools a call is text, and so is one to another tool.
        (f"{CALL}{{}}<|call|>", f"{PROMPT} to=functions.weather", {}),
        (f"{CALL}{{,}}<|call|>", f"{PROMPT} to=functions.weather", {"tools": TOOLS}),
        (f"{CALL}{{", f"{PROMPT} to=functions.weather", {"tools": TOOLS}),
        (
            "<|channel|>analysis to=browser.open code<|message|>{}<|call|>",
            f"{PROMPT} to=browser.open<|channel|>analysis<|message|>{{}}<|call|>",
            {"tools": TOOLS},
        ),
    ],
)
def test_what_is_damaged_is_text(models, said, content, more):
    client, script = models("harmony")
    script.answers = [said]
    (choice,) = client.chat.completions.create(**GIVEN, **more).choices
    assert choice.message.content.startswith(content)
    assert bool(choice.message.content) == bool(content)
    assert choice.message.tool_calls is None
    assert choice.finish_reason == ("length" if "max_tokens" in more else "stop")


def test_responses_have_items_for_each_channel(models):
    client, script = models("harmony")
    script.answers = [CALLS]
    given = {"model": "tiny", "input": "Hi", "tools": [{"type": "function", **WEATHER}]}
    made = client.responses.create(**given)
    assert [each.type for each in made.output] == ["reasoning", "message", "function_call"]
    thought, message, call = made.output
    assert (thought.content[0].text, message.content[0].text) == ("Hm.", "Plan")
    assert (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "completed")
    with client.responses.stream(**given) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds
    assert [each.type for each in found.output] == [each.type for each in made.output]
    assert found.output_text == "Plan"
    # The items come back as one message, with its thoughts.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [each.model_dump(exclude_none=True) for each in made.output]
    script.answers = [f"{FINAL}Rain.<|return|>"]
    talk = [{"role": "user", "content": "Hi"}, *items, result]
    assert client.responses.create(**given | {"input": talk}).output_text == "Rain."
    assert f"{ANALYSIS}Hm.\n\nPlan{NEXT} to=functions.weather" in script.asked()


def test_a_form_for_all_of_the_answer_leaves_no_room_for_channels(models):
    client, script = models("harmony")
    script.answers = ["yes"]
    more = {"extra_body": {"guided_choice": ["yes", "no"]}}
    (choice,) = client.chat.completions.create(**GIVEN, **more).choices
    assert choice.message.content == "yes"


# ---- answers that must be calls or JSON ----------------------------------------------------------


def follows(tokenizer, grammar, text):
    """Whether a grammar allows a text, and the answer may end there."""
    matcher = Matchers(lambda: tokenizer, 300)(grammar)
    for number in tokenizer.encode(text, add_bos=False):
        mask = matcher.mask()
        if matcher.has_ended or mask is None or not mask[number // 32] >> (number % 32) & 1:
            return False
        matcher.push(number)
    return matcher.has_ended or bool(matcher.mask()[0] >> tokenizer.eos_ids[0] & 1)


@pytest.mark.parametrize("thoughts", ["", f"{ANALYSIS}Hm.{NEXT}", f"{ANALYSIS}{NEXT}" * 2])
def test_calls_and_json_may_be_required(tokenizer, thoughts):
    ids, form = tokenizer.chat(USER), format_of(tokenizer)
    functions = Functions(form, {"weather": PARAMETERS, "time": None}, True)
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    calls, both, alone = (
        grammar_of_answer(tokenizer, ids, *each)
        for each in ((functions, None), (functions, schema), (None, schema))
    )
    call, said = f"{thoughts}{CALL}{ARGUMENTS}", f'{thoughts}{FINAL}{{"a":1}}'
    assert [follows(tokenizer, each, call) for each in (calls, both, alone)] == [True, True, False]
    assert [follows(tokenizer, each, said) for each in (calls, both, alone)] == [False, True, True]
    assert follows(tokenizer, calls, call.replace("weather", "time").replace(ARGUMENTS, "{}"))
    for wrong in (call.replace("weather", "x"), call.replace("city", "x"), f"{thoughts}Hi"):
        assert not follows(tokenizer, both, wrong)
    # What is allowed is read as a call.
    reader = Reader(Harmony(PROMPT), form.reader(["weather"], None))
    reader.push(call, is_last=True)
    assert [(each.name, each.arguments) for each in reader.calls.values()] == [
        ("weather", ARGUMENTS)
    ]


def test_a_prompt_that_begins_the_message_allows_no_required_call(models, tmp_path):
    write_model(tmp_path / "m", f"{templates.HARMONY}{FINAL}", templates.HARMONY_TOKENS)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    functions = Functions(format_of(tokenizer), {"weather": None}, True)
    with pytest.raises(kccl.Error, match=r"the prompt ends with '<\|start\|>assistant<\|channel"):
        grammar_of_answer(tokenizer, tokenizer.chat(USER), functions, None)
    write_model(tmp_path / "n", templates.HARMONY, templates.HARMONY_TOKENS[:4])
    with open_checkpoint(tmp_path / "n") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    with pytest.raises(kccl.Error, match=r"has no control token '<\|constrain\|>'"):
        grammar_of_answer(tokenizer, tokenizer.chat(USER), functions, None)
    client, script = models("harmony")
    script.answers = [f"{CALL}{ARGUMENTS}<|call|>"]
    given = GIVEN | {"tools": TOOLS, "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**given).choices
    assert choice.finish_reason == "tool_calls"
    assert script.params[-1].grammar is not None
    with pytest.raises(openai.BadRequestError, match="only JSON goes with tools"):
        client.chat.completions.create(**given, extra_body={"guided_regex": "a"})


# ---- conversations -------------------------------------------------------------------------------


def test_a_conversation_keeps_answers_without_thoughts(model):
    with Engine(model, blocks=1) as engine:
        script = Script(engine)
        script.answers = [THINKS, f"{ANALYSIS}Hm."]
        vars(engine._runner)["tokens"] = script.tokens
        chat = engine.conversation()
        assert chat.ask("Hi") == "Hi"
        assert chat.messages[-1] == {"role": "assistant", "content": "Hi"}
        pieces = list(chat.stream("And you?"))
        assert "".join(each.text for each in pieces) == f"{ANALYSIS}Hm."
        assert f"{PROMPT}{FINAL}Hi<|end|><|start|>user" in script.asked()
        assert chat.messages[-1]["content"] == ""


def test_turns_go_on_in_the_kv_cache(model):
    with Engine(model, blocks=1) as engine, engine.conversation(max_tokens=6) as chat:
        chat.ask("Hi")
        num_prompt = len(chat.ids)
        answer = chat.ask("And you?")
        assert engine._runner.num_cached >= num_prompt - 1
        # The answer is that of an engine without a cache.
        with Engine(model, blocks=1) as other:
            pieces = other.stream(chat.ids, shown=engine.tokenizer.special_ids, max_tokens=6)
            text = "".join(piece.text for piece in pieces)
        reader = Harmony(PROMPT)
        parts = reader.push(text) + reader.finish()
        assert answer == "".join(part.text for part in parts if not part.is_thought)


@pytest.fixture
def here(model, monkeypatch, capsys):
    """here(answers, words, given): a command in this process: its exit code, and its stdout."""

    def run(answers, *words, given=""):
        monkeypatch.setattr(saying, "answers", answers, raising=False)
        monkeypatch.setattr(Engine, "__init__", saying._scripted)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        code = cli.main([*words, "--model", str(model), "--blocks", "1"])
        return code, capsys.readouterr().out

    return run


def command(model, answers, *words):
    return [
        *(sys.executable, saying.__file__, json.dumps(answers)),
        *(*words, "--model", str(model), "--blocks", "1"),
    ]


@pytest.mark.parametrize(
    ("words", "given"),
    [(["generate", "--chat", "--prompt", "Hi"], ""), (["chat"], "Hi")],
)
def test_a_pipe_gets_the_answer_alone(here, words, given):
    assert here([THINKS], *words, given=given) == (0, "Hi\n")


def test_lines_of_json_have_the_answer_alone(here):
    code, out = here([THINKS], "chat", "--json", given='"Hi"\n')
    assert (code, json.loads(out)["content"]) == (0, "Hi")


def test_text_without_a_chat_is_as_before(here):
    assert here([THINKS], "generate", "--prompt", "Hi") == (0, "analysisHm.assistantfinalHi\n")


def test_a_terminal_shows_thoughts_dim(model, tmp_path):
    words = ["generate", "--chat", "--prompt", "Hi", "--quiet"]
    with Terminal(command(model, [THINKS], *words), cwd=tmp_path) as terminal:
        assert terminal.end() == 0
    check_ended_well(terminal)
    assert b"\x1b[2mH\x1b[22m" in terminal.raw and b"<|" not in terminal.raw
    assert terminal.text == "Hm.\n\nHi"


def test_turns_on_a_terminal(model, tmp_path):
    answers = [THINKS, f"{FINAL}Well<|return|>"]
    with Terminal(command(model, answers, "chat"), cwd=tmp_path) as terminal:
        terminal.wait_for("\n>")
        terminal.type("Hello\n")
        terminal.wait_for("Hm.\n\nHi\n")
        terminal.wait_for("first token after")
        terminal.type("And you?\n")
        terminal.wait_for("Well")
        terminal.type("/save talk.json\n")
        # A Ctrl-D that comes before the prompt can be lost.
        terminal.wait_for("4 messages are in talk.json\n>")
        terminal.end_input()
        assert terminal.end() == 0
    assert b"<|" not in terminal.raw
    said = [each["content"] for each in json.loads((tmp_path / "talk.json").read_text())]
    assert said == ["Hello", "Hi", "And you?", "Well"]
