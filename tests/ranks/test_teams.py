"""Failures and parts of communicators whose ranks are in several teams."""

import queue
import threading

import numpy as np
import preloaded
import pytest
from long import long_after

import kccl

LIMIT = 60  # seconds; ends no wait of a test that passes

# The last rank is killed. All others are told so by their own teams, and go on.
KILLED = """
comm = kccl.init()
x = np.ones(VALUES, np.float32)
# A rank that is still in its fifth call may hear of the loss there.
try:
    for _ in range(5):
        x.fill(1)
        comm.all_reduce(x)
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        x.fill(1)
        comm.all_reduce(x)
except kccl.PeerLost as error:
    peer, text = error.peer, str(error)
smaller = comm.shrink()
x.fill(1)
total = smaller.all_reduce(x)[-1]
part = smaller.split(smaller.rank % 2)
x.fill(1)
say(rank=comm.rank, peer=peer, text=text, size=smaller.world_size, total=float(total),
    part=float(part.all_reduce(x)[0]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "values"), long_after(1, [(9, 50_000), (12, 50_000), (9, 2), (12, 2)])
)
def test_a_killed_rank_of_another_group_is_named(world_size, values):
    code, said, err = preloaded.run(world_size, KILLED.replace("VALUES", str(values)), timeout=300)
    assert code == -9, err
    last = world_size - 1
    assert sorted(said) == list(range(last)), err
    for rank, facts in said.items():
        assert facts["peer"] == last, facts
        assert f"the process of peer {last} has ended" in facts["text"]
        assert (facts["size"], facts["total"]) == (last, last)
        assert facts["part"] == len(range(rank % 2, last, 2))


@pytest.mark.long
def test_16_processes():
    program = """
