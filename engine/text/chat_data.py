"""Converts the arguments of a chat template to plain data, as transformers does. A template comes
with a model and may not be trusted, so it gets no objects with methods.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

import kccl

from .function_schemas import schema_of

# The fields in which a message may have its author's thoughts. The first one that a message has
# counts.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def conversation_of(messages: Any) -> list[dict[str, Any]]:
    """Returns messages as templates expect them. A message is a mapping, a dataclass or a model of
    pydantic. A field that is None counts as absent.

    Raises:
        InvalidArgument: `messages` is no list or is empty, or one of them is no message.
    """
    messages = getattr(messages, "messages", messages)
    is_one = isinstance(messages, str | bytes | Mapping) or _fields_of(messages) is not None
    if is_one or not isinstance(messages, Iterable):
        raise kccl.InvalidArgument(
            f"messages is of type {type(messages).__name__}, must be a list of messages"
        )
    found = [_message(f"messages[{index}]", each) for index, each in enumerate(messages)]
    if not found:
        raise kccl.InvalidArgument("messages is empty, must have at least one message")
    return found


def variables_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables of a template as plain data. Functions among `tools` become their
    schemas.

    Raises:
        InvalidArgument: A value is no plain data, or `tools` or `documents` is no list of objects.
    """
    found = dict(given)
    for name in ("tools", "documents"):
        if (listed := given.get(name)) is None:
            continue
        if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Iterable):
            raise kccl.InvalidArgument(
                f"{name} is of type {type(listed).__name__}, must be a list of objects"
            )
        found[name] = [_object(name, index, each) for index, each in enumerate(listed)]
    return {name: _plain(name, value) for name, value in found.items()}


def _object(name: str, index: int, value: Any) -> Any:
    where = f"{name}[{index}]"
    if name == "tools" and (inspect.isfunction(value) or inspect.ismethod(value)):
        return schema_of(value, where)
    if not isinstance(value, Mapping) and _fields_of(value) is None:
        more = ", or a function with type hints and a docstring" if name == "tools" else ""
        raise kccl.InvalidArgument(
            f"{where} is of type {type(value).__name__}, must be an object{more}"
        )
    return value


def _message(where: str, message: Any) -> dict[str, Any]:
    given = _plain(where, message)
    if isinstance(given, list | tuple):
        raise kccl.InvalidArgument(
            f"{where} is a list, must be a message: give one conversation at a time"
        )
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise kccl.InvalidArgument(f"{where} is {message!r:.200}, must be a message with a role")
    given = {name: value for name, value in given.items() if value is not None}
    thought = next((given[name] for name in _THOUGHTS if name in given), None)
    if thought is not None:
        given = {"thinking": thought, **given, "reasoning_content": thought}
    return given


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Returns the fields of a dataclass or a model of pydantic. Returns None for other values."""
    if isinstance(value, type):
        return None
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    dumped = value.model_dump() if callable(getattr(value, "model_dump", None)) else None
    return dumped if isinstance(dumped, dict) else None


def _plain(where: str, value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return _plain(where, value.item())
    # Instances of subclasses are converted to the base class, because they may have other methods.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Enum):
        return _plain(where, value.value)
    if isinstance(value, Mapping):
        return {
            _plain(where, name): _plain(f"{where}.{name}", each) for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        some = [_plain(f"{where}[{index}]", each) for index, each in enumerate(value)]
        return some if isinstance(value, list) else tuple(some)
    if (found := _fields_of(value)) is not None:
        return _plain(where, found)
    raise kccl.InvalidArgument(
        f"{where} is of type {type(value).__name__}, must be text, a number, true, false, null, a "
        "list, or an object"
    )
