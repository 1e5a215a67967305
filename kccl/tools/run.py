"""`kccl run -n 4 -- python program.py`: starts ranks as child processes, without MPI.

Every rank leads its own process group. So a signal reaches the rank and its children, and no other
rank. When a rank ends, the others go on: their calls raise PeerLost, and they may call
comm.shrink(). Ranks that wait for it in kccl.init() are told by ranks/losses.py. With
--kill-on-error the first rank that fails ends the job.

A guard process runs beside the launcher. When the launcher has ended, the guard ends the processes
that remain in the ranks' groups. It notices the launcher's end by EOF on a pipe, so it does after
kill -9, too. Unlike a parent-death signal, the guard needs no code between fork and exec, and it
also ends ranks that were started by a shell.
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
    Each rank also gets the environment variables of torchrun, as RANK and MASTER_ADDR.

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
        is 128 + s after signal s. 124 if the timeout came first.

    Raises:
        InvalidArgument: There are fewer cores than ranks to pin, or another argument is wrong.
        BackendError: The command cannot be started.
    """
    if world_size < 1:
        raise InvalidArgument(f"the number of ranks is {world_size}, must be at least 1")
    if not command:
        raise InvalidArgument("the command is missing, as in: kccl run -n 4 -- python program.py")
    if timeout is not None and not timeout > 0:
        raise InvalidArgument(f"timeout is {timeout}, must be positive")
    cpus = _cpus(world_size) if pins else []
    # Each rank needs a descriptor for its connection and, with labels, two for its pipes. The other
    # 10 are two pipes, the selector, the socket of the announcements, and those that subprocess
    # opens while it starts a rank.
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
    """Returns the CPU to which each rank is to be pinned."""
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
    """Pins this process; its children inherit that. Returns False, with a message on stderr, if the
    system forbids it.
    """
    from ..topology import pin

    if forbidden := pin(cpus):
        _report(f"the ranks are not pinned: {forbidden}")
    return forbidden is None


class _Guard:
    """Runs the guard process, which ends the ranks' process groups when the launcher has ended or
    leaves this context.
    """

    def __init__(self) -> None:
        orders, self._pipe = os.pipe()
        with run_signals.blocked():
            # The launcher has one thread, so no other thread can hold a lock during this fork.
            self._pid = os.fork()
            if self._pid == 0:
                try:
                    # In its own session it gets no signals of the launcher's terminal. It ignores
                    # signals, so that `pkill kccl` does not end it together with the launcher.
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
        # If SIGCHLD is ignored, the kernel reaps the guard, and waitpid() finds no child.
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def begin(self, group: int) -> None:
        os.write(self._pipe, b"+%d\n" % group)

    def end(self, group: int) -> None:
        os.write(self._pipe, b"-%d\n" % group)


def _guard(orders: int) -> None:
    """Runs in the guard process: reads the ranks' groups until EOF, and then ends these groups.

    `orders` is the read end of the launcher's pipe.
    """
    groups: set[int] = set()
    with os.fdopen(orders, "rb") as lines:
        for line in lines:
            group = int(line)
            groups.add(abs(group))
            # Forgets a group without members at once, because the system may reuse its number. A
            # group with members keeps its number.
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
        # The time of the timeout, by clock.now().
        self._ends_at: float | None = None
        # The time at which ranks that have not ended after SIGTERM get SIGKILL.
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
                # Pins the launcher: the child inherits that, and so is pinned from its start.
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
        # A rank must not read a terminal: its group is not the foreground group, so a read would
        # stop it by SIGTTIN.
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
        """Sends SIGTERM to the ranks that still run, unless that was done before."""
        if self._kills_at is not None or not self._running:
            return
        ranks = ", ".join(str(rank) for rank in self._running)
        _report(f"{why}: ending rank(s) {ranks}")
        self._kills_at = clock.now() + _GRACE_S
        self._signal_all(signal.SIGTERM)

    def close(self) -> None:
        """Closes the socket that announces lost ranks."""
        self._losses.close()

    def on_signal(self, number: int) -> None:
        """Passes a signal on to all ranks. The second one that asks for an end becomes SIGKILL."""
        if number in run_signals.PASSED_ON or number == signal.SIGCONT:
            self._signal_all(number)
            return
        self._num_signals += 1
        self._signal_all(number if self._num_signals == 1 else signal.SIGKILL)

    def stop(self) -> None:
        """Stops the ranks and this process. Continues the ranks when this process is continued."""
        # SIGSTOP and not SIGTSTP, which a program may ignore. Such a rank would go on waiting for
        # ranks that have stopped.
        self._signal_all(signal.SIGSTOP)
        run_signals.stop_here()
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        for process in self._running.values():
            _signal_group(process.pid, number)

    def reap(self) -> None:
        """Handles all ranks that have ended since the last call."""
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
        # After a signal that asks for an end, such as Ctrl-C, ranks may take their time to end.
        if self._kills_on_error and self._num_signals == 0:
            self._end_ranks(f"rank {rank} failed")


class _Labelled:
    """Copies one output stream of a rank line by line, and puts the rank before each line."""

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
        """Copies the data that has arrived. Returns False if there is no more data for now."""
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
        """Copies the data that has arrived, and closes the stream.

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
    # The terminal may be closed, for example if SIGHUP ends the launcher.
    with suppress(OSError):
        # One write, so that no rank's output comes in between.
        os.write(2, f"kccl: {sentence}\n".encode())
