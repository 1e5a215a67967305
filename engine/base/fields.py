"""Reads fields of a configuration file by name and type."""

import errno
import json
import math
import reprlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kccl

from .lookalikes import lookalike

# The size in bytes up to which a JSON file is read: 256 MiB, far more than any configuration or
# tokenizer has.
_MAX_JSON = 1 << 28


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        kccl.Error: The file cannot be read, or holds something else.
    """
    try:
        found = path.stat()
        # A pipe or a device is refused, because reading it might never end.
        if not stat.S_ISREG(found.st_mode):
            raise kccl.Error(f"{path} is no ordinary file")
        if found.st_size > _MAX_JSON:
            raise kccl.Error(f"{path} has {found.st_size} bytes, must have at most 256 MiB")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise kccl.Error(f"cannot read {path}: {error.strerror}") from error
    # json.loads() raises RecursionError if brackets are nested too deeply for the parser's stack.
    except (ValueError, RecursionError) as error:
        told = lookalike(path) or f": {one_line(error)}"
        raise kccl.Error(f"{path} is not JSON{told}") from error
    if not isinstance(content, dict):
        raise kccl.Error(f"{path} holds {reprlib.repr(content)}, must hold an object")
    return content


def read_optional(path: Path) -> dict[str, Any]:
    """Does what read_json() does. Returns {} if there is no such file."""
    return read_json(path) if path.exists() else {}


def one_line(error: BaseException) -> str:
    """Returns an exception's text as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def unmapped(path: Path, error: Exception) -> kccl.Error | None:
    """Returns the error to raise if a file could not be mapped for lack of memory. Returns None if
    `error` has another reason.
    """
    if not isinstance(error, MemoryError) and getattr(error, "errno", None) != errno.ENOMEM:
        return None
    return kccl.Error(
        f"cannot map {path}: there is no room for its {path.stat().st_size / (1 << 20):.0f} MiB in "
        "the process's address space: raise `ulimit -v`, or use a smaller model"
    )


def shown(name: str) -> str:
    """Returns a name from a file in a form that fits into a message of one line. A damaged file may
    hold any characters.
    """
    return name if name.isprintable() and len(name) <= 100 else reprlib.repr(name)


class Fields:
    """The fields of a file: values by name. A field whose value is None counts as missing."""

    def __init__(self, path: Path, values: Mapping[str, Any], within: str = "") -> None:
        """Wraps the fields of a file, or of an object in it. `within` is the object's name for
        errors, with a dot at its end.
        """
        self.path = path
        self._values = values
        self._within = within

    def inner(self, name: str) -> "Fields":
        """Returns the fields of an object within this one.

        Raises:
            kccl.Error: The field is no object, or is missing.
        """
        value = self._given((name,), None)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(self.path, value, f"{self._within}{name}.")

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self) -> tuple[str, ...]:
        """Returns the names of all fields, in the file's order."""
        return tuple(self._values)

    def is_null(self, name: str) -> bool:
        """Tells whether the file has the field and gives it the value null."""
        return name in self._values and self._values[name] is None

    def value(self, *names: str) -> Any:
        """Returns the value of a field that may be stored under any of these names. Returns None if
        the file has none of them.

        Raises:
            kccl.Error: Two of the names have different values.
        """
        given = [name for name in names if name in self]
        for name in given[1:]:
            if self._values[name] != self._values[given[0]]:
                raise kccl.Error(
                    f"{self.path}: fields {self._within}{given[0]} and {self._within}{name} "
                    "mean the same and differ"
                )
        return self._values[given[0]] if given else None

    def integer(self, *names: str, default: int | None = None, least: int | None = None) -> int:
        """Returns an integer of at least `least`. Returns `default` if the field is missing.

        Raises:
            kccl.Error: The value is no integer or is below `least`, or the field is missing and has
                no default.
        """
        value = self._given(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(names, "an integer")
        if least is not None and value < least:
            raise self.wrong(names, f"at least {least}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Returns a number as a float. Arguments and errors are those of integer()."""
        value = self._given(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(names, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(names, "a number") from None

    def positive(self, *names: str, default: float | None = None) -> float:
        """Returns a finite number above 0. Arguments and errors are those of integer()."""
        value = self.number(*names, default=default)
        if not 0 < value < math.inf:
            raise self.wrong(names, "a number above 0")
        return value

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        """Returns True or False. Arguments and errors are those of integer()."""
        value = self._given(names, default)
        if not isinstance(value, bool):
            raise self.wrong(names, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """Returns a string. Arguments and errors are those of integer()."""
        value = self._given(names, default)
        if not isinstance(value, str):
            raise self.wrong(names, "a string")
        return value

    def wrong(self, names: tuple[str, ...] | str, wanted: str) -> kccl.Error:
        """Returns the error that says what a field is and what it must be."""
        names = (names,) if isinstance(names, str) else names
        value = " ".join(reprlib.repr(self.value(*names)).split())
        field = shown(self._within + self.name_of(*names))
        return kccl.Error(f"{self.path}: field {field} is {value}, must be {wanted}")

    def name_of(self, *names: str) -> str:
        """Returns which of these names the file has. Returns the first name if it has none."""
        return next((name for name in names if name in self), names[0])

    def _given(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.value(*names)
        if value is None and default is None:
            told = " or ".join(shown(self._within + each) for each in names)
            raise kccl.Error(f"{self.path}: field {told} is missing")
        return default if value is None else value
