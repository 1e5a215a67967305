"""Keeps packed weights in a folder, so that the next start reads them instead of packing them.

A rank has a file of its own. Its name has a hash of all that its content depends on, and its head
has the whole text of that. Behind the head lies a table with an entry for each chunk of 16 MiB;
then come the chunks. An entry has its chunk's CRC-32, and is written behind the chunk. So a file
that is unfinished or damaged is as good as the chunks that agree with their entries: only sections
with other chunks are packed and written again. A file that is complete gets another suffix. Nothing
waits until the disk has the data: after a power failure the CRCs tell what is missing.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import secrets
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from .checkpoint import Checkpoint

CHUNK = 16 << 20
"""The bytes of a chunk. The last chunk of a section may have fewer."""
_PAGE = mmap.PAGESIZE
_MAGIC = b"KCCL packed weights 1\n"
# The bytes of an entry: the chunk's CRC-32, and the same with these bits inverted. So zeros are no
# entry.
_ENTRY, _WRITTEN = 8, 0x4B43434C
# How many threads check and write chunks, and the most chunks that wait for that.
_MOST_THREADS, _MOST_WAITING = 8, 8
# The folders of the engine's code that decides what packed weights are.
_CODE = ("base", "executors", "files", "formats", "host", "kernels", "model", "monokernel")
_SUFFIXES = {".cpp", ".cuh", ".h", ".hpp", ".inc", ".py"}
# How many samples of a model's file are compared, and their bytes.
_SAMPLES, _SAMPLE = 64, 4096


class PackedCache:
    """A folder for the packed weights of a model.

    Attributes:
        folder: The folder.
        notices: Sentences for the user: what is kept, or why nothing is.
    """

    def __init__(self, folder: Path, model: Path, files: Collection[Path]) -> None:
        """Makes the folder if it does not exist.

        Args:
            folder: The folder.
            model: The model's folder or file.
            files: The files with its weights.

        Raises:
            InvalidArgument: The model has no files.
            kccl.Error: The folder cannot be made, or a file cannot be read.
        """
        if not files:
            raise kccl.InvalidArgument(
                f"packed_cache is {str(folder)!r}, must be None for {model}, which are made anew"
            )
        self.folder, self.notices = folder, list[str]()
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise kccl.Error(f"packed_cache {folder} cannot be made: {error.strerror}") from error
        self._name = re.sub(r"[^\w.-]+", "_", model.resolve().name)
        self._files = {file.name: identity(file) for file in sorted(files)}

    def open(
        self,
        checkpoint: Checkpoint,
        facts: Mapping[str, Any],
        rank: int,
        world_size: int,
        sizes: Sequence[int],
    ) -> "PackedFile":
        """Opens a rank's file, or begins one.

        Args:
            checkpoint: The model.
            facts: What packed weights depend on besides the model, its files and the engine's code.
                JSON must represent it.
            rank, world_size: The rank.
            sizes: The bytes of each section of the rank's weights.
        """
        known: dict[str, Any] = {"files": self._files, "code": _code(), "facts": facts}
        known |= {"config": repr(checkpoint.config), "dtype": checkpoint.dtype}
        known["formats"] = {kind: each.name for kind, each in checkpoint.formats.items()}
        known["rounded"] = checkpoint.weights
        known |= {"sections": [*sizes], "rank": rank, "world_size": world_size}
        text = json.dumps(known, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = self.folder / f"{self._name}-{digest}-{rank}of{world_size}"
        return PackedFile(path, text, sizes, self.notices)


class PackedFile:
    """A rank's packed weights in a file, in sections. close() must be called."""

    def __init__(self, path: Path, text: str, sizes: Sequence[int], notices: list[str]) -> None:
        """Opens the file, or begins one. Adds a notice if that fails; then the object is empty, and
        keeps nothing.

        Args:
            path: The path without its suffix.
            text: What the weights depend on.
            sizes: The bytes of each section.
            notices: Where sentences for the user are added.
        """
        head = _MAGIC + text.encode() + b"\n"
        self._head = head + bytes(-len(head) % _PAGE)
        self._sizes, self._notices = [*sizes], notices
        chunks = [-(-size // CHUNK) for size in sizes]
        # The first chunk of each section, and where the section begins in the file: at a page.
        self._first = [sum(chunks[:number]) for number in range(len(chunks) + 1)]
        self._starts, end = list[int](), len(self._head) + _ENTRY * self._first[-1]
        for size in sizes:
            self._starts.append(end + -end % _PAGE)
            end = self._starts[-1] + size
        self._nbytes = end
        self._complete = path.with_name(f"{path.name}.packed")
        self._partial = path.with_name(f"{path.name}.partial")
        self._fd, self._is_locked, self._is_damaged = -1, False, False
        self._has_written = False
        self._map: mmap.mmap | None = None
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, "kccl packed")
        try:
            self._may_write = self._open() or self._begin()
            if self._fd >= 0:
                self._map = mmap.mmap(self._fd, self._nbytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            # A ValueError: somebody has cut the file short meanwhile.
            self._give_up(error)

    def verified(self) -> Iterator[tuple[int, memoryview]]:
        """Yields the number and the bytes of each section whose chunks agree with their entries. A
        section's bytes leave this process's memory when the next one is asked for.
        """
        if self._map is None:
            return
        entries = np.frombuffer(self._map, "<u4", 2 * self._first[-1], len(self._head))
        entries = entries.reshape(-1, 2).copy()
        is_there = entries[:, 0] == entries[:, 1] ^ _WRITTEN
        mapped = memoryview(self._map)
        checks: dict[int, list[Future[bool]]] = {}

        def begin(section: int) -> None:
            """Begins to check a section, which also reads it from the disk."""
            first, end = self._first[section : section + 2]
            if is_there[first:end].all():
                checks[section] = [
                    self._pool.submit(self._agrees, mapped, section, chunk, int(entries[chunk, 0]))
                    for chunk in range(first, end)
                ]

        for section, size in enumerate(self._sizes):
            for each in (section, section + 1):
                if each < len(self._sizes) and each not in checks:
                    begin(each)
            if section not in checks:
                continue
            start = self._starts[section]
            if all(check.result() for check in checks[section]):
                yield section, mapped[start : start + size]
            else:
                self._is_damaged = True
            checks[section] = []
            if size:
                self._map.madvise(mmap.MADV_DONTNEED, start, size)
        if self._is_damaged:
            self._notices.append(f"{self._complete.stem} is damaged: a part of it is packed again")

    def store(self, section: int, chunks: Iterable[NDArray[np.uint8]]) -> None:
        """Writes a section. Adds a notice if that fails, and keeps nothing from then on.

        Args:
            section: Its number.
            chunks: Its bytes, CHUNK at a time.
        """
        if not self._may_write or not self._lock():
            return
        waiting: deque[Future[OSError | None]] = deque()
        try:
            for number, chunk in enumerate(chunks, self._first[section]):
                while len(waiting) >= _MOST_WAITING:
                    self._await(waiting.popleft())
                if not self._may_write:
                    break
                waiting.append(self._pool.submit(self._write, section, number, chunk))
        finally:
            while waiting:
                self._await(waiting.popleft())
        self._has_written = True

    def finish(self) -> None:
        """Gives the file the suffix of complete ones. All sections must be there or stored."""
        if not self._may_write or not self._has_written:
            return
        try:
            if self._is_at(self._partial):
                os.rename(self._partial, self._complete)
            is_kept = self._is_at(self._complete)
        except OSError as error:
            self._give_up(error)
            return
        if not is_kept:
            self._notices.append("packed weights are not kept: another start has begun a new file")
            return
        mb = self._nbytes / 1e6
        size = f"{mb:.0f} MB" if mb < 1000 else f"{mb / 1000:.1f} GB"
        self._notices.append(f"packed weights are kept: {size} in {self._complete}")

    def close(self) -> None:
        """Closes the file. What was stored stays, also if not all was."""
        self._pool.shutdown()
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---- opening ---------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Opens a file that is there. Returns whether it may be written. If there is none, returns
        False and leaves _fd -1.
        """
        for path in (self._complete, self._partial):
            may_write = True
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                self._fd, may_write = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
            is_whole = os.fstat(self._fd).st_size == self._nbytes
            if is_whole and os.pread(self._fd, len(self._head), 0) == self._head:
                return may_write
            os.close(self._fd)
            self._fd = -1
            self._notices.append(f"{path} is damaged: it is packed again")
            os.unlink(path)
        return False

    def _begin(self) -> bool:
        """Begins a file if there is none and the disk has room. Returns whether it did."""
        if self._fd >= 0:
            return False
        disk = os.statvfs(self._partial.parent)
        free = disk.f_bavail * disk.f_frsize
        if free < self._nbytes:
            self._notices.append(
                f"packed weights are not kept: they have {self._nbytes / 1e9:.1f} GB, and "
                f"{self._partial.parent} has room for {free / 1e9:.1f}"
            )
            return False
        # It gets its name when the head is there. So no other process finds a file without head.
        # Until then its name is random: process ids are equal in containers that share the folder.
        new = self._partial.with_name(f"{self._partial.name}.{secrets.token_hex(8)}")
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(self._fd, self._head, 0)
            os.ftruncate(self._fd, self._nbytes)
            os.rename(new, self._partial)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        return True

    def _lock(self) -> bool:
        """Tells whether this process may write the file, which one process may at a time."""
        if not self._is_locked:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_locked = True
            except BlockingIOError:
                self._notices.append("packed weights are not kept: another process is writing them")
                self._may_write = False
            except OSError as error:
                self._give_up(error)
        return self._is_locked

    # ---- chunks ----------------------------------------------------------------------------------

    def _agrees(self, mapped: memoryview, section: int, chunk: int, crc: int) -> bool:
        at = CHUNK * (chunk - self._first[section])
        size = min(CHUNK, self._sizes[section] - at)
        start = self._starts[section] + at
        return zlib.crc32(mapped[start : start + size]) == crc

    def _write(self, section: int, chunk: int, data: NDArray[np.uint8]) -> OSError | None:
        """Writes a chunk. Returns what failed, without the stack, which would hold the data."""
        entry = len(self._head) + _ENTRY * chunk
        at = self._starts[section] + CHUNK * (chunk - self._first[section])
        try:
            _write_all(self._fd, bytes(_ENTRY), entry)
            _write_all(self._fd, data, at)
            crc = zlib.crc32(data.data)
            _write_all(self._fd, np.array([crc, crc ^ _WRITTEN], "<u4").tobytes(), entry)
        except OSError as error:
            return error.with_traceback(None)
        return None

    def _await(self, writing: Future[OSError | None]) -> None:
        if (error := writing.result()) is not None and self._may_write:
            self._give_up(error)

    def _is_at(self, path: Path) -> bool:
        """Tells whether a path names this file, which another process may have replaced."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _give_up(self, error: OSError | ValueError) -> None:
        self._may_write = False
        said = error.strerror if isinstance(error, OSError) else error
        self._notices.append(f"packed weights are not kept in {self._complete.parent}: {said}")


def _write_all(fd: int, data: Any, at: int) -> None:
    rest = memoryview(data).cast("B")
    while len(rest):
        written = os.pwrite(fd, rest, at)
        rest, at = rest[written:], at + written


def identity(file: Path) -> list[Any]:
    """Returns what tells a file from others: its size, its last change, and a hash of samples."""
    samples = hashlib.sha256()
    try:
        with open(file, "rb") as opened:
            found = os.fstat(opened.fileno())
            for number in range(_SAMPLES):
                at = (found.st_size - _SAMPLE) * number // (_SAMPLES - 1)
                samples.update(os.pread(opened.fileno(), _SAMPLE, max(0, at)))
    except OSError as error:
        raise kccl.Error(f"cannot read {file}: {error.strerror}") from error
    return [found.st_size, found.st_mtime_ns, samples.hexdigest()]


@cache
def _code() -> str:
    """Returns a hash of the code on which packed weights depend."""
    found = hashlib.sha256()
    for name, file in sources():
        found.update(f"{name}\n".encode() + file.read_bytes())
    return found.hexdigest()


def sources() -> Iterator[tuple[str, Path]]:
    """Yields the files of that code: the engine's, and the headers that its kernels include. Each
    comes behind its name, which is the same wherever KCCL is installed.
    """
    engine, headers = Path(__file__).parents[1], Path(kccl.include_dir())
    yield "abi.inc", engine / "abi.inc"
    for root, folder in [*((engine, engine / room) for room in _CODE), (headers, headers)]:
        for file in sorted(folder.rglob("*")):
            if file.suffix in _SUFFIXES:
                yield str(file.relative_to(root)), file
