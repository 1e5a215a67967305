"""Memory: what a model needs is compared with what there is, and close() gives it back."""

import dataclasses
import gc
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_models import LLAMA, write_folder, write_gguf

import kccl
from kccl.base import mapping
from kccl.engine import Engine
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.bounds import kv_bytes
from kccl.topology import Room, cgroup_folders, memory_room
from kccl.topology import memory as rooms


@pytest.mark.parametrize("is_of_process", [True, False])
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(monkeypatch, is_of_process):
    room = Room("this box", 100_000, is_of_process, "buy memory")
    monkeypatch.setattr(kccl.topology, "memory_room", lambda: [room])
    # Windows of earlier tests, and the communicator's own, do not count here.
    monkeypatch.setattr(mapping, "untouched_bytes", lambda: 0)
    # The communicator's own memory has room.
    monkeypatch.setattr("kccl.base.memory.check_room", lambda nbytes, count: None)
    read = []
    checkpoint = random_checkpoint("tiny-llama")
    for ranks in (1, 2):
        with pytest.raises(
            kccl.Error, match=r"the model needs .* of memory, .* of it for the cont"
        ):
            Engine(checkpoint, ranks=ranks, blocks=1, progress=lambda *told: read.append(told))
    assert read == []
    with pytest.raises(kccl.Error, match="this box has 0 MiB left: buy memory, or use a smaller"):
        Engine(checkpoint, blocks=1)
    # What fits is read: the same model with less context.
    room = dataclasses.replace(room, nbytes=500_000)
    Engine(checkpoint, blocks=1, context=8).close()


def test_windows_that_nobody_has_written_yet_count(monkeypatch):
    """Both would be written, and the machine would end the process."""
    checkpoint = random_checkpoint("tiny-llama")

    def main(comm):
        gc.collect()
        window = comm.window(64 << 20)
        left = mapping.untouched_bytes() + (32 << 20)
        room = Room("this box", left, False, "buy memory")
        monkeypatch.setattr(kccl.topology, "memory_room", lambda: [room])
        Engine(checkpoint, blocks=1, context=8).close()
        room = dataclasses.replace(room, nbytes=left - (32 << 20))
        monkeypatch.setattr("kccl.base.memory.check_room", lambda nbytes, count: None)
        with pytest.raises(kccl.Error, match=r"has \d+ MiB left, \d+ MiB of it promised to win"):
            Engine(checkpoint, blocks=1, context=8)
        window.local[:] = bytes(window.nbytes)
        Engine(checkpoint, blocks=1, context=8).close()

    kccl.run_threads(main, 1)


def test_a_file_that_is_mapped_counts_in_address_space(monkeypatch, tmp_path):
    write_folder(tmp_path, LLAMA)
    size = (tmp_path / "model.safetensors").stat().st_size
    room = Room("this limit", 1 << 40, True, "raise it", counts_mapped=True)
    monkeypatch.setattr(kccl.topology, "memory_room", lambda: [room])
    # The communicator's own memory has room.
    monkeypatch.setattr("kccl.base.memory.check_room", lambda nbytes, count: None)
    with Engine(tmp_path, blocks=1, context=8) as engine:
        needed = engine.nbytes + kv_bytes(engine.config, 7, 4)
    room = dataclasses.replace(room, nbytes=needed + size // 2)
    with pytest.raises(kccl.Error, match="for its largest file while that is read, and this limi"):
        Engine(tmp_path, blocks=1, context=8)
    room = dataclasses.replace(room, counts_mapped=False)
    Engine(tmp_path, blocks=1, context=8).close()


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_that_cannot_be_mapped_is_named(tmp_path, kind):
    write_folder(tmp_path, LLAMA)
    write_gguf(tmp_path / "model.gguf")
    file = tmp_path / f"model.{kind}"
    os.truncate(file, 64 << 30)
    program = """
    import resource, sys
    import kccl
    from kccl.engine.files.checkpoint import open_checkpoint
    import safetensors.numpy, gguf
    resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
    try:
        open_checkpoint(sys.argv[1])
    except kccl.Error as error:
        print(error)
    """
    model = tmp_path if kind == "safetensors" else file
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(model)],
        **{"capture_output": True, "text": True, "timeout": 60},
    )
    assert done.stdout.startswith(f"cannot map {file}: there is no room for its 65536 MiB")
    assert "raise `ulimit -v`" in done.stdout and done.returncode == 0, done.stderr


