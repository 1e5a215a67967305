"""Describes what an answer must look like: a JSON schema, a regular expression, a grammar or a
choice.

A Grammar only describes. llguidance checks it, and text/matcher.py applies it token by token.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kccl import InvalidArgument

from ..base.extras import library

# Bounds the white space between the parts of a JSON text. Without a bound a model might write white
# space for ever.
JSON_OPTIONS = {"whitespace_pattern": r"(\n {0,24}| )"}
# Kind -> (the name of the argument in messages of errors, what it must be).
_KINDS = {
    "json": ("schema", "a JSON schema"),
    "regex": ("pattern", "a regular expression"),
    "lark": ("text", "a grammar in Lark's form"),
    "choice": ("choices", "strings, at least one"),
}


@dataclass(frozen=True)
class Grammar:
    """The form that an answer must have. Only tokens that can lead to such an answer are chosen.

    json(), regex(), lark(), gbnf() and choice() make one. They need llguidance, of the extra
    "serve".

    Attributes:
        kind: "json", "regex", "lark" or "choice".
        text: The schema or the choices as JSON, the pattern, or the grammar.

    Raises:
        InvalidArgument: llguidance refuses the grammar. The text gives its reason.
        kccl.Error: llguidance is not installed.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            known = ", ".join(map(repr, _KINDS))
            raise InvalidArgument(f"kind is {self.kind!r}, must be one of {known}")
        try:
            self.text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise self._wrong("it must be text that UTF-8 can encode") from None
        matcher = library("llguidance", "serve").LLMatcher
        is_wrong, told = self._guarded(matcher.validate_grammar_with_warnings, self.compiled())
        if is_wrong:
            raise self._wrong(told[0])

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str | None = None) -> "Grammar":
        """Makes a grammar of JSON that a schema describes. Properties come in the order of the
        schema.

        Args:
            schema: A JSON schema, or its text. None allows any JSON object.
        """
        if schema is None:
            schema = {"type": "object"}
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                shown = reprlib.repr(schema)
                raise InvalidArgument(f"schema is {shown}, must be JSON: {error}") from None
        return cls("json", schema)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Makes a grammar of text that a regular expression matches as a whole. Its syntax is
        Rust's.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Makes a grammar of text that the rule "start" of a Lark grammar derives, in llguidance's
        form.
        """
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> "Grammar":
        """Makes a grammar of text that the rule "root" of a GBNF grammar derives. It is kept as
        Lark.
        """
        convert = library("llguidance.gbnf_to_lark", "serve").gbnf_to_lark
        try:
            found = convert(text)
        except Exception as error:
            raise InvalidArgument(_sentence("text", text, "a grammar in GBNF", error)) from None
        return cls("lark", found)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """Makes a grammar of several strings, of which the answer is one."""
        is_list = isinstance(choices, Sequence) and not isinstance(choices, str | bytes)
        if not is_list or not choices or not all(isinstance(each, str) for each in choices):
            shown = reprlib.repr(choices)
            raise InvalidArgument(f"choices is {shown}, must be strings, at least one")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    def compiled(self) -> str:
        """Returns the grammar in the form that llguidance's matchers take."""
        matcher = library("llguidance", "serve").LLMatcher
        if self.kind == "json":
            # Options are possible only in a schema that is an object. "{}" means the same as
            # "true".
            schema = "{}" if self.text.strip() == "true" else self.text
            options = [JSON_OPTIONS] if schema.lstrip().startswith("{") else []
            return str(self._guarded(matcher.grammar_from_json_schema, schema, *options))
        if self.kind == "regex":
            return str(matcher.grammar_from_regex(self.text))
        if self.kind == "lark":
            return str(matcher.grammar_from_lark(self.text))
        choices = self._guarded(json.loads, self.text)
        spelt = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
        return str(matcher.grammar_from_lark(f"start: {spelt}"))

    def _guarded(self, make: Any, *args: Any) -> Any:
        """Calls the function that reads the text, whose failures have many types.

        Raises:
            InvalidArgument: The function failed.
        """
        try:
            return make(*args)
        except BaseException as error:
            if isinstance(error, Exception) or is_panic(error):
                raise self._wrong(str(error)) from None
            raise

    def _wrong(self, reason: str) -> InvalidArgument:
        return InvalidArgument(_sentence(*_named(self), reason))


def _named(grammar: Grammar) -> tuple[str, str, str]:
    name, wanted = _KINDS[grammar.kind]
    return name, grammar.text, wanted


def _sentence(name: str, value: object, wanted: str, reason: object) -> str:
    """Returns the reason of a failure, in one line."""
    return f"{name} is {reprlib.repr(value)}, must be {wanted}: {reason_in(str(reason))}"


def is_panic(error: BaseException) -> bool:
    """Tells whether llguidance's Rust code has panicked. Python gets that as a BaseException that
    is no Exception.
    """
    return type(error).__name__ == "PanicException"


def reason_in(text: str) -> str:
    """Returns the reason from llguidance's text, without the lines below that draw the place."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next((line for line in lines if line.startswith("error: ")), "".join(lines[:1]))
    return found.removeprefix("error: ")[:300] or "llguidance gives no reason"
