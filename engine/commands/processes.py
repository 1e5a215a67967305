"""The ranks of `kccl serve --restart`: processes, which are started anew when one is lost.

Rank 0 is the server's own process, so that requests in its queue outlive the other ranks. Each set
of ranks is a job of its own, as under `kccl run`. Each other rank runs `python -m
kccl.engine.commands.processes ARGUMENTS`.
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

# The number of restarts that may fail in a row before the server gives up, and the seconds before
# the second restart. That time doubles for each further one.
_MOST_TRIES, _PAUSE_S = 5, 1.0
# The seconds that a rank has to end by itself.
_END_S = 10.0


def measured(engine: Engine) -> float:
    """Measures the bytes a second at which an engine reads weights; NaN if they fit into caches.
    Collective.
    """
    bounds = engine.weight_bytes() > engine.cache_bytes()
    return engine.bandwidth() if bounds else math.nan


class Processes:
    """The other ranks' processes. This process is rank 0. It is a context manager, which ends
    them.
    """

    def __init__(self, number: int, given: Mapping[str, Any], tell: Tell) -> None:
        """Prepares to start them.

        Args:
            number: The number of ranks, this process included.
            given: Arguments of Engine, which JSON must be able to represent.
            tell: Shows a line to the person who started the server.
        """
        self._number, self._given, self._tell = number, dict(given), tell
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # The processes may wait for this one, which has given up.
            self.kill()
        self.end()

    def open(self, *, measures: bool, **more: Any) -> Engine:
        """Starts the processes, and opens the engine that they and this process share.

        Args:
            measures: Whether all ranks call measured() next.
            more: Further arguments of Engine, for this rank alone.

        Raises:
            InvalidArgument, kccl.Error: As Engine.
        """
        if self._number == 1:
            return Engine(**self._given, ranks=1, **more)
        # Each set of ranks is a job of its own, so that leftovers of an earlier one cannot disturb
        # it.
        job = {"KCCL_WORLD_SIZE": str(self._number), "KCCL_RENDEZVOUS": secrets.token_hex(16)}
        told = json.dumps({"engine": self._given, "measures": measures})
        command = [sys.executable, "-m", "kccl.engine.commands.processes", told]
        for rank in range(1, self._number):
            self._running.append(
                subprocess.Popen(
                    command,
                    env=os.environ | job | {"KCCL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C in a terminal must reach rank 0 alone, which lets requests end.
                    process_group=0,
                )
            )
            self._tell(f"rank {rank} is process {self._running[-1].pid}")
        os.environ.update(job, KCCL_RANK="0")
        return Engine(**self._given, **more)

    def kill(self) -> None:
        """Ends the processes at once. Another thread may call it."""
        for each in list(self._running):
            each.kill()

    def end(self) -> None:
        """Waits until the processes have ended, as they do when the engine is closed. Kills those
        that do not end.
        """
        for each in self._running:
            try:
                each.wait(_END_S)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self._running = []


class Restarter:
    """Opens the engine anew whenever a rank is lost. It is a context manager, which closes the
    engine and ends its ranks.

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
            # The thread is a daemon. It may be opening an engine, which takes no longer than ranks
            # wait for each other.
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
        """Opens another engine. Tells whether that succeeded."""
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
    """Runs the requests that rank 0 submits until rank 0 closes its engine.

    Args:
        told: The description that Processes.open() has made.
    """
    # Rank 0 reports the end.
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