@pytest.mark.long
def test_all_ranks_of_a_job_refuse_it_together(tmp_path):
    """Though the limit holds for one of them."""
    program = """
    import os, sys
    import kccl
    from kccl.engine import Engine
    from kccl.engine.files.random_weights import random_checkpoint
    from kccl.base import memory

    memory.check_room = lambda nbytes, count: None
    if os.environ["KCCL_RANK"] == "1":
        kccl.topology.memory_room = lambda: [kccl.topology.Room("rank 1", 1, True, "cure")]
    try:
        Engine(random_checkpoint("tiny-llama"), blocks=1)
    except kccl.Error as error:
        # print() writes the end of the line apart, where Python does not buffer.
        sys.stdout.write(f"{'rank 1 has 0 MiB left' in str(error)}\\n")
    """
    job = [sys.executable, "-m", "kccl", "run", "-n", "2", "--", sys.executable, "-c"]
    done = subprocess.run(
        [*job, textwrap.dedent(program)],
        **{"capture_output": True, "text": True, "timeout": 60},
    )
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


def test_the_room_is_what_linux_tells():
    found = memory_room()
    assert found[0].limit == "this machine"
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < found[0].nbytes < total
    assert len(set(cgroup_folders("memory"))) == len(cgroup_folders("memory"))


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_that_is_nearly_full_has_little_room(monkeypatch, tmp_path, version):
    names = ("memory.max", "memory.current", "inactive_file", "active_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "x")
    (tmp_path / names[0]).write_text("1000000\n")
    (tmp_path / names[1]).write_text("900000\n")
    # These bytes are page cache, which the kernel drops.
    (tmp_path / "memory.stat").write_text(f"anon 5\n{names[2]} 30000\n{names[3]} 4000\n")
    monkeypatch.setattr(rooms, "folders", lambda controller: [tmp_path, tmp_path / "gone"])
    (room,) = rooms._of_cgroups()
    assert room.nbytes == 100_000 + (34_000 if version == 2 else 30_000)
    assert not room.is_of_process and tmp_path.name in room.limit
    (tmp_path / names[0]).write_text("max\n")
    assert list(rooms._of_cgroups()) == []


def test_a_process_that_may_open_no_file_knows_no_limit(monkeypatch):
    def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert memory_room() == [] and cgroup_folders("memory") == []


def test_a_limit_of_address_space_has_room_for_what_is_not_used(monkeypatch):
    real = resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (1 << 40, 1 << 40) if which == 9 else real(which)
    )
    (room,) = (each for each in rooms._of_process() if "RLIMIT_AS" in each.limit)
    assert 0 < room.nbytes < 1 << 40 and room.is_of_process and "ulimit -v" in room.cure


def test_closing_gives_the_weights_back():
    """At once, though the engine is still there and no garbage is collected."""
    program = """
    import gc
    from kccl.engine import Engine
    from kccl.engine.files.random_weights import random_checkpoint

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    gc.disable()
    checkpoint = random_checkpoint("smollm2", context=64)
    before = resident()
    engine = Engine(checkpoint, ranks=2, blocks=1)
    during = resident()
    engine.close()
    print(engine.nbytes, during - before, resident() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        **{"capture_output": True, "text": True, "check": True, "timeout": 100},
    )
    weights, during, after = map(int, done.stdout.split())
    assert during > 0.9 * weights
    assert after < 0.4 * weights
