"""Describes Python functions as tools, as transformers' get_json_schema() does. It reads type hints
and a docstring in Google's style.
"""

import inspect
import json
import re
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import kccl

_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
# The types of values that a schema's "enum" can have.
_SCALARS = (int, float, str, bool, type(None))
# Patterns of a docstring's beginning, of its section Args and of its section Returns.
_END = r"[\n\s]*(?:Returns:|Raises:|\Z)"
_ABOUT = re.compile(r"\A(.*?)[\n\s]*(?:Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGS = re.compile(rf"\n\s*Args:\n(.*?){_END}", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(?:Raises:|\Z)", re.DOTALL)
# The first line of an argument in the section Args, as in "name (type): text".
_ARG = re.compile(r"([ \t]*)(\w+)(?:[ \t]*\([^()\n]*\))?:[ \t]*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class _Unknown(Exception):
    """Raised for a type hint that no schema describes."""


def schema_of(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Returns a function's description as a tool, which has a JSON schema of its arguments.

    Args:
        function: A function or method, with type hints, whose docstring describes its arguments.
        where: The name of the function's place, as in "tools[0]", for messages.

    Raises:
        InvalidArgument: A type hint or a description is missing, or no schema describes a hint.
    """
    name = getattr(function, "__name__", "operation")
    doc = (inspect.getdoc(function) or "").strip()
    if not doc:
        raise _wrong(where, name, "has no docstring, must have one that describes its arguments")
    found = _ABOUT.search(doc)
    about = found[1].strip() if found else ""
    try:
        properties, required, returns = _hints(function, where, name)
    except _Unknown as error:
        raise _wrong(where, name, str(error)) from None
    told = _described(doc)
    for argument, schema in properties.items():
        if argument not in told:
            raise _wrong(
                where, name, f"has no description of {argument} under 'Args:' in its docstring"
            )
        text = told[argument]
        if choices := _CHOICES.search(text):
            try:
                listed = json.loads(choices[1])
            except ValueError:
                raise _wrong(where, name, f"has choices of {argument} that are no JSON") from None
            schema["enum"] = [each.strip() if isinstance(each, str) else each for each in listed]
            text = text[: choices.start()].strip()
        schema["description"] = text
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    described = {"name": name, "description": about, "parameters": parameters}
    if returns is not None:
        if found := _RETURNS.search(doc):
            returns["description"] = found[1].strip()
        described["return"] = returns
    return {"type": "function", "function": described}


def _wrong(where: str, name: str, told: str) -> kccl.InvalidArgument:
    return kccl.InvalidArgument(f"{where}, the function {name}, {told}")


def _described(doc: str) -> dict[str, str]:
    """Returns argument -> its description in the docstring."""
    found: dict[str, str] = {}
    section = _ARGS.search(doc)
    indent, name = "", ""
    for line in section[1].splitlines() if section else ():
        begun = _ARG.match(line)
        # A line with a larger indent continues the argument's description.
        if begun and not (name and len(begun[1]) > len(indent)):
            indent, name = begun[1], begun[2]
            found[name] = begun[3].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _hints(
    function: Callable[..., Any], where: str, name: str
) -> tuple[dict[str, dict[str, Any]], list[str], dict[str, Any] | None]:
    """Returns the schemas of the arguments, the names of those without a default, and the schema of
    the result. The last is None if no schema describes the result.
    """
    try:
        hints, signature = get_type_hints(function), inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise _Unknown(f"has type hints that cannot be read: {error}") from None
    required = []
    for index, (argument, parameter) in enumerate(signature.parameters.items()):
        has_hint = parameter.annotation is not inspect.Parameter.empty
        if index == 0 and argument in ("self", "cls") and not has_hint:
            continue
        if not has_hint:
            raise _Unknown(f"has no type hint of {argument}, must have one")
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    returns = None
    if "return" in hints:
        try:
            returns = _schema(hints.pop("return"), "its result")
        except _Unknown:
            # A model writes only arguments. So the description may do without the result.
            returns = None
    return {each: _schema(hint, each) for each, hint in hints.items()}, required, returns


def _schema(hint: Any, of: str) -> dict[str, Any]:
    """Returns the schema of a type hint."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None and isinstance(hint, type) and issubclass(hint, Enum):
        return _listed([member.value for member in hint], of)
    if origin is None:
        if hint not in _TYPES:
            raise _Unknown(
                f"has the type hint {hint!r} of {of}, which no schema describes: give the tool's "
                "JSON schema instead"
            )
        return dict(_TYPES[hint])
    if origin in (Union, types.UnionType):
        return _union(inner, of)
    if origin is Literal:
        return _listed(list(inner), of)
    if not inner and origin in _TYPES:
        return dict(_TYPES[origin])
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], of)}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_schema(each, of) for each in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], of)}
    raise _Unknown(f"has the type hint {hint!r} of {of}, which no schema describes")


def _union(inner: tuple[Any, ...], of: str) -> dict[str, Any]:
    some = [_schema(each, of) for each in inner if each is not type(None)]
    if len(some) == 1:
        found = some[0]
    elif all(each.keys() == {"type"} and isinstance(each["type"], str) for each in some):
        names = sorted({each["type"] for each in some})
        found = {"type": names[0] if len(names) == 1 else names}
    else:
        found = {"anyOf": some}
    return found | ({"nullable": True} if type(None) in inner else {})


def _listed(values: list[Any], of: str) -> dict[str, Any]:
    """Returns the schema of an argument that must be one of several values."""
    if not values or any(type(value) not in _SCALARS for value in values):
        raise _Unknown(f"has values of {of} that are not text, numbers, true, false or null")
    kinds = list(dict.fromkeys(_TYPES[type(value)]["type"] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
