"""How a program gets its communicator: kccl.init() in each rank, or kccl.run_threads(main)."""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .backends.base import Backend, Settings
from .backends.host import HostBackend
from .base import arguments
from .base.abi import MAX_WORLD_SIZE
from .base.env import Env, read
from .base.errors import BackendError, InvalidArgument, WaitFailed
from .comm import Communicator
from .ranks import bootstrap
from .ranks.mesh import Mesh

if TYPE_CHECKING:
    from .sim.machine import Machine

_BACKENDS = ("auto", "host", "cuda")
_OF_THREADS = (*_BACKENDS, "sim")


def _check_backend(backend: str, known: Sequence[str]) -> None:
    if backend not in known:
        raise BackendError(
            f"backend is {backend!r}, this version has {', '.join(known)}; "
            "`kccl doctor` says what runs on this machine"
        )


def init(backend: str = "auto") -> Communicator:
    """The communicator of all ranks of this job. Collective.

    Works under mpirun, torchrun, `kccl run`, and alone as one rank.

    Args:
        backend: "host", which "auto" means too; or "cuda": this rank drives the GPU that is current
            in this thread, else the one of its local rank.

    Raises:
        BackendError: The backend or the launcher's library is not there.
        InvalidArgument: Variables are wrong or differ between ranks.
        Timeout, PeerLost: A rank did not come, or went.
    """
    if backend == "sim":
        raise BackendError(
            "backend 'sim' simulates all ranks in one process: use "
            'kccl.run_threads(main, world_size, backend="sim") in place of kccl.init()'
        )
    _check_backend(backend, _BACKENDS)
    env = read()
    launch = bootstrap.detect(env, os.environ)

    def opens() -> type[Backend]:
        if backend != "cuda":
            return HostBackend
        from .backends.cuda import CudaBackend

        return CudaBackend.for_process(launch.local_rank)

    return join(launch, env, opens)


def join(launch: bootstrap.Launch, env: Env, opens: Callable[[], type[Backend]]) -> Communicator:
    """The communicator of all ranks of a launch. Collective.

    Args:
        launch: Who this process is, and how it exchanges a string with the others.
        env: Variables; `first_timeout` bounds the start.
        opens: Says the backend; called when every rank is connected with this one.

    Raises:
        InvalidArgument: The ranks do not fit each other.
        Timeout, PeerLost: A rank did not come, or went.
    """
    ranks = bootstrap.connect(launch, env.first_timeout)
    try:
        backend = opens()
        return Communicator(
            ranks,
            env,
            launcher=launch.launcher,
            local_rank=launch.local_rank,
            settings=backend.settings(env.epoch_bits),
            opens=backend,
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
    seed: int | None = None,
    warp_size: int | None = None,
    model: str | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Calls `main(comm)` in one thread a rank and returns what they return, in rank order.

    When a rank raises, the others' waits fail, and the first rank's error that is not such a
    consequence is raised here.

    With backend "sim" the ranks share one simulated machine of GPUs, on which the seed decides who
    moves when and what each load sees; `main` drives its rank by one thread. Waits' limits count
    virtual time while all ranks wait.

    Args:
        main: What each rank does.
        world_size: Number of ranks, 1 to 8.
        backend: "auto" or "host", "cuda" or "sim".
        timeout: As `comm.timeout`; KCCL_TIMEOUT when None.
        seed: Of the simulation; 0 when None. The same seed gives the same run.
        warp_size: Of the simulated GPUs: 32, or 64; 32 when None.
        model: Their memory model: "sm_90", or "gfx942"; "sm_90" when None.
        trace: Path for the simulation's last steps, for Perfetto or chrome://tracing.

    Raises:
        ProtocolError: The simulation found that ranks, blocks or threads race, or wait in vain.
    """
    _check_backend(backend, _OF_THREADS)
    world_size = arguments.between("world_size", world_size, 1, MAX_WORLD_SIZE)
    env = read()
    connect: Callable[..., Communicator] = partial(
        Communicator, env=env, launcher="threads", settings=Settings(epoch_bits=env.epoch_bits)
    )
    simulated = {"seed": seed, "warp_size": warp_size, "model": model, "trace": trace}
    given: dict[str, Any] = {name: told for name, told in simulated.items() if told is not None}
    if backend != "sim":
        for name, value in given.items():
            raise InvalidArgument(f"{name} is {value!r}, must be None: backend is {backend!r}")
        streams = bootstrap.thread_streams(world_size)
        meshes = [Mesh(rank, world_size, streams[rank]) for rank in range(world_size)]
        if backend == "cuda":
            connect = partial(_connect_gpu, env=env)
        return _run(main, meshes, connect, timeout)
    # What only a simulation needs is loaded for it alone.
    from .backends.sim import SimBackend
    from .sim.machine import simulated_machine
    from .sim.mesh import thread_meshes

    with simulated_machine(world_size, **given) as machine:
        meshes = thread_meshes(machine, bootstrap.thread_streams(world_size))
        return _run(main, meshes, partial(connect, opens=SimBackend), timeout, machine)


def _connect_gpu(ranks: Mesh, env: Env, local_rank: int) -> Communicator:
    """The communicator of a rank that is a thread and drives the GPU of its number."""
    from .backends.cuda import CudaBackend

    opens = CudaBackend.for_thread(local_rank)
    settings = opens.settings(env.epoch_bits)
    return Communicator(
        ranks, env, launcher="threads", local_rank=local_rank, settings=settings, opens=opens
    )


def _run(
    main: Callable[[Communicator], Any],
    meshes: Sequence[Mesh],
    connect: Callable[..., Communicator],
    timeout: float | None,
    machine: "Machine | None" = None,
) -> list[Any]:
    """The ranks' threads, from their start to the end of the last."""
    results: list[Any] = [None] * len(meshes)
    # In the order in which they were kept.
    errors: list[BaseException] = []
    comms: list[Communicator] = []
    # Not Thread.join(), which in CPython 3.11 takes a thread for ended once Ctrl-C interrupts it.
    ended = [threading.Event() for _ in meshes]

    def be(rank: int, ranks: Mesh) -> None:
        comm = None
        try:
            comm = connect(ranks, local_rank=rank)
            comms.append(comm)
            if timeout is not None:
                comm.timeout = timeout
            results[rank] = main(comm)
            # As the end of a process would be seen: whoever still waits for this rank gives up.
            comm.close()
        except BaseException as error:
            errors.append(error)
            if comm is not None:
                comm.abort()
            ranks.close()
        finally:
            if machine is not None:
                machine.leave(rank)
            ended[rank].set()

    threads = [
        threading.Thread(target=be, args=(rank, ranks), name=f"kccl rank {rank}")
        for rank, ranks in enumerate(meshes)
    ]
    for thread in threads:
        thread.start()
    try:
        for event in ended:
            event.wait()
    except BaseException:
        # Ctrl-C reaches only this thread: it ends the ranks' waits.
        for comm in list(comms):
            comm.abort()
        for ranks in meshes:
            ranks.hang_up()
        for event in ended:
            event.wait()
        raise
    finally:
        for ranks in meshes:
            ranks.close()
    found = None if machine is None else machine.failure()
    if found is not None:
        # Whatever the ranks made of it.
        raise found
    if errors:
        # The others may have seen the cause, and failed by it, before its rank could keep it here.
        causes = [error for error in errors if not isinstance(error, WaitFailed)]
        raise (causes or errors)[0]
    return results
