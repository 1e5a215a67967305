"""shrink(): survivors return the same communicator, whenever a rank ends or times out.

The ranks here are threads with real meshes. A step of a rank is a message to one peer, or a stage
of making the communicator. A rank ends behind its k-th step for every k, so also when some peers
have its last message and others do not.
"""

import contextlib
import itertools
import random
import threading
import time

import pytest
from long import long_after

import kccl
from kccl.ranks import bootstrap, link, survivors
from kccl.ranks.mesh import Mesh

LIMIT = 20


class Ended(BaseException):
    """The rank's process would be gone."""


class Life:
    """Counts a rank's steps and ends it behind its last one. With a seed some steps are slow."""

    def __init__(self, last=None, seed=None, error=Ended):
        self.last = last
        self.error = error
        self.steps = 0
        self.random = None if seed is None else random.Random(seed)

    def step(self):
        self.steps += 1
        if self.random is not None and self.random.random() < 0.2:
            time.sleep(self.random.choice([0, 0.0005, 0.003]))
        if self.steps == self.last:
            raise self.error


class Connection(link.Connection):
    life: Life

    def send(self, data):
        # One message in one piece: a step.
        sent = super().send(data)
        self.life.step()
        return sent


class Ranks(Mesh):
    """A mesh that knows its name, and whose waits may find that time is up."""

    name = ""
    members = ()
    waits = 0
    late_wait = None

    def part(self, rank, members, name, sockets):
        part = Ranks(rank, len(members), sockets)
        part.name, part.members = name, members
        return part

    def wait(self, number, until, deadline):
        self.waits += 1
        return super().wait(number, until, 0 if self.waits == self.late_wait else deadline)


class Part:
    def __init__(self, mesh, life):
        self.mesh, self.is_closed = mesh, False
        try:
            life.step()
            mesh.allgather(b"", "start-up", LIMIT)
            life.step()
        except BaseException:
            mesh.close()
            raise

    def close(self):
        self.is_closed = True
        self.mesh.close()


def run(living, main):
    """Calls main(rank) in a thread for each of these ranks: rank -> what it returned.

    Ranks whose main() returned None are left out.
    """
    parts = {}

    def keep(rank):
        part = main(rank)
        if part is not None:
            parts[rank] = part

    threads = [threading.Thread(target=keep, args=(rank,), daemon=True) for rank in living]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LIMIT)
        assert not thread.is_alive()
    return parts


def assert_one_communicator(parts, alive, case=""):
    """All ranks that are alive have the same communicator, open. Closes it. case: for messages."""
    try:
        assert sorted(parts) == alive, case
        have = {(part.mesh.name, tuple(part.mesh.members)) for part in parts.values()}
        assert len(have) == 1, (case, have)
        for _, members in have:
            assert set(alive) <= set(members), case
        assert not any(part.is_closed for part in parts.values())
    finally:
        for part in parts.values():
            part.close()


def sockets_of(world_size, lives):
    def mortal(rank, each):
        connection = Connection(fileno=each.detach())
        connection.life = lives[rank]
        return connection

    return [
        {peer: mortal(rank, each) for peer, each in of_rank.items()}
        for rank, of_rank in enumerate(bootstrap.thread_sockets(world_size))
    ]


def job(world_size, ends, late=None, seed=None):
    """All ranks call shrink(). Checks what the survivors have; returns the ranks that ended.

    Args:
        world_size: Number of ranks.
        ends: Rank -> its last step; 0: it ends before the others begin.
        late: (rank, number of the wait in which its time is up); it calls shrink() again then.
        seed: The seed of the ranks' paces; all go as fast as they can when None.
    """
    seeds = [None if seed is None else f"{seed} {rank}" for rank in range(world_size)]
    lives = [Life(ends.get(rank), seeds[rank]) for rank in range(world_size)]
    meshes = [
        Ranks(rank, world_size, each) for rank, each in enumerate(sockets_of(world_size, lives))
    ]
    ended, errors = set(), []
    case = world_size, ends, late, seed
    if late is not None:
        meshes[late[0]].late_wait = late[1]

    def main(rank):
        mesh, life = meshes[rank], lives[rank]

        def shrink():
            return survivors.shrink(mesh, lambda ranks: Part(ranks, life), LIMIT)

        try:
            try:
                return shrink()
            except kccl.Timeout:
                if late is None or late[0] != rank:
                    raise
                # Meanwhile the others go on, as far as they can.
                time.sleep(0.01)
                return shrink()
        except Ended:
            ended.add(rank)
        except BaseException as error:
            errors.append(error)
        finally:
            # As at the end of a process, and at the end of Communicator.shrink().
            with contextlib.suppress(Ended):
                mesh.close()

    for rank, last in ends.items():
        if last == 0:
            meshes[rank].close()
            ended.add(rank)
    parts = run([rank for rank in range(world_size) if rank not in ended], main)
    assert errors == [], case
    alive = [rank for rank in range(world_size) if rank not in ended]
    assert_one_communicator(parts, alive, case)
    return ended


