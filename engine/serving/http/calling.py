"""Reads the tools of a request, for the chat template, the grammar and the answer's reader."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kccl

from ..tools.formats import Format, format_of
from ..tools.grammar import Functions
from ..tools.reader import CallReader
from .errors import ApiError, wrong_value
from .service import Service
from .tool_bodies import Function

_MOST_TOOLS = 128
NONE, AUTO, REQUIRED = "none", "auto", "required"


@dataclass(frozen=True)
class Calling:
    """The tools of a request, and how the model may call them.

    Attributes:
        functions: The functions that the model may call. Empty if it may call none.
        format: The format in which the model writes calls. None if it may call no function.
        must: AUTO: the model may call. REQUIRED: it must call some function. Otherwise the name of
            the function that it must call.
        most: The most calls of an answer. None allows any number.
    """

    functions: tuple[Function, ...] = ()
    format: Format | None = None
    must: str = AUTO
    most: int | None = None

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools as chat templates take them. Returns None if there are none."""
        return [{"type": "function", "function": each.given()} for each in self.functions] or None

    @property
    def controls(self) -> tuple[str, ...]:
        """Returns the texts of the control tokens with which calls are written."""
        return self.format.controls if self.format else ()

    def callable(self) -> Functions | None:
        """Returns the calls that an answer may make, for its grammar. Returns None if it may make
        none.
        """
        if self.format is None:
            return None
        is_any = self.must in (AUTO, REQUIRED)
        found = {e.name: e.parameters for e in self.functions if is_any or e.name == self.must}
        # If the request names a function, the answer must be a single call.
        return Functions(self.format, found, self.most is None and is_any)

    def reader(self) -> CallReader | None:
        """Makes a reader that finds the calls in an answer; None if it may have none."""
        if self.format is None:
            return None
        return self.format.reader([each.name for each in self.functions], self.most)


def calling_of(
    service: Service,
    functions: Sequence[Function],
    choice: str,
    *,
    is_parallel: bool | None,
) -> Calling:
    """Reads the tools of a request.

    Args:
        service: The engine.
        functions: The functions that the request describes.
        choice: NONE, AUTO, REQUIRED, or the name of a function.
        is_parallel: Whether an answer may have several calls. None means that it may.

    Raises:
        ApiError: There are too many functions, two have the same name, the choice names none of
            them, or the model has no format for calls.
    """
    names = [each.name for each in functions]
    if len(names) > _MOST_TOOLS:
        raise ApiError(
            400, f"tools has {len(names)} tools, must have at most {_MOST_TOOLS}", param="tools"
        )
    for index, name in enumerate(names):
        if name in names[:index]:
            raise wrong_value("tools", name, "a list of functions of different names")
    if choice not in (NONE, AUTO) and not names:
        raise wrong_value("tool_choice", choice, "'none' or 'auto' without tools")
    if choice not in (NONE, AUTO, REQUIRED, *names):
        known = ", ".join(map(repr, names))
        raise wrong_value("tool_choice", choice, f"a function that tools has: {known}")
    if choice == NONE or not names:
        # Without functions, the prompt does not describe them either. A model that saw them might
        # call them.
        return Calling()
    try:
        found = format_of(service.engine.tokenizer)
    except kccl.Error as error:
        raise ApiError(
            400, f"tools is {names!r:.100}, must be empty: {error}", param="tools"
        ) from None
    return Calling(tuple(functions), found, choice, 1 if is_parallel is False else None)


def chosen(choice: Any, name_of: str) -> str:
    """Reads the choice of a tool: NONE, AUTO, REQUIRED, or the name of a function.

    Args:
        choice: The value of the field tool_choice.
        name_of: If the choice is an object: the path of the field that has the function's name, as
            in "function.name".

    Raises:
        ApiError: The choice is none of these.
    """
    if choice is None:
        return AUTO
    if choice in (NONE, AUTO, REQUIRED):
        return str(choice)
    if isinstance(choice, dict) and choice.get("type") == "function":
        found: Any = choice
        for field in name_of.split("."):
            found = found.get(field) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found
    raise wrong_value(
        "tool_choice",
        choice,
        f"'none', 'auto', 'required', or an object of type 'function' with {name_of}",
    )
