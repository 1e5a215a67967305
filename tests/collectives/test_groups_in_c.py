"""Groups of sends and receives on the host: C adds their messages once it knows calls like them."""

import gc
import pickle
import threading
import time
import weakref

import numpy as np
import pytest

import kccl


def test_calls_that_c_knows_and_others_keep_their_order():
    """The first call of a type goes through Python, and so does one with `stream` or a NumPy int.

    All go to one peer with one tag, so they are received in the order in which they were sent.
    """

    def main(comm):
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for turn in range(4):
            sent = [np.full(3, 10 * turn + i, dtype) for i, dtype in enumerate("fdf")]
            found = [np.zeros_like(each) for each in sent]
            with comm.group():
                comm.send(sent[0], right)
                comm.send(sent[1], peer=np.int64(right))
                comm.send(sent[2], right, stream=None)
                for each in found:
                    assert comm.recv(each, left) is each
            for mine, theirs in zip(sent, found, strict=True):
                np.testing.assert_array_equal(mine, theirs)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("check", ["0", "1"])
def test_the_first_group_may_come_after_single_calls(monkeypatch, check):
    """C knows send and recv then, and no group yet. Each call alone would wait for the other."""
    monkeypatch.setenv("KCCL_CHECK", check)

    def main(comm):
        comm.timeout = 5
        one, x, y = np.zeros(4), np.full(100_000, comm.rank + 1.0), np.zeros(100_000)
        comm.send(one, comm.rank)
        comm.recv(one, comm.rank)
        with comm.group():
            comm.send(x, 1 - comm.rank)
            comm.recv(y, 1 - comm.rank)
        assert (y == 2 - comm.rank).all()

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("check", ["0", "1"])
def test_wrong_calls_in_a_group_after_single_calls(monkeypatch, check):
    """Under KCCL_CHECK=1 C knows no call, and gets to know a group only for calls that it knows."""
    monkeypatch.setenv("KCCL_CHECK", check)
    with kccl.init(backend="host") as comm:
        x, y = np.arange(3.0), np.zeros(3)
        comm.send(x, 0)
        comm.recv(y, 0)
        with comm.group():
            for wrong in ((), (x,), (x, 0, 0, 0)):
                with pytest.raises(TypeError):
                    comm.send(*wrong)
            comm.send(x + 1, 0)
            comm.recv(y, 0)
        assert (y == x + 1).all()


def test_many_messages_of_many_lengths():
    def main(comm):
        lengths = [*range(40), 9000, 300_000]
        for turn in range(3):
            sent = [np.full(each, turn * 50 + i, np.int32) for i, each in enumerate(lengths)]
            found = [np.zeros(each, np.int32) for each in lengths]
            with comm.group():
                for one, other in zip(sent, found, strict=True):
                    comm.send(one, comm.rank ^ 1)
                    comm.recv(other, comm.rank ^ 1)
            for one, other in zip(sent, found, strict=True):
                np.testing.assert_array_equal(one, other)

    kccl.run_threads(main, 2)


def test_an_exception_drops_the_calls_of_its_group_only():
    def main(comm):
        x, found = np.arange(4.0), np.zeros(4)
        for _ in range(3):
            found[:] = 0
            with comm.group():
                comm.send(x, 0, 1)
                with pytest.raises(ZeroDivisionError), comm.group():
                    comm.send(x + 1, 0, 2)
                    comm.send(x + 1, 0, 3)
                    raise ZeroDivisionError
                comm.recv(found, 0, 1)
            np.testing.assert_array_equal(found, x)
            with pytest.raises(ZeroDivisionError), comm.group():
                comm.send(x, 0, 4)
                raise ZeroDivisionError
            # Nothing of what was dropped has come.
            comm.send(x + 5, 0, 5)
            comm.recv(found, 0)
            np.testing.assert_array_equal(found, x + 5)

    kccl.run_threads(main, 1)


def test_arrays_live_until_the_group_has_ended_and_no_longer():
    def main(comm):
        found = np.zeros(1000)
        for _ in range(3):
            x = np.arange(1000.0)
            alive = weakref.ref(x)
            with comm.group():
                comm.send(x, 0)
                comm.recv(found, 0)
                del x
                gc.collect()
                assert alive() is not None
            assert alive() is None
            np.testing.assert_array_equal(found, np.arange(1000.0))

    kccl.run_threads(main, 1)


