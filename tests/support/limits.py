"""How long a test may run, and what happens to one that runs longer.

Its failure shows the stacks of all threads: those of this process, and of each process of Python
that the test started. All that it started is ended. A test that does not return to Python even then
ends its worker, and another one takes its place.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

AT_LEAST_S = 60
AT_MOST_S = 180
# A busy machine takes about 3.5 times as long as an idle one.
TIMES_AS_LONG = 5
# For the stacks, and for what a test does when it fails.
GRACE_S = 30
_TICKS = os.sysconf("SC_CLK_TCK")


def limit_of(seconds):
    """The limit in seconds of a test that takes so many on two idle cores."""
    return min(max(AT_LEAST_S, TIMES_AS_LONG * seconds), AT_MOST_S)


def _processes():
    """(number, parent, start in ticks since the machine's) of each process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # Behind the name in brackets, which may have blanks.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            yield int(folder.name), int(fields[1]), int(fields[19])


def _has_left(pid, test):
    """Whether the test has started the process, and another one is its parent now."""
    with suppress(OSError):
        return f"PYTEST_CURRENT_TEST={test} (".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def started_since(ticks, test):
    """The processes that a test has started after so many ticks."""
    found = {os.getpid()}
    rest = sorted((start, pid, parent) for pid, parent, start in _processes() if start >= ticks)
    for _, pid, parent in rest:
        if parent in found or (pid != os.getpid() and _has_left(pid, test)):
            found.add(pid)
    return sorted(found - {os.getpid()})


def stacks_of(pid):
    """What py-spy tells of a process, or why it cannot."""
    command = Path(f"/proc/{pid}/cmdline")
    with suppress(OSError):
        words = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if "python" not in words:
            return f"{pid}: {words}"
    spy = [str(Path(sys.executable).parent / "py-spy"), "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(spy, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{pid}: {error}"
    return done.stdout or f"{pid}: {done.stderr.partition(chr(10))[0]}"


def own_stacks():
    with tempfile.TemporaryFile("w+") as out:
        faulthandler.dump_traceback(out, all_threads=True)
        out.seek(0)
        return out.read()


class Limits:
    """The plugin that sets the timer of each test, instead of pytest-timeout's own."""

    def __init__(self):
        # pytest does not capture it yet.
        self._stderr = os.dup(sys.__stderr__.fileno())

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            takes = item.get_closest_marker("takes")
            if takes is not None:
                apart = takes.kwargs.get("fixtures_apart", False)
                limit = limit_of(takes.args[0])
                item.add_marker(pytest.mark.timeout(limit, func_only=apart))

    # GPU hosts may not have pytest-timeout.
    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item, settings):
        began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)

        def end(signum, frame):
            started = started_since(began, item.nodeid)
            stacks = [own_stacks(), *map(stacks_of, started)]
            for pid in started:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"not at its end after {settings.timeout:.0f} s\n" + "\n".join(stacks))

        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout)
        faulthandler.dump_traceback_later(settings.timeout + GRACE_S, exit=True, file=self._stderr)
        return True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self, item):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()
        return True
