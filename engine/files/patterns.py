"""The lists of names and patterns with which config.json says which layers are quantised."""

import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from ..base.fields import Fields, shown

LINEAR = "Linear"
"""The target that means all linear layers."""
REGEX = "re:"
"""What a regular expression has in front."""
MOST_NAMES = 2000
"""The most names and patterns of a list. Each is compared with each layer."""
# The most characters of a pattern. No known file comes near them.
_MOST_CHARACTERS = 1000
# A module's name has at most so many characters.
_LONGEST = 40
# The most ways in which the patterns of a list may match a name. Python tries one after another.
# That is four times ".*" in one pattern, or one in each.
_MOST_WAYS = 1 << 22
# Parts of expressions that match in one way.
_SINGLE = {"LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "GROUPREF", "FAILURE"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
# Groups, atomic groups and what looks ahead or behind: the last argument is what they hold.
_GROUPS = {"SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT"}


def names_of(fields: Fields, name: str) -> tuple[str, ...]:
    """Returns a list of names, and of patterns behind "re:".

    Raises:
        kccl.Error: The field is something else, or its patterns would take long to match.
    """
    value: Any = fields.value(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise fields.wrong(name, "a list of names")
    for each in value:
        if not isinstance(each, str) or len(each) > _MOST_CHARACTERS:
            raise fields.wrong(name, f"a list of names of at most {_MOST_CHARACTERS} characters")
        if each.startswith(REGEX):
            try:
                ways = _ways_of(each)
                # This finds what the parser does not, such as looking behind by any length.
                _pattern(each)
            # An expression with many brackets exhausts the parser's stack.
            except (re.error, RecursionError, OverflowError):
                wanted = f"patterns; {shown(each)} is no regular expression"
                raise fields.wrong(name, wanted) from None
            if ways > _MOST_WAYS:
                wanted = f"patterns; {shown(each)} may match a name in too many ways"
                raise fields.wrong(name, wanted)
    check_number(fields, name, value)
    return tuple(value)


def check_number(fields: Fields, name: str, names: Sequence[str]) -> None:
    """Refuses names and patterns, all of which names_of() has returned, if they are too many.

    Raises:
        kccl.Error: They are. The text names the field.
    """
    ways = sum(_ways_of(each) for each in names if each.startswith(REGEX))
    if len(names) > MOST_NAMES or ways > _MOST_WAYS:
        raise fields.wrong(name, f"at most {MOST_NAMES} names and simple patterns")


def is_match(target: str, module: str) -> bool:
    """Tells whether a module's name is a target's, as compressed-tensors does."""
    if target == LINEAR:
        return True
    if not target.startswith(REGEX):
        return target == module
    return _pattern(target).match(module) is not None


def is_kept(names: Sequence[str], module: str) -> bool:
    """Tells whether an entry of `modules_to_not_convert` names a module: by a part of the module's
    name between dots, which may be the whole name.
    """
    plain, patterns = _apart(tuple(names))
    words = module.split(".")
    ends = range(1, len(words) + 1)
    parts = {".".join(words[start:end]) for end in ends for start in range(end)}
    return not plain.isdisjoint(parts) or any(is_match(each, module) for each in patterns)


@lru_cache(maxsize=8)
def _apart(names: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Returns the names, and the patterns among them. Files have some for each layer."""
    patterns = tuple(name for name in names if name.startswith(REGEX))
    return frozenset(names) - {*patterns}, patterns


@lru_cache(maxsize=2 * MOST_NAMES)
def _pattern(target: str) -> re.Pattern[str]:
    pattern: re.Pattern[str] = _quietly(re.compile, target)
    return pattern


@lru_cache(maxsize=2 * MOST_NAMES)
def _ways_of(target: str) -> int:
    # The parser of the standard library has no public name.
    return _ways(_quietly(import_module("re._parser").parse, target))


def _quietly(read: Callable[[str], Any], target: str) -> Any:
    with warnings.catch_warnings():
        # Python warns of expressions that later versions may read otherwise.
        warnings.simplefilter("ignore")
        return read(target.removeprefix(REGEX))


def _ways(parts: Any) -> int:
    """Returns in how many ways a parsed expression can match a name, or more; beyond _MOST_WAYS
    the number is not exact.
    """
    product = 1
    for op, value in parts:
        product = min(product * _ways_of_part(op.name, value), _MOST_WAYS + 1)
    return product


def _ways_of_part(op: str, value: Any) -> int:
    if op in _SINGLE:
        return 1
    if op in _REPEATS:
        least, most, body = value
        each = _ways(body)
        times = range(min(least, _LONGEST), min(most, _LONGEST) + 1)
        return sum(each**number for number in times)
    if op in _GROUPS:
        return _ways(value[-1] if isinstance(value, tuple) else value)
    if op == "BRANCH":
        return sum(_ways(branch) for branch in value[1])
    if op == "GROUPREF_EXISTS":
        return sum(_ways(branch) for branch in value[1:] if branch is not None)
    # What later versions of Python add.
    return _MOST_WAYS + 1
