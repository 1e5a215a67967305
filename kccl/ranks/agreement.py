"""What the ranks agree on by their sockets: settings at start-up, gather_objects(), and split().

survivors.py has shrink().
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from socket import socket
from typing import Any, TypeVar

from ..base import abi, clock
from ..base.env import Env
from ..base.errors import InvalidArgument, PeerLost
from ..base.syscalls import allowed
from ..plan import forms
from ..plan.specs import FUSED, SPECS
from ..plan.tuning import tuning_for
from . import sockets
from .mesh import Closable, Mesh
from .nodes import Listener
from .team import Connected

Part = TypeVar("Part", bound=Closable)


def agree_at_start(
    ranks: Mesh, backend: str, env: Env, settings: object, timeout: float
) -> set[int]:
    """Checks that version and settings are the same on all ranks. Collective.

    Args:
        ranks: The ranks that take part.
        backend: Name of the backend.
        env: Environment variables. Some must be the same on all ranks.
        settings: Settings that must be the same on all ranks; compared as text.
        timeout: Seconds to wait for the other ranks.

    Returns:
        The CPU cores that at least one of the ranks may use.

    Raises:
        InvalidArgument: A setting differs between ranks.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    tuning = tuning_for(backend, env.tuning)
    mine = {
        "abi_version": abi.ABI_VERSION,
        "kernels": ", ".join(abi.KERNELS),
        "tuning": f"{tuning.source} ({zlib.crc32(repr(tuning.thresholds).encode()):08x})",
        "KCCL_EPOCH_BITS": env.epoch_bits,
        "KCCL_CHECK": env.check,
        "KCCL_STREAMS": env.streams,
        "KCCL_ALGORITHM": env.algorithm,
        "settings": repr(settings),
    }
    with allowed("sched_getaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
    message = json.dumps([mine, cpus]).encode()
    replies = ranks.allgather(message, "start-up", timeout)
    everyone = [json.loads(reply) for reply in replies]
    for peer, (theirs, _) in enumerate(everyone):
        for name, value in mine.items():
            if theirs[name] != value:
                its, others = (each if each != "" else "not set" for each in (value, theirs[name]))
                raise InvalidArgument(
                    f"{name} is {its} on rank {ranks.rank} and {others} on rank {peer}, must be "
                    "the same on all ranks"
                )
    return {cpu for _, its_cpus in everyone for cpu in its_cpus}


def check_algorithm(env: Env) -> None:
    """Checks that KCCL_ALGORITHM names an algorithm, if it is set.

    Raises:
        InvalidArgument: There is no algorithm of that name.
    """
    known = [*(spec.name for spec in SPECS), *forms.names(), *FUSED]
    if env.algorithm and env.algorithm not in known:
        raise InvalidArgument(
            f"KCCL_ALGORITHM is {env.algorithm!r}, must be one of {', '.join(known)}"
        )


def agree_on_arguments(
    ranks: Connected, mine: Mapping[str, int | str], what: str, timeout: float
) -> None:
    """Checks that the arguments of a call are the same on all ranks. Collective.

    Args:
        ranks: The ranks that take part.
        mine: This rank's arguments, by name.
        what: The call, for error messages.
        timeout: Seconds to wait for the other ranks.

    Raises:
        InvalidArgument: An argument differs between ranks.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    replies = ranks.allgather(json.dumps(mine).encode(), what, timeout)
    for peer, reply in enumerate(replies):
        for name, value in json.loads(reply).items():
            if value != mine[name]:
                raise InvalidArgument(
                    f"{what}: {name} is {mine[name]} on rank {ranks.rank} and {value} on rank "
                    f"{peer}, must be the same on all ranks"
                )


def gather_objects(ranks: Mesh, value: Any, timeout: float) -> list[Any]:
    """Returns every rank's `value`, in rank order. Collective; see
    Communicator.gather_objects().
    """
    with ranks.call("gather_objects"):
        text = json_of(value)
        replies = ranks.allgather(text, "gather_objects", timeout)
        # A rank that comes late may find all values although the others have failed meanwhile. Then
        # look() raises the error that they sent.
        ranks.look()
    return [json.loads(reply) for reply in replies]


def json_of(value: Any) -> bytes:
    """Returns `value` as JSON, if a peer can make an equal value of it.

    Raises:
        InvalidArgument: A peer would make another value, because `value` has a tuple or a key that
            is no text. Or it has an object that JSON cannot express.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"value cannot be sent as JSON: {error}") from error
    _check_survives(value, "value")
    return text.encode()


def _check_survives(value: Any, where: str) -> None:
    if isinstance(value, tuple):
        raise InvalidArgument(
            f"{where} is {value!r}, a tuple, of which JSON would make a list: pass list(...)"
        )
    if isinstance(value, list):
        for i, each in enumerate(value):
            _check_survives(each, f"{where}[{i}]")
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise InvalidArgument(
                    f"{where} has the key {key!r} of type {type(key).__name__}, of which JSON "
                    "would make text: pass str keys, or a list of [key, value]"
                )
            _check_survives(each, f"{where}[{key!r}]")


def split(
    ranks: Mesh, color: int | None, key: int, make: Callable[[Mesh], Part], timeout: float
) -> Part | None:
    """Splits the ranks by `color`. Collective: it succeeds for all colors or for none.

    Args:
        ranks: The ranks that take part.
        color, key: See Communicator.split().
        make: Makes the communicator of a mesh of this rank's color, ordered by `key`.
        timeout: Seconds to wait for the other ranks.

    Returns:
        What `make` returned; None for a color of None.
    """
    with ranks.together("split", timeout) as undo:
        listener, name = ranks.listen()
        undo.callback(listener.close)
        message = json.dumps([color, key, name]).encode()
        replies = ranks.allgather(message, "split", timeout)
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
        try:
            mesh = connect_part(ranks, names, listener, timeout, ranks.look, what="split")
        except PeerLost as error:
            _hear_reason(ranks, error.peer)
            raise
        try:
            part = make(mesh)
        except Exception as error:
            # Raises the failed rank's reason, so that all ranks raise the same error. The error has
            # that rank's number in `ranks` instead of its number in `mesh`.
            culprit = error.peer if isinstance(error, PeerLost) else mesh.told_by
            _hear_reason(ranks, None if culprit is None else mesh.numbers[culprit])
            raise
        undo.callback(part.close)
        return part


def _hear_reason(ranks: Mesh, peer: int | None) -> None:
    """Raises the reason why a peer has left the new mesh (the part of `ranks` that split()
    connects). Returns if the peer sends none within a second.

    The peer first closes its connections of the part, and then sends the reason over the mesh
    `ranks`.
    """
    if peer not in (None, ranks.rank):
        ranks.hear_reason(peer)


def connect_part(
    ranks: Mesh,
    names: dict[int, str],
    listener: socket | Listener,
    timeout: float,
    look: Callable[[], None] = lambda: None,
    *,
    what: str = "shrink",
) -> Mesh:
    """Connects some of the ranks. Collective among them.

    Args:
        ranks: The mesh of all ranks.
        names: Rank in `ranks` -> name of its listener, for each member, in the new mesh's order.
        listener: This rank's listener. It is closed.
        timeout: Seconds to wait for the others.
        look: Called now and then during the wait. What it raises ends the wait.
        what: What the ranks are doing, for error messages.
    """
    members, listeners = list(names), list(names.values())
    rank = members.index(ranks.rank)
    deadline = clock.now() + timeout
    connections = sockets.connect(
        rank, listeners, listener, deadline, what=what, numbers=members, look=look
    )
    return ranks.part(rank, members, " ".join(listeners), connections)
