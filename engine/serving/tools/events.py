"""The parts of an answer, as they come."""

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
    """A call whose function is known.

    Attributes:
        index: Its number in the answer.
        id: The id that the tool's result names.
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
        is_whole: Whether its arguments are an object in JSON. An answer may end within them.
        written: The whole text of the call, as the model wrote it.
    """

    index: int
    is_whole: bool
    written: str


Event = Thought | Text | CallBegins | Arguments | CallEnds


def merged(events: list[Event]) -> list[Event]:
    """Joins neighbouring events of one kind."""
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
