"""`kccl run -n 4 -- python program.py`: starts ranks as child processes, without MPI.

Every rank leads a process group of its own. So a signal reaches the rank and its own children, and
no other rank. When a rank ends, the others go on: they raise PeerLost and may call comm.shrink().
Ranks that wait for it in kccl.init() hear of it by ranks/losses.py. With --kill-on-error the first
rank that fails ends the job.

A guard process runs beside the launcher. When the launcher has ended, it ends the processes that
remain in the ranks' groups. It notices by the end of a pipe, so this works after kill -9, too.
Unlike a parent-death signal, this needs no code between fork and exec, and reaches ranks that a
shell started.
"""

import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, BinaryIO

from ..base import clock, env, syscalls
from ..base.errors import BackendError, InvalidArgument
from ..ranks import launchers
from ..ranks.job import check_descriptors, namespaces
from ..ranks.losses import Announcer
from . import run_signals

_GRACE_S = 2.0
_TIMED_OUT = 124  # the exit code of timeout(1)


def run(
    command: Sequence[str],
    world_size: int,
    *,
    timeout: float | None = None,
    kills_on_error: bool = False,
    pins: bool = False,
    labels: bool = False,
) -> int:
    """Runs `command` once for each rank, and waits for all of them.

    Rank 0 reads the launcher's standard input, unless that is a terminal. The others have no input.
    SIGINT, SIGTERM, SIGHUP and other signals that ask for an end are passed on to all ranks. The
    second such signal is passed on as SIGKILL. SIGUSR1, SIGUSR2 and real-time signals are passed on
    as often as they come. Ctrl-Z stops the ranks and the launcher, and SIGCONT continues them all.
    Besides its own variables a rank has those of torchrun, RANK and MASTER_ADDR among them.

    Args:
        command: Program and arguments, the same for every rank.
        world_size: Number of ranks.
        timeout: Seconds after which ranks that still run are ended; None for no limit.
        kills_on_error: When a rank fails, end the others: by SIGTERM, and 2 s later by SIGKILL.
            Ranks that end because of a signal that was passed on do not count as failed.
        pins: Pin each rank to an allowed core of its own, near the others: topology/placement.py.
            SMT siblings come after all cores.
        labels: Print the rank before each line of output.

    Returns:
        0 if every rank ended with 0. Otherwise the exit code of the first rank that did not, which
        is 128 + s after signal s. 124 after the time-out.

    Raises:
        InvalidArgument: There are fewer cores than ranks to pin, or nothing to run.
        BackendError: The command cannot be started.
    """
    if world_size < 1:
        raise InvalidArgument(f"the number of ranks is {world_size}, must be at least 1")
    if not command:
        raise InvalidArgument("the command is missing, as in: kccl run -n 4 -- python program.py")
    if timeout is not None and not timeout > 0:
        raise InvalidArgument(f"timeout is {timeout}, must be positive")
    cpus = _cpus(world_size) if pins else []
    # For a rank: its connection and, with labels, its pipes. The rest: two pipes, the selector, the
    # socket of the announcements, and what subprocess opens while it starts a rank.
    check_descriptors(10 + (3 if labels else 1) * world_size, f"kccl run of {world_size} ranks")
    with _Guard() as guard, selectors.DefaultSelector() as selector:
        job = _Job(guard, selector, labels, kills_on_error)
        with run_signals.handled(selector, job):
            try:
                job.start(command, world_size, cpus)
                return job.wait(timeout)
            finally:
                job.close()


def _cpus(world_size: int) -> list[int]:
    """Returns the CPU of each rank that is to be pinned."""
    from ..topology import discover, place_cores

    allowed = _allowed_cpus()
    if len(allowed) < world_size:
        raise InvalidArgument(
            f"{world_size} ranks cannot be pinned to {len(allowed)} allowed cores: start fewer "
            "ranks, or do not pin them"
        )
    return place_cores(discover(), [allowed] * world_size, env.read().layout)


def _allowed_cpus() -> set[int]:
    with syscalls.allowed("sched_getaffinity"):
        return os.sched_getaffinity(0)


