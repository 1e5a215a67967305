"""Reads what launchers tell a process by environment variables: its rank, and the number of
ranks.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..base.errors import BackendError, InvalidArgument

# If one of these variables is set, an MPI launcher started this process.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# SLURM_LOCALID is srun's variable. It is used where srun itself starts the ranks of MPICH.
_MPI_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Together these variables show that srun started this process: only srun sets the variables of a
# step. A batch script and its children, which are no ranks, have SLURM_NTASKS and SLURM_PROCID=0
# too.
_SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")
_CURE = "start the ranks with mpirun, torchrun, srun or `kccl run`"


@dataclass(frozen=True)
class Started:
    """What torchrun or srun told this process. They have no library by which ranks could exchange
    strings, so such ranks meet at a socket.

    Attributes:
        launcher: "torchrun" or "srun".
        rank, world_size: This rank, and the number of ranks.
        local_rank: Index of this rank within the machine.
        key: A text that all ranks of the job have in common, and that other jobs do not have.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    key: str


def is_by_mpi(environ: Mapping[str, str]) -> bool:
    """Tells whether an MPI launcher started this process."""
    return any(name in environ for name in _MPI_VARIABLES)


def started(environ: Mapping[str, str]) -> Started | None:
    """Returns what torchrun or srun tell this process; None if neither started it.

    Raises:
        InvalidArgument: Variables are missing or contradict each other.
        BackendError: The ranks are on several machines.
    """
    if _has_all(environ, _TORCHRUN_VARIABLES):
        return _by_torchrun(environ)
    if _has_all(environ, _SRUN_VARIABLES):
        return _by_srun(environ)
    for first in ("RANK", "WORLD_SIZE"):
        if first in environ:
            missing = _missing(environ, _TORCHRUN_VARIABLES)
            raise InvalidArgument(
                f"{first} is set and {missing} is not: set RANK, WORLD_SIZE, MASTER_ADDR and "
                f"MASTER_PORT as torchrun does, or {_CURE}; for one rank alone, unset {first}"
            )
    if "SLURM_PROCID" in environ and _number_or(environ, "SLURM_NTASKS", 1) > 1:
        missing = _missing(environ, _SRUN_VARIABLES)
        raise InvalidArgument(
            f"SLURM_PROCID and SLURM_NTASKS={environ['SLURM_NTASKS']} are set and {missing} is "
            f"not, as in a batch script: {_CURE}, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT; for one rank alone, unset SLURM_PROCID"
        )
    return None


def _by_torchrun(environ: Mapping[str, str]) -> Started:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    _check_rank("RANK", rank, "WORLD_SIZE", world_size)
    if _number_or(environ, "LOCAL_WORLD_SIZE", world_size) != world_size:
        raise BackendError(
            f"torchrun started {world_size} ranks, {environ['LOCAL_WORLD_SIZE']} of them on "
            "this machine; this version of KCCL works within one machine"
        )
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    key = "torchrun " + " ".join(environ.get(name, "") for name in names)
    return Started("torchrun", rank, world_size, _number_or(environ, "LOCAL_RANK", rank), key)


def _by_srun(environ: Mapping[str, str]) -> Started | None:
    rank = _number(environ, "SLURM_PROCID")
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    _check_rank("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", world_size)
    # The shell that salloc starts may be a step of one task, and is no rank of a job.
    if world_size == 1:
        return None
    nodes = _number_or(environ, "SLURM_STEP_NUM_NODES", 1)
    if nodes != 1:
        raise BackendError(
            f"srun started {world_size} ranks on {nodes} machines; this version of KCCL works "
            "within one machine"
        )
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    key = "srun " + " ".join(environ.get(name, "") for name in names)
    return Started("srun", rank, world_size, _number_or(environ, "SLURM_LOCALID", rank), key)


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns what torchrun sets for a rank of one machine, for programs that call
    torch.distributed's init_process_group().

    Args:
        rank, world_size: This rank, and how many there are.
        port: The port of 127.0.0.1 on which rank 0 listens.
    """
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }


def free_port() -> int:
    """Returns a port of 127.0.0.1 that is free now, for a rank to listen on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_of(environ: Mapping[str, str]) -> int:
    """Returns this process's rank by its launcher's variables; 0 without a launcher. Does not load
    MPI.

    Raises:
        InvalidArgument: The variable is not a number.
    """
    if environ.get("KCCL_RENDEZVOUS"):
        return _number_or(environ, "KCCL_RANK", 0)
    for name in _MPI_RANKS:
        if name in environ:
            return _number(environ, name)
    if _has_all(environ, _TORCHRUN_VARIABLES):
        return _number(environ, "RANK")
    if _has_all(environ, _SRUN_VARIABLES):
        return _number(environ, "SLURM_PROCID")
    return 0


def mpi_world_size(environ: Mapping[str, str]) -> int:
    """Returns the number of processes of the job according to the MPI launcher's variables; 0 if
    not set.
    """
    return next((_number(environ, name) for name in _MPI_SIZES if name in environ), 0)


def mpi_rank_variable(environ: Mapping[str, str]) -> str:
    """Returns the name of the variable in which the MPI launcher gives this process's rank; "" if
    none.
    """
    return next((name for name in _MPI_RANKS if name in environ), "")


def number_of_local_ranks(environ: Mapping[str, str]) -> int:
    """Returns how many ranks the MPI launcher started on this machine; 0 if it does not say."""
    return next((_number(environ, name) for name in _MPI_LOCAL_SIZES if name in environ), 0)


