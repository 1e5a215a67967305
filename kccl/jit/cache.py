"""The cache of compiled kernels on disk, and the compilation of kernels for the simulator.

The name of an entry is a hash over everything that shapes it: source, all headers that it includes,
flags, the compiler's version, target, ABI. So an entry is never out of date. Each entry ends with a
checksum, so a damaged one is compiled again.
"""

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from ..base import extras
from ..base.abi import ABI_VERSION
from ..base.env import read
from ..base.errors import BackendError, CompileError, InvalidArgument
from . import compilers, cuda_words
from .headers import Headers

CSRC = Path(__file__).parents[1] / "csrc"
WARP_SIZES = (32, 64)
# -fsanitize=thread makes the compiler call a hook at each access. The simulator provides the hooks
# (csrc/sim/module.inc), and one for -fsanitize=alignment; the sanitizers' own libraries are not
# linked. The -fno-builtin flags let the simulator see copies. The -fstack flags let it see writes
# beyond a local array or the stack. -Og skips passes of the compiler, because the simulator's speed
# is not measured.
_SIM_FLAGS = (
    *("-std=c++20", "-Og", "-g1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fsanitize=thread", "-DKCCL_TARGET_SIM=1"),
    "-fsanitize=alignment",
    *("-fno-builtin-memcpy", "-fno-builtin-memmove", "-fno-builtin-memset"),
    "-fno-builtin-abort",
    *("-fstack-protector-strong", "-fstack-clash-protection"),
)
# With KCCL_HOST_GRID a block is an OS thread; see platform.cuh.
_HOST_FLAGS = (
    *("-std=c++20", "-O2", "-g1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-DKCCL_HOST_GRID=1"),
)
# Environment variables with more folders for the compiler, which are part of an entry's key.
_COMPILER_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")
# Most seconds that a process waits for another one that compiles the same entry, and may be
# stopped.
_LONGEST_S = 120
_MAGIC = b"kccl"
_locks: dict[str, threading.Lock] = {}
# Stem of the temporary files of a compilation.
_UNIT = "unit"


# ---- The cache -------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Returns the folder of the entries: KCCL_CACHE, or else kccl in the user's cache folder."""
    folder = read().cache
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kccl"


def cached(key: str, suffix: str, make: Callable[[], bytes]) -> Path:
    """Returns the file of an entry. If it is missing or damaged, `make` provides its content.

    Several processes may call this at the same time. One makes the entry, and the others wait for
    it. Where the file system has no locks each makes it, and the last one stays.

    Args:
        key: The name of the entry, from key_of().
        suffix: Suffix of the file's name, as in ".so".
        make: Compiles, and returns the content.

    Raises:
        BackendError: The folder cannot be written to.
    """
    path = cache_folder() / key[:2] / f"{key}{suffix}"
    # A lock for the threads of this process: ranks that are threads need the same kernel at the
    # same time, and only one compiles it.
    with _locks.setdefault(key, threading.Lock()):
        if not _is_whole(path, key):
            with _lock_of_processes(path):
                # Checks again: another process may have made the entry before this one got the
                # lock.
                if not _is_whole(path, key):
                    write(path, _sealed(make(), key))
    return path


@contextmanager
def _lock_of_processes(path: Path) -> Iterator[None]:
    """Returns a context that holds the file lock of an entry. A process that ends releases it too.

    The context is entered without the lock if there is no folder, if the file system has no locks,
    or if another process keeps the lock too long. If the folder is missing, write() raises the
    reason. Two processes may then write an entry at the same time, because a write is atomic. Each
    entry has a lock of its own, because making an entry may need another entry.
    """
    lock = path.with_suffix(".lock")
    with ExitStack() as stack:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            opened = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, opened)
            # _let_go() removes the lock file. Processes that wait for this file, or make a new one,
            # then find the entry and compile nothing.
            stack.callback(_let_go, lock, opened)
            _lock_in_time(opened)
        yield


def _let_go(lock: Path, opened: int) -> None:
    # Unlocks the file, because closing it does not release the lock while a process that was forked
    # meanwhile has the file open.
    with suppress(OSError):
        lock.unlink()
        fcntl.flock(opened, fcntl.LOCK_UN)


def _lock_in_time(opened: int) -> None:
    """Locks a file, but waits at most _LONGEST_S for another process."""
    until = time.monotonic() + _LONGEST_S
    while time.monotonic() < until:
        with suppress(BlockingIOError):
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)


def find(key: str, suffix: str, folder: Path) -> Path | None:
    """Returns the file of an entry; None if it is missing or damaged. See cached().

    Args:
        key, suffix: See cached().
        folder: The folder of the cache.
    """
    path = folder / key[:2] / f"{key}{suffix}"
    return path if _is_whole(path, key) else None


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically: other processes see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, aside = tempfile.mkstemp(dir=path.parent, prefix=".aside-")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside)
            raise
    except OSError as error:
        raise BackendError(
            f"cannot write the compiled kernel {path}: {error}; "
            "set KCCL_CACHE to a folder that can be written to"
        ) from error


def _sealed(content: bytes, key: str) -> bytes:
    """Returns the content with its checksum appended. Loaders ignore bytes behind the end of a
    library.
    """
    return content + _MAGIC + _checksum(content, key)


def _is_whole(path: Path, key: str) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    end = len(content) - hashlib.sha256().digest_size
    start = end - len(_MAGIC)
    sealed = content[max(start, 0) : max(end, 0)] == _MAGIC
    return sealed and content[end:] == _checksum(content[:start], key)


def _checksum(content: bytes, key: str) -> bytes:
    return hashlib.sha256(content + key.encode()).digest()


