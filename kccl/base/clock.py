"""The clock of waits for other ranks. Time in which this process was stopped does not count.

A job may be stopped by Ctrl-Z or SIGSTOP, together with its container, or with its machine. No rank
can run meanwhile, so timeouts must not count this time. Of each stop at most 0.3 s count here, and
0.1 s in waits within calls (csrc/include/kccl/wait.cuh), which read the clock far more often.
"""

import threading
import time

LOOK_S = 0.2
"""A wait sleeps no longer than this, in seconds, before it reads the clock again."""

# The most seconds that count between two reads of the clock. They are more than LOOK_S, because a
# busy machine may wake a wait late.
_MOST_S = 0.3


class _Looks(threading.local):
    """This thread's reads of the clock.

    Attributes:
        last_s: Time of the last read; 0.0 before the first one.
        stopped_s: Seconds in which the process was stopped, which do not count.
    """

    last_s = 0.0
    stopped_s = 0.0


_looks = _Looks()


def now() -> float:
    """Returns seconds as time.monotonic(), without the time in which the process was stopped.

    Only differences between values of one thread have a meaning. A wait must call it again within
    LOOK_S.
    """
    real_s = time.monotonic()
    if _looks.last_s:
        _looks.stopped_s += max(real_s - _looks.last_s - _MOST_S, 0.0)
    _looks.last_s = real_s
    return real_s - _looks.stopped_s


def left(deadline: float) -> float:
    """Returns the seconds that a wait may sleep: until `deadline`, a value of now(), or LOOK_S."""
    return min(max(deadline - now(), 0.0), LOOK_S)