def mpi_local_rank(environ: Mapping[str, str]) -> int | None:
    """Returns this rank's number among the ranks of its machine, which the MPI launcher's variables
    tell; None if they do not.
    """
    return next((_number(environ, name) for name in _MPI_LOCAL_RANKS if name in environ), None)


def launcher_of_several(environ: Mapping[str, str]) -> str:
    """Returns "mpirun", "torchrun" or "srun" if it started this process as one of several, else
    "".
    """
    if mpi_world_size(environ) > 1:
        return "mpirun"
    # Only torchrun sets TORCHELASTIC_RUN_ID. The other variables of torchrun are also set by `kccl
    # run`, and by people who start ranks by hand.
    is_by_torchrun = "TORCHELASTIC_RUN_ID" in environ and not environ.get("KCCL_RENDEZVOUS")
    if is_by_torchrun and _number_or(environ, "WORLD_SIZE", 1) > 1:
        return "torchrun"
    is_by_srun = _has_all(environ, _SRUN_VARIABLES) and not environ.get("KCCL_RENDEZVOUS")
    return "srun" if is_by_srun and _number(environ, "SLURM_STEP_NUM_TASKS") > 1 else ""


def name_of(environ: Mapping[str, str]) -> str:
    """Returns the name of the launcher that started this process as one of several ranks: that of
    launcher_of_several(), or "kccl run". "" if none did.

    "torchrun" also stands for torchrun's variables that were set by hand.
    """
    if environ.get("KCCL_RENDEZVOUS") and _number_or(environ, "KCCL_WORLD_SIZE", 1) > 1:
        return "kccl run"
    if _has_all(environ, _TORCHRUN_VARIABLES) and _number(environ, "WORLD_SIZE") > 1:
        return "torchrun"
    return launcher_of_several(environ)


def is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Tells whether any launcher started this process as one of several."""
    return name_of(environ) != ""


def check_only_one(environ: Mapping[str, str]) -> None:
    """Checks that only one launcher's variables are set, or that those of `kccl run` and torchrun
    give the same rank and number of ranks.

    Raises:
        InvalidArgument: A launcher started this process within a job of another launcher. Each of
            the two jobs would take itself for the whole one.
    """
    found: list[tuple[str, int, int, str]] = []
    if environ.get("KCCL_RENDEZVOUS"):
        rank, size = _number_or(environ, "KCCL_RANK", 0), _number_or(environ, "KCCL_WORLD_SIZE", 1)
        found.append(("`kccl run`", rank, size, "KCCL_RENDEZVOUS"))
    if mpi_world_size(environ) > 1:
        variable = mpi_rank_variable(environ)
        rank = _number_or(environ, variable, 0) if variable else 0
        found.append(("mpirun", rank, mpi_world_size(environ), variable))
    # Requires TORCHELASTIC_RUN_ID, because `kccl run` sets the other variables of torchrun too.
    if "TORCHELASTIC_RUN_ID" in environ and _has_all(environ, _TORCHRUN_VARIABLES):
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        found.append(("torchrun", rank, size, "TORCHELASTIC_RUN_ID"))
    is_named_twice = "mpirun" not in [name for name, *_ in found] and (
        len({(rank, size) for _, rank, size, _ in found}) == 1
    )
    if len(found) < 2 or is_named_twice:
        return
    words = [f"{name} as rank {rank} of {size}" for name, rank, size, _ in found]
    raise InvalidArgument(
        f"this process was started by {' and by '.join(words)}: start the ranks with one of them. "
        f"Where a rank starts another job, start that without {' or '.join(v for *_, v in found)}"
    )


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the launchers' variables, for a child that is not a rank."""
    names = {"KCCL_RANK", "KCCL_WORLD_SIZE", "KCCL_RENDEZVOUS", "KCCL_NAMESPACES", "SLURM_PROCID"}
    names.update(_MPI_VARIABLES, _MPI_RANKS, _MPI_LOCAL_RANKS, _TORCHRUN_VARIABLES)
    return {name: text for name, text in environ.items() if name not in names}


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of one launcher that make this process a rank; {} if there is no
    launcher.

    Raises:
        InvalidArgument, BackendError: As in started().
    """
    names: tuple[str, ...]
    if environ.get("KCCL_RENDEZVOUS"):
        names = ("KCCL_RANK", "KCCL_WORLD_SIZE", "KCCL_RENDEZVOUS")
    elif is_by_mpi(environ):
        # PMIX_NAMESPACE and PMI_FD tell jobs apart.
        names = (*_MPI_VARIABLES, *_MPI_RANKS, "PMIX_NAMESPACE", "PMI_FD")
    elif started(environ) is None:
        return {}
    elif _has_all(environ, _TORCHRUN_VARIABLES):
        names = (*_TORCHRUN_VARIABLES, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    else:
        names = _SRUN_VARIABLES
    return {name: environ[name] for name in names if name in environ}


def _has_all(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    return all(name in environ for name in names)


def _missing(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next(name for name in names if name not in environ)


def _check_rank(name: str, rank: int, size_name: str, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"{name}={rank} must be between 0 and {size_name}={world_size} - 1")


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise InvalidArgument(f"{name}={environ[name]!r} must be a whole number") from None


def _number_or(environ: Mapping[str, str], name: str, default: int) -> int:
    return _number(environ, name) if name in environ else default
