"""Finds calls of Mistral: a list, [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; since
version 11 of their tokenizer, [TOOL_CALLS]name[ARGS]{...} for each call.
"""

import json
import re

from .events import Event
from .reader import CallReader

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(rf"([\w.-]+)\s*(?:{re.escape(ID)}\s*\w+\s*)?(?:{re.escape(ARGUMENTS)})?\s*")
_IN_HEAD = re.compile(r"[\w.\-\[\]\s]")
# The most characters between the marker and the arguments.
_LONGEST_HEAD = 256


class MistralReader(CallReader):
    """See CallReader."""

    marker = BEGIN
    _is_list = _has_name = False
    _head = ""

    def opened(self) -> None:
        """See CallReader."""
        self._is_list = self._has_name = False
        self._head = ""
        self.take = self._behind_marker

    def closed(self) -> None:
        """See CallReader."""
        self.take = self._in_list if self._is_list else self.in_text

    def unwritten(self) -> str:
        """See CallReader. If the name stands in front of the object, the object is only the
        arguments. Then the model does not write the "}" that would close a call's object.
        """
        call = self.call
        is_end = self._has_name and call.name and call.depth == 1 and not call.is_in_string
        return "}" if is_end else ""

    def finish(self) -> list[Event]:
        """See CallReader."""
        if self.take == self._in_list and not self.behind.strip(", \t\r\n"):
            self.behind = ""
        return super().finish()

    def _behind_marker(self, character: str) -> None:
        if character == "[":
            self.write(character)
            self._is_list = True
            self.take = self._before_object
        elif character.isspace():
            self.write(character)
        elif character == "{":
            self.begin_object()
            self.take(character)
        else:
            self.take = self._in_head
            self.take(character)

    def _in_head(self, character: str) -> None:
        if character == "{" and (found := _HEAD.fullmatch(self._head.lstrip())):
            self._has_name = True
            self.begin_object(head=f'{{"name": {json.dumps(found[1])}, "arguments": ')
            self.take(character)
        elif _IN_HEAD.match(character) and len(self._head) < _LONGEST_HEAD:
            self._head += character
            self.write(character)
        else:
            self.refuse()
            self.take(character)

    def _before_object(self, character: str) -> None:
        """Reads a character after "[", before the list's first object."""
        if character == "{":
            self.begin_object()
            self.take(character)
        elif character.isspace():
            self.write(character)
        else:
            self.refuse()
            self.take(character)

    def _in_list(self, character: str) -> None:
        """Reads a character of a list after one of its objects."""
        if character == "]":
            self.behind = ""
            self.take = self.in_text
        elif character == "{" and "," in self.behind:
            self.write(self.behind)
            self.behind = ""
            self.begin_object()
            self.take(character)
        elif character.isspace() or character == ",":
            self.behind += character
        else:
            self.give_back(character)
