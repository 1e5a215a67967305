"""How a program gets its communicator: kccl.init() in each rank, or kccl.run_threads(main)."""

import os
import threading
from collections.abc import Callable
from typing import Any

from . import bootstrap, mesh
from .backends.host import Settings
from .comm import Communicator
from .env import read
from .errors import BackendError, InvalidArgument, WaitFailed

_BACKENDS = ("auto", "host")


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise BackendError(
            f"backend is {backend!r}, this version has {', '.join(_BACKENDS)}; "
            "`kccl doctor` says what runs on this machine"
        )


def init(backend: str = "auto") -> Communicator:
    """The communicator of all ranks of this job. Collective.

    Works under mpirun, torchrun, `kccl run`, and alone as one rank.

    Args:
        backend: "auto" or "host".

    Raises:
        BackendError: The backend or the launcher's library is not there.
        InvalidArgument: Variables are wrong or differ between ranks.
        Timeout, PeerLost: A rank did not come, or went.
    """
    _check_backend(backend)
    env = read()
    launch = bootstrap.detect(env, os.environ)
    ranks = bootstrap.connect(launch, env.first_timeout)
    try:
        return Communicator(
            ranks,
            env,
            launcher=launch.launcher,
            local_rank=launch.local_rank,
            settings=Settings(epoch_bits=env.epoch_bits),
        )
    except BaseException:
        # The peers hear at once that this rank gave up.
        ranks.close()
        raise


def run_threads(
    main: Callable[[Communicator], Any],
    world_size: int,
    backend: str = "host",
    *,
    timeout: float | None = None,
) -> list[Any]:
    """Calls `main(comm)` in one thread a rank and returns what they return, in rank order.

    When a rank raises, the others' waits fail, and the first rank's error that is not such a
    consequence is raised here.

    Args:
        main: What each rank does.
        world_size: Number of ranks, 1 to 8.
        backend: "auto" or "host".
        timeout: As `comm.timeout`; KCCL_TIMEOUT when None.
    """
    _check_backend(backend)
    if not 1 <= world_size <= 8:
        raise InvalidArgument(f"world_size is {world_size}, must be between 1 and 8")
    env = read()
    meshes = bootstrap.thread_meshes(world_size)
    results: list[Any] = [None] * world_size
    # In the order in which they were kept.
    errors: list[BaseException] = []
    comms: list[Communicator] = []

    def be(rank: int, ranks: mesh.Mesh) -> None:
        comm = None
        try:
            settings = Settings(epoch_bits=env.epoch_bits)
            comm = Communicator(ranks, env, launcher="threads", local_rank=rank, settings=settings)
            comms.append(comm)
            if timeout is not None:
                comm.timeout = timeout
            results[rank] = main(comm)
            # As the end of a process would be seen: whoever still waits for this rank gives up.
            comm.close()
        except BaseException as error:
            errors.append(error)
            if comm is not None:
                comm._abort()
            ranks.close()

    threads = [
        threading.Thread(target=be, args=(rank, ranks), name=f"kccl rank {rank}")
        for rank, ranks in enumerate(meshes)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        # Ctrl-C reaches only this thread: it ends the ranks' waits.
        for comm in list(comms):
            comm._abort()
        for ranks in meshes:
            ranks.hang_up()
        for thread in threads:
            thread.join()
        raise
    finally:
        for ranks in meshes:
            ranks.close()
    if errors:
        # The others may have seen the cause, and failed by it, before its rank could keep it here.
        causes = [error for error in errors if not isinstance(error, WaitFailed)]
        raise (causes or errors)[0]
    return results
