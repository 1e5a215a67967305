"""The events of an answer: thoughts, text and calls, as they come."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """The next part of the model's thoughts before its answer."""

    text: str


@dataclass(frozen=True)
class Text:
    """The next part of the answer's text."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The beginning of a call, as soon as the function's name is known.

    Attributes:
        index: The call's number in the answer, from 0.
        id: The id by which the tool's result refers to the call.
        name: The function's name.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of a call's arguments, in JSON.

    Attributes:
        index: The call's number.
        text: The characters that the model wrote.
    """

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """The end of a call.

    Attributes:
        index: The call's number.
        is_whole: Whether its arguments are a JSON object. They may not be, as when the answer ends
            within them.
        written: The whole text of the call, as the model wrote it.
    """

    index: int
    is_whole: bool
    written: str


Event = Thought | Text | CallBegins | Arguments | CallEnds


def merged(events: list[Event]) -> list[Event]:
    """Joins neighbouring events that are all text, all thoughts, or all arguments."""
    found: list[Event] = []
    for each in events:
        last = found[-1] if found else None
        if isinstance(each, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + each.text)
        elif isinstance(each, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + each.text)
        elif isinstance(each, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(last.index, last.text + each.text)
        else:
            found.append(each)
    return found
