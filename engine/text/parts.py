"""The interface of what divides an answer into thoughts and text while it comes."""

from typing import NamedTuple, Protocol


class Part(NamedTuple):
    """A part of an answer.

    Attributes:
        is_thought: Whether the part is a thought.
        text: The part's text.
    """

    is_thought: bool
    text: str


class Divider(Protocol):
    """Divides an answer's text into thoughts and the answer itself. The text may come in pieces of
    any length.
    """

    @property
    def is_thinking(self) -> bool:
        """Tells whether the text that comes next may be a thought."""

    def push(self, text: str) -> list[Part]:
        """Adds a piece of text. Returns the parts that are certain now. Text that may be a marker
        is held back.
        """

    def finish(self) -> list[Part]:
        """Returns the parts that were held back. Must be called at the answer's end."""


def joined(parts: list[Part]) -> str:
    """Returns the text of the answer itself, without thoughts."""
    return "".join(part.text for part in parts if not part.is_thought)
