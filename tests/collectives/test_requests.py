"""Requests and groups: what they keep, what drops them, and which thread they belong to."""

import gc
import threading
import weakref

import numpy as np
import preloaded
import pytest

import kccl

LONG = 20_000  # float64: such a message goes by address


def test_long_sends_without_a_ticket_do_not_stop_those_behind_them():
    def main(comm):
        if comm.rank == 0:
            requests = [comm.isend(np.full(LONG, float(i)), 1, tag=1) for i in range(40)]
            comm.send(np.zeros(1), 1, tag=2)
            for request in requests:
                request.wait()
            return
        comm.recv(np.zeros(1), 0, tag=2)
        x = np.zeros(LONG)
        for i in range(40):
            comm.recv(x, 0, tag=1)
            assert (x == i).all(), i

    kccl.run_threads(main, 2)


def test_reset_drops_requests():
    def main(comm):
        peer = 1 - comm.rank
        done = comm.isend(np.zeros(1), peer, tag=5)
        requests = [comm.isend(np.ones(LONG), peer), comm.irecv(np.zeros(1), peer, tag=9)]
        comm.reset()
        for request, what in zip(requests, ("send of 160000", "receive of 8"), strict=True):
            for ask in (request.test, request.wait):
                with pytest.raises(kccl.Error, match=rf"reset\(\) has dropped this {what} bytes"):
                    ask()
        assert done.test() and not any(request.is_done for request in requests)
        x = np.array([comm.rank])
        with comm.group():
            comm.send(x, peer)
            comm.recv(y := np.zeros_like(x), peer)
        assert y == peer

    kccl.run_threads(main, 2)


def test_arrays_of_done_requests_are_let_go():
    def main(comm):
        arrays = [np.zeros(4) for _ in range(2)]
        kept = [weakref.ref(array) for array in arrays]
        comm.isend(arrays[0], comm.rank).wait()
        assert comm.irecv(arrays[1], comm.rank).test()
        arrays.clear()
        assert [each() for each in kept] == [None, None]

    kccl.run_threads(main, 1)


def test_arrays_of_forgotten_requests_are_let_go_in_time():
    def main(comm):
        kept = []
        for _ in range(500):
            x = np.zeros(4)
            kept.append(weakref.ref(x))
            comm.isend(x, comm.rank)
            comm.recv(x, comm.rank)
        assert sum(each() is not None for each in kept) < 150

    kccl.run_threads(main, 1)


def test_requests_do_not_keep_a_dropped_communicator():
    def main(comm):
        part = comm.split(0)
        part.isend(np.zeros(4), comm.rank)
        context = weakref.ref(part.context)
        gc.disable()
        try:
            del part
            assert context() is None
        finally:
            gc.enable()

    kccl.run_threads(main, 1)


def test_a_group_is_its_threads():
    errors = []

    def other(comm):
        for call in (
            lambda: comm.send(np.zeros(1), comm.rank),
            lambda: comm.recv(np.zeros(1), comm.rank),
            lambda: comm.group().__enter__(),
        ):
            try:
                call()
            except kccl.Error as error:
                errors.append(str(error))

    def main(comm):
        x, y = np.arange(3.0), np.zeros(3)
        with comm.group():
            thread = threading.Thread(target=other, args=(comm,))
            thread.start()
            thread.join()
            comm.send(x, comm.rank)
            comm.recv(y, comm.rank)
        assert (x == y).all()

    kccl.run_threads(main, 1)
    assert len(errors) == 3
    assert all("a group of this communicator is open in another thread" in each for each in errors)


def test_an_exception_in_an_inner_group_drops_its_calls_only():
    def main(comm):
        x, y = np.arange(3.0), np.zeros(3)
        with comm.group():
            comm.recv(y, comm.rank)
            with pytest.raises(ZeroDivisionError), comm.group():
                comm.send(x + 1, comm.rank)
                raise ZeroDivisionError
            comm.send(x, comm.rank)
        assert (x == y).all()

    kccl.run_threads(main, 1)


PROGRAM = """
import sys
import threading
import time
import numpy as np
import kccl

comm = kccl.init()
x = np.ones(4_000_000)
ticks, over = 0, False

def tick():
    global ticks
    while not over:
        ticks += 1
        time.sleep(0)

if comm.rank == 1:
    # Who waits for the interpreter's lock does not ask for it before.
    sys.setswitchinterval(60)
    threading.Thread(target=tick, daemon=True).start()
gained = 0
for turn in range(40):
    if comm.rank == 0:
        comm.barrier()
        request = comm.isend(x, 1)
        comm.barrier()
        request.wait()
    else:
        y = np.zeros_like(x)
        request = comm.irecv(y, 0)
        comm.barrier()
        comm.barrier()
        before = ticks
        request.wait()
        # The first wait makes what the later ones use.
        gained += (ticks - before) * (turn > 0)
        assert (y == 1).all()
over = True
say(rank=comm.rank, gained=gained)
comm.close()
"""


def test_other_threads_run_while_a_request_copies():
    code, said, err = preloaded.run(2, PROGRAM)
    assert code == 0, err
    assert said[1]["gained"] > 0