def test_another_thread_may_not_add_to_a_group():
    def main(comm):
        x, found, told = np.ones(4), np.zeros(4), []

        def other():
            try:
                comm.send(x, 0)
            except kccl.Error as error:
                told.append(str(error))

        for _ in range(3):
            with comm.group():
                comm.send(x, 0)
                comm.recv(found, 0)
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
        assert len(told) == 3 and all("open in another thread" in each for each in told)

    kccl.run_threads(main, 1)


def test_a_group_that_fails_names_the_peer_and_reset_forgets_it():
    def main(comm):
        x, found = np.ones(4), np.zeros(4)
        with comm.group():
            comm.send(x, comm.rank ^ 1)
            comm.recv(found, comm.rank ^ 1)
        if comm.rank == 0:
            comm.timeout = 0.3
            with pytest.raises(kccl.Timeout, match="recv on tag 7: peer 1") as raised, comm.group():
                comm.recv(found, 1, 7)
                comm.recv(np.zeros(5), 1, 8)
            assert raised.value.peer == 1
        else:
            with pytest.raises(kccl.WaitFailed):
                comm.recv(found, 0, 9)
        comm.timeout = 20
        comm.reset()
        found[:] = 0
        with comm.group():
            comm.send(x * 3, comm.rank ^ 1)
            comm.recv(found, comm.rank ^ 1)
        np.testing.assert_array_equal(found, x * 3)

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_a_prepared_group_is_made_again_and_again(backend):
    def main(comm):
        x, found = np.zeros(5), np.zeros(5)
        with comm.group(prepare=True) as exchange:
            comm.send(x, comm.rank ^ 1)
            comm.recv(found, comm.rank ^ 1)
        assert not found.any()
        for turn in range(1, 5):
            x[:] = 10 * turn + comm.rank
            exchange()
            np.testing.assert_array_equal(found, np.full(5, 10.0 * turn + (comm.rank ^ 1)))
            # A group between two calls is another one.
            with comm.group():
                comm.send(x + 1, comm.rank ^ 1)
                comm.recv(found, comm.rank ^ 1)
            np.testing.assert_array_equal(found, np.full(5, 10.0 * turn + (comm.rank ^ 1) + 1))
        told = pytest.raises(kccl.InvalidArgument, match="prepare is True, must be False")
        with comm.group(), told, comm.group(prepare=True):
            pass
        with pytest.raises(TypeError, match="work in its process only"):
            pickle.dumps(exchange)
        with pytest.raises(ZeroDivisionError), comm.group(prepare=True) as nothing:
            comm.send(x, comm.rank ^ 1)
            raise ZeroDivisionError
        nothing()
        with pytest.raises(TypeError):
            exchange(x)

    kccl.run_threads(main, 2, backend=backend)


def test_a_prepared_group_fails_as_other_calls_do_and_works_after_reset():
    def main(comm):
        x, found = np.ones(4), np.zeros(4)
        with comm.group(prepare=True) as exchange:
            comm.send(x, comm.rank ^ 1)
            comm.recv(found, comm.rank ^ 1)
        if comm.rank == 0:
            comm.timeout = 0.3
            with pytest.raises(kccl.Timeout):
                exchange()
        else:
            with pytest.raises(kccl.WaitFailed):
                comm.recv(found, 0, 9)
        comm.timeout = 20
        comm.reset()
        for _ in range(3):
            found[:] = 0
            exchange()
            np.testing.assert_array_equal(found, x)

    kccl.run_threads(main, 2)


def test_a_closed_communicator_says_so():
    comms, prepared = [], []

    def main(comm):
        x = np.ones(4)
        with comm.group(prepare=True) as both:
            comm.send(x, 0)
            comm.recv(np.zeros(4), 0)
        both()
        comms.append(comm)
        prepared.append(both)

    kccl.run_threads(main, 1)
    with pytest.raises(kccl.Error, match="closed"), comms[0].group():
        comms[0].send(np.ones(4), 0)
    with pytest.raises(kccl.Error, match="closed"):
        prepared[0]()


def test_a_group_costs_little_more_than_its_calls():
    """In Python it took some 40 times as long as two calls."""

    def main(comm):
        x, found = np.ones(2), np.zeros(2)

        def alone():
            comm.send(x, 0)
            comm.recv(found, 0)

        def together():
            with comm.group():
                comm.send(x, 0)
                comm.recv(found, 0)

        def least_seconds(call):
            found = []
            for _ in range(500):
                began = time.perf_counter()
                call()
                found.append(time.perf_counter() - began)
            return min(found)

        return least_seconds(together) / least_seconds(alone)

    assert kccl.run_threads(main, 1)[0] < 20
