"""Matrices of 16 or 32 bits that are rounded to fewer bits while they are read."""

from collections.abc import Mapping, Sequence

import kccl

from ..formats.base import Format, Plain
from ..formats.table import ROUNDED
from .kept import op_of, shown_format


def rounded_formats(
    weights: str, stored: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, Format]:
    """Returns the formats of all matrices with those of layers rounded. Embedding and head stay
    in a dtype of arrays, and so does a matrix whose lanes have no whole groups.

    Args:
        weights: One of ROUNDED.
        stored, shapes: As kept_formats() takes them.
        source: The files, for messages.

    Raises:
        InvalidArgument: There are no such weights, the files have fewer bits already, or no lane
            has whole groups.
    """
    if not isinstance(weights, str) or weights not in ROUNDED:
        names = ", ".join(map(repr, ROUNDED))
        raise kccl.InvalidArgument(f"weights is {weights!r}, must be one of {names}")
    wrong = f"weights is {weights!r}, must be None: {source} has"
    packed = {shown_format(each) for each in stored.values() if not isinstance(each, Plain)}
    if packed:
        raise kccl.InvalidArgument(f"{wrong} weights in {', '.join(sorted(packed))} already")
    forms, found = ROUNDED[weights], dict(stored)
    for name in stored:
        if op_of(name)[0]:
            columns = shapes[name][-1]
            found[name] = next((each for each in forms if columns % each.block == 0), found[name])
    if found == stored:
        block = forms[-1].block
        raise kccl.InvalidArgument(
            f"{wrong} no matrix whose lanes have whole groups of {block} columns"
        )
    return found


def is_rounded(given: Format, stored: Format) -> bool:
    """Tells whether a matrix is rounded from a dtype of arrays to a format of blocks."""
    return isinstance(stored, Plain) and not isinstance(given, Plain)


def what_is_rounded(
    weights: str,
    stored: Mapping[str, Format],
    given: Mapping[str, Format],
    shapes: Mapping[str, tuple[int, ...]],
    in_file: Sequence[str],
) -> tuple[str, ...]:
    """Returns a sentence on what is rounded, and one on what is not.

    Args:
        weights: The weights, one of ROUNDED.
        stored, shapes: As kept_formats() takes them.
        given: The format in which each of these matrices is given.
        in_file: The names by which messages call them, in the order of `stored`.
    """
    of_files = {shown_format(stored[n]) for n, each in given.items() if is_rounded(each, stored[n])}
    found = [f"the matrices of layers are rounded from {', '.join(sorted(of_files))} to {weights}"]
    left = [
        (name, named)
        for name, named in zip(stored, in_file, strict=True)
        if op_of(name)[0] and not is_rounded(given[name], stored[name])
    ]
    if left:
        first, named = left[0]
        found.append(
            f"{len(left)} of them stay in {given[first].name}: a lane's {shapes[first][-1]} "
            f"columns are no whole groups of {ROUNDED[weights][-1].block}, as in {named}"
        )
    return tuple(found)
