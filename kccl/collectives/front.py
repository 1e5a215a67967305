"""Gives a call that C answers the signature and the docstring of a Python method."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from typing import Any

from ..base import arguments
from ..base.copying import not_copied
from ..base.errors import NotContiguous
from ..base.strided import Copied
from .context import Context

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
    _context: Context
    _slow: Callable[..., Any]
    prepare: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__call__" not in cls.__dict__:
            return
        cls._slow = arguments.explained(_with_copies(cls.__dict__["__call__"]), cls._NAME)
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

    def _may_copy(self) -> bool:
        """Tells whether a call on arrays that are not C-contiguous may use copies of them: whether
        it is done, or enqueued, when it returns.
        """
        return self._context.copies_strided

    def _copied(self, given: Mapping[str, Any], error: NotContiguous) -> Copied | None:
        """Returns a copy of the array of which `error` says that it is not C-contiguous. None if
        the call must not use copies, or the array's library makes none.
        """
        if not self._may_copy():
            return None
        copied = self._context.backend.copied
        return copied(given, error.name, is_written=error.is_written)


def _with_copies(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of a call. It copies arrays that are not C-contiguous, calls with the
    copies, and copies back what the call has written.
    """
    accepted = signature(method)

    @wraps(method)
    def call(self: AnsweredByC, *args: Any, **keywords: Any) -> Any:
        try:
            return method(self, *args, **keywords)
        except NotContiguous as error:
            given = accepted.bind(self, *args, **keywords).arguments
            first = self._copied(given, error)
            if first is None:
                raise
            copies = {error.name: first}
        while True:
            # A check has refused the arguments so far, before anything was sent.
            made = {name: each.array for name, each in copies.items()}
            try:
                result = method(**{**given, **made})
                break
            except NotContiguous as error:
                another = self._copied(given, error)
                if another is None:
                    raise
                copies[error.name] = another
        for name, each in copies.items():
            if each.is_written:
                each.store()
            if result is each.array:
                result = given[name]
        return result

    return call
