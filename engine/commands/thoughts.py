"""Formats a model's thoughts and answer for a terminal, where thoughts are dim."""

from collections.abc import Sequence

from ..text.parts import Divider, Part
from ..text.reasoning import MARKERS, reasoning_of, shown_in_chats, speaks_harmony
from ..text.tokenizer import Tokenizer

_DIM, _USUAL = "\x1b[2m", "\x1b[22m"
_PARAGRAPH = "\n\n"


class Thoughts:
    """Formats the text of an answer. On a terminal, thoughts become dim. Without a terminal, and if
    the markers of thoughts are control tokens, the text is not changed. Answers in harmony are an
    exception: they are always divided into thoughts and the answer proper, and without a terminal
    the thoughts are left out.

    Attributes:
        controls: The control tokens whose names must be in the text that shown() gets.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], *, is_terminal: bool) -> None:
        """Prepares for one answer.

        Args:
            tokenizer: The model's tokenizer.
            ids: The prompt's ids.
            is_terminal: Whether a terminal shows the answer.
        """
        self.controls = shown_in_chats(tokenizer)
        self._reasoning: Divider | None = None
        if speaks_harmony(tokenizer) or (is_terminal and not tokenizer.control_ids(MARKERS)):
            self._reasoning = reasoning_of(tokenizer, ids)
        self._is_terminal = is_terminal
        # Whether the last part was a thought. None before the first part.
        self._was_thought: bool | None = None

    def shown(self, text: str, *, is_last: bool = False) -> str:
        """Returns what to write for the next part of the answer.

        Args:
            text: The next part.
            is_last: Whether this is the last part.
        """
        if self._reasoning is None:
            return text
        parts = self._reasoning.push(text)
        parts += self._reasoning.finish() if is_last else []
        return "".join(map(self._part, parts))

    def _part(self, part: Part) -> str:
        if part.is_thought and not self._is_terminal:
            return ""
        # The Divider has removed the white space between thoughts and answer. A blank line replaces
        # it.
        is_other = self._was_thought not in (None, part.is_thought)
        between = _PARAGRAPH if is_other and not part.text.startswith(_PARAGRAPH) else ""
        self._was_thought = part.is_thought
        if part.is_thought:
            return f"{between}{_DIM}{part.text}{_USUAL}"
        return between + part.text
