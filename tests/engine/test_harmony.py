"""Answers in harmony, however they are cut, and however they are damaged."""

import itertools
import json

import chat_templates as templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import write_model
from tokenizers import Regex, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kccl.engine.commands.thoughts import Thoughts
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.text.harmony import MARKERS, Harmony, with_calls
from kccl.engine.text.parts import joined
from kccl.engine.text.pretokenizers import PRE_TOKENIZERS
from kccl.engine.text.reasoning import answer_in, begun_message, reasoning_of

PROMPT = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
# A call's header in the form in which the reader writes it, and the forms that models use.
CALL = "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
CALLS = (
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary\n<|constrain|> json<|message|>",
    "<|start|>assistant to=functions.f<|channel|>commentary<|constrain|>json<|message|>",
)


def read(pieces, prompt=PROMPT):
    """The thoughts and the answer that a reader finds in these pieces."""
    reader = Harmony(prompt)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    return "".join(part.text for part in parts if part.is_thought), joined(parts)


WHOLE = [
    (f"{ANALYSIS}Hm.{NEXT}{FINAL}Hi<|return|>", "Hm.", "Hi"),
    (f"{FINAL} Hi\n <|return|>", "", " Hi\n "),
    (f"{ANALYSIS}{NEXT}{FINAL}Hi", "", "Hi"),
    (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\n\nb", "c"),
    # A preamble, and several finals.
    (f"{ANALYSIS}a{NEXT}{PREAMBLE}b{NEXT}{ANALYSIS}c{NEXT}{FINAL}d", "a\n\nc", "b\n\nd"),
    (f"{FINAL}a{NEXT}{FINAL}b{NEXT}{FINAL}<|return|>", "", "a\n\nb"),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    ("<|channel|>final json<|message|>{}", "", "{}"),
    ("<|channel|>commentary to=all<|message|>Hi", "", "Hi"),
    # The first marker is missing, or the prompt's end comes again.
    (f"analysis<|message|>Hm.{NEXT}final<|message|>Hi", "Hm.", "Hi"),
    ("<|message|>Hi", "", "Hi"),
    (f"{PROMPT}{ANALYSIS}Hm.{NEXT}{FINAL}Hi", "Hm.", "Hi"),
    # Markers that a model forgets or repeats.
    (f"{ANALYSIS}Hm.<|end|>{FINAL}Hi", "Hm.", "Hi"),
    (f"{ANALYSIS}Hm.{PROMPT}{FINAL}Hi", "Hm.", "Hi"),
    (f"<|channel|>commentary to=assistant{FINAL}Hi", "", "Hi"),
    (f"{ANALYSIS}Hm.<|end|>\n{PROMPT}{FINAL}Hi", "Hm.", "Hi"),
    # The tokens of the format, as the words of an answer.
    (
        f"{FINAL}The <|end|> of <|start|>user<|message|>",
        "",
        "The <|end|> of <|start|>user<|message|>",
    ),
    (f"{FINAL}a < b <| c |> <|channel|>d<|", "", "a < b <| c |> <|channel|>d<|"),
]
# Headers that are none. Nothing of them is lost.
DAMAGED = [
    ("Hi there", "", "Hi there"),
    ("  \n Hi", "", "  \n Hi"),
    ("final", "", "final"),
    ("final answer: <|channel|>", "", "final answer: <|channel|>"),
    (" ", "", " "),
    ("<|channel|>nothing<|message|>Hi", "", "<|channel|>nothing<|message|>Hi"),
    (f"<|start|>user<|message|>Hi{NEXT}{FINAL}a", "", "<|start|>user<|message|>Hi\n\na"),
    ("<|channel|>final to=x y z<|message|>", "", "<|channel|>final to=x y z<|message|>"),
    (f"{ANALYSIS}Hm.<|end|>The answer", "Hm.", "The answer"),
    (f"{ANALYSIS}Hm.<|end|>The answer{NEXT}{FINAL}a", "Hm.", "The answer\n\na"),
    (f"{ANALYSIS}Hm. <|start|>user{NEXT}{FINAL}a", "Hm. <|start|>user", "a"),
    (f"{ANALYSIS}Hm.<|end|><|end|>a", "Hm.", "<|end|>a"),
    (f"{FINAL}a<|end|>b{NEXT}{FINAL}c", "", "a<|end|>b\n\nc"),
    (f"{FINAL}a{NEXT}<|channel|>none<|message|>b", "", f"a{NEXT}<|channel|>none<|message|>b"),
    (
        f"<|channel|>commentary to={'f' * 300}<|message|>",
        "",
        f"<|channel|>commentary to={'f' * 300}<|message|>",
    ),
    (" " * 300 + "Hi", "", " " * 300 + "Hi"),
    # A message to a tool that only a reader of calls understands.
    (f"{CALLS[0]}{{}}<|call|>", "", f"{CALL}{{}}<|call|>"),
    (f"{PREAMBLE}a{NEXT}{CALLS[2]}{{}}", "", f"a\n\n{CALL}{{}}"),
    (f"{CALLS[0]}{{}}{NEXT}{FINAL}a", "", f"{CALL}{{}}<|end|>\n\na"),
    (f'{CALLS[0]}{{"a": "<|end|>"}}<|call|>', "", f'{CALL}{{"a": "<|end|>"}}'),
    (f'{CALLS[0]}{{"a": "<|start|>"}}<|call|>', "", f'{CALL}{{"a": "<|start|>"}}<|call|>'),
]


@pytest.mark.parametrize(("text", "thoughts", "answer"), WHOLE + DAMAGED)
def test_messages(text, thoughts, answer):
    assert read([text]) == (thoughts, answer)


@pytest.mark.parametrize("text", [text for text, _, _ in WHOLE + DAMAGED])
def test_cuts_make_no_difference(text):
    whole = read([text])
    assert read(text) == whole
    # The longest texts differ at few places.
    for at in range(0, len(text), 1 + len(text) // 150):
        assert read([text[:at], text[at:]]) == whole


@pytest.mark.parametrize("header", CALLS)
def test_headers_of_calls_have_one_form(header):
    assert read([f"{header}{{}}<|call|>"]) == ("", f"{CALL}{{}}<|call|>")


def tokens_of(text):
    """A text as a vocabulary might cut it: markers are single tokens."""
    while text:
        found = next((marker for marker in MARKERS if text.startswith(marker)), text[0])
        yield found
        text = text[len(found) :]


@pytest.mark.parametrize(("text", "thoughts", "answer"), WHOLE[:5])
def test_an_answer_that_is_cut_off_has_no_markers(text, thoughts, answer):
    tokens = list(tokens_of(text))
    told = [read(tokens[:number]) for number in range(len(tokens) + 1)]
    for found in told:
        assert thoughts.startswith(found[0]) and answer.startswith(found[1])
    assert told[-1] == (thoughts, answer)


def test_text_comes_at_once():
    reader = Harmony(PROMPT)
    assert reader.push(f"{ANALYSIS}Hm, 1 < 2") == [(True, "Hm, 1 < 2")]
    assert reader.is_thinking
    assert reader.push(" <|en") == [(True, " ")]
    assert reader.push("d|>") == [] and not reader.is_thinking
    assert reader.push(f"{PROMPT}{FINAL}") == [] and reader.push("H") == [(False, "H")]
    assert Harmony(PROMPT).push("Hi") == [(False, "Hi")]


@pytest.mark.parametrize(
    ("prompt", "text", "thoughts", "answer"),
    [
        ("", f"{ANALYSIS}a{NEXT}{FINAL}b", "a", "b"),
        (f"{PROMPT}<|channel|>", f"analysis<|message|>a{NEXT}{FINAL}b", "a", "b"),
        (f"{PROMPT}{ANALYSIS}", f"a{NEXT}{FINAL}b", "a", "b"),
        (f"{PROMPT}{FINAL}Well, ", "a", "", "a"),
        (f"{PROMPT}{FINAL}Well <", "a", "", "a"),
        (f"{PROMPT}<|channel|>", "nothing", "", "nothing"),
        ("<|start|>user<|message|>Hi<|end|>", "a", "", "a"),
    ],
)
def test_the_prompt_may_begin_the_message(prompt, text, thoughts, answer):
    for pieces in ([text], text):
        assert read(pieces, prompt) == (thoughts, answer)


WORDS = [
    *MARKERS,
    NEXT,
    ANALYSIS,
    FINAL,
    "assistant",
    "final",
    " to=functions.f",
    " json",
    "\n",
    " §",
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 200)))
def test_no_text_is_lost(text, cuts):
    at = [0, *sorted(min(each, len(text)) for each in cuts), len(text)]
    whole = read([text])
    assert read([text[a:b] for a, b in itertools.pairwise(at)]) == whole
    # No header may have this character.
    assert "".join(whole).count("§") == text.count("§")