def _is_pinned(cpus: set[int]) -> bool:
    """Pins this process, whose children inherit that. Reports where the system forbids it."""
    from ..topology import pin

    if forbidden := pin(cpus):
        _report(f"the ranks are not pinned: {forbidden}")
    return forbidden is None


class _Guard:
    """The process that ends the ranks' groups when the launcher has ended or leaves the context."""

    def __init__(self) -> None:
        orders, self._pipe = os.pipe()
        with run_signals.blocked():
            # The launcher has one thread, so no other thread can hold a lock during this fork.
            self._pid = os.fork()
            if self._pid == 0:
                try:
                    # In a session of its own it does not get the signals of the launcher's
                    # terminal, and what is sent to all processes of this name does not end it.
                    os.setsid()
                    run_signals.ignore_all()
                    os.close(self._pipe)
                    _guard(orders)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(0)
        os.close(orders)

    def __enter__(self) -> "_Guard":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)
        # Where the launcher's parent ignores SIGCHLD, the system itself takes the ended guard.
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def begin(self, group: int) -> None:
        os.write(self._pipe, b"+%d\n" % group)

    def end(self, group: int) -> None:
        os.write(self._pipe, b"-%d\n" % group)


def _guard(orders: int) -> None:
    """The program of the guard. `orders` is the read end of the launcher's pipe."""
    groups: set[int] = set()
    with os.fdopen(orders, "rb") as lines:
        for line in lines:
            group = int(line)
            groups.add(abs(group))
            # The system may reuse the number of a group without members, so forget such a group at
            # once. A group with members keeps its number.
            if group < 0 and not _signal_group(-group, 0):
                groups.discard(-group)
    for number in (signal.SIGTERM, signal.SIGKILL):
        groups = {group for group in groups if _signal_group(group, number)}
        deadline = clock.now() + _GRACE_S
        while groups and clock.now() < deadline:
            time.sleep(0.005)
            groups = {group for group in groups if _signal_group(group, 0)}


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group. Returns False when the group has no members."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


