"""Packed weights that a folder keeps: what the next start reads, and what it does not trust."""

import errno
import fcntl
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from long import long_after
from tiny_models import LLAMA, random_tensors, shapes_of, write_folder

import kccl
from kccl.engine import Engine
from kccl.engine.executors import kept_panels, packing
from kccl.engine.executors.kept_panels import KeptPanels
from kccl.engine.files import packed_cache
from kccl.engine.files.packed_cache import PackedFile
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.monokernel import keeping, weights
from kccl.engine.monokernel.source import KERNELS
from kccl.jit.headers import Headers

MODEL = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 64}
IDS = [5, 1, 9]


@pytest.fixture
def model(tmp_path):
    write_folder(tmp_path / "model", MODEL)
    return tmp_path / "model"


def answer(model, cache=None, backend="host", **given):
    """The tokens, and what the user is told."""
    more = {"context": 32, "tokenizer": False, "packed_cache": cache}
    more |= {"blocks": 1} if backend == "host" else {}
    with Engine(model, backend, **more | given) as engine:
        pieces = engine.stream(IDS, max_tokens=2, temperature=0)
        return [piece.id for piece in pieces], engine.notices


@pytest.fixture
def packs(monkeypatch):
    """Counts the matrices that each start packs."""
    counted, made, pack = [], weights.matrices, packing._pack

    def matrices(checkpoint, program, some, **given):
        counted.append(len(some))
        return made(checkpoint, program, some, **given)

    def pack_on_host(*args, **given):
        counted[-1] += 1
        pack(*args, **given)

    def load(self, _load=KeptPanels.load):
        counted.append(0)
        return _load(self)

    monkeypatch.setattr(weights, "matrices", matrices)
    monkeypatch.setattr(packing, "_pack", pack_on_host)
    monkeypatch.setattr(KeptPanels, "load", load)
    return counted


def only(folder, suffix="packed"):
    (found,) = folder.iterdir()
    assert found.suffix == f".{suffix}"
    return found


# The next test starts again in the simulator, too.
@pytest.mark.parametrize("backend", long_after(1, ["host", "sim"]))
def test_the_second_start_packs_nothing_and_a_damaged_part_is_packed_again(
    model, tmp_path, packs, monkeypatch, backend
):
    for user in (packed_cache, keeping, kept_panels):
        monkeypatch.setattr(user, "CHUNK", 4096)
    cache, on = tmp_path / "cache", {"backend": backend}
    expected, notices = answer(model, **on)
    assert notices == ()
    first, (notice,) = answer(model, cache, **on)
    kept = only(cache)
    assert first == expected and str(kept) in notice
    whole = kept.read_bytes()
    assert answer(model, cache, **on) == (expected, ())
    matrices = packs[0]
    assert packs == [matrices, matrices, 0]
    # The first bytes are those of the first layer, the last ones the head's.
    for byte in (len(whole) - 5, len(whole) * 2 // 3)[: 1 if backend == "sim" else 2]:
        damaged = bytearray(whole)
        damaged[byte] ^= 1
        kept.write_bytes(damaged)
        tokens, told = answer(model, cache, **on)
        assert tokens == expected and "damaged" in told[0]
        assert 0 < packs[-1] < matrices and kept.read_bytes() == whole
    kept.write_bytes(whole[:-1])
    tokens, told = answer(model, cache, **on)
    assert tokens == expected and "damaged" in told[0] and only(cache).read_bytes() == whole


@pytest.mark.parametrize("backend", ["sim", "host"])
def test_an_interrupted_start_is_continued(model, tmp_path, packs, backend):
    cache, on = tmp_path / "cache", {"backend": backend}
    expected, _ = answer(model, cache, **on)
    whole = only(cache).read_bytes()
    only(cache).unlink()

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(model, cache, progress=interrupt, **on)
    only(cache, "partial")
    tokens, (notice,) = answer(model, cache, **on)
    assert tokens == expected and "are kept" in notice
    assert 0 < packs[2] < packs[0] and only(cache).read_bytes() == whole


def test_other_weights_ranks_and_formats_have_files_of_their_own(model, tmp_path, packs):
    cache = tmp_path / "cache"
    expected, _ = answer(model, cache)
    file = model / "model.safetensors"
    before = os.stat(file)
    write_folder(model, MODEL, random_tensors(shapes_of(MODEL), seed=1))
    # Only the numbers tell it from the old one.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(file).st_size == before.st_size
    other, notices = answer(model, cache)
    assert other != expected and len(notices) == 1 and packs[1] == packs[0]
    assert answer(model, cache, weights="fp8")[1] and packs[2] == packs[0]
    assert len([*cache.iterdir()]) == 3


def test_a_files_name_depends_on_each_file_that_packing_kernels_include(monkeypatch):
    known = {file.resolve() for _, file in packed_cache.sources()}
    included = Headers().of('#include "pack.cuh"', [KERNELS, Path(kccl.include_dir())])
    paths = {Path(path).resolve() for path, _ in included}
    assert {"abi.inc", "pack.cuh", "mem.cuh"} <= {path.name for path in paths} and paths <= known
    code_of, read = packed_cache._code.__wrapped__, Path.read_bytes
    before = code_of()
    for name in ("abi.inc", "mem.cuh"):
        monkeypatch.setattr(
            Path, "read_bytes", lambda file, name=name: read(file) + b" " * (file.name == name)
        )
        assert code_of() != before
    monkeypatch.undo()
    assert code_of() == before


def test_two_starts_of_one_process_begin_the_same_file(tmp_path, monkeypatch):
    """The second one begins while the first one does, and the first one's file replaces it."""
    rename, second, notices = os.rename, [], ([], [], [])
    name, sizes, data = tmp_path / "name", [100], np.arange(100, dtype=np.uint8)

    def meanwhile(*paths):
        monkeypatch.setattr(os, "rename", rename)
        second.append(PackedFile(name, "text", sizes, notices[1]))
        rename(*paths)

    monkeypatch.setattr(os, "rename", meanwhile)
    files = [PackedFile(name, "text", sizes, notices[0]), *second]
    for file in reversed(files):
        file.store(0, [data])
        file.finish()
        file.close()
    assert notices[1] == ["packed weights are not kept: another start has begun a new file"]
    assert len(notices[0]) == 1 and str(only(tmp_path)) in notices[0][0]
    with closing(PackedFile(name, "text", sizes, notices[2])) as file:
        assert [bytes(part) for _, part in file.verified()] == [data.tobytes()]
    assert notices[2] == []


def test_a_file_that_is_cut_short_meanwhile_ends_what_is_kept(model, tmp_path, monkeypatch):
    cut = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: cut(fd, size - 1))
    tokens, (notice,) = answer(model, tmp_path / "cache")
    assert tokens == answer(model)[0] and "are not kept in" in notice


