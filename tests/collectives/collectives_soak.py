"""Random programs of collectives, messages, splits and kills, on the host, with real processes.

    make collectives-soak MINUTES=30
    python tests/collectives/collectives_soak.py --job 17      # that job once more

A job is a number, which is its seed. It has 1 to 12 ranks and 40 steps. Each result is compared
with NumPy's, bit by bit. In some steps a rank is killed while the others call all_reduce; the
survivors shrink() and go on. When in a call the kill comes is the machine's choice. A line of JSON
names each job that went wrong, and one the whole. tests/collectives/test_soak.py runs a minute.

The ranks are forked from a process that has imported KCCL, so a job takes little time.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import select
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import groups
import oracle

import kccl

LIMIT = 60
STEPS = 40
LENGTHS = (0, 1, 3, 64, 1021, 5000, 40_003)
SHORTER = (0, 1, 5, 300, 2000)
CHANNELS = 4
OUTCOME_BYTES = 1 << 16
# So many of an error's characters are told, which fit even where JSON has six bytes for each.
MOST_CHARACTERS = 8000


def data(job, step, rank, name, count):
    """What a rank, by its number at the job's start, has in a step."""
    rng = np.random.default_rng([job, step, rank])
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    return oracle.any_bits(name, count, rng)


class Step:
    """One step on one rank.

    Attributes:
        comm: The communicator.
        members: Its ranks, by their numbers at the job's start.
        chance: The same on all of its ranks.
    """

    def __init__(self, comm, members, job, number):
        self.comm, self.members = comm, members
        self.rank, self.size = comm.rank, comm.world_size
        self.chance = random.Random(f"{job} {number}")
        self._job, self._number = job, number
        self.name = self.chance.choice(oracle.EVERY_DTYPE)
        self.op = self.chance.choice(oracle.ops_of(self.name))
        self.root = self.chance.randrange(self.size)
        self.options = {"channel": self.chance.randrange(CHANNELS)}

    def inputs(self, count):
        """Every rank's array; `count` may be one for each."""
        counts = count if isinstance(count, list) else [count] * self.size
        return [
            data(self._job, self._number, member, self.name, each)
            for member, each in zip(self.members, counts, strict=True)
        ]

    def reduced(self, inputs):
        grouping = self.comm.context.backend.grouping
        if grouping is None:
            return oracle.all_reduce(inputs, self.op)
        with np.errstate(all="ignore"):
            return groups.reduced(inputs, self.op, grouping.groups)

    def same(self, found, wanted, what):
        assert found.dtype == wanted.dtype and found.size == wanted.size, what
        # A call in place returns the strided array that it was given. NumPy views complex numbers
        # as their parts only in an array of one piece.
        found, wanted = np.ascontiguousarray(found).reshape(-1), wanted.reshape(-1)
        assert np.array_equal(oracle.bits(found), oracle.bits(wanted)), what

    def counts(self):
        return [self.chance.choice(SHORTER) for _ in range(self.size)]

    # ---- Reductions --------------------------------------------------------------------------

    def all_reduce(self):
        inputs = self.inputs(self.chance.choice(LENGTHS))
        x, wanted = inputs[self.rank].copy(), self.reduced(inputs)
        if self.chance.random() < 0.2:
            x = np.repeat(x, 2)[::2]
            self.same(self.comm.all_reduce(x, op=self.op, **self.options), wanted, "strided")
            return
        out = np.empty_like(x) if self.chance.random() < 0.5 else None
        if self.chance.random() < 0.3:
            op = self.comm.all_reduce.prepare(x, out=out, op=self.op, **self.options)
            found = op()
        else:
            found = self.comm.all_reduce(x, out=out, op=self.op, **self.options)
        self.same(found, wanted, "all_reduce")

    def reduce(self):
        inputs = self.inputs(self.chance.choice(LENGTHS))
        found = self.comm.reduce(inputs[self.rank].copy(), self.root, op=self.op, **self.options)
        if self.rank == self.root:
            self.same(found, self.reduced(inputs), "reduce")
        else:
            assert found is None

    def reduce_scatter(self):
        counts = None
        if self.chance.random() < 0.5:
            counts = self.counts()
            inputs, begin = self.inputs(sum(counts)), sum(counts[: self.rank])
            own = slice(begin, begin + counts[self.rank])
        else:
            count = self.chance.choice(SHORTER)
            inputs = self.inputs(count * self.size)
            own = slice(self.rank * count, (self.rank + 1) * count)
        x = inputs[self.rank].copy()
        found = self.comm.reduce_scatter(x, op=self.op, counts=counts, **self.options)
        self.same(found, self.reduced(inputs)[own], "reduce_scatter")

    def scan(self):
        inputs, exclusive = self.inputs(self.chance.choice(LENGTHS)), self.chance.random() < 0.5
        x = inputs[self.rank].copy()
        found = self.comm.scan(x, op=self.op, exclusive=exclusive, **self.options)
        wanted = groups.of_lower_ranks(inputs, self.op, self.rank + 1 - exclusive)
        if wanted is None:
            assert found is None
        else:
            self.same(found, wanted, "scan")

    # ---- Moves -------------------------------------------------------------------------------

    def all_gather(self):
        counts = self.counts() if self.chance.random() < 0.5 else None
        inputs = self.inputs(counts or self.chance.choice(SHORTER))
        found = self.comm.all_gather(inputs[self.rank].copy(), counts=counts, **self.options)
        self.same(found, np.concatenate(inputs), "all_gather")

    def all_to_all(self):
        if self.chance.random() < 0.4:
            return self.all_to_all_of_parts()
        count = self.chance.choice(SHORTER)
        inputs = self.inputs(count * self.size)
        own = slice(self.rank * count, (self.rank + 1) * count)
        found = self.comm.all_to_all(inputs[self.rank].copy(), **self.options)
        self.same(found, np.concatenate([each[own] for each in inputs]), "all_to_all")

    def all_to_all_of_parts(self):
        table = [self.counts() for _ in range(self.size)]
        inputs = self.inputs([sum(row) for row in table])
        begins = [sum(row[: self.rank]) for row in table]
        receives = [row[self.rank] for row in table]
        counts = {"send_counts": table[self.rank], "recv_counts": receives}
        found = self.comm.all_to_all(inputs[self.rank].copy(), **counts, **self.options)
        parts = zip(inputs, begins, receives, strict=True)
        wanted = np.concatenate([x[begin:][:count] for x, begin, count in parts])
        self.same(found, wanted, "all_to_all with counts")

    def broadcast(self):
        inputs = self.inputs(self.chance.choice(LENGTHS))
        found = self.comm.broadcast(inputs[self.rank].copy(), self.root, **self.options)
        self.same(found, inputs[self.root], "broadcast")

    def gather(self):
        inputs = self.inputs(self.chance.choice(SHORTER))
        found = self.comm.gather(inputs[self.rank].copy(), self.root, **self.options)
        if self.rank == self.root:
            self.same(found, np.concatenate(inputs), "gather")
        else:
            assert found is None

    def scatter(self):
        count = self.chance.choice(SHORTER)
        whole = self.inputs(count * self.size)[self.root]
        x = whole.copy() if self.rank == self.root else None
        out = np.empty(count, whole.dtype)
        self.comm.scatter(x, self.root, out=out, **self.options)
        self.same(out, whole[self.rank * count : (self.rank + 1) * count], "scatter")

    def barrier(self):
        self.comm.barrier.prepare(**self.options)()

    # ---- Messages ----------------------------------------------------------------------------

    def messages(self):
        """Random messages: in a group, or as requests that are waited for in any order."""
        everyone, first_tag = range(self.size), 100 * self._number
        plan = [
            (self.chance.choice(everyone), self.chance.choice(everyone), tag, n)
            # Those of other steps have other tags, because a receive may be from any rank.
            for tag, n in enumerate(self.chance.choices(LENGTHS, k=2 * self.size), first_tag)
        ]
        in_group, own = self.chance.random() < 0.5, random.Random(self.rank)
        sent = {tag: self.inputs(n)[source] for source, _, tag, n in plan}
        mine = [each for each in plan if self.rank in each[:2]]
        own.shuffle(mine)
        taken, requests = {}, []
        with self.comm.group() if in_group else contextlib.nullcontext():
            for source, to, tag, n in mine:
                if source == self.rank:
                    send = self.comm.send if in_group else self.comm.isend
                    requests.append(send(sent[tag], to, tag))
                if to == self.rank:
                    taken[tag] = np.zeros(n, sent[tag].dtype)
                    peer = source if own.random() < 0.5 else None
                    receive = self.comm.recv if in_group else self.comm.irecv
                    requests.append(receive(taken[tag], peer, tag))
        own.shuffle(requests)
        for request in [] if in_group else requests:
            request.wait()
        for tag, x in taken.items():
            self.same(x, sent[tag], f"message {tag} of {plan}")


