"""Keeps control tokens that are spelt out in a text from becoming control tokens."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import kccl

# The candidates for a mark: characters of Unicode's private use. No text should have all of them.
_MARKS = tuple(map(chr, range(0xE000, 0xF900)))


class Literal:
    """Marks control tokens that are spelt out in messages, before a template renders these. The
    rendered text is then split at the marks. The parts, which are encoded one by one, contain only
    the control tokens that the template itself wrote.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        """Prepares the search.

        Args:
            tokens: The texts of the control tokens. A text of a single character cannot be split,
                so it is not marked.
        """
        known = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        # A lookahead also finds control tokens that overlap.
        self._known = re.compile(f"(?={'|'.join(map(re.escape, known))})") if known else None

    def marked(self, messages: Any) -> tuple[Any, str]:
        """Inserts a mark after the first character of each control token in the messages. Returns
        the messages and the mark; "" as mark if they have no control token.

        Raises:
            InvalidArgument: The messages have a control token and all characters of private use.
        """
        texts = list(_texts(messages))
        if self._known is None or not any(map(self._known.search, texts)):
            return messages, ""
        whole = "".join(texts)
        # A template may write the mark escaped, so the messages must not have that form either.
        mark = next((m for m in _MARKS if m not in whole and escaped(m) not in whole), None)
        if mark is None:
            raise kccl.InvalidArgument(
                f"the messages have a control token and all {len(_MARKS)} characters of private "
                "use (U+E000 to U+F8FF), must leave one out"
            )
        return self._mark(messages, mark), mark

    def _mark(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._known is not None
            at = [found.start() + 1 for found in self._known.finditer(value)]
            parts = [value[a:b] for a, b in zip([0, *at], [*at, len(value)], strict=True)]
            return mark.join(parts)
        if isinstance(value, Mapping):
            return {self._mark(name, mark): self._mark(each, mark) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(each, mark) for each in value]
        return value


def escaped(mark: str) -> str:
    """Returns a mark as JSON in ASCII writes it: as an escape of six characters."""
    return json.dumps(mark)[1:-1]


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(name)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
