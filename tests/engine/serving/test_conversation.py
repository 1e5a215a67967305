"""Conversations from Python, and messages that spell out control tokens."""

import pytest
from tiny_models import MESSAGES

import kccl
from kccl.engine import Engine
from kccl.engine.text.literal import Literal


def test_a_message_cannot_spell_control_tokens():
    literal = Literal(["<|user|>", "<|user", "|", "<a><b>", "<b>"])
    assert literal.marked(MESSAGES) == (MESSAGES, "")
    content = [{"type": "text", "text": "<|user|><a><b>"}]
    found, mark = literal.marked([{"role": "user", "content": content}])
    text = found[0]["content"][0]["text"]
    assert text.replace(mark, "") == "<|user|><a><b>"
    assert all("<|user" not in part and "<b>" not in part for part in text.split(mark))


def test_the_mark_is_no_character_of_the_messages():
    found, mark = Literal(["<s>"]).marked(["\ue000<s>\ue001"])
    assert mark == "\ue002" and found == ["\ue000<\ue002s>\ue001"]


def test_messages_without_a_character_for_the_mark_are_refused():
    private = "".join(map(chr, range(0xE000, 0xF900)))
    assert Literal(["<s>"]).marked([private]) == ([private], "")
    with pytest.raises(kccl.InvalidArgument, match="all 6400 characters of private use"):
        Literal(["<s>"]).marked([private, "<s>"])


@pytest.fixture
def engine(chat_model):
    with Engine(chat_model, blocks=1, prefixes=2) as engine:
        yield engine


def test_control_tokens_in_messages_stay_text(engine):
    tokenizer = engine.tokenizer
    special = next(tokenizer.name_of(each) for each in tokenizer.special_ids)
    messages = [{"role": "user", "content": f"a{special}b"}]
    spelt, literal = (tokenizer.chat(messages, literal=each) for each in (False, True))
    number = tokenizer.encode(special, add_bos=False)[0]
    assert spelt.count(number) == literal.count(number) + 1
    assert f"a{special}b" in tokenizer.decode(literal)


def test_turns_go_on_where_the_last_one_ended(engine):
    with engine.conversation("Be brief.", max_tokens=6) as chat:
        first = chat.ask("Hi")
        assert [each["role"] for each in chat.messages] == ["system", "user", "assistant"]
        assert chat.messages[-1]["content"] == first
        num_prompt = len(engine.tokenizer.chat(chat.messages[:2]))
        chat.ask("And you?")
        assert engine._runner.num_cached >= num_prompt - 1
        chat.reset()
        assert chat.messages == [{"role": "system", "content": "Be brief."}]
        assert chat.ask("Hi") == first


def test_an_answer_that_was_ended_is_kept_as_it_is(engine):
    chat = engine.conversation(max_tokens=40)
    pieces = chat.stream("Hi")
    text = next(pieces).text + next(pieces).text
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": text}
    assert engine.submit([1], max_tokens=1).job.ids == [1]