# ---- beside a tokenizer --------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hi"}]
SAID = ["<|channel|>", "analysis", "<|message|>", "hm", NEXT, FINAL, "H", "i<|return|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "harmony"
    write_model(folder, templates.HARMONY, templates.HARMONY_TOKENS)
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tokenizer()


def test_the_prompts_end_is_found(tokenizer):
    ids = tokenizer.chat(MESSAGES)
    assert begun_message(tokenizer, ids) == PROMPT
    assert isinstance(reasoning_of(tokenizer, ids), Harmony)
    longer = tokenizer.encode(f"{PROMPT}{ANALYSIS}", add_bos=False)
    assert reasoning_of(tokenizer, [*ids[:-1], *longer]).is_thinking
    assert begun_message(tokenizer, ids[:3]) == "<|start|>sy"
    assert begun_message(tokenizer, ids[1:3]) == ""


@pytest.mark.parametrize(
    ("is_terminal", "wanted"), [(True, "\x1b[2mhm\x1b[22m\n\nHi"), (False, "Hi")]
)
def test_thoughts_are_dim_or_hidden(tokenizer, is_terminal, wanted):
    thoughts = Thoughts(tokenizer, tokenizer.chat(MESSAGES), is_terminal=is_terminal)
    stream = tokenizer.stream(thoughts.controls)
    ids = tokenizer.encode("".join(SAID), add_bos=False)
    assert "".join(map(stream.push, ids)) == "".join(SAID)
    shown = [thoughts.shown(each, is_last=each == SAID[-1]) for each in SAID]
    assert "".join(shown) == wanted


def test_a_terminal_shows_where_thoughts_begin_again(tokenizer):
    thoughts = Thoughts(tokenizer, tokenizer.chat(MESSAGES), is_terminal=True)
    text = f"{PREAMBLE}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c"
    assert thoughts.shown(text, is_last=True) == "a\n\n\x1b[2mb\x1b[22m\n\nc"


def test_the_conversation_keeps_the_answer_alone(tokenizer):
    ids = tokenizer.chat(MESSAGES)
    assert answer_in(tokenizer, ids, "".join(SAID)) == "Hi"
    assert answer_in(tokenizer, ids, "".join(SAID[:4])) == ""


def test_a_call_with_thoughts_and_content_is_rendered(tokenizer):
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": "Plan", "tool_calls": [call]}
    thoughtful = message | {"reasoning_content": "hm"}
    text = tokenizer.chat_text([*MESSAGES, thoughtful])
    assert f"{PROMPT}{ANALYSIS}hm\n\nPlan<|end|>{PROMPT} to=functions.f" in text
    assert f"{PROMPT}{ANALYSIS}Plan<|end|>" in tokenizer.chat_text([*MESSAGES, message])
    for each in (message, {"role": "assistant", "content": "a", "thinking": "b"}):
        assert with_calls(each) == each


# The pattern of o200k_harmony, as a tokenizer.json has it.
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text("aB's é1 \n\t/!中ª\u0301", max_size=30))
def test_gguf_files_of_gpt_oss_split_texts_as_its_folder_does(text):
    wanted = pre_tokenizers.Split(Regex(O200K), "isolated").pre_tokenize_str(text)
    found = PRE_TOKENIZERS["gpt-4o"].steps().pre_tokenize_str(text)
    assert [span for _, span in found] == [span for _, span in wanted]


def test_a_folder_as_gpt_oss_has_it(tmp_path):
    folder = tmp_path / "m"
    write_model(folder, templates.HARMONY, templates.HARMONY_TOKENS)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(O200K), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.save(str(folder / "tokenizer.json"))
    ends = [backend.token_to_id(name) for name in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ends, 1]}))
    with open_checkpoint(folder) as checkpoint:
        tokenizer = checkpoint.tokenizer()
    assert tokenizer.eos_ids == (*ends, 1)
    assert not tokenizer.prefix and not tokenizer.suffix
    assert {tokenizer.id_of(name) for name in MARKERS} <= tokenizer.special_ids
    ids = tokenizer.encode("".join(SAID), add_bos=False)
    assert tokenizer.decode(ids) == "analysishmassistantfinalHi"
    assert [tokenizer.name_of(number) for number in ids if number in tokenizer.special_ids] == [
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>"),
        "<|return|>",
    ]
    assert tokenizer.decode(tokenizer.encode("I'LL say 12345 é中")) == "I'LL say 12345 é中"
