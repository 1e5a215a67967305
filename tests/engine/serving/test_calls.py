"""Calls and thoughts in a text, however it is cut."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kccl.engine.serving.reading import Reader
from kccl.engine.serving.tools.events import Arguments, CallBegins, Text, Thought
from kccl.engine.serving.tools.formats import FORMATS
from kccl.engine.text.reasoning import Reasoning

KINDS = {each.name: each for each in FORMATS}
F, G = '{"a": [1, {"b": "}\\""}]}', "{}"


def read(kind, pieces, most=None, *, is_inside=None):
    """A reader behind these pieces, and its events."""
    reasoning = None if is_inside is None else Reasoning(is_inside=is_inside)
    reader = Reader(reasoning, kind and KINDS[kind].reader(["f", "g"], most))
    events = [event for piece in pieces for event in reader.push(piece)]
    return reader, events + reader.push("", is_last=True)


def told(reader):
    return reader.thoughts, reader.text, [(c.name, c.arguments) for c in reader.calls.values()]


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def harmony(name, arguments):
    header = f"to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"
    return f"<|start|>assistant {header}{arguments}"


WHOLE = [
    ("Hermes", f"Ok.\n{hermes('f', F)}\n{hermes('g', G)}\n", "Ok.", [("f", F), ("g", G)]),
    ("Hermes", f"{hermes('x', F)} more", " more", [("x", F)]),
    ("Hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    ("Hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
    ("Hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (
        "Hermes",
        r'<tool_call>{"arguments": {"a": "\ud800"}, "name": "f"}',
        "",
        [("f", r'{"a": "\ud800"}')],
    ),
    ("Llama 3", f'{{"name": "f", "parameters": {F}}}', "", [("f", F)]),
    (
        "Llama 3",
        f'\n{{"name": "f", "parameters": {G}}}; {{"name": "g", "parameters": {F}}}',
        "",
        [("f", G), ("g", F)],
    ),
    ("Llama 3", f'<|python_tag|>{{"type": "function", "name": "x", "parameters": {F}}}', "", None),
    (
        "Mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {F}, "id": "1"}}, {{"name": "g"}}]',
        "",
        [("f", F), ("g", "{}")],
    ),
    ("Mistral", f"Ok [TOOL_CALLS]f[ARGS]{F}[TOOL_CALLS]g{G}", "Ok", [("f", F), ("g", G)]),
    ("Mistral", f"[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{F}", "", [("f", F)]),
    ("harmony", f"Ok\n{harmony('f', F)}<|call|>", "Ok", [("f", F)]),
    ("harmony", f"{harmony('f', F)}<|end|>\n{harmony('x', ' {}')}", "", [("f", F), ("x", G)]),
    ("harmony", f"{harmony('f', F)} Ok", " Ok", [("f", F)]),
    ("harmony", f"{harmony('f', G)}".replace("functions.", ""), "", [("f", G)]),
    ("Mistral", f"[TOOL_CALLS]größe_2[ARGS]{F}", "", [("größe_2", F)]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), WHOLE)
def test_calls_of_every_format(kind, text, content, calls):
    reader, events = read(kind, text)
    assert told(reader) == ("", content, [("x", F)] if calls is None else calls)
    begun = [each for each in events if isinstance(each, CallBegins)]
    assert [each.index for each in begun] == list(range(len(begun)))
    assert len({each.id for each in begun}) == len(begun) == reader.num_begun
    for each in begun:
        given_before = [e for e in events[: events.index(each)] if isinstance(e, Arguments)]
        assert all(other.index < each.index for other in given_before)
    if kind == "Mistral":
        assert all(len(each.id) == 9 for each in begun)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("Hermes", "no call, < or <tool_ or <tool_call"),
        ("Hermes", "<tool_call>oops</tool_call>"),
        ("Hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "f", "arguments": {"a": </tool_call> and more'),
        ("Hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("Hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "", "arguments": {}}'),
        ("Hermes", '<tool_call>{"name": "f", "arguments": {,}}'),
        ("Hermes", '<tool_call>{"name": "f", "arguments": {,}}</tool_call> and more'),
        # Halves of characters, which UTF-8 cannot encode.
        ("Hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}'),
        ("Hermes", r'<tool_call>{"arguments": {}, "name": "\ud800"}'),
        ("Hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}'),
        # An answer in JSON, or one that calls what does not exist.
        ("Llama 3", '{"name": "Bonn", "parameters": {"a": 1}}'),
        ("Llama 3", '{"cities": ["Bonn", {"name": "f"}]} and more'),
        ("Llama 3", '<|python_tag|>search.call(query="a")'),
        ("Llama 3", "  Hi"),
        ("Mistral", "[TOOL_CALLS][]"),
        ("Mistral", '[TOOL_CALLS][{"name": "f", "arguments": {,}}]'),
        ("Mistral", "[TOOL_CALLS]no name {"),
        ("Mistral", "[TOOL_CALLS] and then"),
        ("Mistral", '[TOOL_CALLS][{"name": "f", "arguments": {'),
        ("harmony", harmony("f", "{,}")),
        ("harmony", harmony("f", "[1]<|call|>")),
        ("harmony", harmony("f", "<|call|>")),
        ("harmony", harmony("f", '{"a": ')),
        ("harmony", harmony("f", "{}").replace("functions.f", "browser.open")),
        ("harmony", harmony("", "{}")),
        ("harmony", f"{harmony('f', '')[:-3]} and more"),
        ("harmony", f"<|start|>assistant to=functions.{'f' * 600}"),
    ],
)
def test_what_is_no_call_is_text(kind, text):
    assert told(read(kind, text)[0]) == ("", text, [])


def test_arguments_come_as_they_are_written():
    reader, events = read("Hermes", ["Let me see.\n", '<tool_call>{"name": "f", "arguments": {"a'])
    assert [type(each) for each in events[:3]] == [Text, CallBegins, Arguments]
    assert events[0] == Text("Let me see.") and events[2] == Arguments(0, '{"a')
    # The answer ends there: a whole one has the text.
    assert reader.num_begun == 1 and reader.calls == {}


def test_only_so_many_calls_are_told():
    text = hermes("f", F) + hermes("g", G)
    assert told(read("Hermes", text, most=1)[0]) == ("", "", [("f", F)])


@pytest.mark.parametrize(
    ("text", "is_inside", "thoughts", "content"),
    [
        ("<think>\nhm\nhm\n</think>\n\nHi", False, "hm\nhm", "Hi"),
        ("\n<think>hm</think>Hi <think>x</think>", False, "hm", "Hi <think>x</think>"),
        ("hm\n</think>\n\nHi", True, "hm", "Hi"),
        ("<think>\nhm</think>Hi", True, "hm", "Hi"),
        ("<think>\n\n</think>\n\nHi", False, "", "Hi"),
        ("Hi </think>", False, "", "Hi </think>"),
        ("  Hi", False, "", "  Hi"),
        ("<think>hm </thin", False, "hm </thin", ""),
        ("<thin", False, "", "<thin"),
        ("hm ", True, "hm", ""),
    ],
)
def test_thoughts(text, is_inside, thoughts, content):
    assert told(read(None, text, is_inside=is_inside)[0]) == (thoughts, content, [])


# What a model may write, and much that it should not.
PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<|start|>assistant to=", "functions.f", "<|message|>", "<|call|>", "<|end|>"),
        *("<think>", "</think>", '{"name": "f", "arguments": ', '{"name": "g", "parameters": '),
        *('{"a": "}"}', "{", "}", "[", "]", ",", ";", '"', "\\", "\n", " ", "f", "1", "NaN", "é"),
    ]
)
TEXTS = st.lists(PARTS | st.text(max_size=3), max_size=12).map("".join)


# Each run has other examples.
@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([None, *KINDS]),
    TEXTS | st.sampled_from([text for _, text, _, _ in WHOLE]),
    st.sampled_from([None, False, True]),
    st.lists(st.integers(0, 200)),
)
def test_cuts_make_no_difference(kind, text, is_inside, cuts):
    at = [0, *sorted(min(each, len(text)) for each in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    found, whole = (read(kind, each, is_inside=is_inside) for each in (pieces, [text]))
    assert told(found[0]) == told(whole[0])
    assert streamed(found[1]) == streamed(whole[1])
    for _, arguments in told(found[0])[2]:
        assert isinstance(json.loads(arguments), dict)


def streamed(events):
    """What a client puts together from a stream: thoughts, text, and calls by their number."""
    calls = {}
    for each in events:
        if isinstance(each, CallBegins):
            calls[each.index] = [each.name, ""]
        elif isinstance(each, Arguments):
            calls[each.index][1] += each.text
    texts = ["".join(e.text for e in events if isinstance(e, kind)) for kind in (Thought, Text)]
    return texts, calls
