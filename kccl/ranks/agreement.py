"""What the ranks agree on out of band: that they fit, parts of a communicator, a fresh start."""

import contextlib
import json
import os
import time
import weakref
import zlib
from typing import TYPE_CHECKING, Any

from ..base import abi
from ..base.abi import lib
from ..base.env import Env
from ..base.errors import InvalidArgument, PeerLost
from ..plan.choice import SPECS, tuning_for
from . import mesh, sockets

if TYPE_CHECKING:
    from ..comm import Communicator


def agree_at_start(ranks: mesh.Mesh, backend: str, env: Env, settings: object) -> set[int]:
    """The cores of all ranks together, after a check that the ranks fit each other. Collective.

    Args:
        ranks: Who takes part.
        backend: Name of the backend.
        env: Variables, of which some must be the same on all ranks.
        settings: What else must be; compared as text.
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


def split(comm: "Communicator", color: int | None, key: int) -> "Communicator | None":
    """See Communicator.split."""
    listener, name = sockets.listen()
    try:
        everyone = comm.gather_objects([color, key, name])
    except BaseException:
        listener.close()
        raise
    if color is None:
        listener.close()
        return None
    members = sorted(
        (its_key, rank)
        for rank, (its_color, its_key, _) in enumerate(everyone)
        if its_color == color
    )
    names = {rank: everyone[rank][2] for _, rank in members}
    return _connect(comm, names, listener)


def reset(comm: "Communicator") -> None:
    """See Communicator.reset."""
    state = comm._backend.state

    def clear() -> None:
        comm._backend.clear()
        state.status = lib.kKcclAborted

    # Until all have come, every call fails here: the others count on it, see Mesh.reset.
    if state.status == lib.kKcclOk:
        state.status = lib.kKcclAborted
    comm._mesh.reset(clear, comm._env.first_timeout)
    state.status = lib.kKcclOk


def shrink(comm: "Communicator") -> "Communicator":
    """See Communicator.shrink."""
    # Peers that still wait in a call, perhaps for this rank, leave it and come too.
    comm._give_up()
    while True:
        listener, name = sockets.listen()
        try:
            survivors = comm._mesh.agree_on_survivors(name.encode(), comm._env.first_timeout)
        except BaseException:
            listener.close()
            raise
        names = {rank: text.decode() for rank, text in survivors.items()}
        part = None
        # Another rank may go meanwhile, and perhaps only some see it: so each says whether it has
        # the new communicator, and it counts only if all have it.
        with contextlib.suppress(PeerLost):
            part = _connect(comm, names, listener)
        vote = b"has it" if part is not None else b"has not"
        votes = comm._mesh.agree_on_survivors(vote, comm._env.first_timeout)
        if part is not None and votes == dict.fromkeys(names, b"has it"):
            return part
        if part is not None:
            part.close()


def _connect(comm: "Communicator", names: dict[int, str], listener: Any) -> "Communicator":
    """A communicator of the ranks of `comm` that `names` lists, in its order."""
    members, listeners = list(names), list(names.values())
    rank = members.index(comm.rank)
    deadline = time.monotonic() + comm._env.first_timeout
    streams = sockets.connect(rank, listeners, listener, deadline)
    ranks = comm._mesh.part(rank, members, " ".join(listeners), streams)
    try:
        part = type(comm)(
            ranks,
            comm._env,
            launcher=comm.launcher,
            local_rank=rank,
            settings=comm._settings,
            opens=comm._opens,
        )
    except BaseException:
        # The peers hear at once that this rank gave up, and do not wait for it in vain.
        ranks.close()
        raise
    # A new list each time, because another thread may be going through the old one.
    comm._parts = [known for known in comm._parts if known() is not None] + [weakref.ref(part)]
    return part
