"""What can go wrong, by whose fault it is."""


class Error(Exception):
    """Base of everything KCCL raises on purpose."""


class InvalidArgument(Error, ValueError):
    """The caller's mistake. Names the argument and both values; nothing was sent."""


class BackendError(Error, RuntimeError):
    """The machine or a library below refused. Names the call and its code."""


class CompileError(Error, RuntimeError):
    """Device source did not compile. Carries the compiler's log."""


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