class _Job:
    """The running ranks, and the exit code of the launcher."""

    def __init__(
        self,
        guard: _Guard,
        selector: selectors.BaseSelector,
        labels: bool,
        kills_on_error: bool,
    ) -> None:
        self._guard = guard
        self._token = secrets.token_hex(16)
        self._losses = Announcer(self._token, selector)
        self._selector = selector
        self._labels = labels
        self._kills_on_error = kills_on_error
        # When the time of the ranks is over, by clock.now().
        self._ends_at: float | None = None
        # When the ranks that do not follow SIGTERM get SIGKILL.
        self._kills_at: float | None = None
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[int, list[_Labelled]] = {}
        self._exit_code = 0
        self._num_signals = 0

    def start(self, command: Sequence[str], world_size: int, cpus: Sequence[int]) -> None:
        allowed = _allowed_cpus() if cpus else set()
        port = launchers.free_port()
        try:
            for rank in range(world_size):
                # The child inherits this, so it is pinned from its start.
                if cpus and not _is_pinned({cpus[rank]}):
                    cpus = []
                variables = {
                    "KCCL_RANK": str(rank),
                    "KCCL_WORLD_SIZE": str(world_size),
                    "KCCL_RENDEZVOUS": self._token,
                    "KCCL_NAMESPACES": namespaces(),
                    **launchers.torchrun_variables(rank, world_size, port),
                }
                self._start_rank(rank, command, os.environ | variables)
        finally:
            if cpus:
                _is_pinned(allowed)

    def _start_rank(self, rank: int, command: Sequence[str], environ: dict[str, str]) -> None:
        # A rank's group is not the foreground group of the terminal. A read from the terminal would
        # stop the rank.
        reads = rank == 0 and sys.stdin is not None and not sys.stdin.isatty()
        output = subprocess.PIPE if self._labels else None
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=None if reads else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                bufsize=0,
                process_group=0,
            )
        except OSError as error:
            raise BackendError(f"cannot start {command[0]!r}: {error.strerror}") from error
        self._guard.begin(process.pid)
        self._running[rank] = process
        self._streams[rank] = [
            _Labelled(rank, source, sink.buffer, self._selector)
            for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
            if source is not None
        ]

    def wait(self, timeout: float | None) -> int:
        self._ends_at = None if timeout is None else clock.now() + timeout
        while self._running:
            deadlines = [each for each in (self._ends_at, self._kills_at) if each is not None]
            left = clock.left(min(deadlines)) if deadlines else None
            for key, _ in self._selector.select(left):
                key.data()
            now = clock.now()
            if self._ends_at is not None and now >= self._ends_at and self._running:
                self._ends_at = None
                self._exit_code = self._exit_code or _TIMED_OUT
                self._end_ranks(f"{timeout:g} s have passed")
            if self._kills_at is not None and now >= self._kills_at:
                self._kills_at = now + _GRACE_S
                self._signal_all(signal.SIGKILL)
        return self._exit_code

    def _end_ranks(self, why: str) -> None:
        """Ends the ranks that still run, unless that has begun."""
        if self._kills_at is not None or not self._running:
            return
        ranks = ", ".join(str(rank) for rank in self._running)
        _report(f"{why}: ending rank(s) {ranks}")
        self._kills_at = clock.now() + _GRACE_S
        self._signal_all(signal.SIGTERM)

    def close(self) -> None:
        """Ends what the job has besides its ranks."""
        self._losses.close()

    def on_signal(self, number: int) -> None:
        """Passes a signal on to all ranks. Passes the second one that asks for an end on as
        SIGKILL.
        """
        if number in run_signals.PASSED_ON or number == signal.SIGCONT:
            self._signal_all(number)
            return
        self._num_signals += 1
        self._signal_all(number if self._num_signals == 1 else signal.SIGKILL)

    def stop(self) -> None:
        """Stops the ranks and this process; when it goes on, the ranks do."""
        # A program may ignore SIGTSTP, and would wait for ranks that have stopped.
        self._signal_all(signal.SIGSTOP)
        run_signals.stop_here()
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        for process in self._running.values():
            _signal_group(process.pid, number)

    def reap(self) -> None:
        """Handles the ends of the ranks that have ended."""
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                self._handle_end(rank, code)

    def _handle_end(self, rank: int, code: int) -> None:
        process = self._running.pop(rank)
        self._losses.announce(rank)
        self._guard.end(process.pid)
        for stream in self._streams.pop(rank):
            stream.close()
        if code == 0:
            return
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        _report(f"rank {rank} {how}")
        self._exit_code = self._exit_code or (128 - code if code < 0 else code)
        # After Ctrl-C every rank ends in its own time.
        if self._kills_on_error and self._num_signals == 0:
            self._end_ranks(f"rank {rank} failed")


class _Labelled:
    """One output stream of a rank, passed on line by line after the rank's number."""

    def __init__(
        self, rank: int, source: IO[bytes], sink: BinaryIO, selector: selectors.BaseSelector
    ) -> None:
        self._prefix = b"[%d] " % rank
        self._source = source.fileno()
        self._file = source
        self._sink = sink
        self._selector = selector
        self._line = b""
        self._is_open = True
        os.set_blocking(self._source, False)
        selector.register(self._source, selectors.EVENT_READ, self._pass_on)

    def _pass_on(self) -> bool:
        """Passes on what has arrived. Returns False when there is no more for now."""
        if not self._is_open:
            # The selector reported the stream and the rank's end together, and close() ran first.
            return False
        try:
            data = os.read(self._source, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(self._source)
            self._is_open = False
            return False
        *lines, self._line = (self._line + data).split(b"\n")
        self._write(lines)
        return True

    def close(self) -> None:
        """Passes on what has arrived, and closes the stream.

        Does not wait for the stream's end, because a child of the rank may hold it open.
        """
        while self._is_open and self._pass_on():
            pass
        if self._is_open:
            self._selector.unregister(self._source)
            self._is_open = False
        self._write([self._line] if self._line else [])
        self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._sink.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._sink.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _report(sentence: str) -> None:
    # The terminal may have gone, as the reason for SIGHUP.
    with suppress(OSError):
        # One write, so that no rank's output comes in between.
        os.write(2, f"kccl: {sentence}\n".encode())
