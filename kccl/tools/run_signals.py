"""The signals of `kccl run`: which it takes, and how they wake its loop."""

import os
import selectors
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

# A person or a batch system sends these to a program, which knows what they mean. Some of the
# real-time signals are the C library's own.
PASSED_ON = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)}
)
# These ask for an end.
_ENDS = frozenset(
    {
        *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU),
        *(signal.SIGIO, signal.SIGPWR, signal.SIGABRT),
    }
)
_JOB_CONTROL = frozenset({signal.SIGTSTP, signal.SIGCONT})
_TAKEN = PASSED_ON | _ENDS | _JOB_CONTROL | {signal.SIGCHLD}
# A parent that ignores a signal means its children to ignore it too, as nohup does with SIGHUP.
# Scripts ignore SIGINT in what they start in the background, and then end it by SIGINT themselves.
_NEVER_IGNORED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})


class Handler(Protocol):
    """What a job does about signals."""

    def reap(self) -> None:
        """A child has ended or stopped."""

    def stop(self) -> None:
        """SIGTSTP, as by Ctrl-Z."""

    def on_signal(self, number: int) -> None:
        """Any other signal."""


def _note(_number: int, _frame: FrameType | None) -> None:
    """Does nothing: the signal wakes the selector."""


def _may_take(number: int) -> bool:
    # None: code in C has it, as `python -X dev` lets faulthandler have SIGABRT.
    handler = signal.getsignal(number)
    return handler is not None and (number in _NEVER_IGNORED or handler != signal.SIG_IGN)


@contextmanager
def handled(selector: selectors.BaseSelector, job: Handler) -> Iterator[None]:
    """A context in which signals and the end of a rank wake the selector, which then calls the job.

    Why not pidfds: old kernels, and containers with an old seccomp profile, have none.
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
    """A context in which no signal is handled: a fork within it begins without one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_all() -> None:
    """Ignores all of them in this process."""
    for number in _TAKEN - {signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)


def stop_here() -> None:
    """Stops this process as SIGTSTP does by itself, until somebody continues it.

    Where nobody could, because the process has no shell with job control, it is not stopped.
    """
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, before)
