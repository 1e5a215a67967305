"""Finds out why one process may not read another's memory, and says it in words."""

import json
import os
import warnings
from pathlib import Path

from ..base.abi import ffi, lib
from ..ranks.team import Connected

_CAP_SYS_PTRACE = 19


class Probes:
    """Words of the ranks' memory, by which each finds out whether it may read the others'.

    Attributes:
        are_readable: True if every rank can read every other's memory.
        pids, addresses: Each rank's process, and the address of its word there.
    """

    def __init__(self, mesh: Connected, timeout: float) -> None:
        """Reads the words. Collective.

        Each rank reads a word of each other, because permission depends on the pair, and because a
        process id means another process in another container.
        """
        # Kept alive as an attribute: peers read this word again later, to check whether they may
        # still read this process's memory.
        self._word = own = ffi.new("uint64_t *", int.from_bytes(os.urandom(8), "little"))
        address = int(ffi.cast("uintptr_t", own))
        mine = {"pid": os.getpid(), "address": address, "token": own[0]}
        told = mesh.allgather(json.dumps(mine).encode(), "start-up", timeout)
        replies = [json.loads(each) for each in told]
        self.pids = [each["pid"] for each in replies]
        self.addresses = [each["address"] for each in replies]
        found = ffi.new("uint64_t *")
        is_able = all(
            lib.kccl_host_read_process(each["pid"], found, each["address"], 8) == 0
            and found[0] == each["token"]
            for each in replies
        )
        told = mesh.allgather(b"01"[is_able : is_able + 1], "start-up", timeout)
        self.are_readable = all(each == b"1" for each in told)


def warn(rank: int, peer: int, pid: int, error: int) -> None:
    """Warns that large messages go through the staging from now on. C calls it, once.

    Args:
        rank: This rank.
        peer: The rank whose memory can no longer be read.
        pid: Its process.
        error: The errno of process_vm_readv.
    """
    warnings.warn(
        f"rank {rank} may no longer read the memory of rank {peer} (process {pid}): "
        f"process_vm_readv: {os.strerror(error)}; {why_refused(pid)}. Results are right, but large "
        "messages are copied once more, which takes longer",
        RuntimeWarning,
        stacklevel=2,
    )


def why_refused(pid: int) -> str:
    """Returns why this process may not read the memory of process `pid`, as far as the system
    tells.
    """
    mine, theirs = _status("self"), _status(str(pid))
    found = []
    if theirs and _user_namespace("self") != _user_namespace(str(pid)):
        found.append("the processes are in different user namespaces")
    if theirs and mine.get("Uid") != theirs.get("Uid"):
        found.append("the processes belong to different users")
    elif theirs and _is_undumpable(pid, theirs):
        found.append("the process has called prctl(PR_SET_DUMPABLE, 0) or changed its user")
    scope = _number("/proc/sys/kernel/yama/ptrace_scope")
    if scope:
        found.append(f"kernel.yama.ptrace_scope is {scope} (sysctl; 0 allows it)")
    if int(mine.get("Seccomp", "0")):
        found.append("a seccomp filter is active (docker run --cap-add=SYS_PTRACE allows the call)")
    if not int(mine.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1:
        found.append("this process lacks CAP_SYS_PTRACE")
    return "possible reasons: " + ", ".join(found) if found else "the system does not say why"


def _status(process: str) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def _number(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0


def _user_namespace(process: str) -> str:
    # The link cannot be read if this process may not inspect the other one. Then the two namespaces
    # count as equal.
    try:
        return os.readlink(f"/proc/{process}/ns/user")
    except OSError:
        return os.readlink("/proc/self/ns/user")


def _is_undumpable(pid: int, status: dict[str, str]) -> bool:
    # The /proc files of a process that is not dumpable belong to root. For processes of root the
    # owner says nothing, so they count as dumpable.
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return False
    effective = int(status.get("Uid", "0 0").split()[1])
    return owner != effective or effective == 0
