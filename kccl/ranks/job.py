"""Checks of a process before it connects with the other ranks of its job.

They are: is the process a rank or a rank's helper, is it in the same namespaces as the other ranks,
and may it open enough files.
"""

import errno
import hashlib
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..base.descriptors import is_open
from ..base.errors import BackendError, Error
from . import launchers

_KINDS = ("net", "pid", "user")
_CLAIM = "KCCL_RANK_PROCESS"
# File descriptors for files that are open for a moment only, such as a module that Python imports.
_SPARE = 8
# File descriptors that a rank needs for the message to the others that it cannot start, and why.
_TO_TELL = 16


@dataclass(frozen=True)
class JobRank:
    """The rank that this process is, and how it reaches the others.

    Attributes:
        launcher: "mpi", "torchrun", "srun", "torch.distributed", "kccl run", "threads" or "alone".
        rank, world_size: This rank, and the number of ranks.
        local_rank: Index of this rank within the machine.
        exchange: Takes this rank's string, and most seconds to wait. Returns all ranks' strings in
            rank order; or fewer, if one of them is a refusal (refusal.py).
        is_mpi_world: The ranks are those of MPI.COMM_WORLD, in its order.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    exchange: Callable[[str, float], list[str]]
    is_mpi_world: bool = False


def namespaces() -> str:
    """Returns the ids of the namespaces that ranks must share: network (which has the sockets'
    names), process and user.

    Raises:
        BackendError: They cannot be read in /proc.
    """
    return " ".join(_of_proc(os.readlink, f"/proc/self/ns/{kind}") for kind in _KINDS)


def machine_id() -> str:
    """Returns an id that two processes share only if they share socket names and process ids."""
    return f"{boot_id()} {namespaces()}"


def boot_id() -> str:
    """Returns an id that two processes share only if they run on one machine, in any containers."""
    return _of_proc(lambda path: Path(path).read_text(), "/proc/sys/kernel/random/boot_id").strip()


def _of_proc(read: Callable[[str], str], path: str) -> str:
    try:
        return read(path)
    except OSError as error:
        raise BackendError(
            f"{path} cannot be read ({error.strerror}): ranks find each other's processes by "
            "/proc, so mount it (mount -t proc proc /proc), as containers do by default"
        ) from error


def check_namespaces(launchers_own: str) -> None:
    """Checks that this process is in the launcher's namespaces.

    Args:
        launchers_own: What namespaces() returned in the launcher; "" if that is not known.

    Raises:
        BackendError: This process is in another namespace than the launcher.
    """
    if not launchers_own:
        return
    mine = namespaces()
    if launchers_own == mine:
        return
    pairs = zip(_KINDS, launchers_own.split(), mine.split(), strict=True)
    other = [kind for kind, theirs, its in pairs if theirs != its]
    names = {"net": "network", "pid": "process", "user": "user"}
    raise BackendError(
        f"this rank is in another {' and '.join(names[kind] for kind in other)} namespace than "
        "`kccl run` (unshare, or a container of its own), so the other ranks cannot reach it: run "
        "all ranks in one container, or start the containers with the host's namespaces, as by "
        "docker run --network=host --pid=host"
    )


def claim(environ: Mapping[str, str]) -> None:
    """Makes this process the rank that its launcher's variables name. Idempotent.

    The claim is an environment variable, KCCL_RANK_PROCESS. Processes that the rank starts inherit
    it together with the launcher's variables, and are refused here. It is set when kccl is imported
    and again by kccl.init(), so helpers that a rank starts before its kccl.init() are refused too.
    A wrapper that imports kccl and then starts the rank looks like a rank with a helper. It must
    start the rank without KCCL_RANK_PROCESS.

    Raises:
        BackendError: The process that started this one, or the parent of this fork, is the rank.
    """
    variables = launchers.own_variables(environ)
    if not variables:
        return
    job = hashlib.sha256(repr(sorted(variables.items())).encode()).hexdigest()[:16]
    pid, _, its_job = environ.get(_CLAIM, "").partition("/")
    if its_job == job and int(pid) != os.getpid():
        raise BackendError(
            f"this process is no rank: process {pid} is rank {launchers.rank_of(environ)}, and "
            f"this one (process {os.getpid()}) was started by it and inherits its variables. Call "
            "kccl.init() in the rank only, which is the process that has imported kccl first; or "
            f"start this process without {', '.join(sorted(variables))}. If process {pid} only "
            f"starts the rank, and this one is it, start it without {_CLAIM}"
        )
    os.environ[_CLAIM] = f"{os.getpid()}/{job}"


def claim_at_import() -> None:
    """Calls claim() and ignores its errors, because kccl.init() calls it again and raises them."""
    with suppress(Error):
        claim(os.environ)


@contextmanager
def room_to_tell() -> Iterator[None]:
    """Returns a context in which this process may open _TO_TELL more files, as far as the hard
    limit allows. A rank without descriptors needs them to tell the others why it cannot start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = soft + _TO_TELL if hard == resource.RLIM_INFINITY else min(soft + _TO_TELL, hard)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_descriptors(needed: int, what: str) -> None:
    """Checks that this process may open `needed` more descriptors.

    Args:
        needed: Descriptors that `what` opens.
        what: What opens them, as in "kccl.init() of 4 ranks".

    Raises:
        BackendError: The limit is too low. The text names the limit and the number needed.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        num_open = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        # EMFILE: all descriptors are open. Otherwise there is no /proc, so each number is tried.
        num_open = limit if error.errno == errno.EMFILE else sum(map(is_open, range(limit)))
    if num_open + needed + _SPARE > limit:
        raise BackendError(
            f"{what} needs {needed + _SPARE} file descriptors, {num_open} are open, and the limit "
            f"is {limit}: raise it, as by `ulimit -n {num_open + needed + _SPARE}`"
        )
