"""Converts the events of an answer to OpenAI's API: to deltas for a stream, or to a message."""

from typing import Any

from ..reading import Reader
from ..tools.events import Arguments, CallBegins, Event, Text, Thought


def deltas_of(events: list[Event]) -> list[dict[str, Any]]:
    """Returns the `delta` objects for events. Each belongs into a chunk of its own."""
    return [delta for event in events if (delta := _delta(event)) is not None]


def _delta(event: Event) -> dict[str, Any] | None:
    match event:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallBegins(index, number, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": number, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    # CallEnds has no delta in this API. Clients notice the end by the next delta.
    return None


def message_of(reader: Reader) -> dict[str, Any]:
    """Returns the message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": reader.text, "refusal": None}
    if reader.thoughts:
        message["reasoning_content"] = reader.thoughts
    if reader.calls:
        message["content"] = reader.text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reader.calls.values()
        ]
    return message
