"""Defines how pickle and copy treat KCCL's objects.

Errors, plans and records can be sent to other processes. An object that works by memory or
descriptors of its process cannot: a copy would have addresses that mean nothing elsewhere.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn


def not_copied(what: str, instead: str) -> Callable[[Any, Any], NoReturn]:
    """Returns a `__reduce_ex__` for a class whose objects pickle and copy must refuse.

    Args:
        what: The object and why it cannot be copied, as in "a window belongs to its process".
        instead: What the caller can do.
    """

    def refuse(self: Any, _protocol: Any) -> NoReturn:
        raise TypeError(f"cannot pickle or copy {type(self).__name__}: {what}; {instead}")

    return refuse


def restored(kind: type[BaseException], args: tuple[Any, ...], state: Mapping[str, Any]) -> Any:
    """Returns the exception with these `args` and attributes, without a call of its `__init__`.

    An `__init__` may have keyword-only arguments, and pickle passes none.
    """
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
