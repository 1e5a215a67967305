"""all_reduce_two_shot_cma_simple reads the peers' memory: where that is allowed, and where not."""

import ctypes
import json
import mmap
import os
import signal
import time

import numpy as np
import pytest
from ranks import Job

import kccl
from kccl.backends.host import HostBackend

CMA = "all_reduce_two_shot_cma_simple"
PULL = "all_reduce_two_shot_pull_simple"
LONG = 1 << 20  # float32 elements: 4 MiB


def sum_of_ranks(comm):
    x = np.full(LONG, comm.rank + 1, np.float32)
    plan = comm.plan("all_reduce", x.nbytes, x.dtype)
    comm.all_reduce(x)
    return plan.name, x.min(), x.max()


def test_one_rank_without_permission_keeps_all_from_it(monkeypatch):
    """All ranks must run the same algorithm."""
    real = HostBackend._try_to_attach

    def refused_on_rank_1(self, mesh, timeout):
        if mesh.rank == 1:
            # The rank takes part in the exchange, and answers that it may not read.
            mesh.allgather(b'{"pid": 1, "address": 0, "token": 1}', "start-up", timeout)
            mesh.allgather(b"0", "start-up", timeout)
            return False
        return real(self, mesh, timeout)

    monkeypatch.setattr(HostBackend, "_try_to_attach", refused_on_rank_1)
    results = kccl.run_threads(sum_of_ranks, 3)
    assert {name for name, *_ in results} <= {PULL, "all_reduce_one_shot_pull_simple"}
    assert {(low, high) for _, low, high in results} == {(6.0, 6.0)}


def secret_memory(num_bytes):
    """Memory of this process that not even the kernel reads for another one (memfd_secret)."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(447, 0)
    if fd < 0:
        pytest.skip(f"memfd_secret: {os.strerror(ctypes.get_errno())}")
    os.ftruncate(fd, num_bytes)
    try:
        return mmap.mmap(fd, num_bytes)
    except OSError as error:
        pytest.skip(f"memfd_secret memory cannot be mapped: {error}")
    finally:
        os.close(fd)


@pytest.mark.parametrize("what", ["x", "out"])
def test_memory_that_nobody_may_read_goes_through_the_staging(what):
    """The kernel finds that a read fails, and all ranks go through the staging instead."""
    count = 16384
    memory = secret_memory(4 * count)

    def main(comm):
        x = np.full(count, comm.rank + 1, np.float32)
        out = np.zeros(count, np.float32)
        if comm.rank == 1:
            special = np.frombuffer(memory, np.float32)
            special[:] = x
            x, out = (special, out) if what == "x" else (x, special)
        for _ in range(3):
            out[:] = 0
            comm.all_reduce(x, out=out, algorithm=CMA)
        return out.min(), out.max()

    assert kccl.run_threads(main, 3) == [(6.0, 6.0)] * 3


def test_a_late_rank_does_not_use_the_data_of_a_rank_that_gave_up():
    """After a time-out the peer may overwrite its array, so what is read of it is not valid."""

    def main(comm):
        x = np.full(LONG, comm.rank + 1, np.float32)
        comm.all_reduce(x, algorithm=CMA)
        x[:] = comm.rank + 1
        comm.timeout = 0.2 if comm.rank == 0 else 20
        if comm.rank == 1:
            time.sleep(0.6)
        try:
            comm.all_reduce(x, algorithm=CMA)
        except kccl.Timeout as error:
            x[:] = -1000
            if comm.rank == 1:
                return str(error)
            time.sleep(0.8)
            return error.peer
        return x.tolist()

    rank_0, rank_1 = kccl.run_threads(main, 2)
    assert rank_0 == 1
    assert "rank 1 heard it from rank 0" in rank_1


def test_rank_killed_during_long_messages():
    program = """
comm = kccl.init()
x = np.ones(1 << 22, np.float32)
assert comm.all_reduce.prepare(x, op="max").plan.name.startswith("all_reduce_two_shot")
if comm.rank == 1:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
began = time.monotonic()
try:
    while True:
        comm.all_reduce(x, op="max", algorithm="all_reduce_two_shot_cma_simple")
