"""Models of the tools and calls in bodies, in the form of /v1/chat/completions."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, field_validator

from .nesting import MOST_LEVELS, nests_too_deeply

FunctionName = Annotated[StrictStr, Field(pattern=r"^[\w.-]{1,128}$")]


def arguments_of(text: str) -> dict[str, Any]:
    """Parses the arguments of a call, which are JSON. An empty text means no arguments.

    Raises:
        ValueError: The text is no JSON object, or nests too deeply.
    """
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be an object in JSON")
    if nests_too_deeply(found):
        raise ValueError(f"must not nest deeper than {MOST_LEVELS} levels")
    return found


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class Function(_Body):
    """A function that the model may call."""

    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None

    def given(self) -> dict[str, Any]:
        """Returns the function in the form that chat templates take."""
        found = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in found.items() if value is not None}


class Tool(_Body):
    """A tool that a request describes. Only functions are supported."""

    type: Literal["function"]
    function: Function


class CalledFunction(_Body):
    """The function that a call names, and its arguments."""

    name: StrictStr
    arguments: StrictStr

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        arguments_of(text)
        return text


class ToolCall(_Body):
    """A call in an assistant's message."""

    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def given(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates take. Its arguments are an object, not
        text, because templates write them as JSON themselves.
        """
        function = {
            "name": self.function.name,
            "arguments": arguments_of(self.function.arguments),
        }
        return {"id": self.id, "type": "function", "function": function}
