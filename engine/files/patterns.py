"""Reads and matches the lists of names and patterns by which config.json says which layers are
quantised. Patterns are limited, so that a file cannot make matching take for ever.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from ..base.fields import Fields, shown

LINEAR = "Linear"
"""The name in a list that means all linear layers."""
REGEX = "re:"
"""The prefix of regular expressions in a list."""
MOST_NAMES = 2000
"""The most names and patterns of a list, because each is compared with each layer."""
# The most characters of a pattern. No known file comes near them.
_MOST_CHARACTERS = 1000
# The most characters of a module's name. _ways() does not count more repetitions than that.
_LONGEST = 40
# The most ways in which the patterns of a list may match a name, because Python's backtracking may
# try them all. It permits four ".*" in one pattern, or one in each pattern.
_MOST_WAYS = 1 << 22
# Parts of regular expressions that can match in only one way.
_SINGLE = {"LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "GROUPREF", "FAILURE"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
# Groups, atomic groups and lookarounds. Their last argument is the expression inside.
_GROUPS = {"SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT"}


def names_of(fields: Fields, name: str) -> tuple[str, ...]:
    """Reads a field that is a list of names, and of patterns with "re:" in front.

    Raises:
        kccl.Error: The field is no such list, or its patterns would take too long to match.
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
                # Compiling finds errors that the parser does not, such as a lookbehind of variable
                # length.
                _pattern(each)
            # The parser raises RecursionError if brackets are nested too deeply.
            except (re.error, RecursionError, OverflowError):
                wanted = f"patterns; {shown(each)} is no regular expression"
                raise fields.wrong(name, wanted) from None
            if ways > _MOST_WAYS:
                wanted = f"patterns; {shown(each)} may match a name in too many ways"
                raise fields.wrong(name, wanted)
    check_number(fields, name, value)
    return tuple(value)


def check_number(fields: Fields, name: str, names: Sequence[str]) -> None:
    """Checks the number of names, and of the ways in which patterns match. `names` must be from
    names_of().

    Raises:
        kccl.Error: There are too many. The text names the field.
    """
    ways = sum(_ways_of(each) for each in names if each.startswith(REGEX))
    if len(names) > MOST_NAMES or ways > _MOST_WAYS:
        raise fields.wrong(name, f"at most {MOST_NAMES} names and simple patterns")


def is_match(target: str, module: str) -> bool:
    """Tells whether a target names a module, by the rule of compressed-tensors."""
    if target == LINEAR:
        return True
    if not target.startswith(REGEX):
        return target == module
    return _pattern(target).match(module) is not None


def is_kept(names: Sequence[str], module: str) -> bool:
    """Tells whether `modules_to_not_convert` names a module. An entry must equal one or several
    consecutive words of the module's dotted name, or be a pattern that matches.
    """
    plain, patterns = _apart(tuple(names))
    words = module.split(".")
    ends = range(1, len(words) + 1)
    parts = {".".join(words[start:end]) for end in ends for start in range(end)}
    return not plain.isdisjoint(parts) or any(is_match(each, module) for each in patterns)


@lru_cache(maxsize=8)
def _apart(names: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Returns the plain names and the patterns. Cached, because lists may be long and is_kept() is
    called for each layer.
    """
    patterns = tuple(name for name in names if name.startswith(REGEX))
    return frozenset(names) - {*patterns}, patterns


@lru_cache(maxsize=2 * MOST_NAMES)
def _pattern(target: str) -> re.Pattern[str]:
    pattern: re.Pattern[str] = _quietly(re.compile, target)
    return pattern


@lru_cache(maxsize=2 * MOST_NAMES)
def _ways_of(target: str) -> int:
    # The standard library's parser of regular expressions is not public.
    return _ways(_quietly(import_module("re._parser").parse, target))


def _quietly(read: Callable[[str], Any], target: str) -> Any:
    with warnings.catch_warnings():
        # Ignores warnings that later versions of Python may read the expression differently.
        warnings.simplefilter("ignore")
        return read(target.removeprefix(REGEX))


def _ways(parts: Any) -> int:
    """Returns an upper bound of the number of ways in which a parsed expression can match a name.
    Numbers above _MOST_WAYS become _MOST_WAYS + 1.
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
    # Unknown parts, which later versions of Python may have, are refused.
    return _MOST_WAYS + 1
