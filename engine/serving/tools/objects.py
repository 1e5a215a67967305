"""Reads the JSON object that is a call, as its text comes."""

import json
from collections.abc import Collection
from typing import Any

# The characters of values outside strings, without brackets: blanks, numbers, true, false, null.
_PLAIN = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")
_PAIRS = {"{": "}", "[": "]"}
# Different families of models use different names for the arguments.
_ARGUMENTS = ("arguments", "parameters")


class Brackets:
    """Follows the brackets and strings of a JSON value.

    Attributes:
        closers: The characters that close the open brackets.
        is_in_string: Whether the next character belongs to a string.
    """

    def __init__(self) -> None:
        self.closers: list[str] = []
        self.is_in_string = False
        self._is_escaped = False

    def take(self, character: str) -> bool:
        """Tells whether the value may go on with this character. The text between brackets is not
        checked against JSON's grammar.
        """
        if self.is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self.is_in_string = False
            return True
        if character in _PAIRS:
            self.closers.append(_PAIRS[character])
            return True
        if not self.closers:
            return character.isspace()
        if character == self.closers[-1]:
            self.closers.pop()
            return True
        self.is_in_string = character == '"'
        return self.is_in_string or character in _PLAIN


class CallObject:
    """A call in the form {"name": ..., "arguments": {...}}; "parameters" means the same. If the
    arguments follow the name, they are passed on as they come. Otherwise both come at the end.

    Attributes:
        name: The function's name; "" while it is not known, and if this is no call.
        is_done: Whether the object is complete.
        is_whole: Whether it is a call whose arguments are an object in JSON.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """Begins before the object.

        Args:
            names: The names of the functions; None: any name.
        """
        self.name = ""
        self.is_done = self.is_whole = False
        self._names = names
        self._brackets = Brackets()
        self._written: list[str] = []
        self._new: list[str] = []
        self._is_in_arguments = self._has_streamed = False

    @property
    def depth(self) -> int:
        """Returns how many brackets are open."""
        return len(self._brackets.closers)

    @property
    def is_in_string(self) -> bool:
        """Tells whether the next character belongs to a string."""
        return self._brackets.is_in_string

    def take(self, character: str) -> bool:
        """Takes a character. Returns False, and does not take it, if with it the object would be no
        call.
        """
        is_opened = character == "{" and not self._brackets.is_in_string
        if not self._brackets.take(character):
            return False
        self._written.append(character)
        if is_opened and self.depth == 2 and not self.name and not self._begins():
            return False
        if self._is_in_arguments:
            self._new.append(character)
            self._is_in_arguments = self.depth > 1
        if character == "}" and self.depth == 0:
            self.is_done = True
            self._ends()
        return True

    def new_arguments(self) -> str:
        """Returns the characters of the arguments that are new since the last call."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _begins(self) -> bool:
        """Looks whether an object that begins here has the arguments of a call. Tells whether the
        function exists.
        """
        found = _loaded("".join(self._written) + "}}")
        if isinstance(found, dict) and next(reversed(found)) in _ARGUMENTS:
            name = found.get("name")
            if isinstance(name, str) and name:
                self._is_in_arguments = self._has_streamed = self._is_known(name)
                self.name = name if self._has_streamed else ""
                return self._has_streamed
        return True

    def _is_known(self, name: str) -> bool:
        if not _is_text(name):
            return False
        return self._names is None or name in self._names

    def _ends(self) -> None:
        found = _loaded("".join(self._written))
        if self._has_streamed:
            self.is_whole = isinstance(found, dict)
            return
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or not name or not self._is_known(name):
            return
        given = next((found[each] for each in _ARGUMENTS if each in found), None)
        # Some models write the object of the arguments as a string.
        given = {} if given is None else given
        text = given if isinstance(given, str) else json.dumps(given)
        if isinstance(_loaded(text), dict) and _is_text(text):
            self.name, self.is_whole = name, True
            self._new.append(text)


def _loaded(text: str) -> Any:
    """Returns the text's value in JSON; None if it is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _is_text(text: str) -> bool:
    """Tells whether UTF-8 can encode a text: JSON may spell single surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
