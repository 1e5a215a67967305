"""Fields of a configuration that a file holds, by name and kind."""

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

# Bytes of a JSON file, far above any configuration or tokenizer.
_MAX_JSON = 1 << 28


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        kccl.Error: It cannot be read, or it is something else.
    """
    try:
        found = path.stat()
        # To read a pipe or a device might never end.
        if not stat.S_ISREG(found.st_mode):
            raise kccl.Error(f"{path} is no ordinary file")
        if found.st_size > _MAX_JSON:
            raise kccl.Error(f"{path} has {found.st_size} bytes, must have at most 256 MiB")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise kccl.Error(f"cannot read {path}: {error.strerror}") from error
    # A file of brackets only exhausts the parser's stack.
    except (ValueError, RecursionError) as error:
        told = lookalike(path) or f": {one_line(error)}"
        raise kccl.Error(f"{path} is not JSON{told}") from error
    if not isinstance(content, dict):
        raise kccl.Error(f"{path} holds {reprlib.repr(content)}, must hold an object")
    return content


def read_optional(path: Path) -> dict[str, Any]:
    """As read_json(); empty if there is no such file."""
    return read_json(path) if path.exists() else {}


def one_line(error: BaseException) -> str:
    """An exception's text for a message of one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def unmapped(path: Path, error: Exception) -> kccl.Error | None:
    """What to raise for an error of mapping a file; None if it is no lack of memory."""
    if not isinstance(error, MemoryError) and getattr(error, "errno", None) != errno.ENOMEM:
        return None
    return kccl.Error(
        f"cannot map {path}: there is no room for its {path.stat().st_size / (1 << 20):.0f} MiB in "
        "the process's address space: raise `ulimit -v`, or use a smaller model"
    )


def shown(name: str) -> str:
    """A name that a file gives, for a message of one line: a damaged one may hold anything."""
    return name if name.isprintable() and len(name) <= 100 else reprlib.repr(name)


class Fields:
    """Values by name. A field that is None counts as not given."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the file has the field, and None in it."""
        return name in self._values and self._values[name] is None

    def value(self, *names: str) -> Any:
        """The value that is given under one or several of these names; None if under none.

        Raises:
            kccl.Error: Two of the names have different values.
        """
        given = [name for name in names if name in self]
        for name in given[1:]:
            if self._values[name] != self._values[given[0]]:
                raise kccl.Error(
                    f"{self.path}: fields {given[0]} and {name} mean the same and differ"
                )
        return self._values[given[0]] if given else None

    def integer(self, *names: str, default: int | None = None, least: int | None = None) -> int:
        """An integer, not below `least`; `default` if it is not given.

        Raises:
            kccl.Error: It is something else, or it is neither given nor has a default.
        """
        value = self._given(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(names, "an integer")
        if least is not None and value < least:
            raise self.wrong(names, f"at least {least}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """As integer(), for a number."""
        value = self._given(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(names, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(names, "a number") from None

    def positive(self, *names: str, default: float | None = None) -> float:
        """As integer(), for a finite number above 0."""
        value = self.number(*names, default=default)
        if not 0 < value < math.inf:
            raise self.wrong(names, "a number above 0")
        return value

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        """As integer(), for true or false."""
        value = self._given(names, default)
        if not isinstance(value, bool):
            raise self.wrong(names, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """As integer(), for a string."""
        value = self._given(names, default)
        if not isinstance(value, str):
            raise self.wrong(names, "a string")
        return value

    def wrong(self, names: tuple[str, ...] | str, wanted: str) -> kccl.Error:
        """The exception that says what a field must be."""
        names = (names,) if isinstance(names, str) else names
        value = " ".join(reprlib.repr(self.value(*names)).split())
        return kccl.Error(f"{self.path}: field {self.name_of(*names)} is {value}, must be {wanted}")

    def name_of(self, *names: str) -> str:
        """The name under which a value is given; the first if it is under none."""
        return next((name for name in names if name in self), names[0])

    def _given(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.value(*names)
        if value is None and default is None:
            raise kccl.Error(f"{self.path}: field {' or '.join(names)} is missing")
        return default if value is None else value
