"""Separates a model's thoughts from its answer."""

from collections.abc import Callable, Sequence

from . import harmony
from .harmony import Harmony
from .markers import Marker
from .parts import Divider, Part, joined
from .tokenizer import Tokenizer

_BEGIN, _END = "<think>", "</think>"
MARKERS = (_BEGIN, _END)
"""The markers around thoughts. They may be control tokens or ordinary text."""
# How many tokens at a prompt's end are decoded, to see whether it ends within thoughts.
_LOOKED_AT = 16


class Reasoning:
    """A Divider (parts.py) for thoughts between markers. Drops the markers, and the white space
    around them. Finds thoughts only at the answer's beginning.
    """

    def __init__(self, *, is_inside: bool = False) -> None:
        """Begins before the first text of the answer.

        Args:
            is_inside: Whether the prompt ends within thoughts.
        """
        self._is_inside = is_inside
        self._head = ""
        self._end = Marker(_END)
        self._parts: list[Part] = []
        self._take: Callable[[str], None] | None = self._at_start

    @property
    def is_thinking(self) -> bool:
        """See Divider."""
        return self._take == self._in_thoughts or (self._is_inside and self._take == self._at_start)

    def push(self, text: str) -> list[Part]:
        """See Divider."""
        for index, character in enumerate(text):
            if self._take is None:
                # The answer itself has begun. From now on markers are ordinary text.
                self._give(False, text[index:])
                break
            self._take(character)
        return self._given()

    def finish(self) -> list[Part]:
        """See Divider."""
        if self._take == self._at_start:
            self._give(self._is_inside, self._head)
        elif self._take == self._in_thoughts:
            self._give(True, self._end.held.rstrip())
        return self._given()

    def _at_start(self, character: str) -> None:
        self._head += character
        begun = self._head.lstrip()
        if begun == _BEGIN:
            self._take = self._before_thoughts
        elif not _BEGIN.startswith(begun):
            text, self._head = self._head, ""
            if not self._is_inside:
                self._take = None
                self._give(False, text)
                return
            self._take = self._before_thoughts
            for each in text:
                self._take(each)

    def _before_thoughts(self, character: str) -> None:
        if not character.isspace():
            self._take = self._in_thoughts
            self._in_thoughts(character)

    def _in_thoughts(self, character: str) -> None:
        found = self._end.take(character)
        if found is None:
            self._take = self._before_answer
        else:
            self._give(True, found)

    def _before_answer(self, character: str) -> None:
        if not character.isspace():
            self._take = None
            self._give(False, character)

    def _give(self, is_thought: bool, text: str) -> None:
        if not text:
            return
        if self._parts and self._parts[-1].is_thought == is_thought:
            text = self._parts.pop().text + text
        self._parts.append(Part(is_thought, text))

    def _given(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def speaks_harmony(tokenizer: Tokenizer) -> bool:
    """Tells whether the model answers in harmony (harmony.py)."""
    return harmony.is_in(tokenizer.template_source())


def markers_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the markers that reasoning_of()'s Divider must find in an answer's text."""
    return harmony.MARKERS if speaks_harmony(tokenizer) else MARKERS


def shown_in_chats(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the control tokens whose names must be in the text of a conversation's answers. In
    harmony these divide the answer from the thoughts; other models need none.
    """
    return tokenizer.control_ids(harmony.MARKERS) if speaks_harmony(tokenizer) else ()


def answer_in(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> str:
    """Returns the answer as a conversation must keep it for later prompts. In harmony this is the
    answer without thoughts. Other models' templates remove thoughts themselves.

    Args:
        tokenizer: The model's tokenizer.
        ids: The prompt's ids.
        text: The text that the model wrote.
    """
    if not speaks_harmony(tokenizer):
        return text
    reader = Harmony(begun_message(tokenizer, ids))
    return joined([*reader.push(text), *reader.finish()])


def reasoning_of(tokenizer: Tokenizer, ids: Sequence[int]) -> Divider | None:
    """Makes the Divider of an answer in a conversation. Returns None if the chat template has no
    thoughts.

    Args:
        tokenizer: The model's tokenizer.
        ids: The prompt, from Tokenizer.chat().
    """
    if speaks_harmony(tokenizer):
        return Harmony(begun_message(tokenizer, ids))
    source = tokenizer.template_source()
    if not any(marker in source for marker in MARKERS):
        return None
    return Reasoning(is_inside=_end_of(tokenizer, ids).endswith(_BEGIN))


def begun_message(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Returns the end of a prompt in harmony, from its last START on: the answer continues this
    message. Returns "" if the prompt has no START.
    """
    start = tokenizer.id_of(harmony.START)
    at = next((at for at in reversed(range(len(ids))) if ids[at] == start), len(ids))
    stream = tokenizer.stream(tokenizer.control_ids(harmony.MARKERS))
    return "".join(map(stream.push, ids[at:]))


def has_thought(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Tells whether a prompt ends with "</think>". Templates write empty thoughts if a request asks
    for none.
    """
    return _end_of(tokenizer, ids).endswith(_END)


def _end_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Returns the text of a prompt's last _LOOKED_AT tokens, without white space at the end."""
    stream = tokenizer.stream(tokenizer.control_ids(MARKERS))
    return "".join(map(stream.push, ids[-_LOOKED_AT:])).rstrip()
