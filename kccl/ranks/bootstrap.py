"""Connects the ranks that mpirun, torchrun, srun or `kccl run` started, and makes their Mesh.

The ranks use the launcher only to exchange short strings, with which they find each other. All
later exchanges go through the Mesh.
"""

import contextlib
import hashlib
import itertools
import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ..base import clock, extras
from ..base.env import Env
from ..base.errors import BackendError, Error, InvalidArgument
from . import last_word, launchers, mesh, mpi, mpi_ranks, nodes, refusal, rendezvous, sockets
from .job import JobRank, machine_id, room_to_tell
from .siblings import Siblings, of_torchrun

# A job's key -> the numbers of this process's calls of kccl.init() in the job.
_rendezvous_numbers: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


def detect(env: Env, environ: Mapping[str, str], comm: Any = None) -> JobRank:
    """Finds out from the environment which launcher started this process. Under MPI collective.

    Args:
        env, environ: The environment.
        comm: A communicator of mpi4py whose ranks meet; None: all ranks of the job do.

    Raises:
        InvalidArgument: The launcher's variables contradict each other, or one is missing. Or
            `comm` is no intracommunicator.
        BackendError: An MPI launcher started this process, and mpi4py is not installed or was
            built for another MPI. Or torchrun or srun started ranks on several machines.
        Timeout: Under MPI, a rank did not come.
    """
    if comm is not None:
        return mpi_ranks.of_comm(comm, env.first_timeout, environ)
    launchers.check_only_one(environ)
    if env.rendezvous:
        if not 0 <= env.rank < env.world_size:
            raise InvalidArgument(
                f"KCCL_RANK={env.rank} must be between 0 and KCCL_WORLD_SIZE={env.world_size} - 1"
            )
        return _by_socket("kccl run", env.rendezvous, env.rank, env.world_size, env.rank)
    if launchers.is_by_mpi(environ):
        return mpi_ranks.of_launcher(env.first_timeout, environ)
    found = launchers.started(environ)
    if found is not None:
        where = found.rank, found.world_size, found.local_rank
        siblings = None
        if found.launcher == "torchrun":
            siblings = of_torchrun(environ, found.rank, found.world_size)
        return _by_socket(found.launcher, found.key, *where, siblings)
    return JobRank("alone", 0, 1, 0, lambda text, _: [text])


def connect(job_rank: JobRank, timeout: float, ranks_per_node: int = 0) -> mesh.Mesh:
    """Connects all ranks of a job. Collective.

    Args:
        job_rank: This process's rank, and how it reaches the others.
        timeout: Seconds to wait for the other ranks.
        ranks_per_node: KCCL_RANKS_PER_NODE, as in Env.

    Raises:
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        BackendError: The ranks are not on one machine and not started by mpirun, or one cannot
            start.
        InvalidArgument: One cannot start because of an argument or a variable; or there are more
            nodes than KCCL can have.
    """
    if job_rank.world_size == 1:
        return mesh.Mesh(0, 1, {})
    deadline = clock.now() + timeout
    with telling(job_rank):
        machine = machine_id()
        near, name = sockets.listen()
    listener: socket.socket | nodes.Listener = near
    try:
        mine = {"name": name, "machine": machine, "ranks_per_node": ranks_per_node}
        everyone = _exchange(job_rank, mine, timeout)
        homes = _homes(job_rank, everyone)
        if homes:
            # The exchange above has shown that the ranks are on several nodes. Such ranks need MPI,
            # and listeners for TCP.
            with telling(job_rank):
                mpi.check_threads()
                far = nodes.Listener(near, name, homes[job_rank.rank].node)
            listener = far
            everyone = _exchange(job_rank, {"name": far.name}, timeout)
            mpi.open_comm(job_rank.rank, max(deadline - clock.now(), 0))
    except BaseException:
        listener.close()
        raise
    names = [other["name"] for other in everyone]
    connections = sockets.connect(job_rank.rank, names, listener, deadline)
    last_word.init_ends()
    return mesh.Mesh(job_rank.rank, job_rank.world_size, connections, homes)


