"""Reads the fields that say which form an answer must have: OpenAI's response_format, and those of
vLLM and llama.cpp. Compiles them to grammars.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

import kccl

from ...api import Engine
from ...model.grammar import Grammar
from .errors import ApiError, ListOf, wrong_value

R = TypeVar("R")

# The largest number of characters of a grammar: llguidance compiles that many in about a second.
# And the largest number of choices.
MOST_CHARACTERS, _MOST_CHOICES = 1 << 16, 2000
# The threads that compile grammars. They are separate, so that the event loop's other threads stay
# free to encode texts and cancel requests.
_COMPILERS = ThreadPoolExecutor(2, "kccl compiler")


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class JsonSchema(_Body):
    """A schema with a name. Answers follow the schema even if `strict` is not true."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Body):
    """OpenAI's field response_format. With type "json_object" it may also have a field `schema`, as
    in llama.cpp.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Any = Field(default=None, alias="schema")


class StructuredOutputs(_Body):
    """vLLM's field structured_outputs, which replaced guided_json and similar fields."""

    json_: Any = Field(default=None, alias="json")
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: ListOf[StrictStr] | None = None
    grammar: StrictStr | None = None


class Structured(_Body):
    """The fields of a request that say which form its answer must have. Only one may be given."""

    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: StrictStr | None = None
    guided_choice: ListOf[StrictStr] | None = None
    guided_grammar: StrictStr | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: StrictStr | None = None


async def compiled(make: Callable[..., R], *args: Any) -> R:
    """Calls a function that compiles a grammar in another thread, so that the event loop goes on.
    Returns its result.
    """
    return await asyncio.get_running_loop().run_in_executor(_COMPILERS, make, *args)


Made = tuple[str, Callable[[Any], Grammar], Any]
"""A request for a grammar: (the field that asks for it, function that makes it, its argument)."""


async def grammar_of(engine: Engine, body: Structured) -> dict[str, Grammar]:
    """Returns the field `grammar` of SamplingParams for a body. Returns {} if it asks for no
    grammar. Compiles in another thread, so that the event loop goes on.

    Raises:
        ApiError: Two fields ask for a grammar, or a grammar is wrong.
    """
    found = [*_of_format(body.response_format), *_of_outputs(body.structured_outputs)]
    for name, make in _FIELDS.items():
        if (value := getattr(body, name)) is not None:
            found.append((name, make, value))
    if not found:
        return {}
    param, make, value = found[0]
    if len(found) > 1:
        raise ApiError(
            400, f"{param} and {found[1][0]} are given, only one may be", param=found[1][0]
        )
    try:
        grammar = await compiled(_checked, engine, param, make, value)
    except kccl.InvalidArgument as error:
        # The error's first word is the name of Grammar's argument. The client must see the field's
        # name instead.
        reason = str(error).partition(" ")[2]
        raise ApiError(400, f"{param} {reason}", param=param) from None
    except kccl.Error as error:
        raise ApiError(501, str(error), param=param) from None
    return {"grammar": grammar}


def _checked(engine: Engine, param: str, make: Callable[[Any], Grammar], value: Any) -> Grammar:
    if isinstance(value, list) and make == Grammar.choice and len(value) > _MOST_CHOICES:
        raise ApiError(
            400,
            f"{param} has {len(value)} choices, must have at most {_MOST_CHOICES}",
            param=param,
        )
    check_characters(len(value if isinstance(value, str) else json.dumps(value)), param)
    grammar = make(value)
    # Raises if the grammar uses tokens that the model lacks, or is too complex at its beginning.
    engine.matcher(grammar).first_mask()
    return grammar


def check_characters(number: int, param: str, most: int = MOST_CHARACTERS) -> None:
    """Raises ApiError for a grammar that would take too long to compile."""
    if number > most:
        raise ApiError(
            400, f"{param} has {number} characters, must have at most {most}", param=param
        )


def _lark_or_gbnf(text: str) -> Grammar:
    """Makes a grammar from a text in Lark's or GBNF's syntax. Only GBNF has "::="."""
    return Grammar.gbnf(text) if "::=" in text else Grammar.lark(text)


_FIELDS: dict[str, Callable[[Any], Grammar]] = {
    "guided_json": Grammar.json,
    "guided_regex": Grammar.regex,
    "guided_choice": Grammar.choice,
    "guided_grammar": _lark_or_gbnf,
    "grammar": _lark_or_gbnf,
}


def _of_format(given: ResponseFormat | None) -> list[Made]:
    """Returns the grammar that response_format asks for, or []."""
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        param = "response_format" if given.schema_ is None else "response_format.schema"
        return [(param, Grammar.json, given.schema_)]
    param = "response_format.json_schema"
    if given.json_schema is None:
        raise wrong_value(param, None, "an object if the type is 'json_schema'")
    if given.json_schema.schema_ is None:
        raise wrong_value(f"{param}.schema", None, "a JSON schema")
    return [(f"{param}.schema", Grammar.json, given.json_schema.schema_)]


def _of_outputs(given: StructuredOutputs | None) -> list[Made]:
    """Returns the grammars that the fields of structured_outputs ask for."""
    if given is None:
        return []
    found: list[Made] = []
    for name, attribute in (("json", "json_"), *((each, each) for each in _OTHERS)):
        if (value := getattr(given, attribute)) is not None:
            found.append((f"structured_outputs.{name}", _FIELDS[f"guided_{name}"], value))
    if given.json_object:
        found.append(("structured_outputs.json_object", Grammar.json, None))
    return found


_OTHERS = ("regex", "choice", "grammar")
