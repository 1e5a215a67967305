"""The errors of backends without streams, for calls that need streams."""

from collections.abc import Sequence
from typing import Any, NoReturn

from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument


def stream(given: Any, view: ArrayView | None, others: Sequence[ArrayView] = ()) -> int:
    """See Backend.

    Raises:
        InvalidArgument: The caller gave a stream.
    """
    if given is not None:
        raise InvalidArgument(f"stream is {given!r}, must be None: host memory has no streams")
    return 0


def no_shape(name: str, blocks: Any, threads: Any) -> InvalidArgument:
    """Returns the error of Backend.check_shape() where calls have no shape."""
    return InvalidArgument(
        f"blocks is {blocks!r} and threads {threads!r}, must be 0: they are for backends "
        f"with streams, as cuda; this one is {name}"
    )


def not_here(*_: Any, **__: Any) -> NoReturn:
    """Stands in place of methods that a backend without streams cannot have.

    Raises:
        InvalidArgument: Always.
    """
    raise InvalidArgument('this needs a backend with streams, as "cuda" or "hip"')