comm = kccl.init()
x = np.full(30_000, comm.rank, np.float64)
whole = comm.all_gather(comm.all_reduce(x)[:2])
say(rank=comm.rank, right=bool((whole == 120).all() and whole.shape == (16, 2)))
"""
    code, said, err = preloaded.run(16, program, timeout=300)
    assert code == 0, err
    assert len(said) == 16 and all(facts["right"] for facts in said.values())


@pytest.mark.parametrize("world_size", long_after(1, [9, 11]))
def test_a_late_rank_is_named_and_reset_goes_on(world_size):
    late = world_size - 1
    # The others' time is up, so the late rank may come.
    all_failed = threading.Barrier(world_size)

    def main(comm):
        x = np.ones(3, np.float32)
        comm.all_reduce(x)
        # On a busy machine one of many threads may not run for a second.
        comm.timeout = 2
        error = None
        if comm.rank != late:
            with pytest.raises(kccl.Timeout) as caught:
                comm.all_reduce(x)
            error = caught.value
        all_failed.wait(LIMIT)
        comm.timeout = LIMIT
        if comm.rank != late:
            with pytest.raises(kccl.Timeout):
                comm.barrier()
        comm.reset()
        for _ in range(3):
            x.fill(1)
            assert (comm.all_reduce(x) == world_size).all()
        return error

    for rank, error in enumerate(kccl.run_threads(main, world_size)):
        if rank != late:
            assert error.peer == late, error
            assert f"peer {late} did not arrive" in str(error)


@pytest.mark.parametrize(
    ("world_size", "call", "own", "across"),
    [
        # Copies and conversions come before the first step with other ranks, and between them.
        (16, "reduce_scatter", 8, 9),
        # Only leaders have a step across groups; the others' next step has the same number.
        (11, "all_reduce", 10, 9),
    ],
)
def test_only_steps_with_other_ranks_lengthen_the_next_ones_limit(world_size, call, own, across):
    def main(comm):
        comm.timeout = 8
        getattr(comm, call)(np.ones(world_size, np.float16))
        backend = comm.context.backend
        return [
            each.state.limit_ns / 1e9
            for each, team in zip(backend._backends, backend.teams, strict=True)
            if team.world_size > 1
        ]

    found = kccl.run_threads(main, world_size)
    assert [own, across] in found
    assert all(limits in ([own, across], [own]) for limits in found), found


def test_a_rank_that_closes_or_raises_ends_the_waits_of_all():
    class Mishap(Exception):
        pass

    errors = []
    # A rank that still waits when another one gives up gives up too.
    all_past = threading.Barrier(10)

    def main(comm):
        comm.barrier()
        all_past.wait(LIMIT)
        if comm.rank == 8:
            raise Mishap
        try:
            comm.barrier()
        except kccl.PeerLost as error:
            errors.append((comm.rank, error.peer))
            raise

    with pytest.raises(Mishap):
        kccl.run_threads(main, 10, timeout=LIMIT)
    assert sorted(errors) == [(rank, 8) for rank in range(10) if rank != 8]

    def leaves(comm):
        comm.barrier()
        all_past.wait(LIMIT)
        if comm.rank == 9:
            comm.close()
            return 9
        with pytest.raises(kccl.PeerLost, match="peer 9 has closed") as caught:
            comm.barrier()
        return caught.value.peer

    assert kccl.run_threads(leaves, 10, timeout=LIMIT) == [9] * 10


@pytest.mark.parametrize("check", ["0", "1"])
def test_calls_that_differ(monkeypatch, check):
    monkeypatch.setenv("KCCL_CHECK", check)

    def lengths(comm):
        x = np.ones(4 if comm.rank < 8 else 6, np.float32)
        with pytest.raises(kccl.InvalidArgument, match=r"disagree|make different"):
            comm.all_reduce(x)
            comm.barrier()

    def roots(comm):
        with pytest.raises(kccl.InvalidArgument, match=r"disagree|make different"):
            comm.broadcast(np.ones(4), 0 if comm.rank < 3 else 8)
            comm.barrier()
            comm.barrier()

    for main in (lengths, roots):
        kccl.run_threads(main, 9, timeout=LIMIT)


def test_split_of_16():
    def main(comm):
        found = []
        for parts in (2, 4, 1):
            part = comm.split(comm.rank % parts, key=-comm.rank)
            x = np.array([1, comm.rank])
            part.all_reduce(x)
            found.append((part.world_size, part.rank, x.tolist()))
            again = part.split(part.rank // 2)
            assert again.all_reduce(np.ones(1))[0] == 2
            part.close()
        return found

    for rank, found in enumerate(kccl.run_threads(main, 16, timeout=LIMIT)):
        for parts, (size, place, total) in zip((2, 4, 1), found, strict=True):
            members = range(rank % parts, 16, parts)
            assert (size, total) == (16 // parts, [len(members), sum(members)])
            assert place == size - 1 - list(members).index(rank)


def test_abort_from_another_thread_ends_all_waits():
    """Also those of ranks that wait in a team without the one that gave up."""
    ended = queue.Queue()

    def main(comm):
        comm.barrier()
        if comm.rank == 0:
            threading.Timer(0.1, comm.abort).start()
            with pytest.raises(kccl.PeerLost, match="rank 0 gave up"):
                comm.all_reduce(np.ones(2))
        elif comm.rank != 9:
            with pytest.raises(kccl.PeerLost) as caught:
                comm.all_reduce(np.ones(2))
            assert caught.value.peer == 0
            ended.put(comm.rank)
        else:
            for _ in range(8):
                ended.get(timeout=LIMIT)

    kccl.run_threads(main, 10, timeout=LIMIT)


INTERRUPTED = """
comm = kccl.init()
comm.barrier()
if comm.rank == 9:
    time.sleep(5)
    os._exit(0)
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start() if comm.rank == 0 else 0
try:
    comm.barrier()
except KeyboardInterrupt:
    say(rank=comm.rank, how="interrupted")
except kccl.Error as error:
    say(rank=comm.rank, how=str(error))
comm.close()
"""


@pytest.mark.long
def test_ctrl_c_ends_a_wait():
    code, said, err = preloaded.run(10, INTERRUPTED, timeout=300)
    assert code == 0, err
    assert said[0]["how"] == "interrupted", err
    for rank in range(1, 9):
        assert "rank 0 was interrupted" in said[rank]["how"], said[rank]
