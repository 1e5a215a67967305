"""How ranks that MPI knows meet: all that mpirun started, or those of a communicator of mpi4py."""

import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..base import clock, extras
from ..base.errors import BackendError, InvalidArgument
from . import last_word, launchers, losses
from .job import JobRank, machine_id
from .siblings import Siblings, of_mpi

_RETRY_S = 0.002
_LOOK_S = 0.1  # seconds between two checks that the other ranks' processes still run
# The string of a rank in an exchange, padded with zeros.
_TEXT = struct.Struct("1024s")
MOST_BYTES = _TEXT.size
"""The most bytes that a rank's string in an exchange may have."""

# The requests and buffers of exchanges that timed out or failed. They are kept alive, because MPI
# may still write to the buffers.
_given_up: list[Any] = []


def of_launcher(timeout: float, environ: Mapping[str, str]) -> JobRank:
    """Returns this process's rank among those that mpirun started. Collective.

    Args:
        timeout: Most seconds to wait for the others.
        environ: The environment.

    Raises:
        BackendError: mpi4py is not installed, was built for another MPI, or cannot be called now.
        Timeout: A rank did not come.
    """
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
    _check_usable(MPI)
    world = MPI.COMM_WORLD
    started = launchers.mpi_world_size(environ)
    if started and world.Get_size() != started:
        library = MPI.Get_library_version().splitlines()[0]
        raise BackendError(
            f"the MPI launcher started {started} processes, but mpi4py sees {world.Get_size()}: "
            f"mpi4py was built for another MPI ({library.strip()}); use that MPI's mpirun, or "
            "`kccl run`"
        )
    exchange = _exchange_of(MPI, world, siblings)
    return _rank_of(world, exchange, timeout, None)


def of_comm(comm: Any, timeout: float, environ: Mapping[str, str]) -> JobRank:
    """Returns this process's rank in a communicator of mpi4py. Collective over its ranks.

    Args:
        comm: What the program passed to kccl.init().
        timeout: Most seconds to wait for the others.
        environ: The environment.

    Raises:
        InvalidArgument: `comm` is no intracommunicator of mpi4py.
        BackendError: MPI cannot be called now.
        Timeout: A rank did not come.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise InvalidArgument(
            f"comm is {comm!r:.100}, must be an intracommunicator of mpi4py, as MPI.COMM_WORLD"
        )
    _check_usable(mpi)
    if comm == mpi.COMM_NULL or comm.Is_inter():
        kind = "MPI.COMM_NULL" if comm == mpi.COMM_NULL else "an intercommunicator"
        raise InvalidArgument(f"comm is {kind}, must be an intracommunicator of mpi4py")
    # The numbers in MPI.COMM_WORLD of the ranks of `comm`. mpirun put these numbers into the
    # environment of the ranks' processes, so Siblings can find the processes by them.
    ours, everyone = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    names = ours.Translate_ranks(group=everyone)
    ours.Free()
    everyone.Free()
    siblings = None
    if launchers.is_by_mpi(environ) and mpi.UNDEFINED not in names:
        siblings = of_mpi(environ).among(names)
    exchange = _exchange_of(mpi, comm, siblings)
    world = mpi.COMM_WORLD
    is_world = list(names) == list(range(world.Get_size()))
    local_rank = None
    if not is_world:
        # The local rank selects the process's GPU, so it must not depend on the communicator. None
        # if mpirun does not tell it: then it is counted within `comm`.
        local_rank = launchers.mpi_local_rank(environ)
        if launchers.number_of_local_ranks(environ) == world.Get_size():
            local_rank = world.Get_rank()
    return _rank_of(comm, exchange, timeout, local_rank, is_world=is_world)


def _rank_of(
    comm: Any,
    exchange: Callable[[str, float], list[str]],
    timeout: float,
    local_rank: int | None,
    *,
    is_world: bool = True,
) -> JobRank:
    rank = comm.Get_rank()
    if local_rank is None:
        machines = exchange(machine_id(), timeout)
        local_rank = machines[:rank].count(machines[rank])
    return JobRank("mpi", rank, comm.Get_size(), local_rank, exchange, is_world)


def _check_usable(mpi: Any) -> None:
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


def _exchange_of(
    mpi: Any, comm: Any, siblings: Siblings | None
) -> Callable[[str, float], list[str]]:
    """Returns JobRank.exchange. It makes no blocking call of MPI, because those have no timeout."""

    def exchange(text: str, timeout: float) -> list[str]:
        last_word.init_begins()
        assert len(text) <= MOST_BYTES
        mine, everyone = _TEXT.pack(text.encode()), bytearray(MOST_BYTES * comm.Get_size())
        request = comm.Iallgather([mine, mpi.BYTE], [everyone, mpi.BYTE])
        began = looked = clock.now()
        try:
            while not request.Test():
                now = clock.now()
                if now > began + timeout:
                    raise losses.absent(comm.Get_rank(), None, by_mpi=True)
                if siblings is not None and now > looked + _LOOK_S:
                    looked = now
                    siblings.check()
                time.sleep(_RETRY_S)
        except BaseException:
            _given_up.append((request, mine, everyone))
            raise
        return [text.rstrip(b"\0").decode() for (text,) in _TEXT.iter_unpack(everyone)]

    return exchange
