"""Every wait ends with an error that says why, and the ranks go on after reset()."""

import threading
import time

import collectives
import numpy as np
import oracle
import pytest
from programs import OF_DATA, algorithms_for
from ranks import AT_ONCE

import kccl

LIMIT = 0.15
CALLS = {name: each for each in OF_DATA for name in algorithms_for(each, 3, "float32")}
CALLS |= {"barrier_direct": "barrier"}


@pytest.fixture
def short(monkeypatch):
    """Waits end after LIMIT seconds; those of the first call have more time."""
    monkeypatch.setenv("KCCL_TIMEOUT", str(LIMIT))
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "20")


def call(comm, name):
    x = np.full(9, comm.rank + 1, np.float32)
    if name == "barrier_direct":
        comm.barrier()
        return x
    # Whole chunks, for collectives that have them.
    x = x[: x.size // comm.world_size * comm.world_size]
    return collectives.load(CALLS[name]).call(comm, x, op="sum", root=0, algorithm=name)


def check_all_right(comm):
    """Every kind of call gives the right result, and all_reduce does on every channel."""
    size, limit = comm.world_size, comm.timeout
    # A busy machine may stop a rank for longer than the test's limit.
    comm.timeout = 5
    for name in CALLS:
        x = call(comm, name)
        if CALLS[name] != "barrier":
            inputs = [np.full(9 // size * size, rank + 1, np.float32) for rank in range(size)]
            want = collectives.load(CALLS[name]).want(inputs, comm.rank, op="sum", root=0)
            assert (x is None) == (want is None), name
            if want is not None:
                oracle.assert_same(x.reshape(-1), want, name)
    for channel in range(comm.num_channels):
        assert (comm.all_reduce(np.ones(2000, np.float32), channel=channel) == size).all()
    comm.signal((comm.rank + 1) % size)
    comm.wait()
    comm.timeout = limit


def reset(comm):
    """reset() with time for a rank that a busy machine stops."""
    limit, comm.timeout = comm.timeout, 20
    comm.reset()
    comm.timeout = limit


def check_fails_at_once(comm, kind):
    x = np.ones(4, np.float32)
    for use in (
        comm.barrier,
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(x[:0]),
        lambda: comm.broadcast(x, 1),
        lambda: comm.all_gather(x),
        lambda: comm.all_gather(x[:0]),
        lambda: comm.reduce_scatter(np.ones(comm.world_size)),
        lambda: comm.all_reduce.prepare(x)(),
        lambda: comm.all_gather.prepare(x)(),
        lambda: comm.signal(0),
        lambda: comm.wait(),
        lambda: comm.window(64),
        lambda: comm.split(0),
    ):
        seconds = []
        # The fastest of three counts, because the machine may be busy with something else.
        for _ in range(3):
            started = time.perf_counter()
            with pytest.raises(kind) as caught:
                use()
            seconds.append(time.perf_counter() - started)
        assert min(seconds) < 0.01, caught.value
    return caught.value


@pytest.mark.parametrize("name", CALLS)
def test_late_rank(short, name):
    """The others time out and name the late rank, whose next calls fail too, until reset()."""
    late = collectives.load(CALLS[name]).AWAITED
    all_failed = threading.Barrier(3)
    waited = []

    def main(comm):
        check_all_right(comm)
        if comm.rank != late:
            started = time.perf_counter()
            with pytest.raises(kccl.Timeout) as caught:
                _ = call(comm, name), call(comm, name)  # the second waits for the first's credit
            error = caught.value
            waited.append(time.perf_counter() - started)
            assert waited[-1] < LIMIT + AT_ONCE
            assert (error.peer, error.collective, error.channel) == (late, name, 0)
            assert error.epoch_seen < error.epoch_wanted > 1
            assert f"{name} on channel 0: peer {late} did not arrive" in str(error)
            assert f"epoch seen {error.epoch_seen}, wanted {error.epoch_wanted}" in str(error)
            assert str(check_fails_at_once(comm, kccl.Timeout)) == str(error)
        all_failed.wait(20)
        if comm.rank == late:
            # The others' words of the first call may have come; those of the next cannot.
            comm.timeout = 30
            started = time.perf_counter()
            with pytest.raises(kccl.Timeout, match=f"peer {late} did not arrive.*heard it from"):
                for _ in range(3):
                    comm.barrier()
            assert time.perf_counter() - started < AT_ONCE
            check_fails_at_once(comm, kccl.Timeout)
        reset(comm)
        check_all_right(comm)
        check_all_right(comm)

    kccl.run_threads(main, 3)
    # A rank that began later hears of it from the one whose time was over first.
    assert max(waited) > LIMIT * 0.9


def test_reset_again_and_again(short, monkeypatch):
    """Narrow epochs come again soon, so words that reset() did not clear would look valid."""
    monkeypatch.setenv("KCCL_EPOCH_BITS", "4")

    def main(comm):
        for number in range(12):
            comm.timeout = 0.02
            x = np.full(1000 + number, comm.rank + number, np.int64)
            try:
                for _ in range(number + 2):
                    comm.all_reduce(x.copy(), algorithm="all_reduce_one_shot_ll16")
                if comm.rank != number % 2:
                    comm.all_reduce(x.copy())
                    raise AssertionError("the call returned although its peer did not come")
                else:
                    time.sleep(0.1)
                    comm.barrier()
                    comm.barrier()
            except kccl.Timeout:
                pass
            # This limit also holds after reset(), even for the first call.
            comm.timeout = 5
            comm.reset()
            assert comm.timeout == 5
            inputs = [np.full(x.size, rank + number, np.int64) for rank in range(2)]
            comm.all_reduce(x)
            oracle.assert_same(x, oracle.all_reduce(inputs, "sum"), number)

    kccl.run_threads(main, 2)


def test_wait_times_out(short):
    done = threading.Event()

    def main(comm):
        check_all_right(comm)
        if comm.rank == 0:
            comm.signal(0, 9)
            with pytest.raises(kccl.Timeout) as caught:
                comm.wait(9, count=3)
            error = caught.value
            assert "wait on signal_id 9: any peer did not arrive" in str(error)
            assert "1 signals seen, 3 wanted" in str(error)
            assert (error.peer, error.epoch_seen, error.epoch_wanted) == (None, 1, 3)
            check_fails_at_once(comm, kccl.Timeout)
        reset(comm)
        check_all_right(comm)
        if comm.rank == 1:
            with pytest.raises(kccl.Timeout, match="peer 0 did not arrive") as caught:
                comm.wait(9, peer=0)
            assert caught.value.peer == 0
            done.set()
        # If rank 0 returned now, the wait would end with PeerLost.
        assert done.wait(20)

    kccl.run_threads(main, 2)


def test_waiting_ranks_follow_the_first(short):
    """When one rank times out, ranks with longer limits fail too and say what it waited for."""
    failed = threading.Barrier(3)

    def main(comm):
        check_all_right(comm)
        if comm.rank == 0:
            failed.wait(20)
            return
        comm.timeout = LIMIT if comm.rank == 1 else 30
        started = time.perf_counter()
        with pytest.raises(kccl.Timeout, match="peer 0 did not arrive; rank 1 waited for peer 0"):
            comm.barrier()
        assert time.perf_counter() - started < LIMIT + AT_ONCE
        failed.wait(20)

    kccl.run_threads(main, 3)


def test_timeout_changes_during_a_wait():
    """Another thread may shorten the limit of a rank that waits."""
    failed = threading.Barrier(2)

    def main(comm):
        check_all_right(comm)
        comm.timeout = 30
        assert comm.timeout == 30
        if comm.rank == 1:
            failed.wait(20)
            return
        started = time.perf_counter()
        threading.Timer(0.05, setattr, (comm, "timeout", 0.01)).start()
        with pytest.raises(kccl.Timeout):
            comm.barrier()
        assert 0.04 < time.perf_counter() - started < AT_ONCE
        failed.wait(20)

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("is_reset_first", [False, True])
def test_timeout_set_before_the_first_call(monkeypatch, is_reset_first):
    """It holds for the first call, although KCCL_FIRST_TIMEOUT is longer; also after reset()."""
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "20")
    failed = threading.Event()
    limit = 3 if is_reset_first else 0.05  # reset() has it too

    def main(comm):
        comm.timeout = limit
        if is_reset_first:
            comm.reset()
        if comm.rank == 1:
            assert failed.wait(30)
            return
        started = time.perf_counter()
        try:
            with pytest.raises(kccl.Timeout):
                comm.wait()
        finally:
            failed.set()
        assert time.perf_counter() - started < limit + AT_ONCE

    kccl.run_threads(main, 2)


def give_reset_up(comm, times):
    comm.timeout = 0.3
    for _ in range(times):
        with pytest.raises(kccl.Timeout, match="during reset"):
            comm.reset()
    comm.timeout = 20
    check_fails_at_once(comm, kccl.Timeout)
    with pytest.raises(kccl.Timeout, match=r"reset\(\) has begun .* call it again"):
        comm.gather_objects(1)


@pytest.mark.parametrize("times", [1, 3])
def test_reset_that_was_given_up(times):
    """After a Timeout in reset() the ranks that called it too early may call it again."""
    gave_up = threading.Barrier(3)

    def main(comm):
        if comm.rank != 1:
            give_reset_up(comm, times if comm.rank == 0 else 1)
        gave_up.wait(20)
        for _ in range(3):
            comm.reset()
            check_all_right(comm)
        assert comm.gather_objects(comm.rank) == [0, 1, 2]
        comm.window(64)

    kccl.run_threads(main, 3)


def test_reset_given_up_after_clearing():
    """When a rank calls reset() once more, what a peer has sent after its own reset() stays."""
    gave_up, sent = threading.Event(), threading.Event()

    def main(comm):
        check_all_right(comm)
        clear = comm._backend.clear

        def late_clear():
            clear()
            assert gave_up.wait(20)

        if comm.rank == 1:
            comm._backend.clear = late_clear
            comm.reset()
            comm.signal(0, 3)
            sent.set()
        else:
            give_reset_up(comm, 1)
            gave_up.set()
            assert sent.wait(20)
            comm.reset()
            comm.wait(3, peer=1)
        check_all_right(comm)
        assert comm.gather_objects(comm.rank) == [0, 1]

    kccl.run_threads(main, 2)


def test_reset_while_another_rank_waits_out_of_band(monkeypatch):
    """The waiting rank fails at once, because the other will not come. No old message is read."""
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "20")

    def main(comm):
        if comm.rank == 1:
            started = time.perf_counter()
            with pytest.raises(
                kccl.Timeout, match=r"rank [02] called reset\(\) and will not answer"
            ):
                comm.window(4096)
            assert time.perf_counter() - started < AT_ONCE
        comm.reset()
        check_all_right(comm)
        window = comm.window(64)
        assert comm.gather_objects(window.nbytes) == [64, 64, 64]

    kccl.run_threads(main, 3)


def test_shrink_after_a_reset_that_was_given_up():
    gave_up = threading.Event()

    def main(comm):
        if comm.rank == 2:
            assert gave_up.wait(20)
            return
        if comm.rank == 0:
            give_reset_up(comm, 1)
            gave_up.set()
        else:
            assert gave_up.wait(20)
        smaller = comm.shrink()
        assert smaller.world_size == 2
        check_all_right(smaller)

    kccl.run_threads(main, 3)


def test_use_after_close():
    def main(comm):
        x = np.ones(4, np.float32)
        both = np.ones(8, np.float32)
        prepared, window = comm.all_reduce.prepare(x), comm.window(16)
        check_all_right(comm)
        comm.all_reduce(x)
        comm.all_gather(x, out=both)
        comm.reduce_scatter(both, out=x)
        comm.close()
        comm.close()
        for use in (
            prepared,
            comm.barrier,
            lambda: comm.all_reduce(x),
            lambda: comm.all_reduce(x[:0]),
            lambda: comm.broadcast(x),
            lambda: comm.all_gather(x),
            lambda: comm.all_gather(x, out=both),
            lambda: comm.reduce_scatter(x),
            lambda: comm.reduce_scatter(both, out=x),
            lambda: comm.all_reduce.prepare(x)(),
            lambda: comm.put(x, 0, window),
            lambda: comm.get(x, 0, window),
            lambda: comm.signal(0),
            lambda: comm.wait(),
            lambda: comm.window(16),
            lambda: comm.empty(3),
            lambda: comm.gather_objects(1),
            lambda: comm.split(0),
            lambda: comm.reset(),
            lambda: comm.shrink(),
        ):
            with pytest.raises(kccl.Error, match=f"communicator is closed on rank {comm.rank}"):
                use()
        assert bytes(window.local) == bytes(16)

    kccl.run_threads(main, 2)


def test_with_closes_the_communicator():
    def main(comm):
        with comm:
            check_all_right(comm)
        with pytest.raises(kccl.Error, match="is closed"):
            comm.barrier()

    kccl.run_threads(main, 2)
