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
from ..base.errors import BackendError, Error, InvalidArgument
from . import job, last_word, launchers, losses, mesh, refusal, rendezvous, sockets
from .siblings import Siblings, of_mpi, of_torchrun

_RETRY_S = 0.002
_LOOK_S = 0.1  # between two looks at the other ranks' processes

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
        exchange: Takes this rank's string, and most seconds to wait. Returns all ranks' strings in
            rank order; or fewer, if one of them is a refusal (refusal.py).
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    exchange: Callable[[str, float], list[str]]


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
        return _by_socket("kccl run", env.rendezvous, env.rank, env.world_size, env.rank)
    if launchers.is_by_mpi(environ):
        return _by_mpi(env.first_timeout, environ)
    found = launchers.started(environ)
    if found is not None:
        where = found.rank, found.world_size, found.local_rank
        siblings = None
        if found.launcher == "torchrun":
            siblings = of_torchrun(environ, found.rank, found.world_size)
        return _by_socket(found.launcher, found.key, *where, siblings)
    return JobRank("alone", 0, 1, 0, lambda text, _: [text])


def connect(job_rank: JobRank, timeout: float) -> mesh.Mesh:
    """Connects all ranks of a job. Collective.

    Args:
        job_rank: This process's rank, and how it reaches the others.
        timeout: Seconds to wait for the other ranks.

    Raises:
        Timeout, PeerLost: A rank did not come, or went.
        BackendError: The ranks are not on one machine, or one cannot start.
        InvalidArgument: One cannot start because of an argument or a variable.
    """
    if job_rank.world_size == 1:
        return mesh.Mesh(0, 1, {})
    deadline = time.monotonic() + timeout
    listener, name = sockets.listen()
    try:
        mine = {"name": name, "machine": _machine_id()}
        texts = job_rank.exchange(json.dumps(mine), timeout)
        refusal.check(texts, job_rank.rank)
    except BaseException:
        listener.close()
        raise
    everyone = [json.loads(text) for text in texts]
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


def refuse(job_rank: JobRank, error: Error) -> None:
    """Tells the other ranks why this one cannot start. The text of `error` gets this rank."""
    if job_rank.world_size > 1:
        said = refusal.refusal(error, job_rank.rank, _MPI_TEXT.size)
        # What happens meanwhile to this rank or the others is no reason to keep back the error.
        with contextlib.suppress(Error, OSError):
            job_rank.exchange(said, refusal.WAITS_S)


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
            with siblings.guarding(timeout):
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

    def exchange(text: str, seconds: float) -> list[str]:
        return _mpi_exchange(MPI, text, seconds, siblings)

    machines = exchange(_machine_id(), timeout)
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
                raise losses.absent(world.Get_rank(), None, by_mpi=True)
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
    siblings: Siblings | None = None,
) -> JobRank:
    # Each init() has a rendezvous of its own. All ranks call init() equally often, so the numbers
    # agree.
    number = next(_rendezvous_numbers)
    name = "kccl-" + hashlib.sha256(f"{os.getuid()} {key} {number}".encode()).hexdigest()[:32]

    def exchange(text: str, seconds: float) -> list[str]:
        return rendezvous.exchange(name, key, rank, world_size, text, seconds, siblings)

    return JobRank(launcher, rank, world_size, local_rank, exchange)
