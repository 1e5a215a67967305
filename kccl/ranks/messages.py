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
    """Returns the call and the data of what named() has made."""
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    return payload[_LENGTH.size : end].decode(), payload[end:]


def drop(kind: bytes, payload: bytes) -> None:
    """Forgets a message that nobody wants."""
    if kind == FD:
        close_fd(int(parts_of(payload)[1]))


def disagreement(calls: dict[int, str]) -> InvalidArgument:
    """Returns the error of ranks that make different calls; `calls` has those that are known, by
    rank.
    """
    listing = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return InvalidArgument(
        f"the ranks disagree about this call: {listing}; all ranks must make the same collective "
        "calls in the same order"
    )


def own_failure(error: BaseException, rank: int, call: str) -> BaseException:
    """Returns the error of a rank on which a call has failed: names the rank where `error` does
    not.
    """
    if isinstance(error, BackendError):
        reason = getattr(error, "_reason", str(error))
        error._reason = reason  # type: ignore[attr-defined]  # for the call around this one
        error.args = (f"{call} failed on rank {rank}: {reason}", *error.args[1:])
        return error
    if isinstance(error, OSError | MemoryError) and not isinstance(error, Error):
        made = BackendError(_sentence(error))
        made.__cause__ = error
        return own_failure(made, rank, call)
    return error


def _sentence(error: OSError | MemoryError) -> str:
    """Returns what the operating system said, which limit that is, and what to do."""
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
    """Returns what a rank tells its peers about its error."""
    kinds = (Timeout, PeerLost, InvalidArgument, BackendError, Error, KeyboardInterrupt)
    kind = next((each.__name__ for each in kinds if isinstance(error, each)), "")
    named = [str(error)] if isinstance(error, Error) else [type(error).__name__, str(error)]
    text = ": ".join(filter(None, named))
    peer = error.peer if isinstance(error, WaitFailed) else None
    return json.dumps([rank, kind, text, peer]).encode()


def peers_failure(reason: bytes, rank: int, call: str) -> tuple[int, Error]:
    """Returns the rank on which a call has failed, and the error of `rank`, which was told the
    reason.
    """
    source, kind, text, peer = json.loads(reason)
    return source, _error_of(source, kind, text, peer, rank, call)


def _error_of(source: int, kind: str, text: str, peer: int | None, rank: int, call: str) -> Error:
    for waited in (Timeout, PeerLost):
        if kind == waited.__name__:
            heard = f"{text} (rank {rank} heard it from rank {source})"
            return waited(heard, rank=source, peer=peer, collective=call)
    if kind != BackendError.__name__:  # own_failure() has named the rank in those
        text = f"{call} failed on rank {source}: {text}"
    if kind == KeyboardInterrupt.__name__:
        return PeerLost(text, rank=rank, peer=source, collective=call)
    return InvalidArgument(text) if kind == InvalidArgument.__name__ else BackendError(text)
