"""Makes errors in the form in which OpenAI's clients read them."""

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError
from starlette.responses import JSONResponse

# HTTP status -> OpenAI's type of error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

# Names of types that pydantic adds to the path of an error, after the fields' names.
_KINDS = ("str", "int", "float", "bool")


T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body. Validation stops at the first wrong item, because a list may have a million of
them, and only one is reported."""


class ApiError(Exception):
    """An error with which a request is answered.

    Attributes:
        status: The HTTP status.
        param: The field of the request that is wrong, or None.
        code: OpenAI's code of the error, for programs, or None.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_escaped(message))
        self.status, self.code = status, code
        self.param = None if param is None else _escaped(param)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the error as a JSON object."""
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        """Returns the error as an answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def _escaped(text: str) -> str:
    """Escapes surrogates. A request's JSON may have them, but an answer's UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()


def wrong_value(param: str, value: Any, must: str) -> ApiError:
    """Returns the error for a field, which says its value and what it must be."""
    return ApiError(400, f"{param} is {reprlib.repr(value)}, must be {must}", param=param)


def of_validation(error: ValidationError, at: str = "") -> ApiError:
    """Converts pydantic's error to an ApiError for one wrong field. `at` is the path of the part of
    the body that was validated. "" means the whole body.
    """
    # A field of several possible types has an error for each. If the value has one of the types but
    # wrong parts, the parts' errors say more than the other types'. So the deepest error, and none
    # about a type, is preferred.
    found = error.errors(include_url=False, include_context=False)
    first = min(found, key=lambda each: (each["type"].endswith("_type"), -len(each["loc"])))
    param = at
    for index, part in enumerate(first["loc"]):
        # Leaves out a type's name at the end, which is no field.
        if part in _KINDS and index + 1 == len(first["loc"]):
            continue
        if isinstance(part, int):
            param += f"[{part}]"
        elif part.isidentifier():
            param += f".{part}" if param else part
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing, must be given", param=param)
    shown = reprlib.repr(first["input"])
    return ApiError(400, f"{param or 'the body'} is {shown}: {message}", param=param or None)
