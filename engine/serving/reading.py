"""Divides an answer of a chat model into thoughts, text, and calls of tools."""

from dataclasses import dataclass

from ..text.parts import Divider
from .tools.events import Arguments, CallBegins, CallEnds, Event, Text, Thought, merged
from .tools.reader import CallReader


@dataclass
class Call:
    """A call of a function, which may still be incomplete.

    Attributes:
        id: The id by which the tool's result refers to the call.
        name: The function's name.
        arguments: The arguments so far, as JSON.
    """

    id: str
    name: str
    arguments: str = ""


class Reader:
    """Reads an answer while its text comes: returns events, and collects the whole answer.

    Attributes:
        thoughts: The model's thoughts so far.
        text: The answer's text so far. It includes calls whose arguments are no JSON.
        calls: Number of a call -> the call, for calls that are complete.
        events: All events so far, in order. Neighbouring events of the same kind are joined.
        num_begun: The number of calls that have begun.
    """

    def __init__(self, reasoning: Divider | None = None, calls: CallReader | None = None) -> None:
        """Begins before the first text of an answer.

        Args:
            reasoning: Finds thoughts. None if there are none.
            calls: Finds calls. None if there are none.
        """
        self.thoughts = self.text = ""
        self.calls: dict[int, Call] = {}
        self.events: list[Event] = []
        self.num_begun = 0
        self._reasoning, self._reader = reasoning, calls
        self._open: dict[int, Call] = {}

    @property
    def divides(self) -> bool:
        """Tells whether the reader separates thoughts or calls from the text."""
        return self._reasoning is not None or self._reader is not None

    @property
    def is_thinking(self) -> bool:
        """Tells whether the text that comes next may be a thought."""
        return self._reasoning is not None and self._reasoning.is_thinking

    def push(self, text: str, *, is_last: bool = False) -> list[Event]:
        """Adds text. Returns the events that it completes.

        Args:
            text: The next part of the answer.
            is_last: Whether this is the last part.
        """
        parts = [(False, text)]
        if self._reasoning is not None:
            parts = [*self._reasoning.push(text)]
            parts += self._reasoning.finish() if is_last else []
        events: list[Event] = []
        for is_thought, part in parts:
            if is_thought:
                events.append(Thought(part))
            elif self._reader is not None:
                events += self._reader.push(part)
            elif part:
                events.append(Text(part))
        if is_last and self._reader is not None:
            events += self._reader.finish()
        events = merged(events)
        for event in events:
            self._note(event)
        self.events[-1:] = merged([*self.events[-1:], *events])
        return events

    def _note(self, event: Event) -> None:
        match event:
            case Thought(text):
                self.thoughts += text
            case Text(text):
                self.text += text
            case CallBegins(index, number, name):
                self._open[index] = Call(number, name)
                self.num_begun += 1
            case Arguments(index, text):
                self._open[index].arguments += text
            case CallEnds(index, is_whole, written):
                call = self._open.pop(index)
                if is_whole:
                    self.calls[index] = call
                else:
                    self.text += written