def test_a_full_disk_ends_what_is_kept_and_not_the_start(model, tmp_path, monkeypatch):
    cache, pwrite, left = tmp_path / "cache", os.pwrite, [6]

    def full(fd, data, at):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    expected, (notice,) = answer(model, cache)
    assert notice == f"packed weights are not kept in {cache}: No space left on device"
    monkeypatch.undo()
    only(cache, "partial")
    tokens, (notice,) = answer(model, cache)
    assert tokens == expected and "are kept" in notice and only(cache)


def test_a_folder_that_may_only_be_read(model, tmp_path, monkeypatch, packs):
    """Its files are used, and nothing is written."""
    full, empty, opened = tmp_path / "full", tmp_path / "empty", os.open
    expected, _ = answer(model, full)
    empty.mkdir()

    def read_only(path, flags, *mode):
        is_change = flags & os.O_CREAT or (flags & os.O_RDWR and Path(path).exists())
        if is_change and tmp_path in Path(path).parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    assert answer(model, full) == (expected, ()) and packs[1] == 0
    told = f"packed weights are not kept in {empty}: Read-only file system"
    assert answer(model, empty) == (expected, (told,)) and [*empty.iterdir()] == []


def test_caches_that_are_refused(model, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    # One that another process writes, and one on a disk without room.
    with Engine(model, context=32, blocks=1, tokenizer=False, packed_cache=cache):
        kept = only(cache)
    data = bytearray(kept.read_bytes())
    data[-5] ^= 1
    kept.write_bytes(data)
    with open(kept) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        _, notices = answer(model, cache)
    assert "another process" in notices[1] and kept.read_bytes() == data
    kept.unlink()
    fields = ("f_bavail", "f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**dict.fromkeys(fields, 1)))
    _, (notice,) = answer(model, cache)
    assert str(cache) in notice and "room" in notice and [*cache.iterdir()] == []
    with pytest.raises(kccl.Error, match="gone/cache cannot be made: No such file"):
        answer(model, tmp_path / "gone/cache")
    with pytest.raises(kccl.Error, match=r"config\.json cannot be made: File exists"):
        answer(model, model / "config.json")
    with pytest.raises(kccl.InvalidArgument, match=r"packed_cache is .*, must be None for random"):
        answer(random_checkpoint("tiny-llama"), cache)
