"""The contents of an exchange's messages: the name of the call, and why a call has failed."""

import errno
import json
import resource
import struct

from ..base.errors import BackendError, Error, InvalidArgument, PeerLost, Timeout, WaitFailed
from .link import FD, close_fd

_LENGTH = struct.Struct("<H")


def named(call: str, data: bytes = b"") -> bytes:
    """Returns the payload of a message in an exchange: the sender's call, and what it sends."""
    name = call.encode()
    return _LENGTH.pack(len(name)) + name + data


def parts_of(payload: bytes) -> tuple[str, bytes]:
    """Returns the call's name and the data of a payload that named() made."""
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    return payload[_LENGTH.size : end].decode(), payload[end:]


def drop(kind: bytes, payload: bytes) -> None:
    """Drops a message: if it is an FD, closes the descriptor that came with it."""
    if kind == FD:
        close_fd(int(parts_of(payload)[1]))


def disagreement(calls: dict[int, str]) -> InvalidArgument:
    """Returns the error for ranks that make different calls.

    Args:
        calls: Rank -> name of its call, for the ranks whose call is known.
    """
    listing = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return InvalidArgument(
        f"the ranks disagree about this call: {listing}; all ranks must make the same collective "
        "calls in the same order"
    )


def own_failure(error: BaseException, rank: int, call: str) -> BaseException:
    """Returns what a rank raises when a call has failed on it with `error`.

    The text of a BackendError gets the call and the rank. An OSError or a MemoryError becomes such
    a BackendError. Every other error is returned as it is.
    """
    if isinstance(error, BackendError):
        reason = getattr(error, "_reason", str(error))
        # own_failure() of an outer call takes the reason from here, and adds its own name.
        error._reason = reason  # type: ignore[attr-defined]
        error.args = (f"{call} failed on rank {rank}: {reason}", *error.args[1:])
        return error
    if isinstance(error, OSError | MemoryError) and not isinstance(error, Error):
        made = BackendError(_sentence(error))
        made.__cause__ = error
        return own_failure(made, rank, call)
    return error


def _sentence(error: OSError | MemoryError) -> str:
    """Returns the operating system's text, which limit is reached, and what to do about it."""
    text = str(error) or type(error).__name__
    code = error.errno if isinstance(error, OSError) else errno.ENOMEM
    if code == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"{text}: this process may have {limit} files open; close some, or raise the limit, as "
            f"by `ulimit -n {2 * limit}`"
        )
    if code == errno.ENFILE:
        return (
            f"{text}: all processes of this machine may have /proc/sys/fs/file-max files open; end "
            "other programs, or raise that number"
        )
    if code == errno.ENOMEM:
        return (
            f"{text}: this process may have no more memory or mappings; see `ulimit -v` and "
            "/proc/sys/vm/max_map_count, close communicators, or end other programs"
        )
    return text


def reason_of(error: BaseException, rank: int) -> bytes:
    """Returns the payload of a FAIL message: what a rank tells its peers about its error."""
    kinds = (Timeout, PeerLost, InvalidArgument, BackendError, Error, KeyboardInterrupt)
    kind = next((each.__name__ for each in kinds if isinstance(error, each)), "")
    named = [str(error)] if isinstance(error, Error) else [type(error).__name__, str(error)]
    text = ": ".join(filter(None, named))
    peer = error.peer if isinstance(error, WaitFailed) else None
    return json.dumps([rank, kind, text, peer]).encode()


def peers_failure(reason: bytes, rank: int, call: str) -> tuple[int, Error]:
    """Returns the rank on which a call has failed, and the error that `rank` raises for it.

    Args:
        reason: What the failed rank told, as reason_of() made it.
        rank: The rank that was told.
        call: The call's name.
    """
    source, kind, text, peer = json.loads(reason)
    return source, _error_of(source, kind, text, peer, rank, call)


def _error_of(source: int, kind: str, text: str, peer: int | None, rank: int, call: str) -> Error:
    for waited in (Timeout, PeerLost):
        if kind == waited.__name__:
            heard = f"{text} (rank {rank} heard it from rank {source})"
            return waited(heard, rank=source, peer=peer, collective=call)
    if kind != BackendError.__name__:  # a BackendError names the rank already, see own_failure()
        text = f"{call} failed on rank {source}: {text}"
    if kind == KeyboardInterrupt.__name__:
        return PeerLost(text, rank=rank, peer=source, collective=call)
    return InvalidArgument(text) if kind == InvalidArgument.__name__ else BackendError(text)