except kccl.PeerLost as error:
    small = comm.shrink()
    small.all_reduce(x)
    say(peer=error.peer, after=time.monotonic() - began, sum=float(x.max()))
"""
    with Job(3, program) as job:
        output, errors = job.process.communicate(timeout=30)
    assert job.process.returncode == 128 + signal.SIGKILL, errors
    facts = [json.loads(line) for line in output.splitlines()]
    assert [fact["sum"] for fact in facts] == [2.0, 2.0], output + errors
    assert all(fact["after"] < 4 for fact in facts)


def test_a_process_that_forbids_reading_after_start_up():
    """Its peers go through the staging, say once why, and no rank raises."""
    program = """
import ctypes, warnings

libc = ctypes.CDLL(None, use_errno=True)
# Root reads every process unless it gives up CAP_SYS_PTRACE.
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for i in range(3):
    sets[i] &= ~(1 << 19)
assert libc.capset(header, sets) == 0
comm = kccl.init()
warnings.simplefilter("always")
x = np.full(1 << 20, comm.rank + 1, np.float32)
algorithm = "all_reduce_two_shot_cma_simple"
if algorithm not in comm.algorithms("all_reduce") or not comm.context.backend.can_attach:
    say(skip=True)
    raise SystemExit
found = []
with warnings.catch_warnings(record=True) as caught:
    comm.all_reduce(x, algorithm=algorithm)
    assert not caught
    if comm.rank == 1:
        assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
    comm.barrier()
    for _ in range(3):
        x[:] = comm.rank + 1
        comm.all_reduce(x, algorithm=algorithm)
        found.append(float(x.min()))
say(rank=comm.rank, sums=found, told=[str(each.message) for each in caught])
"""
    with Job(2, program) as job:
        output, errors = job.process.communicate(timeout=60)
    facts = [json.loads(line) for line in output.splitlines()]
    if any("skip" in fact for fact in facts):
        pytest.skip("processes may not read each other's memory here")
    facts.sort(key=lambda fact: fact["rank"])
    assert [fact["sums"] for fact in facts] == [[3.0] * 3] * 2, output + errors
    (told,), silent = facts[0]["told"], facts[1]["told"]
    assert told.startswith("rank 0 may no longer read the memory of rank 1 (process ")
    assert "Operation not permitted; possible reasons: " in told
    assert "prctl(PR_SET_DUMPABLE, 0)" in told and silent == []


def test_memory_with_a_hole():
    """A read fails with EFAULT although the process lives, and is told as what it is."""
    memory = mmap.mmap(-1, 4 * LONG)
    view = np.frombuffer(memory, np.float32)
    libc = ctypes.CDLL(None, use_errno=True)

    def main(comm):
        x = view if comm.rank == 1 else np.ones(LONG, np.float32)
        comm.all_reduce(x, algorithm=CMA)
        if comm.rank == 1:
            # In the half that rank 0 reduces.
            hole = ctypes.c_void_p(x.ctypes.data + 16 * mmap.PAGESIZE)
            assert libc.munmap(hole, ctypes.c_size_t(mmap.PAGESIZE)) == 0
        comm.barrier()
        with pytest.raises(kccl.BackendError) as raised:
            comm.all_reduce(x, algorithm=CMA)
        return str(raised.value)

    for text in kccl.run_threads(main, 2):
        assert text.startswith(f"{CMA} on channel 0: rank 0 could not read the memory of peer 1: ")
        assert "Bad address (errno 14); all ranks may go on after comm.reset()" in text


@pytest.mark.filterwarnings("error")
def test_a_failed_call_keeps_its_status_where_a_warning_is_due():
    """The warning, an error here, comes with the next call that succeeds."""

    def main(comm):
        x = np.ones(LONG, np.float32)
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.context.backend.context.refused = 1
            comm.context.backend.context.refused_peer = 1
            comm.timeout = 0.2
            with pytest.raises(kccl.Timeout):
                comm.all_reduce(x)
        comm.timeout = 20
        comm.reset()
        if comm.rank == 0:
            with pytest.raises(RuntimeWarning, match="may no longer read the memory of rank 1"):
                comm.all_reduce(x)
        else:
            comm.all_reduce(x)

    kccl.run_threads(main, 2)