def _exchange(job_rank: JobRank, mine: object, timeout: float) -> list[Any]:
    """Returns every rank's `mine`, in rank order. Collective."""
    texts = job_rank.exchange(json.dumps(mine), timeout)
    refusal.check(texts, job_rank.rank)
    return [json.loads(text) for text in texts]


def _homes(job_rank: JobRank, everyone: list[Any]) -> tuple[nodes.Home, ...]:
    """Returns where each rank is, as the ranks describe themselves; () if all are on one node.

    Raises:
        BackendError: There are several nodes, and the ranks have no MPI.
        InvalidArgument: KCCL_RANKS_PER_NODE differs between ranks, or there are too many nodes.
    """
    rank, mine = job_rank.rank, everyone[job_rank.rank]
    for peer, other in enumerate(everyone):
        if other["ranks_per_node"] != mine["ranks_per_node"]:
            raise InvalidArgument(
                f"KCCL_RANKS_PER_NODE is {mine['ranks_per_node']} on rank {rank} and "
                f"{other['ranks_per_node']} on rank {peer}, must be the same on all ranks"
            )
    homes = nodes.homes_of([other["machine"] for other in everyone], mine["ranks_per_node"])
    if not homes or job_rank.is_mpi_world:
        return homes
    if job_rank.launcher == "mpi":
        raise BackendError(
            f"comm has {job_rank.world_size} ranks on several nodes, which must then be all ranks "
            "of MPI.COMM_WORLD in their order: call kccl.init() on all ranks, and split() what it "
            "returns"
        )
    peer = next(each for each, home in enumerate(homes) if home.node != homes[rank].node)
    if mine["machine"] == everyone[peer]["machine"]:
        raise BackendError(
            f"KCCL_RANKS_PER_NODE is {mine['ranks_per_node']}, and nodes exchange by MPI, which "
            f"{job_rank.launcher} does not start: start the ranks with mpirun, or unset it"
        )
    raise BackendError(
        f"ranks {rank} and {peer} are on different machines, or in containers that do not share "
        "network, process and user namespaces. Such ranks exchange by MPI: start them with mpirun "
        f"({extras.install('mpi')})"
    )


@contextlib.contextmanager
def telling(job_rank: JobRank) -> Iterator[None]:
    """Returns a context. An exception in it is raised on all other ranks too, with this rank's
    number and the reason.

    The other ranks must be about to call JobRank.exchange, or be in it already.
    """
    try:
        yield
    except BaseException as error:
        mine = refuse(job_rank, error)
        if mine is error:
            raise
        raise mine from error


def refuse(job_rank: JobRank, error: BaseException) -> BaseException:
    """Tells the other ranks why this one cannot start.

    Returns:
        What this rank raises: `error` with the rank in its text, or a BackendError for an error of
        the operating system.
    """
    if job_rank.world_size == 1:
        return error
    mine, said = refusal.refusal(error, job_rank.rank, mpi_ranks.MOST_BYTES)
    # Errors of this exchange are ignored: this rank raises `error`, whoever hears of it.
    with contextlib.suppress(Error, OSError), room_to_tell():
        job_rank.exchange(said, refusal.WAITS_S)
    return mine


def thread_sockets(world_size: int) -> list[dict[int, socket.socket]]:
    """Returns connected sockets for ranks that are threads: for each rank, {peer: socket}."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    for low, high in itertools.combinations(range(world_size), 2):
        connections[low][high], connections[high][low] = socket.socketpair()
    return connections


def _by_socket(
    launcher: str,
    key: str,
    rank: int,
    world_size: int,
    local_rank: int,
    siblings: Siblings | None = None,
) -> JobRank:
    # Each init() has a rendezvous of its own. All ranks of a job call init() equally often, so the
    # numbers agree. They are counted for each job, because a process may be a rank of several jobs,
    # one after another.
    number = next(_rendezvous_numbers[key])
    name = "kccl-" + hashlib.sha256(f"{os.getuid()} {key} {number}".encode()).hexdigest()[:32]

    def exchange(text: str, seconds: float) -> list[str]:
        return rendezvous.exchange(name, key, rank, world_size, text, seconds, siblings)

    return JobRank(launcher, rank, world_size, local_rank, exchange)
