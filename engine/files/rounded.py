"""Decides which matrices of 16 or 32 bits are rounded to fewer bits while they are read."""

from collections.abc import Mapping, Sequence

import kccl

from ..formats.base import Format, Plain
from ..formats.table import ROUNDED
from .kept import op_of, shown_format


def rounded_formats(
    weights: str, stored: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, Format]:
    """Returns the format of each matrix if the layers' matrices are rounded. The embedding, the
    head, and matrices whose lanes have no whole groups keep their dtype.

    Args:
        weights: One of ROUNDED.
        stored, shapes: As in kept_formats().
        source: The files, for messages.

    Raises:
        InvalidArgument: `weights` is wrong, the files are quantised already, or no matrix's lanes
            have whole groups.
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
    """Tells whether a matrix is rounded from 16 or 32 bits (Plain) to a format of blocks."""
    return isinstance(stored, Plain) and not isinstance(given, Plain)


def what_is_rounded(
    weights: str,
    stored: Mapping[str, Format],
    given: Mapping[str, Format],
    shapes: Mapping[str, tuple[int, ...]],
    in_file: Sequence[str],
) -> tuple[str, ...]:
    """Returns sentences for the user: which matrices are rounded, and which of the layers' are not.

    Args:
        weights: One of ROUNDED.
        stored, shapes: As in kept_formats().
        given: Matrix -> the format in which it is given.
        in_file: The matrices' names for messages, in the order of `stored`.
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
