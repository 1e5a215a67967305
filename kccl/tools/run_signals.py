"""Handles the signals of `kccl run`, which wake its event loop."""

import os
import selectors
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

# Signals with a meaning that only the program knows. They are passed on to the ranks unchanged.
# SIGRTMIN leaves out the real-time signals that the C library uses itself.
PASSED_ON = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)}
)
# Signals that ask a program to end.
_ENDS = frozenset(
    {
        *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU),
        *(signal.SIGIO, signal.SIGPWR, signal.SIGABRT),
    }
)
_JOB_CONTROL = frozenset({signal.SIGTSTP, signal.SIGCONT})
_TAKEN = PASSED_ON | _ENDS | _JOB_CONTROL | {signal.SIGCHLD}
# A signal that was ignored when this process started stays ignored, as SIGHUP under nohup. These
# signals are handled anyway: a shell script starts background jobs with SIGINT ignored, and may
# then send SIGINT to end them.
_NEVER_IGNORED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})


class Handler(Protocol):
    """The methods of a job that handled() calls."""

    def reap(self) -> None:
        """Handles SIGCHLD: a child has ended or stopped."""

    def stop(self) -> None:
        """Handles SIGTSTP, as from Ctrl-Z."""

    def on_signal(self, number: int) -> None:
        """Handles any other signal."""


def _note(_number: int, _frame: FrameType | None) -> None:
    """Does nothing: the signal wakes the selector."""


def _may_take(number: int) -> bool:
    # getsignal() returns None if the handler is in C, as faulthandler's for SIGABRT.
    handler = signal.getsignal(number)
    return handler is not None and (number in _NEVER_IGNORED or handler != signal.SIG_IGN)


@contextmanager
def handled(selector: selectors.BaseSelector, job: Handler) -> Iterator[None]:
    """Runs its body with handlers for signals and for the end of a rank. They wake the selector,
    whose callback calls the job.

    It does not use pidfds, because old kernels and containers with an old seccomp profile refuse
    them.
    """
    source, sink = os.pipe()
    os.set_blocking(source, False)
    os.set_blocking(sink, False)

    def pass_on() -> None:
        for number in os.read(source, 64):
            if number == signal.SIGCHLD:
                job.reap()
            elif number == signal.SIGTSTP:
                job.stop()
            else:
                job.on_signal(number)

    selector.register(source, selectors.EVENT_READ, pass_on)
    numbers = [number for number in sorted(_TAKEN) if _may_take(number)]
    before = [signal.signal(number, _note) for number in numbers]
    wakeup_before = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        selector.unregister(source)
        os.close(source)
        os.close(sink)


@contextmanager
def blocked() -> Iterator[None]:
    """Runs its body with all handled signals blocked, so that a forked child starts undisturbed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_all() -> None:
    """Makes this process ignore all handled signals except SIGCHLD."""
    for number in _TAKEN - {signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)


def stop_here() -> None:
    """Stops this process by the default action of SIGTSTP, until SIGCONT continues it.

    The system does not stop a process that has no shell with job control to continue it.
    """
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, before)
