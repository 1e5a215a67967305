"""KCCL's exceptions."""

from typing import Any

from .copying import restored


class Error(Exception):
    """Base class of KCCL's exceptions. They can be pickled and copied, with all attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self), self.args, vars(self))


class InvalidArgument(Error, ValueError):
    """An argument is wrong. The text names it, its value and what it must be.

    Most wrong arguments are found before anything is sent. That counts or calls differ between
    ranks, or that a call within a kernel has a wrong argument, is found during the call. The text
    then names comm.reset(), after which all ranks may go on. In a call by which the ranks agree,
    such as split() or window(), all ranks raise this error.
    """


class NotContiguous(InvalidArgument):
    """An array is not C-contiguous, where it must be.

    Attributes:
        name: The argument's name.
        is_written: True if the call writes the array.
    """

    def __init__(self, name: str, shape: Any, *, is_written: bool) -> None:
        super().__init__(f"{name} has shape {shape} and is not C-contiguous, must be C-contiguous")
        self.name = name
        self.is_written = is_written


class BackendError(Error, RuntimeError):
    """The machine, or a library that KCCL calls, refused a call. The text names the call and its
    code.
    """


class CompileError(Error, RuntimeError):
    """Device source does not compile.

    Attributes:
        log: The compiler's messages.
    """

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class WaitFailed(Error):
    """A wait ended without success. The communicator stays failed until `reset()`.

    Attributes:
        rank: The rank that gave up.
        peer: The rank it waited for; None if it waited for any rank.
        collective: Name of the kernel that waited.
        channel: The kernel's channel. For `wait` the signal_id, for `send` and `recv` on CPUs the
            tag, for grid_sync and grid_exchange the block that it waited for.
        epoch_seen: The epoch last seen from the peer; for `wait`, the number of signals seen.
        epoch_wanted: The epoch, or the number of signals, that it waited for.
        waited_s: How long it waited, in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        peer: int | None = None,
        collective: str = "",
        channel: int = 0,
        epoch_seen: int = 0,
        epoch_wanted: int = 0,
        waited_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.collective = collective
        self.channel = channel
        self.epoch_seen = epoch_seen
        self.epoch_wanted = epoch_wanted
        self.waited_s = waited_s


class Timeout(WaitFailed, TimeoutError):
    """A peer did not arrive in time. All ranks may go on after `comm.reset()`."""


class PeerLost(WaitFailed, ConnectionError):
    """A peer is gone. The survivors go on with the communicator that `comm.shrink()` returns."""


class ProtocolError(Error):
    """The simulator found a bug in how ranks, blocks or threads synchronise.

    The simulated machine has stopped, and every rank's next call raises this error too. The text
    says what happened, who did it, where, and the last steps.

    Attributes:
        kind: The kind of bug, as in "data_race"; kccl/sim/report.py lists all kinds.
        rank, block, thread: The thread that did it. Block -1 is the rank's host. Thread -1 is an
            asynchronous copy of the block.
        site: The source line, as in "csrc/include/kccl/kernels/put.cuh:15".
        kernel, channel, epoch: The call of the library that the thread makes or made last; "", -1
            and 0 if it made none.
        seed: The seed that replays the run.
        other: The earlier access in the conflict, with the same attributes; None if there is none.
        timeline: The last steps, one in each line.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        seed: int,
        rank: int,
        block: int = -1,
        thread: int = -1,
        site: str = "",
        kernel: str = "",
        channel: int = -1,
        epoch: int = 0,
        other: Any = None,
        timeline: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.seed = seed
        self.rank = rank
        self.block = block
        self.thread = thread
        self.site = site
        self.kernel = kernel
        self.channel = channel
        self.epoch = epoch
        self.other = other
        self.timeline = timeline