KINDS = (
    *("all_reduce", "reduce", "reduce_scatter", "scan", "all_gather", "all_to_all"),
    *("broadcast", "gather", "scatter", "barrier", "messages"),
)


def lose(comm, members, victim, chance):
    """Rank `victim` is killed among calls of all. Returns the survivors' communicator."""
    kill = threading.Timer(chance.random() * 0.01, os.kill, (os.getpid(), signal.SIGKILL))
    x = np.ones(chance.choice((1, 5000)), np.float32)
    try:
        # Nobody is in an earlier step when it has ended on one rank.
        comm.barrier()
        if members[comm.rank] == victim:
            kill.start()
        while True:
            comm.all_reduce(x)
    except kccl.PeerLost:
        return comm.shrink()


def run(job, rank, world_size, rendezvous, told):
    """What one rank does. `told` gets what it does, for the text of an error."""
    os.environ |= {
        "KCCL_RENDEZVOUS": rendezvous,
        "KCCL_RANK": str(rank),
        "KCCL_WORLD_SIZE": str(world_size),
        "KCCL_TIMEOUT": str(LIMIT),
        "KCCL_FIRST_TIMEOUT": str(LIMIT),
    }
    comm = kccl.init(backend="host")
    members = list(range(world_size))
    shared, part, part_members = random.Random(job), None, []
    for number in range(STEPS):
        what = shared.random()
        if what < 0.04 and comm.world_size > 1:
            victim = shared.choice(members)
            told[0] = f"step {number}: rank {victim} of {members} is killed"
            if part is not None:
                part.close()
                part = None
            comm = lose(comm, members, victim, shared)
            members.remove(victim)
            assert comm.gather_objects(rank) == members
        elif what < 0.12:
            told[0] = f"step {number}: split of {members}"
            colors = [shared.choice((0, 0, 1, None)) for _ in members]
            color = colors[comm.rank]
            if part is not None:
                part.close()
            part = comm.split(color)
            part_members = [m for m, each in zip(members, colors, strict=True) if each == color]
        in_part = shared.random() < 0.3
        kind = shared.choice(KINDS)
        if in_part and part is None:
            continue
        team = (part, part_members) if in_part else (comm, members)
        step = Step(*team, job, number)
        told[0] = f"step {number}: {kind} of {step.name} {step.op} by {team[1]}"
        getattr(step, kind)()
    told[0] = "end"
    comm.barrier()
    if part is not None:
        part.close()
    comm.close()


