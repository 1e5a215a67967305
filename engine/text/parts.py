"""The parts of an answer, which a reader tells apart as the text comes."""

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
    """Divides an answer into thoughts and the answer itself. It does not matter how the text is
    cut.
    """

    @property
    def is_thinking(self) -> bool:
        """Tells whether the text that comes next may be a thought."""

    def push(self, text: str) -> list[Part]:
        """Returns the parts that this text completes."""

    def finish(self) -> list[Part]:
        """Returns the text that was kept back, at the answer's end."""


def joined(parts: list[Part]) -> str:
    """Returns the text of the answer itself, without thoughts."""
    return "".join(part.text for part in parts if not part.is_thought)
