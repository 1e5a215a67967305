"""Reads a call's JSON object character by character."""

import json
from collections.abc import Collection
from typing import Any

# The characters that JSON has outside strings, except brackets and quotes: blanks, separators, and
# those of numbers, true, false and null.
_PLAIN = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")
_PAIRS = {"{": "}", "[": "]"}
# The names of the field with the arguments, which differ between families of models.
_ARGUMENTS = ("arguments", "parameters")


class Brackets:
    """Counts the open brackets of a JSON value, and recognises its strings.

    Attributes:
        closers: The characters that will close the open brackets, the innermost last.
        is_in_string: Whether the next character belongs to a string.
    """

    def __init__(self) -> None:
        self.closers: list[str] = []
        self.is_in_string = False
        self._is_escaped = False

    def take(self, character: str) -> bool:
        """Adds a character. Returns False if JSON cannot have it here. Checks only brackets,
        strings and the set of characters, not JSON's whole grammar.
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
    """Reads a call of the form {"name": ..., "arguments": {...}}. The arguments' field may also be
    "parameters". If it follows the name, new_arguments() returns the arguments as they come.
    Otherwise the name and the arguments are known only at the object's end.

    Attributes:
        name: The function's name. "" while it is not known, and if the object is no call.
        is_done: Whether the object is complete.
        is_whole: Whether it is complete and a call whose arguments are a JSON object.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """Begins before the object's first character.

        Args:
            names: The names that a function may have. None allows any name.
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
        """Adds a character. Returns False if with it the object cannot be a call. Then no more
        characters may be added.
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
        """Returns the arguments' characters that have come since this method was last called."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _begins(self) -> bool:
        """Called when an inner object begins. If it is the arguments, and the name came before,
        stores the name. Returns False if no function has this name, else True.
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
        # Some models write the arguments' object as a string that has its JSON.
        given = {} if given is None else given
        text = given if isinstance(given, str) else json.dumps(given)
        if isinstance(_loaded(text), dict) and _is_text(text):
            self.name, self.is_whole = name, True
            self._new.append(text)


def _loaded(text: str) -> Any:
    """Parses JSON. Returns None if the text is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _is_text(text: str) -> bool:
    """Tells whether UTF-8 can encode a text. JSON may contain lone surrogates as escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
