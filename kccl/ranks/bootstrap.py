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
from typing import Any

from ..base.env import Env
from ..base.errors import BackendError, InvalidArgument, PeerLost, Timeout
from . import mesh, sockets

# Variables by which an MPI launcher tells a process that it is one rank of several.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RETRY_S = 0.002
# What rank 0 of a meeting has, beyond a guest's patience, to say which rank did not come.
_LAST_WORD_S = 1.0

_meetings = itertools.count()


@dataclass(frozen=True)
class Launch:
    """Who this process is.

    Attributes:
        launcher: "mpi", "torchrun", "torch.distributed", "kccl run", "threads" or "alone".
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
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise InvalidArgument(f"RANK={rank} must be between 0 and WORLD_SIZE={world_size} - 1")
        if "LOCAL_WORLD_SIZE" in environ and _number(environ, "LOCAL_WORLD_SIZE") != world_size:
            raise BackendError(
                f"torchrun started {world_size} ranks, {environ['LOCAL_WORLD_SIZE']} of them on "
                "this machine; this version works within one"
            )
        names = (
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
        )
        key = "torchrun " + " ".join(environ.get(name, "") for name in names)
        local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
        return _by_socket("torchrun", key, rank, world_size, local_rank, env)
    return Launch("alone", 0, 1, 0, lambda text: [text])


def rank_of(environ: Mapping[str, str]) -> int:
    """This process's rank as its launcher's variables have it, 0 when alone; asks no MPI.

    Raises:
        InvalidArgument: The variable is no number.
    """
    if environ.get("KCCL_RENDEZVOUS"):
        return _number(environ, "KCCL_RANK") if "KCCL_RANK" in environ else 0
    for name in _MPI_RANKS:
        if name in environ:
            return _number(environ, name)
    if all(name in environ for name in _TORCHRUN_VARIABLES):
        return _number(environ, "RANK")
    return 0


def mpi_world_size(environ: Mapping[str, str]) -> int:
    """How many processes an MPI launcher says to have started; 0 when none says so."""
    return next((_number(environ, name) for name in _MPI_SIZES if name in environ), 0)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for a child that is no rank of the job this process belongs to."""
    names = {"KCCL_RANK", "KCCL_WORLD_SIZE", "KCCL_RENDEZVOUS"}
    names.update(_MPI_VARIABLES, _MPI_RANKS, _TORCHRUN_VARIABLES)
    return {name: text for name, text in environ.items() if name not in names}


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise InvalidArgument(f"{name}={environ[name]!r} is not of type int") from None


def connect(launch: Launch, timeout: float) -> mesh.Mesh:
    """Connects all ranks of the launch. Collective.

    Raises:
        Timeout, PeerLost: A rank did not come, or went.
        BackendError: The ranks are not on one machine.
    """
    if launch.world_size == 1:
        return mesh.Mesh(0, 1, {})
    deadline = time.monotonic() + timeout
    listener, name = sockets.listen()
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
                f"ranks {launch.rank} and {peer} are on different machines or in containers that "
                "do not share network and process namespaces; this version works within one"
            )
    names = [other["name"] for other in everyone]
    streams = sockets.connect(launch.rank, names, listener, deadline)
    return mesh.Mesh(launch.rank, launch.world_size, streams)


def thread_streams(world_size: int) -> list[dict[int, socket.socket]]:
    """For each of the ranks that are threads of this process, its streams by peer."""
    streams: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    for low, high in itertools.combinations(range(world_size), 2):
        streams[low][high], streams[high][low] = socket.socketpair()
    return streams


def _machine_id() -> str:
    """The same string exactly where socket names and process ids mean the same."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join([boot_id, *namespaces])


def _by_mpi() -> Launch:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendError(
            f"started by an MPI launcher, but mpi4py cannot be imported ({error}); "
            "install it with: pip install 'kccl[mpi]'"
        ) from error
    world = MPI.COMM_WORLD
    started = mpi_world_size(os.environ)
    if started and world.Get_size() != started:
        library = MPI.Get_library_version().splitlines()[0]
        raise BackendError(
            f"the MPI launcher started {started} processes and mpi4py sees {world.Get_size()}: it "
            f"was built for another MPI ({library.strip()}); use that MPI's mpirun, or `kccl run`"
        )
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


def _send(connection: socket.socket, message: object, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(data)) + data)


def _receive(connection: socket.socket, deadline: float) -> Any:
    (length,) = struct.unpack("<I", sockets.receive(connection, 4, deadline))
    return json.loads(sockets.receive(connection, length, deadline))


def _host_meeting(name: str, world_size: int, text: str, deadline: float) -> list[str]:
    """Rank 0's part: collects every rank's string and hands all of them to each."""
    try:
        listener = sockets.bind(name)
    except OSError as error:
        raise BackendError(f"another job already meets under the name {name}: {error}") from error
    texts = {0: text}
    guests: dict[int, socket.socket] = {}
    try:
        while len(texts) < world_size:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            connection, _ = listener.accept()
            try:
                sockets.peer_pid(connection)
                rank, its_text = _receive(connection, deadline)
            except ConnectionError:
                # It ended before it said who it is; that rank will be missed.
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            if rank in texts or not 0 < rank < world_size:
                connection.close()
                raise InvalidArgument(
                    f"a second process says that it is rank {rank} of {world_size}, or there is no "
                    "such rank"
                )
            guests[rank] = connection
            texts[rank] = its_text
        everyone = [texts[rank] for rank in range(world_size)]
        _tell_all(guests, everyone, deadline)
        return everyone
    except TimeoutError:
        missing = min(set(range(world_size)) - set(texts), default=None)
        _tell_all(guests, missing, time.monotonic() + _LAST_WORD_S)
        raise _absent(0, missing) from None
    finally:
        for connection in guests.values():
            connection.close()
        listener.close()


def _tell_all(guests: dict[int, socket.socket], message: object, deadline: float) -> None:
    for rank, connection in guests.items():
        try:
            _send(connection, message, deadline)
        except ConnectionError as error:
            raise PeerLost(
                f"rank 0 lost rank {rank} at start-up: {error}",
                rank=0,
                peer=rank,
                collective="start-up",
            ) from error


def _absent(rank: int, missing: int | None) -> Timeout:
    whom = "the other ranks" if missing is None else f"rank {missing}"
    return Timeout(
        f"rank {rank} waited in vain for {whom} at start-up (KCCL_FIRST_TIMEOUT says how long)",
        rank=rank,
        peer=missing,
        collective="start-up",
    )


def _attend_meeting(name: str, rank: int, text: str, deadline: float) -> list[str]:
    """Every other rank's part."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(f"\0{name}")
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise _absent(rank, 0) from None
                time.sleep(_RETRY_S)
                continue
            sockets.peer_pid(connection)
            try:
                _send(connection, [rank, text], deadline)
                everyone = _receive(connection, deadline + _LAST_WORD_S)
            except TimeoutError:
                raise _absent(rank, None) from None
            except ConnectionError as error:
                raise PeerLost(
                    f"rank {rank} lost rank 0 at start-up: {error}",
                    rank=rank,
                    peer=0,
                    collective="start-up",
                ) from error
            if isinstance(everyone, list):
                return everyone
            raise _absent(rank, everyone)
