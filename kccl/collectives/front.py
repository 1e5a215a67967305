"""Gives a call that C answers the signature and the docstring of a Python method."""

from collections.abc import Callable
from inspect import Parameter, Signature, getdoc, signature
from typing import Any

from ..base import arguments
from ..base.copying import not_copied

call_is_not_copied = not_copied(
    "a communicator's calls work in its process only",
    "prepare or make the call with a communicator of that process, which kccl.init() returns",
)


class AnsweredByC:
    """Base class of calls. A subclass writes its call as `__call__`, and C answers it.

    So people, editors and mypy find signature and documentation in the usual place.
    `__init_subclass__` renames the method to `_slow`, and C runs it for calls that it does not
    know. A subclass also inherits from a type of kccl._fastcall, whose `__call__` is then used.
    """

    __reduce_ex__ = call_is_not_copied

    _NAME: str
    _slow: Callable[..., Any]
    prepare: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__call__" not in cls.__dict__:
            return
        cls._slow = arguments.explained(cls.__dict__["__call__"], cls._NAME)
        cls.prepare = arguments.explained(cls.__dict__["prepare"], f"{cls._NAME}.prepare")
        # help() shows the first line as the signature.
        given = list(signature(cls._slow).parameters.values())[1:]
        line = Signature([each.replace(annotation=Parameter.empty) for each in given])
        cls.__doc__ = f"{cls._NAME}{line}\n\n{getdoc(cls._slow)}"
        # Now calls go to the C type's `__call__`. A statement `del cls.__call__` would make editors
        # believe that the class has none.
        type.__delattr__(cls, "__call__")

    @property
    def __signature__(self) -> Signature:
        """Returns the signature of the call, for inspect and help()."""
        return signature(self._slow)
