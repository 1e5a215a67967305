"""New communicators from old ones: parts of one, or what is left of one."""

import time
from typing import TYPE_CHECKING, Any

from . import mesh, sockets
from .errors import PeerLost

if TYPE_CHECKING:
    from .comm import Communicator


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


def shrink(comm: "Communicator") -> "Communicator":
    """See Communicator.shrink."""
    # Peers that still wait in a call, perhaps for this rank, leave it and come too.
    comm._abort()
    while True:
        listener, name = sockets.listen()
        try:
            survivors = comm._mesh.agree_on_survivors(name.encode(), comm._env.first_timeout)
        except BaseException:
            listener.close()
            raise
        names = {rank: text.decode() for rank, text in survivors.items()}
        try:
            return _connect(comm, names, listener)
        except PeerLost:
            # Another rank went meanwhile: the next round sees its end.
            continue


def _connect(comm: "Communicator", names: dict[int, str], listener: Any) -> "Communicator":
    """A communicator of the ranks of `comm` that `names` lists, in its order."""
    rank = list(names).index(comm.rank)
    deadline = time.monotonic() + comm._env.first_timeout
    streams = sockets.connect(rank, list(names.values()), listener, deadline)
    ranks = mesh.Mesh(rank, len(names), streams)
    try:
        return type(comm)(
            ranks, comm._env, launcher=comm.launcher, local_rank=rank, settings=comm._settings
        )
    except BaseException:
        # The peers hear at once that this rank gave up, and do not wait for it in vain.
        ranks.close()
        raise
