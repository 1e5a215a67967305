"""Makes the output of a response: its items, and the events of a stream."""

from typing import Any

from ..reading import Reader
from ..tools.events import Arguments, CallBegins, CallEnds, Event, Text, Thought
from .service import new_id

Told = dict[str, Any]
_MESSAGE, _REASONING, _CALL = "message", "reasoning", "function_call"
# Type of an item -> the type of its content part, which is also in the names of its text's events.
_PARTS = {_MESSAGE: "output_text", _REASONING: "reasoning_text"}


class Output:
    """Collects the items of a response while the answer comes.

    Attributes:
        items: All items so far. The last one may be incomplete.
    """

    def __init__(self) -> None:
        self.items: list[Told] = []
        self._is_open = False
        self._told: list[Told] = []

    def take(self, events: list[Event]) -> list[Told]:
        """Adds the next events of the answer's reader. Returns the API's events for them."""
        for event in events:
            match event:
                case Thought(text):
                    self._add(_REASONING, text)
                case Text(text):
                    self._add(_MESSAGE, text)
                case CallBegins(_, number, name):
                    more = {"call_id": number, "name": name, "arguments": ""}
                    self._open(_CALL, "fc", more)
                case Arguments(_, text):
                    self.items[-1]["arguments"] += text
                    self._tell("response.function_call_arguments.delta", delta=text)
                case CallEnds(_, is_whole, _):
                    self._close("completed" if is_whole else "incomplete")
        return self._given()

    def finish(self, status: str) -> list[Told]:
        """Completes the last item, and returns the API's events for that. Must be called at the
        answer's end.

        Args:
            status: The status of the last item: "completed" or "incomplete".
        """
        if not self.items:
            self._add(_MESSAGE, "")
        self._close(status)
        return self._given()

    def _add(self, kind: str, text: str) -> None:
        """Adds text to a message, or to the model's thoughts. Opens an item if needed."""
        if not self._is_open or self.items[-1]["type"] != kind:
            if kind == _MESSAGE:
                self._open(kind, "msg", {"role": "assistant", "content": []})
            else:
                self._open(kind, "rs", {"summary": [], "content": []})
            part = _part(kind, "")
            self._tell("response.content_part.added", content_index=0, part=part)
            self.items[-1]["content"] = [_part(kind, "")]
        self.items[-1]["content"][0]["text"] += text
        if text:
            self._tell(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **_more(kind))

    def _open(self, kind: str, prefix: str, more: Told) -> None:
        self._close("completed")
        item = {"id": new_id(prefix, "_"), "type": kind, "status": "in_progress"} | more
        self.items.append(item)
        self._is_open = True
        self._tell("response.output_item.added", item=dict(item))

    def _close(self, status: str) -> None:
        if not self._is_open:
            return
        item = self.items[-1]
        kind, item["status"] = item["type"], status
        if kind == _CALL:
            told = {"name": item["name"], "arguments": item["arguments"]}
            self._tell("response.function_call_arguments.done", **told)
        else:
            part = item["content"][0]
            text = part["text"]
            self._tell(f"response.{_PARTS[kind]}.done", content_index=0, text=text, **_more(kind))
            self._tell("response.content_part.done", content_index=0, part=part)
        self._tell("response.output_item.done", item=item)
        self._is_open = False

    def _tell(self, kind: str, **more: Any) -> None:
        where: Told = {"output_index": len(self.items) - 1}
        if "item" not in more:
            where["item_id"] = self.items[-1]["id"]
        self._told.append({"type": kind} | where | more)

    def _given(self) -> list[Told]:
        told, self._told = self._told, []
        return told


def _part(kind: str, text: str) -> Told:
    more: Told = {"annotations": [], "logprobs": []} if kind == _MESSAGE else {}
    return {"type": _PARTS[kind], "text": text} | more


def _more(kind: str) -> Told:
    """Returns the further fields that events of a message's text have."""
    return {"logprobs": []} if kind == _MESSAGE else {}


def output_of(reader: Reader, status: str) -> list[Told]:
    """Returns the items of a whole answer. They are those that its stream would have.

    Args:
        reader: The reader that has read the answer.
        status: As in Output.finish().
    """
    output = Output()
    output.take(reader.events)
    output.finish(status)
    return output.items
