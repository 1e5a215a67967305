"""Requests that a program tests again and again, on the host: every such loop ends."""

import threading
import time

import numpy as np
import preloaded
import pytest

import kccl

SECONDS = 50


def poll(request):
    began = time.monotonic()
    while not request.test():
        assert time.monotonic() - began < SECONDS, "a loop on test() does not end"
        time.sleep(0)


@pytest.mark.parametrize("world_size", [2, 9])
@pytest.mark.parametrize("receives", [True, False])
def test_a_peer_that_has_closed(world_size, receives):
    last = world_size - 1

    def main(comm):
        try:
            comm.barrier()
        except kccl.PeerLost:
            # This rank was still in the barrier when it heard what rank 0 has found.
            assert comm.rank not in (0, last)
        if comm.rank != 0:
            return
        x = np.zeros(100_000)
        request = comm.irecv(x, last) if receives else comm.isend(x, last)
        with pytest.raises(kccl.PeerLost, match=rf"peer {last} has closed"):
            poll(request)

    kccl.run_threads(main, world_size, timeout=60)


@pytest.mark.parametrize("world_size", [2, 9])
def test_a_peer_that_has_given_up(world_size):
    last = world_size - 1

    def main(comm):
        comm.barrier()
        if comm.rank == last:
            comm.timeout = 0.05
            with pytest.raises(kccl.Timeout):
                comm.recv(np.zeros(1), 1 % last, tag=5)
        if comm.rank == 0:
            with pytest.raises(kccl.Error, match=rf"heard it from rank {last}|rank {last}"):
                poll(comm.irecv(np.zeros(1), last))
        over.wait()

    over = threading.Barrier(world_size)
    kccl.run_threads(main, world_size, timeout=60)


LOST = """
comm = kccl.init()
last = comm.world_size - 1
try:
    comm.barrier()
except kccl.PeerLost:
    # The last rank may be gone before a rank between leaves the barrier.
    if comm.rank in (0, last):
        raise
    os._exit(0)
if comm.rank == last:
    os.kill(os.getpid(), 9)
if comm.rank == 0:
    request = comm.irecv(np.zeros(1), last)
    try:
        while not request.test():
            pass
    except kccl.PeerLost as error:
        say(rank=comm.rank, message=str(error))
os._exit(0)
"""


@pytest.mark.parametrize("world_size", [2, 9])
def test_a_peer_that_is_killed(world_size):
    code, said, err = preloaded.run(world_size, LOST)
    assert code == -9, err
    assert f"peer {world_size - 1}" in said[0]["message"], err


def test_a_message_that_was_sent_before_the_end_comes():
    def main(comm):
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.full(4, 7.0), 0)
            return
        time.sleep(0.1)
        x = np.zeros(4)
        poll(comm.irecv(x, 1))
        assert (x == 7).all()

    kccl.run_threads(main, 2, timeout=60)


@pytest.mark.long
def test_the_shorter_limit_holds_after_a_message():
    """A program may have messages only, and no collective."""
    program = """
comm = kccl.init()
x = np.zeros(1)
if comm.rank == 0:
    comm.recv(x, 1)
    began = time.monotonic()
    try:
        comm.recv(x, 1)
    except kccl.Timeout as error:
        say(rank=0, seconds=time.monotonic() - began)
else:
    comm.send(x, 0)
    time.sleep(SECONDS)
os._exit(0)
""".replace("SECONDS", "3")
    code, said, err = preloaded.run(2, program, KCCL_TIMEOUT="0.3", KCCL_FIRST_TIMEOUT="40")
    assert code == 0, err
    assert said[0]["seconds"] < 20, err


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_isend_and_irecv_have_no_place_in_a_group(backend):
    def main(comm):
        peer = 1 - comm.rank
        x, y = np.full(4, comm.rank, np.float32), np.zeros(4, np.float32)
        with comm.group():
            with pytest.raises(kccl.InvalidArgument, match=r"isend\(\) is called .*call send\(\)"):
                comm.isend(x, peer)
            with pytest.raises(kccl.InvalidArgument, match=r"irecv\(\) is called .*call recv\(\)"):
                comm.irecv(y, peer)
            comm.send(x, peer)
            comm.recv(y, peer)
        assert (y == peer).all()

    seeds = {"seeds": 1} if backend == "sim" else {}
    kccl.run_threads(main, 2, backend=backend, **seeds)


def test_what_could_not_be_launched_is_begun_still(monkeypatch):
    from kccl.collectives.gpu_messages import GpuMessages

    run = GpuMessages._run

    def main(comm):
        peer = 1 - comm.rank
        x, y = np.full(4, comm.rank, np.float32), np.zeros(4, np.float32)
        requests = [comm.isend(x, peer), comm.irecv(y, peer)]
        failing[comm.rank] = True
        with pytest.raises(kccl.BackendError, match="no launch"):
            requests[0].wait()
        failing[comm.rank] = False
        for request in requests:
            request.wait()
        comm.barrier()
        assert (y == peer).all()

    def refuse(self, *args):
        if failing[self.context.rank]:
            raise kccl.BackendError("no launch")
        run(self, *args)

    failing = [False, False]
    monkeypatch.setattr(GpuMessages, "_run", refuse)
    kccl.run_threads(main, 2, backend="sim", seeds=1)
