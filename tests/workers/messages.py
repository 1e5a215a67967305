"""A rank of the tests of messages: between all pairs, in random order, from any source.

Usage: messages.py [ROUNDS]
"""

import random
import sys

import numpy as np

import kccl

# What one record carries is 8,160 bytes.
LENGTHS = [0, 1, 7, 33, 4096, 8160, 8161, 100_000, 300_000]


def bytes_of(length, *seed):
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8).view(np.int8)


def check_every_pair(comm):
    """Every rank sends to every rank, itself included, in one group a length."""
    everyone = range(comm.world_size)
    for length in LENGTHS:
        mine = [bytes_of(length, comm.rank, peer) for peer in everyone]
        theirs = [np.zeros(length, np.int8) for _ in everyone]
        with comm.group():
            for peer in everyone:
                comm.send(mine[peer], peer)
            for peer in everyone:
                comm.recv(theirs[peer], peer)
        for peer in everyone:
            assert (theirs[peer] == bytes_of(length, peer, comm.rank)).all(), (length, peer)


def check_blocking_calls(comm, turns):
    """Short sends need no receiver yet; the order is kept over many turns of a ring."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for turn in range(turns):
        x = np.full(turn % 50, turn * 100 + comm.rank, np.int64)
        y = np.empty_like(x)
        comm.send(x, right)
        comm.recv(y, left)
        assert (y == turn * 100 + left).all(), turn


def check_any_source(comm):
    """One rank asks for the messages of all others, and then for some by their tags."""
    last = comm.world_size - 1
    if comm.rank != last:
        for turn in range(5):
            comm.send(np.array([comm.rank * 100 + turn]), last, tag=10 + turn)
        comm.send(bytes_of(50_000, comm.rank), last, tag=77)
        return
    seen = {rank: [] for rank in range(last)}
    for _ in range(5 * last):
        x = np.empty(1, np.int64)
        # Those of other tags have other lengths.
        request = comm.irecv(x, tag=10 + min(map(len, seen.values())))
        request.wait()
        assert x[0] == request.source * 100 + request.tag - 10
        seen[request.source].append(request.tag)
    assert all(tags == list(range(10, 15)) for tags in seen.values())
    for rank in reversed(range(last)):
        x = np.zeros(50_000, np.int8)
        comm.recv(x, rank, 77)
        assert (x == bytes_of(50_000, rank)).all()


def check_random_programs(comm, rounds):
    """Requests posted in a random order, waited for in another, equal what was sent."""
    shared, own = random.Random(7), random.Random(comm.rank)
    everyone = range(comm.world_size)
    for _ in range(rounds):
        plan = [
            (shared.choice(everyone), shared.choice(everyone), shared.randrange(3), n)
            for n in shared.choices(LENGTHS, k=3 * comm.world_size)
        ]
        mine = []
        for number, (source, to, tag, n) in enumerate(plan):
            if comm.rank == source:
                mine.append((comm.isend(bytes_of(n, number), to, tag), None, number))
        wanted = [(i, p) for i, p in enumerate(plan) if p[1] == comm.rank]
        # Those of one source and tag in their order; the others in any.
        for key in sorted({(p[0], p[2]) for _, p in wanted}, key=lambda _: own.random()):
            for number, (source, _, tag, n) in wanted:
                if (source, tag) == key:
                    x = np.zeros(n, np.int8)
                    mine.append((comm.irecv(x, source, tag), x, number))
        own.shuffle(mine)
        for request, x, number in mine:
            while own.random() < 0.3 and not request.test():
                pass
            request.wait()
            if x is not None:
                assert (x == bytes_of(x.size, number)).all(), number


def check_all(comm, rounds=3):
    check_every_pair(comm)
    check_blocking_calls(comm, 100 * rounds)
    check_any_source(comm)
    check_random_programs(comm, rounds)
    # Between collectives too.
    assert comm.all_reduce(np.ones(3)).tolist() == [comm.world_size] * 3
    op = comm.send.prepare(np.array([comm.rank]), (comm.rank + 1) % comm.world_size, tag=5)
    for _ in range(3):
        op()
        taken = comm.recv(np.zeros(1, np.int64), (comm.rank - 1) % comm.world_size, 5)
        assert taken == [(comm.rank - 1) % comm.world_size]


if __name__ == "__main__":
    world = kccl.init()
    check_all(world, int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    world.barrier()
    world.close()
    print("right")  # mpirun passes it on