def _rank(job, number, world_size, rendezvous, result):
    told, said = ["start"], ""
    try:
        run(job, number, world_size, rendezvous, told)
    except BaseException as error:
        said = f"{told[0]}: {error!r}"
    finally:
        os.write(result, json.dumps(said[:MOST_CHARACTERS]).encode())
        os._exit(0)


def wrong(job):
    """Runs a job. Returns what each rank said that went wrong."""
    world_size = random.Random(f"size {job}").choice((1, 2, 2, 3, 4, 5, 7, 8, 9, 12))
    rendezvous = uuid.uuid4().hex
    outcomes, pids, said, told = {}, {}, {}, {}
    try:
        for number in range(world_size):
            outcomes[number], result = os.pipe()
            pids[number] = os.fork()
            if pids[number] == 0:
                _rank(job, number, world_size, rendezvous, result)
            os.close(result)
        deadline = time.monotonic() + 4 * LIMIT
        for number, outcome in outcomes.items():
            if not select.select([outcome], [], [], max(deadline - time.monotonic(), 0))[0]:
                said[number] = "it hangs"
                continue
            text = os.read(outcome, OUTCOME_BYTES)
            told[number] = bool(text)
            if text and json.loads(text):
                said[number] = json.loads(text)
    finally:
        for number, pid in pids.items():
            # It may be there still: it hangs, or Ctrl-C has come.
            if said.get(number) == "it hangs" or sys.exc_info()[0] is not None:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            # A rank that is killed on purpose says nothing. Whoever ends otherwise must say.
            is_victim = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            if not told.get(number) and not is_victim:
                said.setdefault(number, f"it ended with status {status:#x} and said nothing")
        for outcome in outcomes.values():
            os.close(outcome)
    return said


def left_behind():
    """What a job must leave none of: descriptors of this process, and children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"descriptors": len(os.listdir("/proc/self/fd")), "children": children}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--first", type=int, default=int(time.time()), help="the first job's number"
    )
    parser.add_argument("--job", type=int, help="run this job only")
    args = parser.parse_args()
    # No rank is to import later.
    kccl.init(backend="host").close()
    began = time.monotonic()
    before, count, bad = left_behind(), 0, 0
    for job in [args.job] if args.job is not None else itertools.count(args.first):
        if args.job is None and time.monotonic() > began + 60 * args.minutes:
            break
        said = wrong(job)
        count += 1
        if said:
            bad += 1
            print(json.dumps({"job": job, "wrong": said}), flush=True)
    after = left_behind()
    bad += after != before
    seconds = round(time.monotonic() - began, 1)
    whole = {"jobs": count, "first": args.first, "wrong": bad, "seconds": seconds}
    print(json.dumps(whole | ({"left": [before, after]} if after != before else {})))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
