"""Finds calls of gpt-oss. text/harmony.py has brought their headers into this form:

<|start|>assistant to=functions.name<|channel|>commentary <|constrain|>json<|message|>{}<|call|>
"""

import json

from ...text.harmony import AUTHOR, ENDS, FUNCTIONS, MESSAGE, START
from .reader import CallReader

BEGIN = f"{START}{AUTHOR} to="
# The most characters from a call's recipient to its arguments.
_LONGEST_HEAD = 512


class HarmonyReader(CallReader):
    """A CallReader for harmony. The header has the function's name, and the object is only the
    arguments.
    """

    marker = BEGIN
    _head = _name = ""

    def opened(self) -> None:
        """See CallReader."""
        self._head = ""
        self.take = self._in_head

    def closed(self) -> None:
        """See CallReader."""
        self.take = self._in_end

    def unwritten(self) -> str:
        """See CallReader. The object is only the arguments, so the model does not write the "}"
        that would close a call's object.
        """
        call = self.call
        return "}" if call.name and call.depth == 1 and not call.is_in_string else ""

    def _in_head(self, character: str) -> None:
        self._head += character
        self.write(character)
        if self._head.endswith(MESSAGE):
            recipient = self._head.partition("<|")[0]
            name = recipient.removeprefix(FUNCTIONS)
            if name and (name != recipient or name in self.names):
                self._name = name
                self.take = self._before_arguments
            else:
                self.refuse()
        elif len(self._head) > _LONGEST_HEAD:
            self.refuse()

    def _before_arguments(self, character: str) -> None:
        if character.isspace():
            self.write(character)
        elif character == "{":
            self.begin_object(head=f'{{"name": {json.dumps(self._name)}, "arguments": ')
            self.take(character)
        else:
            self.refuse()
            self.take(character)

    def _in_end(self, character: str) -> None:
        begun = (self.behind + character).lstrip()
        if not any(end.startswith(begun) for end in ENDS):
            self.give_back(character)
        elif begun in ENDS:
            self.behind = ""
            self.take = self.in_text
        else:
            self.behind += character
