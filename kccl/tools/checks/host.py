"""Checks what the host backend needs, and what makes it fast."""

import mmap
import os
import platform
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ...base import extras
from ...base.env import read
from ...base.errors import InvalidArgument
from ...base.syscalls import allowed
from ...ranks import launchers, sockets
from ...ranks.dialing import dial, new_socket
from ...topology import cgroup_folders
from .finding import LIMIT_S, Finding


def compiled_core() -> Finding:
    """Checks that the compiled core loads and has kernels for this CPU's vector instructions."""
    try:
        from ...base.abi import lib
    except ImportError as error:
        return Finding(
            "no",
            str(error),
            "The compiled core does not load.",
            f"Install again where a C++20 compiler is: {extras.reinstall()}",
        )
    from ...base.abi import ffi

    name = ffi.string(lib.kccl_host_instruction_set()).decode()
    if name == "baseline" and platform.machine() == "x86_64":
        return Finding(
            "warn",
            name,
            "This CPU, or the virtual machine around it, lacks AVX2, FMA, BMI2 or F16C.",
            "Give the virtual machine the host's CPU type.",
        )
    return Finding("ok", f"kernels for {name}, Python {platform.python_version()}")


def shared_memory() -> Finding:
    """Checks that a memfd that was sent over a Unix socket maps the same memory."""
    with allowed("memfd_create"):
        fd = os.memfd_create("kccl-doctor", os.MFD_CLOEXEC)
    with allowed("socketpair"):
        left, right = socket.socketpair()
    with left, right:
        received: list[int] = []
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            socket.send_fds(left, [b"x"], [fd])
            received = socket.recv_fds(right, 1, 1)[1]
            with (
                mmap.mmap(fd, mmap.PAGESIZE) as mine,
                mmap.mmap(received[0], mmap.PAGESIZE) as theirs,
            ):
                mine[0] = 42
                seen = theirs[0]
        finally:
            for each in (fd, *received):
                os.close(each)
    if seen != 42:
        return Finding(
            "no",
            f"wrote 42, read {seen}",
            "Two mappings of one memfd differ.",
            "Report this with the version of the Linux kernel; it must not happen.",
        )
    return Finding("ok", "a memfd passed over a Unix socket is the same memory")


def process_ends() -> Finding:
    """Checks that a pidfd becomes readable when its process ends, so a rank notices a lost peer."""
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pidfd = os.pidfd_open(child.pid)
        try:
            is_early = bool(select.select([pidfd], [], [], 0)[0])
            child.kill()
            is_seen = bool(select.select([pidfd], [], [], LIMIT_S)[0])
        finally:
            os.close(pidfd)
    except OSError as error:
        return Finding(
            "warn",
            str(error),
            "pidfd_open is refused, so a rank sees a peer's end by their connection, which ends "
            "later if a fork of the peer still has it open.",
            "Use Linux 5.3 or newer, and a container whose seccomp profile allows pidfd_open.",
        )
    finally:
        child.kill()
        child.communicate()
    if is_early or not is_seen:
        return Finding(
            "no",
            f"readable before the end: {is_early}, after it: {is_seen}",
            "A pidfd does not become readable when its process ends.",
            "Use Linux 5.3 or newer.",
        )
    return Finding("ok", "a pidfd becomes readable when its process ends")


def abstract_sockets() -> Finding:
    """Checks that ranks can connect over abstract Unix sockets and learn the peer's process id."""
    listener, name = sockets.listen()
    with listener, new_socket() as guest:
        dial(guest, name)
        with allowed("accept"):
            connection, _ = listener.accept()
        with connection:
            pid = sockets.peer_pid(connection)
    if pid != os.getpid():
        return Finding(
            "no",
            f"the peer's process id is {pid}, expected {os.getpid()}",
            "A socket reports another process id than the peer has.",
            "Run all ranks in one process namespace.",
        )
    return Finding("ok", "abstract Unix sockets connect and report the peer's process id")


def _num_allowed() -> int:
    with allowed("sched_getaffinity"):
        return len(os.sched_getaffinity(0))


_PROGRAM = """
import array, kccl
with kccl.init() as comm:
    x = array.array("f", [comm.rank + 1.0])
    comm.all_reduce(x)
    assert x[0] == comm.world_size * (comm.world_size + 1) / 2, x
"""


def exchange(world_size: int) -> Callable[[], Finding]:
    """Returns a check that starts `world_size` ranks, which make one all_reduce."""
    launcher = [] if world_size == 1 else ["-m", "kccl", "run", "-n", str(world_size), "--"]
    command = [sys.executable, *launcher, *([sys.executable] if launcher else []), "-c", _PROGRAM]
    limits = {"KCCL_TIMEOUT": "10", "KCCL_FIRST_TIMEOUT": "10"}

    def check() -> Finding:
        done = subprocess.run(
            command,
            env=launchers.without_launcher(os.environ) | limits,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode != 0:
            last = "; ".join(done.stderr.strip().splitlines()[-2:])
            return Finding(
                "no",
                f"exit code {done.returncode}: {last}",
                "kccl.init() or all_reduce failed.",
                "See the other checks; if all are ok, report this one.",
            )
        return Finding("ok", "kccl.init() and all_reduce give the right sum")

    return check


def variables() -> Finding:
    """Checks that no environment variable of KCCL is wrong or makes calls slow."""
    given = sum(name.startswith("KCCL_") for name in os.environ)
    try:
        env = read()
    except InvalidArgument as error:
        return Finding(
            "no",
            f"{given} variables set",
            f"{error}.",
            "Correct the variable, or unset it: kccl.init() raises this.",
        )
    if env.check:
        return Finding(
            "warn",
            f"{given} variables set",
            "Under KCCL_CHECK=1 the ranks compare every call, which takes milliseconds.",
            "Unset KCCL_CHECK for measurements.",
        )
    return Finding("ok", f"{given} variables set, listed below")


# ---- What makes it fast ----------------------------------------------------------------------


def cores() -> Finding:
    """Checks that this process may use more than one core."""
    allowed, online = _num_allowed(), os.cpu_count()
    found = f"{allowed} of {online} logical CPUs allowed"
    if allowed > 1:
        return Finding("ok", found)
    return Finding(
        "warn",
        found,
        "Ranks that share a core take turns. Each switch costs some microseconds.",
        "Allow more cores: see taskset, the container's cpuset, the batch system's binding.",
    )


def quota() -> Finding:
    """Checks that no cgroup's CPU quota throttles ranks that spin while they wait."""
    quotas = [quota for quota in map(_quota_of, cgroup_folders("cpu")) if quota is not None]
    cores = _num_allowed()
    if not quotas:
        return Finding("ok", "no cgroup limits CPU time")
    found = f"{min(quotas):g} cores' worth of CPU time for {cores} allowed cores"
    if min(quotas) >= cores:
        return Finding("ok", found)
    return Finding(
        "warn",
        found,
        "Waiting ranks spin and use up the quota. Then the operating system stops all of them for "
        "milliseconds.",
        "Limit the cores instead of the time (docker --cpuset-cpus, not --cpus), or start fewer "
        "ranks.",
    )


def _quota_of(folder: Path) -> float | None:
    """Returns the CPU time that a cgroup allows, in cores; None if it has no limit."""
    unified, old = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if unified.exists():
        quota, period = unified.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if old.exists():
        quota_us = int(old.read_text())
        return None if quota_us < 0 else quota_us / int((folder / "cpu.cfs_period_us").read_text())
    return None
