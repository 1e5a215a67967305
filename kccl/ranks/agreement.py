"""What the ranks agree on out of band: settings at start-up, split() and shrink()."""

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable
from socket import socket
from typing import Protocol, TypeVar

from ..base import abi
from ..base.env import Env
from ..base.errors import InvalidArgument, PeerLost
from ..plan.specs import SPECS
from ..plan.tuning import tuning_for
from . import sockets
from .mesh import Mesh


def agree_at_start(ranks: Mesh, backend: str, env: Env, settings: object) -> set[int]:
    """Checks that version and settings are the same on all ranks. Collective.

    Args:
        ranks: The ranks that take part.
        backend: Name of the backend.
        env: Environment variables. Some must be the same on all ranks.
        settings: Settings that must be the same on all ranks; compared as text.

    Returns:
        The cores that any of the ranks may use.

    Raises:
        InvalidArgument: A setting differs between ranks, or KCCL_ALGORITHM is unknown.
        Timeout, PeerLost: A rank did not come, or went.
    """
    known = [spec.name for spec in SPECS]
    if env.algorithm and env.algorithm not in known:
        raise InvalidArgument(
            f"KCCL_ALGORITHM is {env.algorithm!r}, must be one of {', '.join(known)}"
        )
    tuning = tuning_for(backend, env.tuning)
    mine = {
        "abi_version": abi.ABI_VERSION,
        "kernels": ", ".join(abi.KERNELS),
        "tuning": f"{tuning.source} ({zlib.crc32(repr(tuning.thresholds).encode()):08x})",
        "settings": repr(settings),
        "KCCL_CHECK": env.check,
        "KCCL_ALGORITHM": env.algorithm,
    }
    cpus = sorted(os.sched_getaffinity(0))
    message = json.dumps([mine, cpus]).encode()
    replies = ranks.allgather(message, "start-up", env.first_timeout)
    everyone = [json.loads(reply) for reply in replies]
    for peer, (theirs, _) in enumerate(everyone):
        for name, value in mine.items():
            if theirs[name] != value:
                raise InvalidArgument(
                    f"{name} is {value} on rank {ranks.rank} and {theirs[name]} on rank {peer}, "
                    "must be the same on all ranks"
                )
    return {cpu for _, its_cpus in everyone for cpu in its_cpus}


def split(ranks: Mesh, color: int | None, key: int, timeout: float) -> Mesh | None:
    """Splits the ranks by `color`. Collective.

    Returns:
        The mesh of the ranks with this rank's color, ordered by `key`; None for a color of None.
    """
    listener, name = sockets.listen()
    try:
        message = json.dumps([color, key, name]).encode()
        replies = ranks.allgather(message, "split", timeout)
    except BaseException:
        listener.close()
        raise
    if color is None:
        listener.close()
        return None
    everyone = [json.loads(reply) for reply in replies]
    members = sorted(
        (its_key, rank)
        for rank, (its_color, its_key, _) in enumerate(everyone)
        if its_color == color
    )
    names = {rank: everyone[rank][2] for _, rank in members}
    return _connect(ranks, names, listener, timeout)


class Closable(Protocol):
    """An object with a close() method, as a communicator."""

    def close(self) -> None:
        """Ends the use of the object."""


Part = TypeVar("Part", bound=Closable)


def shrink(ranks: Mesh, make: Callable[[Mesh], Part], timeout: float) -> Part:
    """Calls `make` with the mesh of the ranks that are alive. Collective among them.

    Returns:
        What `make` returned, once it has succeeded on all of these ranks.

    Raises:
        Timeout: A rank that is alive did not come in time.
    """
    while True:
        listener, name = sockets.listen()
        try:
            survivors = ranks.agree_on_survivors(name.encode(), timeout)
        except BaseException:
            listener.close()
            raise
        names = {rank: text.decode() for rank, text in survivors.items()}
        part = None
        # Another rank may be lost meanwhile, and perhaps only some ranks see it. So the ranks vote:
        # the new communicator counts only if all of them have it. Else they try again.
        with contextlib.suppress(PeerLost):
            part = make(_connect(ranks, names, listener, timeout))
        vote = b"has it" if part is not None else b"has not"
        votes = ranks.agree_on_survivors(vote, timeout)
        if part is not None and votes == dict.fromkeys(names, b"has it"):
            return part
        if part is not None:
            part.close()


def _connect(ranks: Mesh, names: dict[int, str], listener: socket, timeout: float) -> Mesh:
    """The mesh of the ranks in `names`, in its order. `names`: rank -> name of its listener."""
    members, listeners = list(names), list(names.values())
    rank = members.index(ranks.rank)
    streams = sockets.connect(rank, listeners, listener, time.monotonic() + timeout)
    return ranks.part(rank, members, " ".join(listeners), streams)