def steps(world_size, victim, *, lost=(), **others):
    """The last steps with which `victim` ends, from 0: one after the other, until it returns.

    lost: Ranks that have ended before.
    """
    for last in itertools.count():
        if victim not in job(world_size, {victim: last, **dict.fromkeys(lost, 0)}, **others):
            # It sends more often than once to each peer.
            assert last > world_size - len(lost)
            return


@pytest.mark.parametrize(
    ("world_size", "victim"),
    long_after(5, [(size, victim) for size in (2, 3, 4) for victim in range(size)]),
)
def test_a_rank_ends_behind_any_step(world_size, victim):
    steps(world_size, victim)


@pytest.mark.parametrize(("first", "victim"), long_after(1, itertools.permutations(range(4), 2)))
def test_a_rank_ends_behind_any_step_after_another_was_lost(first, victim):
    steps(4, victim, lost=[first])


@pytest.mark.long
@pytest.mark.parametrize("victims", [(0, 1), (1, 3)])
def test_two_ranks_end_behind_two_steps(victims):
    """Any step of the first, every other one of the second; `make shrink-soak` takes any moments of
    any ranks.
    """
    first, second = victims
    for last in itertools.count(1):
        # By turns the odd steps and the even ones.
        for other in itertools.count(1 + last % 2, 2):
            ended = job(4, {first: last, second: other})
            if second not in ended:
                break
        assert other > 4
        if first not in ended:
            assert last > 4
            return


@pytest.mark.long
@pytest.mark.parametrize("late", range(3))
def test_a_rank_times_out_and_tries_again(late):
    """Whatever it waited for; and also when another one ends behind any of its steps."""
    for wait in (1, 2, 3):
        job(3, {}, late=(late, wait))
        steps(3, (late + 1) % 3, late=(late, wait))


@pytest.mark.parametrize("seed", long_after(12, range(40)))
def test_ranks_of_different_paces(seed):
    """Up to three of five end, and one times out."""
    moment = random.Random(seed)
    ends = {rank: moment.randrange(30) for rank in moment.sample(range(5), moment.randrange(4))}
    late = None if seed % 2 == 0 else (moment.randrange(5), moment.randrange(1, 5))
    job(5, ends, late, seed)


def test_all_time_out_until_the_last_one_comes():
    """Those that came too early have the same communicator once all have come again."""
    lives = [Life() for _ in range(3)]
    meshes = [Ranks(rank, 3, each) for rank, each in enumerate(sockets_of(3, lives))]
    too_early = threading.Barrier(3)

    def main(rank):
        for _ in range(3 if rank < 2 else 0):
            with pytest.raises(kccl.Timeout, match=f"rank {rank} waited 0.1 s for rank 2 during"):
                survivors.shrink(meshes[rank], lambda ranks: Part(ranks, lives[rank]), 0.1)
        too_early.wait(LIMIT)
        part = survivors.shrink(meshes[rank], lambda it: Part(it, lives[rank]), LIMIT)
        meshes[rank].close()
        return part

    assert_one_communicator(run(range(3), main), [0, 1, 2])


def test_a_communicator_that_fails_on_one_rank_fails_on_all():
    """All get its reason, and their next shrink() goes on."""
    meshes = [Ranks(rank, 3, each) for rank, each in enumerate(sockets_of(3, [Life()] * 3))]

    def refused(ranks):
        ranks.close()
        raise kccl.BackendError("no memory")

    def main(rank):
        def make(ranks):
            return refused(ranks) if rank == 1 else Part(ranks, Life())

        for _ in range(2):
            with pytest.raises(kccl.BackendError, match=r"^shrink failed on rank 1: no memory$"):
                survivors.shrink(meshes[rank], make, LIMIT)
        part = survivors.shrink(meshes[rank], lambda ranks: Part(ranks, Life()), LIMIT)
        meshes[rank].close()
        return part

    assert_one_communicator(run(range(3), main), [0, 1, 2])


def test_no_rank_goes_on_alone_after_abort():
    def main(comm):
        if comm.rank == 0:
            comm.abort()
            with pytest.raises(kccl.PeerLost, match=r"rank 0 has called abort\(\)"):
                comm.shrink()
            return None
        return comm.shrink().world_size

    assert kccl.run_threads(main, 3) == [None, 2, 2]


@pytest.mark.parametrize("stopped", range(3))
def test_ctrl_c_behind_any_step(stopped):
    """The next shrink() says to all peers what this one may have said to some."""
    for last in itertools.count(1):
        lives = [
            Life(last if rank == stopped else None, None, KeyboardInterrupt) for rank in range(3)
        ]
        meshes = [Ranks(rank, 3, each) for rank, each in enumerate(sockets_of(3, lives))]
        interrupted = []

        def main(rank, meshes=meshes, lives=lives, interrupted=interrupted):
            def shrink():
                return survivors.shrink(meshes[rank], lambda it: Part(it, lives[rank]), LIMIT)

            try:
                part = shrink()
            except KeyboardInterrupt:
                interrupted.append(rank)
                part = shrink()
            with contextlib.suppress(KeyboardInterrupt):
                meshes[rank].close()
            return part

        assert_one_communicator(run(range(3), main), [0, 1, 2])
        if not interrupted:
            break
    assert last > 3
