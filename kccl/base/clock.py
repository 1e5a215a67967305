"""The clock of waits for other ranks. Time in which this process was stopped does not count.

A job is stopped by Ctrl-Z or SIGSTOP, by a container that is frozen, or with its machine. When it
goes on, no rank has had the time that has passed. Of each stop at most 0.3 s count here, and
0.1 s in waits in calls, which look far more often: csrc/include/kccl/wait.cuh.
"""

import threading
import time

LOOK_S = 0.2
"""A wait sleeps no longer than this before it looks at the clock again."""

# The most that counts between two looks. A busy machine may wake a wait late.
_MOST_S = 0.3


class _Looks(threading.local):
    """What this thread knows of the time.

    Attributes:
        last_s: When it looked last; 0.0: it has not looked yet.
        stopped_s: Seconds that do not count.
    """

    last_s = 0.0
    stopped_s = 0.0


_looks = _Looks()


def now() -> float:
    """Returns seconds as time.monotonic(), without the time in which the process was stopped.

    Only differences count, of values from one thread. A wait looks again after LOOK_S.
    """
    real_s = time.monotonic()
    if _looks.last_s:
        _looks.stopped_s += max(real_s - _looks.last_s - _MOST_S, 0.0)
    _looks.last_s = real_s
    return real_s - _looks.stopped_s


def left(deadline: float) -> float:
    """Returns how long a wait may sleep now: up to its deadline, a value of now(), or LOOK_S."""
    return min(max(deadline - now(), 0.0), LOOK_S)
