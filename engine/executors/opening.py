"""Opens a model's ranks on a backend: which executor a rank has, and how it is set up."""

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import kccl

from ..files.checkpoint import DTYPES, Checkpoint
from ..model.executor import Executor
from ..model.program import Program
from ..monokernel.limits import check
from ..monokernel.machine import machine_of
from ..monokernel.tuning import tuning_for
from ..monokernel.weights import total_bytes
from .device import DeviceExecutor
from .host import DTYPE as HOST_DTYPE
from .host import HostExecutor
from .memory import check_memory
from .packing import Parts, Sizes
from .placement import place
from .ranks import Ranks, check_same, ranks_of_job, ranks_of_threads

Told = Callable[[int], None]
"""Called with the number of bytes that were packed since the last call."""


class Backend(NamedTuple):
    """What a rank has on a backend.

    Attributes:
        bytes_of: Gives what a rank of so many packs, in bytes.
        dtypes: What weights may be in.
        make: Makes a rank's executor: (checkpoint, comm, blocks, context, progress). Collective.
        is_on_host: Whether the weights are in this machine's memory. A GPU's driver refuses what
            its memory does not hold, before anything is read.
    """

    bytes_of: Callable[[Program, int, int], int]
    dtypes: Collection[str]
    make: Callable[[Checkpoint, kccl.Communicator, int | None, int, Told], Executor]
    is_on_host: bool


def _host_bytes(program: Program, rank: int, world_size: int) -> int:
    return Sizes(program, Parts(program, world_size), rank).total


def _make_host(
    checkpoint: Checkpoint,
    comm: kccl.Communicator,
    blocks: int | None,
    context: int,
    progress: Told,
) -> Executor:
    number, cpus = place(comm, blocks)
    return HostExecutor(
        checkpoint, comm, blocks=number, cpus=cpus, context=context, progress=progress
    )


def _make_device(
    checkpoint: Checkpoint,
    comm: kccl.Communicator,
    blocks: int | None,
    context: int,
    progress: Told,
) -> Executor:
    program = Program(checkpoint.config)
    check(program, comm.world_size)
    tuning = tuning_for(program, comm.world_size, machine_of(comm, program), blocks)
    return DeviceExecutor(checkpoint, comm, tuning=tuning, context=context, progress=progress)


_ON_GPU = Backend(total_bytes, DTYPES, _make_device, is_on_host=False)
BACKENDS = {
    "host": Backend(_host_bytes, (HOST_DTYPE,), _make_host, is_on_host=True),
    "cuda": _ON_GPU,
    "hip": _ON_GPU,
    "sim": _ON_GPU._replace(is_on_host=True),
}


def read_for(checkpoint: Checkpoint, backend: str, dtype: str | None) -> Checkpoint:
    """The checkpoint with its weights read in a dtype that the backend has: the given one; else as
    they are stored, where the backend has that.

    Raises:
        InvalidArgument: There is no such backend, or it has no such dtype.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise kccl.InvalidArgument(f"backend is {backend!r}, must be one of {names}")
    has = BACKENDS[backend].dtypes
    if dtype is not None and dtype not in has:
        names = " or ".join(map(repr, has))
        raise kccl.InvalidArgument(f"dtype is {dtype!r}, must be {names} on backend {backend!r}")
    if dtype is None:
        dtype = checkpoint.dtype if checkpoint.dtype in has else next(iter(has))
    return checkpoint.as_dtype(dtype)


def start_ranks(
    checkpoint: Checkpoint,
    backend: str,
    ranks: int | None,
    blocks: int | None,
    context: int,
    progress: Callable[[int, int], None] | None,
) -> Ranks[Executor]:
    """The ranks of a model, or what this process has of them: the arguments are Engine's, and the
    checkpoint is from read_for().

    Raises:
        InvalidArgument: An argument is wrong, or the backend cannot run the model.
        kccl.Error: The model cannot be read, or does not fit into memory.
    """
    kind = BACKENDS[backend]
    packed, lock = [0], threading.Lock()

    def make(comm: kccl.Communicator) -> Executor:
        model = {"model": repr(checkpoint.config), "dtype": checkpoint.dtype}
        check_same(comm, model | {"context": context, "blocks": blocks})
        program = Program(checkpoint.config)
        mine = range(comm.world_size) if comm.launcher == "threads" else [comm.rank]
        sizes = [kind.bytes_of(program, rank, comm.world_size) for rank in range(comm.world_size)]
        if kind.is_on_host:
            check_memory(
                comm, sizes, list(mine), checkpoint.config, context, checkpoint.mapped_bytes
            )
        total = sum(sizes[rank] for rank in mine)

        def tell(nbytes: int) -> None:
            # Raises if Ctrl-C has aborted it: reading may take minutes.
            comm.check()
            with lock:
                packed[0] += nbytes
                if progress is not None:
                    progress(packed[0], total)

        return kind.make(checkpoint, comm, blocks, context, tell)

    if backend == "sim" and kccl.launched_rank() is None:
        # A rank that has no launch of its own under way would hold up the simulator's others.
        if ranks not in (None, 1):
            raise kccl.InvalidArgument(f"ranks is {ranks}, must be 1 on backend 'sim'")
        ranks = 1
    if ranks is None:
        return ranks_of_job(partial(kccl.init, backend=backend), make)
    return ranks_of_threads(ranks, backend, make)
