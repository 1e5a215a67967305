"""How ranks find each other: from mpirun, torchrun, `kccl run` or alone to a Mesh.

Each way only has to exchange one short string a rank; everything after goes through the Mesh.
"""

import hashlib
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import mesh
from .env import Env
from .errors import BackendError, InvalidArgument, PeerLost, Timeout

# Variables by which an MPI launcher tells a process that it is one rank of several.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RETRY_S = 0.002

_meetings = itertools.count()


@dataclass(frozen=True)
class Launch:
    """Who this process is.

    Attributes:
        launcher: "mpi", "torchrun", "kccl run", "threads" or "alone".
        rank, world_size: This rank and their number.
        local_rank: Index within the machine.
        exchange: Takes this rank's string, returns all ranks' in rank order.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    exchange: Callable[[str], list[str]]


def detect(env: Env, environ: Mapping[str, str]) -> Launch:
    """Which launcher started this process, by its environment.

    Raises:
        InvalidArgument: The launcher's variables contradict each other.
        BackendError: MPI started this process and mpi4py is not installed.
    """
    if env.rendezvous:
        if not 0 <= env.rank < env.world_size:
            raise InvalidArgument(
                f"KCCL_RANK={env.rank} must be between 0 and KCCL_WORLD_SIZE={env.world_size} - 1"
            )
        return _by_socket("kccl run", env.rendezvous, env.rank, env.world_size, env.rank, env)
    if any(name in environ for name in _MPI_VARIABLES):
        return _by_mpi()
    if all(name in environ for name in _TORCHRUN_VARIABLES):
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        if not 0 <= rank < world_size:
            raise InvalidArgument(f"RANK={rank} must be between 0 and WORLD_SIZE={world_size} - 1")
        names = (
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
        )
        key = "torchrun " + " ".join(environ.get(name, "") for name in names)
        local_rank = int(environ.get("LOCAL_RANK", rank))
        return _by_socket("torchrun", key, rank, world_size, local_rank, env)
    return Launch("alone", 0, 1, 0, lambda text: [text])


def connect(launch: Launch, timeout: float) -> mesh.Mesh:
    """Connects all ranks of the launch. Collective.

    Raises:
        Timeout, PeerLost: A rank did not come, or went.
        BackendError: The ranks are not on one machine.
    """
    if launch.world_size == 1:
        return mesh.Mesh(0, 1, {})
    deadline = time.monotonic() + timeout
    listener, name = mesh.listen()
    try:
        mine = {"name": name, "machine": _machine_id()}
        everyone = [json.loads(text) for text in launch.exchange(json.dumps(mine))]
    except BaseException:
        listener.close()
        raise
    for peer, other in enumerate(everyone):
        if other["machine"] != mine["machine"]:
            listener.close()
            raise BackendError(
                f"ranks {launch.rank} and {peer} are on different machines or in containers that do "
                "not share a network namespace; this version works within one"
            )
    names = [other["name"] for other in everyone]
    sockets = mesh.connect(launch.rank, names, listener, deadline)
    return mesh.Mesh(launch.rank, launch.world_size, sockets)


def thread_meshes(world_size: int) -> list[mesh.Mesh]:
    """Meshes of ranks that are threads of this process, in rank order."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    for low, high in itertools.combinations(range(world_size), 2):
        sockets[low][high], sockets[high][low] = socket.socketpair()
    return [mesh.Mesh(rank, world_size, sockets[rank]) for rank in range(world_size)]


def _machine_id() -> str:
    """The same string exactly where abstract socket names reach each other."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/net')}"


def _by_mpi() -> Launch:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendError(
            f"started by an MPI launcher, but mpi4py cannot be imported ({error}); "
            "install it with: pip install 'kccl[mpi]'"
        ) from error
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = local.Get_rank()
    local.Free()
    return Launch("mpi", world.Get_rank(), world.Get_size(), local_rank, world.allgather)


def _by_socket(
    launcher: str, key: str, rank: int, world_size: int, local_rank: int, env: Env
) -> Launch:
    # Each init() of a process is a meeting of its own: ranks call it equally often.
    meeting = next(_meetings)
    name = "kccl-" + hashlib.sha256(f"{os.getuid()} {key} {meeting}".encode()).hexdigest()[:32]

    def exchange(text: str) -> list[str]:
        deadline = time.monotonic() + env.first_timeout
        if rank == 0:
            return _host_meeting(name, world_size, text, deadline)
        return _attend_meeting(name, rank, text, deadline)

    return Launch(launcher, rank, world_size, local_rank, exchange)


def _send(connection: socket.socket, message: object) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(data)) + data)


def _receive(connection: socket.socket, deadline: float) -> object:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    header = connection.recv(4, socket.MSG_WAITALL)
    if len(header) < 4:
        raise ConnectionResetError("the stream ended")
    (length,) = struct.unpack("<I", header)
    return json.loads(connection.recv(length, socket.MSG_WAITALL))


def _host_meeting(name: str, world_size: int, text: str, deadline: float) -> list[str]:
    """Rank 0's part: collects every rank's string and hands all of them to each."""
    try:
        listener = mesh.bind(name)
    except OSError as error:
        raise BackendError(f"another job already meets under the name {name}: {error}") from error
    texts = {0: text}
    guests: list[socket.socket] = []
    try:
        while len(texts) < world_size:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
                guests.append(connection)
                mesh.peer_pid(connection)
                rank, its_text = _receive(connection, deadline)  # type: ignore[misc]
            except TimeoutError:
                missing = min(set(range(world_size)) - set(texts))
                raise Timeout(
                    f"rank 0 waited in vain for rank {missing} at start-up",
                    rank=0,
                    peer=missing,
                    collective="start-up",
                ) from None
            if rank in texts:
                raise InvalidArgument(f"two processes say they are rank {rank} of {world_size}")
            texts[rank] = its_text
        everyone = [texts[rank] for rank in range(world_size)]
        for connection in guests:
            _send(connection, everyone)
        return everyone
    finally:
        for connection in guests:
            connection.close()
        listener.close()


def _attend_meeting(name: str, rank: int, text: str, deadline: float) -> list[str]:
    """Every other rank's part."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with connection:
            try:
                connection.connect(f"\0{name}")
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise Timeout(
                        f"rank {rank} waited in vain for rank 0 at start-up",
                        rank=rank,
                        peer=0,
                        collective="start-up",
                    ) from None
                time.sleep(_RETRY_S)
                continue
            mesh.peer_pid(connection)
            try:
                _send(connection, [rank, text])
                return _receive(connection, deadline)  # type: ignore[return-value]
            except TimeoutError:
                raise Timeout(
                    f"rank {rank} waited in vain for the other ranks at start-up",
                    rank=rank,
                    collective="start-up",
                ) from None
            except ConnectionError as error:
                raise PeerLost(
                    f"rank {rank} lost rank 0 at start-up: {error}",
                    rank=rank,
                    peer=0,
                    collective="start-up",
                ) from error
