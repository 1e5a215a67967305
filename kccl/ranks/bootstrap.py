"""Connects the ranks that mpirun, torchrun, srun or `kccl run` started, and makes their Mesh.

Each launcher only has to exchange one short string for each rank. The rest goes through the Mesh.
"""

import contextlib
import hashlib
import itertools
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import extras
from ..base.env import Env
from ..base.errors import BackendError, InvalidArgument, PeerLost, Timeout
from . import job, last_word, launchers, mesh, sockets
from .losses import Watch, ended_before
from .siblings import Siblings, of_mpi, of_torchrun

_RETRY_S = 0.002
_LOOK_S = 0.1  # between two looks at the other ranks' processes
# After the time-out the other ranks wait so much longer for rank 0 to name the missing rank.
_LAST_REPLY_S = 1.0

# The string of a rank in an exchange by MPI, padded with zeros.
_MPI_TEXT = struct.Struct("1024s")

_rendezvous_numbers = itertools.count()


@dataclass(frozen=True)
class JobRank:
    """The rank that this process is, and how it reaches the others.

    Attributes:
        launcher: "mpi", "torchrun", "srun", "torch.distributed", "kccl run", "threads" or "alone".
        rank, world_size: This rank, and the number of ranks.
        local_rank: Index of this rank within the machine.
        exchange: Takes this rank's string, and returns all ranks' strings in rank order.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    exchange: Callable[[str], list[str]]


def detect(env: Env, environ: Mapping[str, str]) -> JobRank:
    """Finds out from the environment which launcher started this process. Under MPI collective.

    Raises:
        InvalidArgument: The launcher's variables contradict each other, or one is missing.
        BackendError: An MPI launcher started this process, and mpi4py is not installed or was
            built for another MPI. Or torchrun or srun started ranks on several machines.
        Timeout: Under MPI, a rank did not come.
    """
    if env.rendezvous:
        if not 0 <= env.rank < env.world_size:
            raise InvalidArgument(
                f"KCCL_RANK={env.rank} must be between 0 and KCCL_WORLD_SIZE={env.world_size} - 1"
            )
        return _by_socket("kccl run", env.rendezvous, env.rank, env.world_size, env.rank, env)
    if launchers.is_by_mpi(environ):
        return _by_mpi(env.first_timeout, environ)
    found = launchers.started(environ)
    if found is not None:
        where = found.rank, found.world_size, found.local_rank
        siblings = None
        if found.launcher == "torchrun":
            siblings = of_torchrun(environ, found.rank, found.world_size)
        return _by_socket(found.launcher, found.key, *where, env, siblings)
    return JobRank("alone", 0, 1, 0, lambda text: [text])


def connect(job_rank: JobRank, timeout: float) -> mesh.Mesh:
    """Connects all ranks of a job. Collective.

    Args:
        job_rank: This process's rank, and how it reaches the others.
        timeout: Seconds to wait for the other ranks.

    Raises:
        Timeout, PeerLost: A rank did not come, or went.
        BackendError: The ranks are not on one machine.
    """
    if job_rank.world_size == 1:
        return mesh.Mesh(0, 1, {})
    deadline = time.monotonic() + timeout
    listener, name = sockets.listen()
    try:
        mine = {"name": name, "machine": _machine_id()}
        everyone = [json.loads(text) for text in job_rank.exchange(json.dumps(mine))]
    except BaseException:
        listener.close()
        raise
    for peer, other in enumerate(everyone):
        if other["machine"] != mine["machine"]:
            listener.close()
            raise BackendError(
                f"ranks {job_rank.rank} and {peer} are on different machines, or in containers "
                "that do not share network, process and user namespaces; this version of KCCL "
                "works within one machine"
            )
    names = [other["name"] for other in everyone]
    streams = sockets.connect(job_rank.rank, names, listener, deadline)
    return mesh.Mesh(job_rank.rank, job_rank.world_size, streams)


def thread_streams(world_size: int) -> list[dict[int, socket.socket]]:
    """Connected sockets for ranks that are threads: for each rank, {peer: socket}."""
    streams: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    for low, high in itertools.combinations(range(world_size), 2):
        streams[low][high], streams[high][low] = socket.socketpair()
    return streams


def _machine_id() -> str:
    """An id that two processes share only if they share socket names and process ids."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {job.namespaces()}"


