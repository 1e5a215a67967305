"""Makes the grammars of answers that are calls, for each format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import kccl

from ...model.grammar import JSON_OPTIONS, Grammar
from ...text import harmony
from ...text.reasoning import (
    MARKERS,
    begun_message,
    has_thought,
    reasoning_of,
    speaks_harmony,
)
from ...text.tokenizer import Tokenizer
from . import hermes, mistral
from .formats import Format

# The white space that templates write in JSON. The grammar demands it, because the model was
# trained on it.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Functions:
    """The calls that an answer may make.

    Attributes:
        format: The format in which the model writes calls.
        parameters: Name of a function -> the JSON schema of its arguments. None if it has none.
        is_several: Whether the answer may have several calls.
    """

    format: Format
    parameters: Mapping[str, Mapping[str, Any] | None]
    is_several: bool


def grammar_of_answer(
    tokenizer: Tokenizer, ids: list[int], functions: Functions | None, schema: str | None
) -> Grammar:
    """Returns the grammar of answers that are calls, or JSON that a schema describes. If the model
    writes thoughts, these may come first.

    Args:
        tokenizer: The model's tokenizer.
        ids: The prompt's ids.
        functions: The functions that the answer may call. None if it must not be calls.
        schema: The JSON schema that the answer may follow. None if it must not be JSON.

    Raises:
        InvalidArgument: A schema of arguments is wrong, describes no object, or is not supported.
        kccl.Error: The model answers in harmony, and its prompt does not end with a message's
            beginning, or its vocabulary lacks a control token.
    """
    spell = _Spelling(tokenizer)
    ways, rules = [], []
    if functions is not None:
        ways.append("calls")
        rules += _RULES[functions.format.name](functions, tokenizer, spell)
        for index, (name, given) in enumerate(functions.parameters.items()):
            parameters = _schema(name, given)
            # Checks each schema alone, so that an error names it. The error of the whole grammar
            # would not.
            Grammar.json(parameters)
            rules.append(f"arguments_{index}: %json {json.dumps(parameters)}")
    if schema is not None:
        ways.append("json")
        rules += _json(tokenizer, f"%json {_bounded(schema)}", spell)
    start = _start(tokenizer, ids, spell)
    return Grammar.lark("\n".join([start, f"answer: {' | '.join(ways)}", *rules]))


def _bounded(schema: str) -> str:
    """Returns a schema that limits white space, as Grammar.json() does for answers that are only
    JSON.
    """
    given = json.loads(schema)
    if given is True:
        given = {}
    if isinstance(given, dict) and isinstance(own := given.get("x-guidance", {}), dict):
        given["x-guidance"] = JSON_OPTIONS | own
    return json.dumps(given)


def _schema(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the schema of a function's arguments. Raises InvalidArgument unless it describes an
    object.
    """
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = empty if given is None else {"type": "object", **given}
    if schema["type"] != "object":
        raise kccl.InvalidArgument(
            f"parameters of {name} have type {schema['type']!r:.60}, must have type 'object'"
        )
    return schema | {"x-guidance": _SPACING}


