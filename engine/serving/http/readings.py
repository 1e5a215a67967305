"""Chooses the reader and the grammar of an answer to a conversation."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import kccl

from ...model.grammar import Grammar
from ...text.reasoning import markers_of, reasoning_of
from ..reading import Reader
from ..tools.grammar import Functions, grammar_of_answer
from .calling import AUTO, Calling
from .errors import ApiError
from .service import Service
from .structured import MOST_CHARACTERS, check_characters, compiled

# The most characters of all tools' parameters together, as JSON.
_MOST_CHARACTERS = 4 * MOST_CHARACTERS


@dataclass(frozen=True)
class Reading:
    """The reader and the grammar of an answer.

    Attributes:
        shown: Ids of the control tokens whose names the reader must find in the text.
        reader: Makes a reader for an answer.
        grammar: The field `grammar` of SamplingParams by its name. {} if there is no grammar.
    """

    shown: tuple[int, ...]
    reader: Callable[[], Reader]
    grammar: dict[str, Grammar]


async def reading_of(
    service: Service, ids: list[int], calling: Calling, asked: dict[str, Grammar], param: str
) -> Reading:
    """Chooses the reader and the grammar of an answer. Compiles the grammar in another thread, so
    that the event loop goes on.

    Args:
        service: The engine.
        ids: The prompt's ids.
        calling: The request's tools.
        asked: The grammar that the request asks for, from grammar_of().
        param: The request's field that asks for the grammar, for errors.

    Raises:
        ApiError: A tool's parameters are no schema, or tools and the grammar cannot be combined.
    """
    tokenizer = service.engine.tokenizer
    thinks = reasoning_of(tokenizer, ids) is not None
    functions = calling.callable()
    is_json = not asked or asked["grammar"].kind == "json"
    if functions is not None and not is_json:
        raise ApiError(400, f"{param} and tools are given: only JSON goes with tools", param=param)
    if calling.must == AUTO and not is_json:
        # A grammar that is not JSON is not combined with thoughts. So the answer has none.
        thinks = False
    elif calling.must != AUTO or (asked and (thinks or functions is not None)):
        schema = asked["grammar"].text if asked and calling.must == AUTO else None
        asked = await compiled(_combined, service, ids, functions, schema)
    names = calling.controls + (markers_of(tokenizer) if thinks else ())

    def reader() -> Reader:
        return Reader(reasoning_of(tokenizer, ids) if thinks else None, calling.reader())

    return Reading(tokenizer.control_ids(names), reader, asked)


def _combined(
    service: Service, ids: list[int], functions: Functions | None, schema: str | None
) -> dict[str, Grammar]:
    """Returns a grammar of calls, or of JSON, with the thoughts that may come first."""
    given = functions.parameters.values() if functions is not None else ()
    check_characters(sum(len(json.dumps(each)) for each in given), "tools", _MOST_CHARACTERS)
    try:
        grammar = grammar_of_answer(service.engine.tokenizer, ids, functions, schema)
        service.engine.matcher(grammar).first_mask()
    except kccl.InvalidArgument as error:
        raise ApiError(400, f"tools: {error}", param="tools") from None
    except kccl.Error as error:
        raise ApiError(501, str(error), param="tools") from None
    return {"grammar": grammar}