def _by_mpi(timeout: float, environ: Mapping[str, str]) -> JobRank:
    siblings = of_mpi(environ)
    try:
        if "mpi4py.MPI" in sys.modules:
            from mpi4py import MPI
        else:
            # The import calls MPI_Init.
            with siblings.guarding():
                from mpi4py import MPI
    except ImportError as error:
        raise BackendError(
            f"an MPI launcher started this process, but mpi4py cannot be imported ({error}); "
            f"install it with: {extras.install('mpi')}"
        ) from error
    _check_mpi(MPI)
    world = MPI.COMM_WORLD
    started = launchers.mpi_world_size(environ)
    if started and world.Get_size() != started:
        library = MPI.Get_library_version().splitlines()[0]
        raise BackendError(
            f"the MPI launcher started {started} processes, but mpi4py sees {world.Get_size()}: "
            f"mpi4py was built for another MPI ({library.strip()}); use that MPI's mpirun, or "
            "`kccl run`"
        )
    rank = world.Get_rank()

    def exchange(text: str) -> list[str]:
        return _mpi_exchange(MPI, text, timeout, siblings)

    machines = exchange(_machine_id())
    local_rank = machines[:rank].count(machines[rank])
    return JobRank("mpi", rank, world.Get_size(), local_rank, exchange)


def _check_mpi(mpi: Any) -> None:
    """Raises BackendError unless MPI can be called now."""
    if mpi.Is_finalized():
        raise BackendError(
            "MPI is finalized, and kccl.init() needs it under mpirun: call kccl.init() before "
            "MPI.Finalize(), or start the ranks with `kccl run`"
        )
    if not mpi.Is_initialized():
        raise BackendError(
            "MPI is not initialized, and kccl.init() needs it under mpirun: call MPI.Init() first, "
            "or leave mpi4py.rc.initialize True"
        )


# Exchanges of MPI that were given up. MPI may still write to their memory.
_given_up: list[Any] = []


def _mpi_exchange(mpi: Any, text: str, timeout: float, siblings: Siblings) -> list[str]:
    """See JobRank.exchange. Makes no blocking call of MPI, because those have no limit."""
    last_word.is_needed = False
    world = mpi.COMM_WORLD
    assert len(text) <= _MPI_TEXT.size
    mine, everyone = _MPI_TEXT.pack(text.encode()), bytearray(_MPI_TEXT.size * world.Get_size())
    request = world.Iallgather([mine, mpi.BYTE], [everyone, mpi.BYTE])
    began = looked = time.monotonic()
    try:
        while not request.Test():
            now = time.monotonic()
            if now > began + timeout:
                raise _absent(world.Get_rank(), None)
            if now > looked + _LOOK_S:
                looked = now
                siblings.check()
            time.sleep(_RETRY_S)
    except BaseException:
        _given_up.append((request, mine, everyone))
        raise
    return [its_text.rstrip(b"\0").decode() for (its_text,) in _MPI_TEXT.iter_unpack(everyone)]


def _by_socket(
    launcher: str,
    key: str,
    rank: int,
    world_size: int,
    local_rank: int,
    env: Env,
    siblings: Siblings | None = None,
) -> JobRank:
    # Each init() has a rendezvous of its own. All ranks call init() equally often, so the numbers
    # agree.
    number = next(_rendezvous_numbers)
    name = "kccl-" + hashlib.sha256(f"{os.getuid()} {key} {number}".encode()).hexdigest()[:32]

    def exchange(text: str) -> list[str]:
        deadline = time.monotonic() + env.first_timeout
        with Watch(rank, key, siblings.check if siblings else None) as watch:
            if rank == 0:
                return _host_rendezvous(name, world_size, text, deadline, watch)
            return _join_rendezvous(name, rank, text, deadline, watch)

    return JobRank(launcher, rank, world_size, local_rank, exchange)


def _send(connection: socket.socket, message: object, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(data)) + data)


def _receive(connection: socket.socket, deadline: float) -> Any:
    (length,) = struct.unpack("<I", sockets.receive(connection, 4, deadline))
    return json.loads(sockets.receive(connection, length, deadline))