class _Spelling:
    """Writes texts in the syntax of llguidance's Lark grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def marker(self, text: str) -> str:
        """Returns a marker. If it is a control token, the grammar requires this token, and no
        others that spell the same text.
        """
        (number,) = self._tokenizer.control_ids([text]) or (None,)
        return json.dumps(text) if number is None else f"<[{number}]>"

    @staticmethod
    def text(text: str) -> str:
        """Returns a text that is no marker."""
        return json.dumps(text, ensure_ascii=False)


def _start(tokenizer: Tokenizer, ids: list[int], spell: _Spelling) -> str:
    """Returns the rule `start` and what it needs: thoughts if the model may write some, and the
    answer.
    """
    if speaks_harmony(tokenizer):
        return _start_of_harmony(tokenizer, ids, spell)
    reasoning = reasoning_of(tokenizer, ids)
    if reasoning is None or has_thought(tokenizer, ids):
        return "start: answer"
    begin, end = MARKERS
    inside = f"thought[suffix={spell.text(end)}]: /(?s:.*)/"
    if tokenizer.control_ids([end]):
        inside = f"thought: text {spell.marker(end)}\ntext: /(?s:.*)/"
    start = "start: thought space answer"
    if not reasoning.is_thinking:
        start = f"start: ({spell.marker(begin)} thought space)? answer"
    return f"{start}\n{inside}\nspace: /[ \\n]{{0,2}}/"


def _start_of_harmony(tokenizer: Tokenizer, ids: list[int], spell: _Spelling) -> str:
    """Returns the rule `start` for harmony: messages with thoughts, and the message that answers.

    Raises:
        kccl.Error: The prompt does not end with "<|start|>assistant", or the vocabulary lacks a
            control token.
    """
    begun = f"{harmony.START}{harmony.AUTHOR}"
    if (found := begun_message(tokenizer, ids)) != begun:
        raise kccl.Error(
            f"the prompt ends with {found!r:.100}, must end with {begun!r} for answers that are "
            "calls or JSON"
        )
    for name in (harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, harmony.END):
        if not tokenizer.control_ids([name]):
            raise kccl.Error(
                f"the vocabulary has no control token {name!r}, which answers that are calls or "
                "JSON need"
            )
    header = _header(harmony.ANALYSIS, spell)
    between = f"{spell.marker(harmony.END)} {spell.marker(harmony.START)}"
    thought = f"thought: {header} text {between} {spell.text(harmony.AUTHOR)}"
    return f"start: thought* answer\n{thought}\ntext: /(?s:.*)/"


def _header(channel: str, spell: _Spelling) -> str:
    """Returns the header of a message in harmony."""
    marker, end = spell.marker(harmony.CHANNEL), spell.marker(harmony.MESSAGE)
    return f"{marker} {spell.text(channel)} {end}"


def _json(tokenizer: Tokenizer, body: str, spell: _Spelling) -> list[str]:
    """Returns the rules for an answer in JSON."""
    if not speaks_harmony(tokenizer):
        return [f"json: {body}"]
    return [f"json: {_header(harmony.FINAL, spell)} body", f"body: {body}"]


def _several(functions: Functions, one: str, between: str = "") -> str:
    """Returns an expression for one call, or for several if the functions permit that."""
    return f"{one} ({between} {one})*" if functions.is_several else one


def _objects(functions: Functions, arguments: str, spell: _Spelling) -> str:
    """Returns the rule `call` for a JSON object with a function's name and its arguments."""
    heads = (
        f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '
        for name in functions.parameters
    )
    ways = (f'{spell.text(head)} arguments_{index} "}}"' for index, head in enumerate(heads))
    return "call: " + " | ".join(ways)


def _of_hermes(functions: Functions, _: Tokenizer, spell: _Spelling) -> list[str]:
    begin, end = spell.marker(hermes.BEGIN), spell.marker(hermes.END)
    wrapped = f'wrapped: {begin} "\\n" call "\\n" {end}'
    calls = _several(functions, "wrapped", '"\\n"')
    return [f"calls: {calls}", wrapped, _objects(functions, "arguments", spell)]


def _of_llama(functions: Functions, _: Tokenizer, spell: _Spelling) -> list[str]:
    calls = _several(functions, "call", '"; "')
    return [f"calls: {calls}", _objects(functions, "parameters", spell)]


def _of_mistral(functions: Functions, tokenizer: Tokenizer, spell: _Spelling) -> list[str]:
    begin = spell.marker(mistral.BEGIN)
    between = mistral.ARGUMENTS
    if between not in tokenizer.template_source(with_tools=True):
        calls = _several(functions, "call", '", "')
        return [f'calls: {begin} "[" {calls} "]"', _objects(functions, "arguments", spell)]
    ways = (
        f"{spell.text(name)} {spell.marker(between)} arguments_{index}"
        for index, name in enumerate(functions.parameters)
    )
    return [f"calls: {_several(functions, 'call')}", f"call: {begin} ({' | '.join(ways)})"]


def _of_harmony(functions: Functions, _: Tokenizer, spell: _Spelling) -> list[str]:
    """Returns the rules for a single call, because in harmony an answer ends after a call."""
    begin = f"{harmony.COMMENTARY} to={harmony.FUNCTIONS}"
    end = f'" " {spell.marker(harmony.CONSTRAIN)} "json" {spell.marker(harmony.MESSAGE)}'
    ways = (
        f"{spell.text(begin + name)} {end} arguments_{index}"
        for index, name in enumerate(functions.parameters)
    )
    return [f"calls: {spell.marker(harmony.CHANNEL)} ({' | '.join(ways)})"]


_RULES = {
    "Hermes": _of_hermes,
    "Llama 3": _of_llama,
    "Mistral": _of_mistral,
    "harmony": _of_harmony,
}
