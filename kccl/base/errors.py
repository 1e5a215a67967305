"""What can go wrong, by whose fault it is."""

from typing import Any


class Error(Exception):
    """Base of everything KCCL raises on purpose."""


class InvalidArgument(Error, ValueError):
    """The caller's mistake. Names the argument and both values; nothing was sent."""


class BackendError(Error, RuntimeError):
    """The machine or a library below refused. Names the call and its code."""


class CompileError(Error, RuntimeError):
    """Device source did not compile.

    Attributes:
        log: What the compiler said.
    """

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class WaitFailed(Error):
    """A wait ended without what it waited for. The communicator stays failed until `reset()`.

    Attributes:
        rank: The rank that gave up.
        peer: The rank it waited for, or None when any would have done.
        collective: Name of the kernel that waited.
        channel: Its channel; for `wait`, the signal_id.
        epoch_seen: The epoch (for `wait`, the count of signals) last seen from the peer.
        epoch_wanted: The epoch (or count) waited for.
        waited_s: How long, in seconds.
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
    """A peer did not arrive within the limit. All ranks may go on after `comm.reset()`."""


class PeerLost(WaitFailed, ConnectionError):
    """A peer is gone. The survivors go on with the communicator that `comm.shrink()` returns."""


class ProtocolError(Error):
    """The simulator found that ranks, blocks or threads do not exchange data soundly.

    The simulated machine has stopped, and every rank's next call raises this too. The text is the
    whole report: what, who, where, and the last steps.

    Attributes:
        kind: What was found, as in "data_race": kccl/sim/report.py has all.
        rank, block, thread: Who did it; a block of -1 is the rank's host, a thread of -1 what
            copies for the block asynchronously.
        site: Where in the source, as in "csrc/include/kccl/kernels/put.cuh:15".
        kernel, channel, epoch: The library's call that the thread makes or made last; "", -1 and 0
            without one.
        seed: Replays it.
        other: The earlier access, with the same attributes; None without one.
        timeline: The last steps, one a line.
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