def _host_rendezvous(
    name: str, world_size: int, text: str, deadline: float, watch: Watch
) -> list[str]:
    """Rank 0's part: collects every rank's string, and sends all of them to every rank."""
    try:
        listener = sockets.bind(name)
    except OSError as error:
        raise BackendError(
            f"another process is rank 0 already: the rendezvous {name} is taken ({error}). If a "
            "rank started this process, which has inherited its variables, this one must not call "
            "kccl.init(); if this one is rank 0, the other one must not. If the other one is of "
            "another job, give each job a rendezvous of its own"
        ) from error
    texts = {0: text}
    connections: dict[int, socket.socket] = {}
    try:
        while len(texts) < world_size:
            if not watch.wait(listener, deadline - time.monotonic()):
                if time.monotonic() < deadline:
                    continue
                raise TimeoutError
            connection, _ = listener.accept()
            try:
                sockets.peer_pid(connection)
                rank, its_text = _receive(connection, deadline)
            except (BackendError, ConnectionError):
                # A stranger; or a rank that ended before it sent its rank, which the time-out will
                # name.
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            if rank in texts:
                # A helper process of that rank, which must not end the job.
                with contextlib.suppress(OSError), connection:
                    _send(connection, {"taken": rank}, time.monotonic() + _LAST_REPLY_S)
                continue
            if not 0 < rank < world_size:
                connection.close()
                raise InvalidArgument(
                    f"a process says that it is rank {rank} of {world_size}: there is no such rank"
                )
            connections[rank] = connection
            texts[rank] = its_text
        everyone = [texts[rank] for rank in range(world_size)]
        _send_all(connections, everyone, deadline)
        return everyone
    except TimeoutError:
        missing = min(set(range(world_size)) - set(texts), default=None)
        _send_all(connections, missing, time.monotonic() + _LAST_REPLY_S)
        raise _absent(0, missing) from None
    except PeerLost as error:
        # All hear of the same rank.
        _send_all(connections, {"lost": error.peer}, time.monotonic() + _LAST_REPLY_S)
        raise
    finally:
        for connection in connections.values():
            connection.close()
        listener.close()


def _send_all(connections: dict[int, socket.socket], message: object, deadline: float) -> None:
    """Sends a message to all ranks that are still there; sockets.connect() names those that went.

    So a rank that has ended keeps the message from no other, which would take rank 0 for lost.
    """
    for connection in connections.values():
        with contextlib.suppress(OSError):
            _send(connection, message, deadline)


def _absent(rank: int, missing: int | None) -> Timeout:
    whom, it_is = f"rank {missing}", "it has not called kccl.init(), or is"
    if missing is None:
        whom, it_is = "the other ranks", "they have not called kccl.init(), or are"
    return Timeout(
        f"rank {rank} waited too long for {whom} at start-up (KCCL_FIRST_TIMEOUT is the limit): "
        f"{it_is} in another network or user namespace (another container), where the ranks cannot "
        "see each other",
        rank=rank,
        peer=missing,
        collective="start-up",
    )


def _join_rendezvous(name: str, rank: int, text: str, deadline: float, watch: Watch) -> list[str]:
    """The part of ranks 1 and up: sends this rank's string, and receives all ranks' strings."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(f"\0{name}")
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise _absent(rank, 0) from None
                watch.wait(None, _RETRY_S)
                continue
            sockets.peer_pid(connection)
            try:
                _send(connection, [rank, text], deadline)
                ends = deadline + _LAST_REPLY_S
                while not watch.wait(connection, ends - time.monotonic()):
                    if time.monotonic() > ends:
                        raise TimeoutError
                everyone = _receive(connection, ends)
            except TimeoutError:
                raise _absent(rank, None) from None
            except PeerLost:  # a ConnectionError too
                raise
            except ConnectionError as error:
                # Rank 0 gives up when another one has ended. The launcher may be about to say so.
                watch.wait(None, _LAST_REPLY_S)
                raise PeerLost(
                    f"rank {rank} lost rank 0 at start-up: {error}",
                    rank=rank,
                    peer=0,
                    collective="start-up",
                ) from error
            if isinstance(everyone, list):
                return everyone
            if isinstance(everyone, dict) and "taken" in everyone:
                raise BackendError(
                    f"another process is rank {rank} already. If a rank started this process, "
                    "which has inherited its variables, this one must not call kccl.init(); if "
                    f"this one is rank {rank}, the other one must not"
                )
            if isinstance(everyone, dict):
                raise ended_before(rank, everyone["lost"])
            raise _absent(rank, everyone)
