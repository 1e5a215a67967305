"""A prepared call keeps the memory of its arrays. KCCL_CHECK=1 finds an array that has moved."""

import numpy as np
import pytest

import kccl

COUNT = 512


def grouped(comm, x, peer):
    with comm.group(prepare=True) as op:
        comm.send(np.ones(COUNT, np.float32), peer)
        comm.recv(x, peer)
    return op


# What is prepared with an array, a peer and a window.
PREPARED = {
    "all_reduce": lambda comm, x, *_: comm.all_reduce.prepare(x),
    "all_reduce_rms_norm": lambda comm, x, *_: comm.all_reduce_rms_norm.prepare(
        x, None, np.ones_like(x), 0
    ),
    "out": lambda comm, x, *_: comm.all_reduce.prepare(np.ones_like(x), out=x),
    "all_gather": lambda comm, x, *_: comm.all_gather.prepare(x),
    "scatter": lambda comm, x, *_: comm.scatter.prepare(x, root=1),
    "put": lambda comm, x, peer, window: comm.put.prepare(x, peer, window, 0),
    "get": lambda comm, x, peer, window: comm.get.prepare(x, peer, window, 0),
    "send": lambda comm, x, peer, _: comm.send.prepare(x, peer),
    "recv": lambda comm, x, peer, _: comm.recv.prepare(x, peer),
    "group": lambda comm, x, peer, _: grouped(comm, x, peer),
}


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_an_array_that_has_moved_is_found(backend, monkeypatch):
    monkeypatch.setenv("KCCL_CHECK", "1")

    def main(comm):
        window, peer = comm.window(1 << 16), 1 - comm.rank
        for name, prepare in PREPARED.items():
            x = np.ones(COUNT, np.float32)
            op = prepare(comm, x, peer, window)
            if name not in ("send", "recv"):
                op()
            x.resize(1 << 22, refcheck=False)
            what = "out" if name == "out" else "x"
            call = "all_reduce" if name == "out" else name
            call = "group.prepare=True." if name == "group" else rf"{call}\.prepare"
            words = f"rank {comm.rank}: {call}: {what} had 2048 bytes at .*Prepare the call again"
            with pytest.raises(kccl.InvalidArgument, match=words):
                op()
            if name != "group":
                with pytest.raises(kccl.InvalidArgument, match=words):
                    op.time(3)
        comm.barrier.prepare()()

    kccl.run_threads(main, 2, backend=backend, **({"seed": 0} if backend == "sim" else {}))


def test_memory_that_is_exported_cannot_move():
    def main(comm):
        for x in (bytearray(64), np.ones(16, np.float32)):
            op = comm.broadcast.prepare(x)
            with pytest.raises((BufferError, ValueError)):
                x.resize(1 << 20) if isinstance(x, np.ndarray) else x.extend(bytes(1 << 20))
            op()

    kccl.run_threads(main, 2)
