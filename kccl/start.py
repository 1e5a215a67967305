"""Makes a program's communicator: kccl.init() in each process, or kccl.run_threads(main)."""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from .backends.base import Opener
from .backends.openers import OF_PROCESSES, OF_THREADS, most_ranks, opener
from .base import arguments
from .base.descriptors import keep_standard
from .base.env import Env, read, read_what_is_right
from .base.errors import BackendError, Error, InvalidArgument, ProtocolError, WaitFailed
from .comm import Communicator
from .ranks import agreement, bootstrap, job
from .ranks.mesh import Mesh

if TYPE_CHECKING:
    from .sim.machine import Machine

# The most file descriptors that a communicator has open at once: its own, and for each peer. They
# are connections, pidfds of the peers, and the ranks' memory until it is mapped.
_DESCRIPTORS, _OF_A_PEER = 6, 4


def _check_backend(backend: str, known: Sequence[str]) -> None:
    if backend not in known:
        raise BackendError(
            f"backend is {backend!r}, must be one of {', '.join(known)}; `kccl doctor` says which "
            "of them run on this machine"
        )


def init(backend: str = "auto", *, comm: Any = None) -> Communicator:
    """Makes the communicator of all ranks of this job, or of a communicator of MPI. Collective.

    Works under mpirun, torchrun, srun and `kccl run`, and without a launcher as one rank. Under
    mpirun a process whose init() timed out hangs when it exits: mpi4py calls MPI_Finalize, which
    waits until the absent rank comes or mpirun ends the job.

    Args:
        backend: "auto" or "host" for arrays in host memory, "cuda" for arrays on NVIDIA GPUs, "hip"
            on AMD's. On a GPU the rank uses the one that is current in this thread. If none is
            current, it uses the GPU with the number of its local rank. HIP cannot tell whether GPU
            0 or none is current, so GPU 0 counts as none.
        comm: An intracommunicator of mpi4py, as MPI.COMM_WORLD or what its Split() returned. Its
            ranks make the communicator, with the same numbers, and only they call init(). The
            caller may go on using it, and frees it. If it spans nodes, it must have all ranks of
            MPI.COMM_WORLD in their order. None: all ranks of the job.

    Raises:
        BackendError: The backend, or the launcher's library, is not available on this machine. Or
            this process is a helper of a rank, is in other namespaces than `kccl run`, or may open
            too few files. Or the communicator could not be made on some rank; the text has its
            number and the reason.
        InvalidArgument: Environment variables are wrong, are missing or differ between ranks. Or
            `comm` is no intracommunicator: where only some ranks give a wrong one, the others wait
            for KCCL_FIRST_TIMEOUT.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    keep_standard()
    wrong: Error | None = None
    try:
        if backend == "sim":
            raise BackendError(
                "backend 'sim' simulates all ranks in one process: use "
                'kccl.run_threads(main, world_size, backend="sim") instead of kccl.init()'
            )
        _check_backend(backend, OF_PROCESSES)
        env = read()
    except (BackendError, InvalidArgument) as error:
        # The other ranks must learn of the error, so this rank still meets them, with the settings
        # that are right.
        wrong, env = error, read_what_is_right()
    job.check_namespaces(env.namespaces)
    job.claim(os.environ)
    if wrong is not None:
        # Tells the other ranks. An error here is suppressed, because `wrong` is the one to raise.
        with suppress(Error):
            bootstrap.refuse(bootstrap.detect(env, os.environ, comm), wrong)
        raise wrong
    job_rank = bootstrap.detect(env, os.environ, comm)
    return join(job_rank, env, lambda: opener(backend, "of_process", job_rank.local_rank))


def join(job_rank: job.JobRank, env: Env, find: Callable[[], Opener]) -> Communicator:
    """Makes the communicator of all ranks of a job. Collective.

    Args:
        job_rank: This process's rank, and how it reaches the others.
        env: Environment variables. `first_timeout` limits the start-up.
        find: Returns the Opener of the backend. It is called once this rank is connected with all
            others.

    Raises:
        InvalidArgument: Settings differ between ranks, or KCCL_ALGORITHM is unknown.
        BackendError: It could not be made on some rank; the text has its number and the reason.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    keep_standard()
    size = job_rank.world_size
    with bootstrap.telling(job_rank):
        agreement.check_algorithm(env)
        needed = _DESCRIPTORS + _OF_A_PEER * (size - 1)
        job.check_descriptors(needed, f"kccl.init() of {size} ranks")
    ranks = bootstrap.connect(job_rank, env.first_timeout, env.ranks_per_node)
    try:
        return _meet(ranks, env, job_rank.launcher, job_rank.local_rank, find)
    except BaseException:
        # Closing tells the peers at once that this rank gave up.
        ranks.close()
        raise


