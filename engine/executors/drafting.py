"""Lets the host executor's threads call a drafter: a Python function that guesses the next tokens
(model/drafts.py).
"""

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import kccl

from ..base.core import ffi, lib
from ..base.scalars import as_integer
from ..model.drafts import Drafter


class _Here(threading.local):
    """Thread-local state: the executor to which a thread belongs.

    Attributes:
        executor: The executor to which this thread belongs. None in other threads. Set when the
            thread calls a drafter, and never reset, because these threads run Python for nothing
            else.
    """

    executor: weakref.ref[Any] | None = None


class _Uncollected:
    """Makes contexts in which automatic garbage collection is off. Contexts of several threads may
    overlap. The last one to end turns the collection on again, if it was on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._was_enabled = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._number == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._number += 1
        try:
            yield
        finally:
            with self._lock:
                self._number -= 1
                if self._number == 0 and self._was_enabled:
                    gc.enable()


_here, _uncollected = _Here(), _Uncollected()


def is_drafting(executors: Sequence[object]) -> bool:
    """Tells whether this thread belongs to one of the executors and is in a call of a drafter. Such
    a thread must not wait for the end of the executor's request, which waits for the drafter.
    """
    mine = None if _here.executor is None else _here.executor()
    return mine is not None and any(each is mine for each in executors)


def predicting(num_prompt: int, prediction: Sequence[int]) -> Drafter:
    """Returns a drafter that has predicted the answer on a prompt of so many ids
    (Drafts.prediction).
    """

    def draft(ids: list[int], most: int) -> Sequence[int]:
        at = len(ids) - num_prompt
        return prediction[at : at + most]

    return draft


class Drafting:
    """Calls one request's drafter, and keeps what it raises.

    Attributes:
        address: The address of the C function KcclEngineDrafter that the executor must call.
        context: The argument `context` of that function. It is valid as long as this object.
        error: The exception that the drafter raised, or None. After an error it is not called
            again.
        slowest_s: How many seconds the drafter's longest call took.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, executor: object) -> None:
        """Prepares the calls.

        Args:
            drafter: The drafter.
            vocab_size: The number of the model's ids.
            executor: The executor whose thread calls the drafter.
        """
        self._drafter, self._vocab_size = drafter, vocab_size
        self._executor = weakref.ref(executor)
        self._handle = ffi.new_handle(self)
        self.address = int(ffi.cast("uintptr_t", lib.kccl_engine_ask_python))
        self.context = int(ffi.cast("uintptr_t", self._handle))
        self.error: BaseException | None = None
        self.slowest_s = 0.0

    def ask(self, ids: list[int], most: int) -> list[int]:
        """Calls the drafter with the ids so far, and returns its drafts, at most `most` ids.
        Returns [] if the drafter raises, or has raised before.
        """
        _here.executor = self._executor
        if self.error is not None:
            return []
        began = time.monotonic()
        try:
            # Garbage collection is off during the call. It could end requests that nobody reads any
            # more, and their end would wait for the executor's threads, and so for this thread
            # itself: a deadlock.
            with _uncollected():
                return self._checked(self._drafter(ids, most), most)
        except (StopIteration, GeneratorExit) as error:
            # HostExecutor.tokens() raises the error later. It is a generator, out of which these
            # two exceptions would not come as errors of the drafter: Python turns StopIteration
            # into RuntimeError, and GeneratorExit means that the caller has closed the generator.
            self.error = kccl.Error(f"the drafter raised {type(error).__name__}")
            self.error.__cause__ = error
            return []
        # C++ code has called this method, so nothing may be raised here. HostExecutor.tokens()
        # raises the error later.
        except BaseException as error:
            self.error = error
            return []
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _checked(self, given: Any, most: int) -> list[int]:
        try:
            coming = iter(given)
        except TypeError:
            raise kccl.InvalidArgument(
                f"the drafter returned {given!r:.60}, must return a sequence of ids"
            ) from None
        # The drafter may return an infinite iterator. One id more than allowed is enough to see
        # that there are too many.
        returned = list(islice(coming, most + 1))
        found = [as_integer(each) for each in returned]
        for each, number in zip(returned, found, strict=True):
            if number is None or not 0 <= number < self._vocab_size:
                raise kccl.InvalidArgument(
                    f"the drafter returned id {each!r:.60}, must be from 0 to "
                    f"{self._vocab_size - 1}"
                )
        if len(found) > most:
            raise kccl.InvalidArgument(
                f"the drafter returned more than {most} ids, must return at most {most}"
            )
        return [number for number in found if number is not None]


@ffi.def_extern()  # type: ignore[untyped-decorator]
def kccl_engine_ask_python(context: Any, ids: Any, num_ids: int, most: int, drafts: Any) -> int:
    """Called by the executor's C++ code for drafts: a KcclEngineDrafter (host/api.inc)."""
    found = ffi.from_handle(context).ask(ffi.unpack(ids, num_ids), most)
    drafts[0 : len(found)] = found
    return len(found)
