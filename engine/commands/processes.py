"""The ranks of `kccl serve --restart`: processes, which are all started anew when one is lost.

Rank 0 is the server's own process, so that the requests in its queue survive a restart. The other
ranks run `python -m kccl.engine.commands.processes ARGUMENTS`. At each restart the ranks are a new
job, as under `kccl run`.
"""

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import kccl

from ..api import Engine

Tell = Callable[[str], None]

# After _MOST_TRIES failed restarts in a row the server gives up. It waits _PAUSE_S seconds between
# the first and the second of these, and doubles the wait before each further one.
_MOST_TRIES, _PAUSE_S = 5, 1.0
# A rank that has not ended by itself after this many seconds is killed.
_END_S = 10.0


def measured(engine: Engine) -> float:
    """Measures the bytes a second at which an engine reads weights. Returns NaN, and measures
    nothing, if the weights fit into the caches. Collective: all ranks must call it.
    """
    bounds = engine.weight_bytes() > engine.cache_bytes()
    return engine.bandwidth() if bounds else math.nan


class Processes:
    """The processes of all ranks except rank 0, which is this process. A context manager, which
    ends them on exit.
    """

    def __init__(self, number: int, given: Mapping[str, Any], tell: Tell) -> None:
        """Stores the arguments. open() starts the processes.

        Args:
            number: The number of ranks, including this process.
            given: Arguments of Engine. They must be representable as JSON.
            tell: Shows a line to the person who started the server.
        """
        self._number, self._given, self._tell = number, dict(given), tell
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # After an error the other ranks may be waiting for this process, so they would not end.
            self.kill()
        self.end()

    def open(self, *, measures: bool, **more: Any) -> Engine:
        """Starts the processes, and opens the engine that they and this process share.

        Args:
            measures: Whether the other ranks call measured() next. If so, the caller must call it,
                too, because it is collective.
            more: Further arguments of Engine, for this rank alone.

        Raises:
            InvalidArgument, kccl.Error: As Engine.
        """
        if self._number == 1:
            return Engine(**self._given, ranks=1, **more)
        # The rendezvous is new, so that processes that are left from an earlier job cannot join.
        job = {"KCCL_WORLD_SIZE": str(self._number), "KCCL_RENDEZVOUS": secrets.token_hex(16)}
        told = json.dumps({"engine": self._given, "measures": measures})
        command = [sys.executable, "-m", "kccl.engine.commands.processes", told]
        for rank in range(1, self._number):
            self._running.append(
                subprocess.Popen(
                    command,
                    env=os.environ | job | {"KCCL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    # The ranks get a process group of their own, so that Ctrl-C in a terminal
                    # reaches only rank 0's process. Rank 0 then lets the requests end.
                    process_group=0,
                )
            )
            self._tell(f"rank {rank} is process {self._running[-1].pid}")
        os.environ.update(job, KCCL_RANK="0")
        return Engine(**self._given, **more)

    def kill(self) -> None:
        """Kills the processes, and does not wait. Any thread may call it."""
        for each in list(self._running):
            each.kill()

    def end(self) -> None:
        """Waits until the processes have ended. They end when this process closes its engine. Kills
        those that have not ended after _END_S seconds.
        """
        for each in self._running:
            try:
                each.wait(_END_S)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self._running = []


class Restarter:
    """Opens a new engine whenever a rank is lost. A context manager, which closes the newest engine
    and ends its ranks.

    Attributes:
        engine: The newest engine.
    """

    def __init__(
        self,
        processes: Processes,
        engine: Engine,
        *,
        told: Callable[[Engine | None], None],
        tell: Tell,
    ) -> None:
        """Begins to watch an engine.

        Args:
            processes: The Processes that opened the engine.
            engine: The engine, whose queue has started.
            told: Called with each new engine, and with None when all restarts have failed.
            tell: Shows a line to the person who started the server.
        """
        self.engine = engine
        self._processes, self._told, self._tell = processes, told, tell
        self._is_ending, self._replacing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="kccl restart", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Restarter":
        return self

    def __exit__(self, *_: object) -> None:
        with self._replacing:
            self._is_ending.set()
        self.engine.sessions.close()
        self._thread.join(0.1)
        if self._thread.is_alive():
            # The thread may be opening an engine. Killing the other ranks makes that fail, at the
            # latest when a wait times out. If the thread runs even longer, it is left behind: as a
            # daemon thread it does not keep the process alive.
            self._processes.kill()
            self._thread.join(_END_S)
        self.engine.close()
        self._processes.end()

    def _watch(self) -> None:
        while (failure := self.engine.sessions.wait_for_failure()) is not None:
            if self._is_ending.is_set():
                return
            self._tell(f"the engine has failed: {failure}")
            limit = self.engine.sessions.limit
            self.engine.close()
            self._processes.kill()
            self._processes.end()
            if not self._reopen(limit):
                return

    def _reopen(self, limit: int) -> bool:
        """Tries to open a new engine, up to _MOST_TRIES times. Tells whether that succeeded."""
        for number in range(_MOST_TRIES):
            if self._is_ending.wait(number and _PAUSE_S * 2 ** (number - 1)):
                return False
            try:
                engine = self._processes.open(measures=False)
            except (kccl.Error, OSError, MemoryError) as error:
                self._tell(f"restart {number + 1} of {_MOST_TRIES} has failed: {error}")
                self._processes.kill()
                self._processes.end()
                continue
            engine.sessions.limit = limit
            engine.sessions.start()
            with self._replacing:
                if self._is_ending.is_set():
                    engine.close()
                    return False
                self.engine = engine
            self._told(engine)
            self._tell("the engine has been restarted")
            return True
        self._tell("the engine is not restarted any more")
        self._told(None)
        return False


def main(told: str) -> None:
    """Runs a rank other than 0: opens its engine, and runs the requests that rank 0 submits until
    rank 0 closes its engine.

    Args:
        told: JSON that Processes.open() has made: the arguments of Engine, and `measures`.
    """
    # Rank 0 handles these signals, and ends this process by closing its engine.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(told)
    with Engine(**given["engine"]) as engine:
        if given["measures"]:
            measured(engine)
        engine.sessions.follow()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except kccl.Error as error:
        sys.exit(f"kccl: {error}")
