"""Sees whether the other ranks that mpirun or torchrun started still run, before the ranks meet.

MPI's own calls wait for a rank that has ended, some without a timeout. torchrun lets the others
wait for a rank that has ended with status 0. So a rank looks in /proc for the launcher's other
children. Ranks on other machines are not found.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base import clock
from ..base.errors import Error
from . import launchers
from .losses import absent, ended_before
from .processes import is_running
from .sockets import bind

# A launcher starts all its ranks within a short time. A rank whose process is not found after this
# many seconds has ended.
_STARTS_WITHIN_S = 3.0
_LOOK_S = 0.05
_LINGERS_S = 1.0
_GUARD = "import sys; sys.path.append({!r}); from kccl.ranks.siblings import guard; guard()"


class Siblings:
    """The processes of the other ranks of this job, as far as they can be found in /proc."""

    def __init__(self, variable: str, rank: int, size: int, *, is_one_machine: bool) -> None:
        """Finds the launcher.

        Args:
            variable: The environment variable in which the launcher gives each process its rank.
            rank, size: This rank, and the number of ranks.
            is_one_machine: The launcher started all of them on this machine.
        """
        self._variable, self._rank, self._size = variable, rank, size
        self._launcher = _launcher(variable) if is_one_machine and size > 1 else 0
        self._pids = {self._rank: os.getpid()}
        # For each watched rank: its number in the launcher's environment variable -> its number in
        # error messages.
        self._names = {rank: rank for rank in range(size)}
        self._began = clock.now()

    def among(self, ranks: Sequence[int]) -> "Siblings":
        """Watches only some ranks from now on. Returns this object.

        Args:
            ranks: Those ranks, this one included, by the launcher's numbers. Errors call the first
                one 0, the second one 1, and so on.
        """
        self._names = {rank: name for name, rank in enumerate(ranks)}
        return self

    def check(self) -> None:
        """Raises PeerLost if a rank has ended, or will not call kccl.init()."""
        lost = self._lost()
        if lost is not None:
            # The other ranks look for ended processes within this time too. If this rank ended
            # earlier, they might name this rank instead of the one that was lost first.
            time.sleep(_LINGERS_S)
            raise ended_before(self._names[self._rank], self._names[lost])

    def _lost(self) -> int | None:
        if not self._launcher:
            return None
        all_known = len(self._pids) == self._size or self._look()
        for rank in set(self._names) - {self._rank}:
            if rank not in self._pids:
                if all_known and clock.now() - self._began > _STARTS_WITHIN_S:
                    return rank
            elif not is_running(self._pids[rank]) or _has_said_that_it_ends(self._launcher, rank):
                return rank
        return None

    def _look(self) -> bool:
        """Finds the launcher's children. Returns False if one of them does not show its rank."""
        all_known = True
        for pid in _children(self._launcher):
            text = _variable_of(pid, self._variable)
            if text is not None:
                self._pids.setdefault(int(text), pid)
            elif is_running(pid):
                all_known = False
        return all_known

    @contextmanager
    def guarding(self, seconds: float) -> Iterator[None]:
        """Returns a context for a call that waits for the other ranks and cannot be interrupted,
        such as MPI_Init.

        If another rank ends during the call, or the time is up, guard() ends this process.

        Args:
            seconds: Most seconds to wait for the other ranks.

        Raises:
            PeerLost: Another rank has ended before the call.
            Timeout: The launcher has not started all ranks in time.
        """
        deadline = clock.now() + seconds
        self.check()
        while self._launcher and len(self._pids) < self._size:
            if clock.now() > deadline:
                raise absent(self._rank, min(set(range(self._size)) - set(self._pids)))
            time.sleep(_LOOK_S)
            self.check()
        if not self._launcher:
            yield
            return
        program = _GUARD.format(str(Path(__file__).parents[2]))
        peers = [f"{rank}:{pid}" for rank, pid in self._pids.items() if rank != self._rank]
        left = max(deadline - clock.now(), 0)
        facts = [str(self._rank), str(left), *peers]
        command = [sys.executable, "-I", "-S", "-c", program, *facts]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            yield
        finally:
            process.communicate()


def of_mpi(environ: Mapping[str, str]) -> Siblings:
    """Returns the ranks that mpirun started."""
    variable, size = launchers.mpi_rank_variable(environ), launchers.mpi_world_size(environ)
    is_one_machine = launchers.number_of_local_ranks(environ) == size
    return Siblings(variable, launchers.rank_of(environ), size, is_one_machine=is_one_machine)


def of_torchrun(environ: Mapping[str, str], rank: int, size: int) -> Siblings:
    """Returns the ranks that torchrun started. Looks for none if RANK was set by hand."""
    return Siblings("RANK", rank, size, is_one_machine="TORCHELASTIC_RUN_ID" in environ)


def guard() -> None:
    """Runs in a process that guarding() starts: ends its parent when a peer ends or the time is up.

    It returns when its standard input is closed. A thread of the parent could not do this, because
    MPI_Init holds the GIL.
    """
    rank, seconds, *peers = sys.argv[1:]
    deadline = clock.now() + float(seconds)
    parent = os.getppid()
    os.set_blocking(0, False)
    while _is_open(0):
        for peer, _, pid in (each.partition(":") for each in peers):
            if not is_running(int(pid)):
                # Leaves the launcher time to end all ranks itself, which it does if a rank has
                # failed.
                time.sleep(_LOOK_S)
                _end(parent, int(rank), ended_before(int(rank), int(peer)))
                return
        if clock.now() > deadline:
            _end(parent, int(rank), absent(int(rank), None, by_mpi=True))
            return
        time.sleep(_LOOK_S)


def _end(parent: int, rank: int, why: Exception) -> None:
    os.write(2, f"kccl: {why}; rank {rank} ends\n".encode())
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(parent, number)
        time.sleep(1)


def _is_open(descriptor: int) -> bool:
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return True


def say_that_this_rank_ends(environ: Mapping[str, str]) -> None:
    """Tells the ranks that wait, and those that will, that this one will not call kccl.init().

    A process calls this at its end if it has initialized MPI. MPI_Finalize then waits for the other
    ranks, so they cannot see that the process ends. The sign is a socket that listens under a name
    known to all, until the process has ended.
    """
    variable = launchers.mpi_rank_variable(environ)
    launcher = _launcher(variable) if variable else 0
    if launcher:
        with suppress(OSError, Error):
            bind(_name(launcher, int(environ[variable]))).detach()


def _has_said_that_it_ends(launcher: int, rank: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(f"\0{_name(launcher, rank)}")
        except OSError:
            return False
    return True


def _name(launcher: int, rank: int) -> str:
    return f"kccl-{launcher}-ended-{rank}"


def _launcher(variable: str) -> int:
    """Returns the process id of the launcher; 0 if it is not found.

    The launcher is the nearest ancestor that does not have a rank's variables. It may have started
    a rank through a shell or another program, which then has the rank's variables too.
    """
    pid = os.getppid()
    while pid > 1 and _variable_of(pid, variable) is not None:
        pid = _parent(pid)
    return pid if pid > 1 else 0


def _variable_of(pid: int, name: str) -> str | None:
    """Returns an environment variable of another process; None if it is not set or may not be
    read.
    """
    with suppress(OSError):
        for text in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, _, value = text.partition(b"=")
            if key == name.encode():
                return value.decode()
    return None


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _children(pid: int) -> list[int]:
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and _parent(int(entry)) == pid
    ]