def key_of(
    source: str,
    *,
    target: str,
    compiler: str,
    flags: Sequence[str],
    include_dirs: Sequence[Path],
    headers: Headers | None = None,
) -> str:
    """Returns the name of the cache entry for a compilation.

    Args:
        source: The whole text of the translation unit.
        target: Target and architecture, as in "sim x86_64".
        compiler: Name and version of the compiler; differs between any two compilers.
        flags: All flags of the compiler.
        include_dirs: Folders to search for headers.
        headers: The headers that have been read for other keys; None if none have.

    Raises:
        CompileError: An #include names a macro, so its header is not known here.
    """
    hashes = (headers or Headers()).of(source, include_dirs)
    variables = [os.environ.get(name, "") for name in _COMPILER_VARIABLES]
    parts = [ABI_VERSION, target, compiler, list(flags), variables, source, hashes]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ---- The simulator's target ------------------------------------------------------------------


def compile_sim(
    source: str,
    kernels: Sequence[str],
    *,
    warp_size: int = 32,
    name: str = "source",
    include_dirs: Sequence[Path] = (),
    csrc: Path = CSRC,
) -> Path:
    """Compiles kernels for the simulator.

    Args:
        source: Text in the dialect of platform.cuh and mem.cuh.
        kernels: Names or template instances. Entry i of the library is kernels[i].
        warp_size: 32 or 64.
        name: Name of the source in messages and reports.
        include_dirs: More folders to search for headers.
        csrc: Root of the device headers.

    Returns:
        The path of the library, in the cache.

    Raises:
        InvalidArgument: An argument is wrong.
        CompileError: The source does not compile. The error has the compiler's log.
        BackendError: There is no compiler, or the cache cannot be written to.
    """
    if warp_size not in WARP_SIZES:
        raise InvalidArgument(f"warp_size is {warp_size!r}, must be 32 or 64")
    flags = (*_SIM_FLAGS, f"-DKCCL_SIM_WARP_SIZE={warp_size}")
    return _compile("sim", source, kernels, name, include_dirs, csrc, flags)


def compile_host(
    source: str, kernels: Sequence[str], *, name: str = "source", include_dirs: Sequence[Path] = ()
) -> Path:
    """Compiles kernels for the host's CPU. Arguments, result and errors as in compile_sim()."""
    return _compile("host", source, kernels, name, include_dirs, CSRC, _HOST_FLAGS)


def _compile(
    target: str,
    source: str,
    kernels: Sequence[str],
    name: str,
    include_dirs: Sequence[Path],
    csrc: Path,
    options: Sequence[str],
) -> Path:
    """See compile_sim(). `options` are flags of the target, "sim" or "host"."""
    cxx = compilers.find_cxx()
    if cxx is None:
        raise BackendError(
            "the simulator and the host compile kernels at run time, and this machine has no C++ "
            f"compiler. {compiler_cure()}"
        )
    include_dirs = [csrc / "include", csrc / "sim" / "cuda", *include_dirs]
    flags = [*options, *(f"-I{at}" for at in include_dirs)]
    # Makes debug information name the source, not the temporary file.
    flags.append(f"-fdebug-prefix-map={_UNIT}.cpp={name}")
    if compilers.is_zig(cxx):
        # Switches off what zig switches on by default.
        flags[:0] = ["-fno-sanitize=undefined", "-fno-sanitize-trap=all"]
    unit = "\n".join(
        (
            f"#line 1 {json.dumps(name)}",
            source,
            '#line 1 "entries of the kernels"',
            f'#include "{csrc}/{target}/module.inc"',
            *(f"KCCL_ENTRY({index}, ({kernel}))" for index, kernel in enumerate(kernels)),
            "",
        )
    )
    linker = compilers.linker_of(cxx)
    key = key_of(
        unit,
        target=f"{target} {platform.machine()}",
        compiler=f"{_version(tuple(cxx))} {linker}",
        flags=flags,
        include_dirs=include_dirs,
    )
    cuda_words.check_variables(source, name)

    def make() -> bytes:
        try:
            return _make_sim(unit, name, cxx, linker, flags)
        except CompileError as error:
            told = cuda_words.explanations(source, name)
            if not told:
                raise
            head, _, log = str(error).partition("\n")
            raise CompileError(f"{head}\n{told}{log}", log=told + error.log) from None

    return cached(key, ".so", make)


@lru_cache(maxsize=8)
def _version(command: tuple[str, ...]) -> str:
    """Returns the output of a compiler's --version."""
    return _run([*command, "--version"], "the compiler's version").stdout


def compiler_cure() -> str:
    """Returns advice on how to install a C++ compiler."""
    return compilers.cure(extras.pip_install())


def compiler_name() -> str:
    """Returns the name and version of the simulator's compiler; "" when there is none."""
    cxx = compilers.find_cxx()
    return "" if cxx is None else _version(tuple(cxx)).partition("\n")[0]


def _make_sim(unit: str, name: str, cxx: list[str], linker: list[str], flags: list[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="kccl-") as folder:
        source, compiled, linked = (Path(folder) / f"{_UNIT}.{end}" for end in ("cpp", "o", "so"))
        source.write_text(unit, encoding="utf-8")
        flags = [*flags, f"-fdebug-prefix-map={folder}=."]
        _run([*cxx, *flags, "-c", source.name, "-o", str(compiled)], name, folder)
        _run([*linker, "-shared", str(compiled), "-o", str(linked)], name, folder)
        return linked.read_bytes()


def _run(
    command: list[str], what: str, folder: str | None = None
) -> "subprocess.CompletedProcess[str]":
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise BackendError(f"cannot run {command[0]} ({error}). {compiler_cure()}") from error
    if done.returncode != 0:
        log = done.stderr.strip() or done.stdout.strip()
        raise CompileError(f"{what} does not compile with {command[0]}:\n{log}", log=log)
    return done
