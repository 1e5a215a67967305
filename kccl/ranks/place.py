"""Decides which of several processes with the same variables is a rank. It is used where ranks find
each other by sockets, and the rank is the process that listens under the rank's socket name. That
name is called the rank's place.

A helper process (a child of the rank) may inherit the rank's variables and call kccl.init() before
the rank does. It then has the rank's place. If the helper still waits for the other ranks when the
rank comes, it gives the place back, and its kccl.init() raises. If the helper has met the other
ranks, the rank's kccl.init() raises and names the helper.
"""

import contextlib
import hashlib
import os
import socket
import time
from pathlib import Path

from ..base import clock
from ..base.errors import BackendError
from . import sockets
from .dialing import dial, new_socket

# Seconds that a rank waits for a helper to give its place back. A waiting helper checks every 0.2 s
# whether the rank has come.
_GIVES_BACK_S = 2.0
_RETRY_S = 0.02

_held: dict[str, socket.socket] = {}
"""Name -> listener of each place that this process has taken, until it ends or gives it back."""


class Place:
    """The place of a rank in a job, taken by this process."""

    def __init__(self, job: str, rank: int) -> None:
        """Takes the place. Idempotent.

        Args:
            job: The job's unique name.
            rank: The rank.

        Raises:
            BackendError: Another process has the place, and keeps it.
        """
        self._rank = rank
        text = f"place {rank} {os.getuid()} {job}"
        self._name = "kccl-" + hashlib.sha256(text.encode()).hexdigest()[:32]
        deadline = clock.now() + _GIVES_BACK_S
        while self._name not in _held:
            try:
                listener = sockets.bind(self._name)
            except OSError:
                self._ask_holder(deadline)
                continue
            listener.setblocking(False)
            _held[self._name] = listener

    def check(self) -> None:
        """Gives the place back if an ancestor of this process asks for it.

        That ancestor is the rank, and this process is a helper with its variables.

        Raises:
            BackendError: The place was given back.
        """
        listener = _held[self._name]
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # nobody has come
                return
            with connection:
                try:
                    pid = sockets.peer_pid(connection)
                except BackendError:  # a process of another user
                    continue
            if pid in _ancestors(os.getpid()):
                _held.pop(self._name).close()
                raise BackendError(
                    f"this process is no rank: process {pid}, which started it, is rank "
                    f"{self._rank} and has called kccl.init() after it. Only that one is a rank: "
                    f"this one, {_described(os.getpid())}, must not call kccl.init(), or must be "
                    "started without the launcher's variables"
                )

    def _ask_holder(self, deadline: float) -> None:
        """Asks the process that holds the place for it.

        Returns when the place may be free, so that bind() is worth another try. Raises BackendError
        if the holder keeps the place.
        """
        with new_socket() as connection:
            # A holder that has met the other ranks no longer accepts, so its backlog may be full.
            # A connect() that does not block then fails at once, instead of waiting for ever.
            connection.setblocking(False)
            try:
                dial(connection, self._name)
            except ConnectionRefusedError:
                return  # the holder has just ended, or given the place back
            except BlockingIOError as error:
                raise self._is_held("a process that many others have asked for it") from error
            pid = sockets.peer_pid(connection)
            is_helper = os.getpid() in _ancestors(pid)
            while is_helper and clock.now() < deadline:
                time.sleep(_RETRY_S)
                with contextlib.suppress(OSError), sockets.bind(self._name):
                    return
        if is_helper:
            raise BackendError(
                f"another process is rank {self._rank} already: {_described(pid)}. This process "
                "started it, it has inherited the variables, and it has called kccl.init() first. "
                "Only this one may call that; or start the other one without the launcher's "
                "variables"
            )
        raise self._is_held(_described(pid))

    def _is_held(self, holder: str) -> BackendError:
        return BackendError(
            f"another process is rank {self._rank} already. If a rank started this process, which "
            "has inherited its variables, this one must not call kccl.init(); if this one is rank "
            f"{self._rank}, the other one must not: {holder}. If that is of another job, give each "
            "job a rendezvous of its own"
        )


def _described(pid: int) -> str:
    words = " ".join(_read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").split())
    return f"process {pid} ({words[:80]})" if words else f"process {pid}"


def _ancestors(pid: int) -> list[int]:
    """Returns a process's parent, the parent of that, and so on."""
    found: list[int] = []
    while pid > 1:
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        pid = int(fields[1]) if fields else 0
        found.append(pid)
    return found


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _forget() -> None:
    # Runs in a forked child, which is no rank: it must not keep the listeners open, or the places
    # would stay taken after the rank has ended.
    for listener in _held.values():
        listener.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)