def _meet(
    ranks: Mesh, env: Env, launcher: str, local_rank: int, find: Callable[[], Opener]
) -> Communicator:
    """Returns the communicator of ranks that are connected. Collective; see join()."""
    with ranks.call("start-up"):
        opens = find()
        settings = opens.settings(env.epoch_bits)
        return Communicator(
            ranks,
            env,
            launcher=launcher,
            local_rank=local_rank,
            settings=settings,
            opens=opens,
            timeout=env.first_timeout,
        )


def run_threads(
    main: Callable[[Communicator], Any],
    world_size: int,
    backend: str = "host",
    *,
    timeout: float | None = None,
    seed: int | None = None,
    seeds: int | Collection[int] | None = None,
    warp_size: int | None = None,
    model: str | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Runs `main(comm)` in one thread for each rank.

    When a rank raises, the other ranks' waits for it fail. run_threads() then raises the first
    error that is not such a failed wait.

    With backend "sim" the ranks share one simulated machine of GPUs. A seed determines its schedule
    and what each load returns. Many bugs show under some seeds only. So the program runs several
    times, under seeds 0, 1 and so on, each time on a new machine, until one run raises. Hence
    `main` must make its arrays itself, and do the same each time. Give a seed to run it once.
    `main` may use one thread only. While all ranks wait, timeouts count virtual time.

    Args:
        main: The program of each rank.
        world_size: Number of ranks: 1 to 64 on the host, 1 to 8 on the other backends.
        backend: "auto" or "host", "cuda", "hip" or "sim".
        timeout: As `comm.timeout`; KCCL_TIMEOUT when None.
        seed: The only seed of the simulation. The same seed gives the same run.
        seeds: How many seeds to run under, from 0 on, or the seeds themselves. When None,
            KCCL_SEEDS, which is 4 by default.
        warp_size: Warp size of the simulated GPUs, 32 or 64; 32 when None.
        model: Memory model of the simulated GPUs, "sm_90" or "gfx942"; "sm_90" when None.
        trace: Path of a file that gets the last steps of the last run, for Perfetto or
            chrome://tracing.

    Returns:
        The results of `main` in the last run, in rank order.

    Raises:
        InvalidArgument: An argument is wrong.
        ProtocolError: The simulation found a data race, a deadlock or another bug. Its `seed` is
            the one to replay.
        Exception: What `main` raised. On the simulator, a note of the exception has the seed.
    """
    keep_standard()
    _check_backend(backend, OF_THREADS)
    world_size = arguments.between("world_size", world_size, 1, most_ranks(backend))
    env = read()
    agreement.check_algorithm(env)
    if env.ranks_per_node:
        raise InvalidArgument(
            f"KCCL_RANKS_PER_NODE is {env.ranks_per_node}, must be unset: nodes exchange by "
            "MPI, where all threads of a process are one rank"
        )
    connect = partial(_connect, env=env, backend=backend)
    simulated: dict[str, Any] = {"seed": seed, "seeds": seeds, "warp_size": warp_size}
    simulated |= {"model": model, "trace": trace}
    given: dict[str, Any] = {name: value for name, value in simulated.items() if value is not None}
    if backend != "sim":
        for name, value in given.items():
            raise InvalidArgument(f"{name} is {value!r}, must be None: backend is {backend!r}")
        # Each rank has a socket to each other rank, and opens the memory of its team to map it.
        needed = world_size * (world_size - 1 + _OF_A_PEER)
        job.check_descriptors(needed, f"kccl.run_threads() of {world_size} ranks")
        sockets = bootstrap.thread_sockets(world_size)
        meshes = [Mesh(rank, world_size, sockets[rank]) for rank in range(world_size)]
        return _run(main, meshes, connect, timeout)
    # Imported here because only a simulation needs them.
    from .sim.machine import simulated_machine
    from .sim.mesh import thread_meshes

    results: list[Any] = []
    tried = _seeds(given.pop("seed", None), given.pop("seeds", None), env.seeds)
    for each in tried:
        try:
            with simulated_machine(world_size, seed=each, **given) as machine:
                meshes = thread_meshes(machine, bootstrap.thread_sockets(world_size))
                results = _run(main, meshes, connect, timeout, machine)
        except Exception as error:
            if not isinstance(error, ProtocolError):
                error.add_note(f"under seed {each} of the simulation; seed={each} runs it again")
            raise
    return results


def _seeds(seed: Any, seeds: Any, default: int) -> Collection[int]:
    """Returns the seeds for run_threads(), from its arguments or else `default`, KCCL_SEEDS.

    Raises:
        InvalidArgument: The arguments name no seed, or both are given.
    """
    if seed is not None:
        if seeds is not None:
            raise InvalidArgument(f"seed is {seed!r} and seeds is {seeds!r}, must be one of them")
        return [seed]
    seeds = default if seeds is None else seeds
    if isinstance(seeds, Collection) and not isinstance(seeds, str):
        if not any(True for _ in seeds):
            raise InvalidArgument(f"seeds is {seeds!r}, must have a seed")
        return seeds
    if isinstance(seeds, Iterator):
        # An iterator may be endless, so it is refused.
        raise InvalidArgument(f"seeds is {seeds!r}, must be a number or a list of seeds")
    return range(arguments.between("seeds", seeds, 1, 2**31 - 1))


def _connect(ranks: Mesh, rank: int, env: Env, backend: str) -> Communicator:
    """Returns the communicator of a rank that is a thread."""
    return _meet(ranks, env, "threads", rank, lambda: opener(backend, "of_thread", rank))


def _run(
    main: Callable[[Communicator], Any],
    meshes: Sequence[Mesh],
    connect: Callable[[Mesh, int], Communicator],
    timeout: float | None,
    machine: "Machine | None" = None,
) -> list[Any]:
    """Runs each rank in a thread until all have ended. Returns their results, or raises."""
    results: list[Any] = [None] * len(meshes)
    errors: list[BaseException] = []  # in the order in which the ranks raised them
    comms: list[Communicator] = []
    # These events replace Thread.join(). After a Ctrl-C, join() in CPython 3.11 treats a running
    # thread as ended.
    ended = [threading.Event() for _ in meshes]

    def run_rank(rank: int, ranks: Mesh) -> None:
        comm = None
        try:
            comm = connect(ranks, rank)
            comms.append(comm)
            if timeout is not None:
                comm.timeout = timeout
            results[rank] = main(comm)
            # From here on, peers' waits for this rank fail, as when its process ends.
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
        threading.Thread(target=run_rank, args=(rank, ranks), name=f"kccl rank {rank}")
        for rank, ranks in enumerate(meshes)
    ]
    for thread in threads:
        thread.start()
    try:
        for event in ended:
            event.wait()
    except BaseException:
        # Only this thread receives Ctrl-C, so it makes the waits of all ranks fail.
        if machine is not None:
            machine.interrupt()
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
        # What the simulator found caused the ranks' errors, so it is raised instead of them.
        raise found
    if errors:
        # A peer's failed wait may precede the error that caused it, so other errors are preferred.
        causes = [error for error in errors if not isinstance(error, WaitFailed)]
        raise (causes or errors)[0]
    if machine is not None:
        machine.check_calls()
    return results
