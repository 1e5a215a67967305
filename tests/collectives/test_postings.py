"""Small calls of more than 8 ranks, whose parts the ranks post in their own memory."""

import time

import numpy as np
import pytest

import kccl
from kccl.base.abi import POSTING_BYTES
from kccl.base.env import Env
from kccl.plan.grouped import GroupedPlanner
from kccl.plan.grouping import Grouping
from kccl.plan.steps import MOST_POSTED_BYTES

RANKS = 9


def test_a_root_may_be_many_calls_ahead():
    """More calls than there are slots, from roots that do not wait for those who sleep."""

    def main(comm):
        x = np.empty(3, np.int64)
        for root in (0, 4):
            if comm.rank != root:
                time.sleep(0.01 * comm.rank)
            for number in range(400):
                x[:] = number if comm.rank == root else -1
                comm.broadcast(x, root)
                assert (x == number).all()
        # Now the root sleeps, and the others are ahead.
        if comm.rank == 4:
            time.sleep(0.2)
        for number in range(400):
            x[:] = comm.rank + number
            found = comm.reduce(x, 4)
            assert found is None or (found == 36 + 9 * number).all()

    kccl.run_threads(main, RANKS, timeout=60)


@pytest.mark.parametrize("nbytes", [1, POSTING_BYTES, POSTING_BYTES + 1, MOST_POSTED_BYTES])
def test_long_parts_go_in_pieces(nbytes):
    def main(comm):
        want = np.arange(nbytes, dtype=np.uint8)
        x = want.copy() if comm.rank == 3 else np.zeros(nbytes, np.uint8)
        assert comm.plan("broadcast", nbytes).name == "broadcast_posted"
        comm.broadcast(x, 3)
        assert (x == want).all()
        found = comm.gather(want + np.uint8(comm.rank), 5)
        assert (found is not None) == (comm.rank == 5)
        if found is not None:
            assert (found == want + np.arange(RANKS, dtype=np.uint8)[:, np.newaxis]).all()
        assert comm.plan("broadcast", MOST_POSTED_BYTES + 1).name == "broadcast_grouped"

    kccl.run_threads(main, RANKS, timeout=60)


def test_channels_are_sequences_of_their_own():
    """The ranks use them in different orders, and nobody waits for the root."""

    def main(comm):
        for number in range(200):
            for channel in (0, 3) if comm.rank else (3, 0):
                x = np.full(2, 10 * number + channel if comm.rank == 0 else -1)
                comm.broadcast(x, channel=channel)
                assert (x == 10 * number + channel).all()

    kccl.run_threads(main, RANKS, timeout=60)


def test_a_rank_that_does_not_come_is_named_and_reset_clears_the_postings():
    def main(comm):
        comm.barrier()
        comm.timeout = 0.3
        x = np.full(4, comm.rank, np.float32)
        told = None
        if comm.rank != 2:
            with pytest.raises((kccl.Timeout, kccl.WaitFailed)) as error:
                comm.broadcast(x, 2)
            told = str(error.value)
        else:
            time.sleep(0.6)
        comm.timeout = 30
        comm.reset()
        for number in range(300):
            x[:] = comm.rank + number
            assert comm.broadcast(x, 7)[0] == 7 + number
        return told

    told = kccl.run_threads(main, RANKS, timeout=60)
    assert any("broadcast" in each and "peer 2" in each for each in told if each), told


@pytest.mark.parametrize("what", ["root", "size", "call"])
def test_calls_that_differ_are_an_error(what):
    def main(comm):
        x = np.zeros(4, np.float32)
        is_other = comm.rank == 6
        try:
            if what == "call" and is_other:
                comm.scatter(np.zeros(4 * RANKS, np.float32), 6, out=x)
            elif what == "size" and is_other:
                comm.broadcast(x[:3], 1)
            else:
                comm.broadcast(x, 6 if what == "root" and is_other else 1)
            comm.broadcast(x, 1)
            comm.barrier()
        except kccl.Error as error:
            return str(error)
        return None

    told = kccl.run_threads(main, RANKS, timeout=20)
    assert all(told) and any("broadcast" in each for each in told), told


def _errors_of(calls, **options):
    """Returns what each rank is told that calls calls(comm, x, y, z)."""

    def main(comm):
        try:
            calls(comm, *(np.zeros(count, np.float32) for count in (4, 8, 4)))
        except kccl.Error as error:
            return str(error)
        return None

    return kccl.run_threads(main, RANKS, **{"timeout": 20, **options})


def test_the_next_call_tells_that_a_repeated_call_differed_on_a_rank_that_takes_nothing():
    """No rank takes anything of rank 0 in the call that differs, nor does rank 0 of others."""

    def calls(comm, x, y, z):
        for _ in range(3):
            comm.broadcast(x, 0)
            comm.broadcast(y, 1)
        time.sleep(0.05 * (comm.rank == 0))
        if comm.rank == 0:
            comm.broadcast(x, 0)
        else:
            comm.broadcast(y, 1)
        comm.broadcast(z, 2)
        comm.barrier()

    told = _errors_of(calls)
    assert all(told) and any("rank 0" in each for each in told), told
    assert "before this one" in told[0] and "KCCL_CHECK=1" in told[0], told


def test_ranks_that_never_take_of_each_other_find_that_their_calls_differ():
    """Rank 0 is its own calls' root for ever; all look at all in some of the calls."""

    def calls(comm, x, y, z):
        comm.broadcast(x, 0)
        comm.broadcast(y, 1)
        for _ in range(100):
            if comm.rank == 0:
                comm.broadcast(x, 0)
            else:
                comm.broadcast(y, 1)
        comm.barrier()

    told = _errors_of(calls)
    assert all("broadcast_posted, root 0, 16 bytes" in str(each) for each in told), told
    assert all("broadcast_posted, root 1, 32 bytes" in str(each) for each in told), told


def test_errors_name_the_form_and_roots_of_the_communicator():
    def differ(comm, x, y, z):
        if comm.rank == 0:
            comm.broadcast(x, 0)
        else:
            comm.reduce(x, 8)
        comm.barrier()

    for told in _errors_of(differ):
        assert "broadcast_posted, root 0, 16 bytes" in told, told
        assert "reduce_posted, root 8, 16 bytes, float32, sum" in told, told
        assert "team" not in told, told

    def wait(comm, x, y, z):
        if comm.rank != 3:
            comm.broadcast(x, 3)
        else:
            time.sleep(1)

    told = _errors_of(wait, timeout=0.3)
    named = "broadcast_posted on channel 0: peer 3 did not arrive"
    assert any(named in str(each) and "call 1 on this channel" in str(each) for each in told), told


def test_a_posted_form_is_chosen_wherever_a_rank_can_post_its_part():
    """Each rank posts a chunk of a gather, and the root posts all of a scatter."""
    planner = GroupedPlanner("host", Grouping(((0, 1, 2, 3, 4), (5, 6, 7, 8))), 0, Env())
    for collective, most in {
        "broadcast": MOST_POSTED_BYTES,
        "scatter": MOST_POSTED_BYTES // RANKS * RANKS,
        "gather": MOST_POSTED_BYTES * RANKS,
    }.items():
        plan = planner(collective, most)
        assert plan.name == f"{collective}_posted", plan.explain()
        assert f"at most {MOST_POSTED_BYTES} bytes" in plan.explain(), plan.explain()
        plan = planner(collective, most + RANKS)
        assert plan.name == f"{collective}_grouped", plan.explain()
        assert f"more than {MOST_POSTED_BYTES} bytes" in plan.explain(), plan.explain()
