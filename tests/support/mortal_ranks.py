"""Jobs of real processes that call shrink(), in which some are killed before their k-th send.

    python tests/support/mortal_ranks.py each 4     # 4 ranks; one ends, at any moment
    python tests/support/mortal_ranks.py soak 10    # 10 minutes; several end, at random moments

tests/ranks/test_shrink_processes.py runs the first, `make shrink-soak` the second. Both print a
line of JSON for each job that went wrong, and one for the whole. The ranks are forked from a
process that has imported KCCL, so a job takes some 40 ms.
"""

import itertools
import json
import os
import random
import select
import signal
import socket
import sys
import time
import uuid

import numpy as np

import kccl
from kccl.ranks import survivors

LIMIT = 20
# Whether a planted bug shows depends on the order in which the killed rank's peers run, and the
# machine chooses that. While other programs are running, one search in eight finds nothing.
SEARCHES = 10
# What sends: a message, a descriptor, and a connection with its rank.
# A communicator that is dropped sends a farewell. What is killed there has done its work.
_kept = []
_SENDS = ("send", "sendall", "sendmsg", "connect")


def kill_before(last):
    """This process kills itself before its send number `last`, from 1."""
    sends = itertools.count(1)

    def mortal(send):
        def wrapper(self, *args, **kwargs):
            if next(sends) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(self, *args, **kwargs)

        return wrapper

    for name in _SENDS:
        setattr(socket.socket, name, mortal(getattr(socket.socket, name)))


def rank(number, world_size, rendezvous, last, settled):
    """What one rank does: the old ranks whose sum it has in the end, or its error.

    Args:
        number: Its rank.
        world_size: Number of ranks.
        rendezvous: The job's unique name.
        last: It is killed before this send of shrink(); 0: before shrink(); None: it lives.
        settled: Descriptor that is at its end once the ranks with `last` 0 are gone.
    """
    os.environ |= {
        "KCCL_RENDEZVOUS": rendezvous,
        "KCCL_RANK": str(number),
        "KCCL_WORLD_SIZE": str(world_size),
        "KCCL_TIMEOUT": str(LIMIT),
        "KCCL_FIRST_TIMEOUT": str(LIMIT),
    }
    comm = kccl.init(backend="host")
    if last == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(settled, 1)
    if last is not None:
        kill_before(last)
    while True:
        comm = comm.shrink()
        _kept.append(comm)
        x = np.full(3, 1 << number, np.int64)
        try:
            comm.all_reduce(x)
            comm.barrier()
        except kccl.PeerLost:
            # A member may end after it has voted.
            continue
        return x.tolist()


def job(world_size, lasts):
    """Starts one rank for each number, and waits for all.

    Args:
        world_size: Number of ranks.
        lasts: Rank -> its last send, as rank() takes it.

    Returns:
        Rank -> what rank() returned, of the ranks that were not killed.
    """
    rendezvous = uuid.uuid4().hex
    settled, alive = os.pipe()
    outcomes, pids = {}, {}
    for number in range(world_size):
        outcomes[number], result = os.pipe()
        pids[number] = os.fork()
        if pids[number] == 0:
            try:
                # Only those that end before shrink() keep this open.
                if lasts.get(number) != 0:
                    os.close(alive)
                said = rank(number, world_size, rendezvous, lasts.get(number), settled)
                os.write(result, json.dumps(said).encode())
            except BaseException as error:
                os.write(result, json.dumps(repr(error)).encode())
            finally:
                os._exit(0)
        os.close(result)
    os.close(settled)
    os.close(alive)
    deadline = time.monotonic() + 3 * LIMIT
    said = {}
    for number, outcome in outcomes.items():
        hangs = not select.select([outcome], [], [], max(deadline - time.monotonic(), 0))[0]
        if hangs:
            os.kill(pids[number], signal.SIGKILL)
        text = os.read(outcome, 4096)
        os.close(outcome)
        _, status = os.waitpid(pids[number], 0)
        if hangs:
            said[number] = "it hangs"
        elif text:
            said[number] = json.loads(text)
        elif lasts.get(number) is None or os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            said[number] = f"it ended with status {status}"
    return said


def wrong(world_size, lasts):
    """Runs a job. Returns the ranks that lived, and what is wrong or ""."""
    said = job(world_size, lasts)
    sums = [sum(1 << number for number in said)] * 3
    is_right = all(outcome == sums for outcome in said.values())
    return set(said), "" if is_right else f"sum must be {sums}"


def each_moment(world_size):
    """One rank ends before its first send, its second, ... until it lives. With four ranks also
    after another one was lost. Yields the jobs: who ends when, who lived, and what is wrong.
    """
    for victim in range(world_size):
        for lost in [None] if world_size < 4 else [None, (victim + 1) % world_size]:
            for last in itertools.count(1):
                lasts = {victim: last} if lost is None else {victim: last, lost: 0}
                lived, error = wrong(world_size, lasts)
                yield lasts, lived, error
                if error or victim in lived:
                    break


def random_moments(minutes, seed):
    """Up to all but one of three to six ranks end at random moments."""
    moment = random.Random(seed)
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        world_size = moment.randrange(3, 7)
        victims = moment.sample(range(world_size), moment.randrange(1, world_size))
        lasts = {victim: moment.randrange(12 * world_size) for victim in victims}
        yield lasts, *wrong(world_size, lasts)


def plant(bug):
    """Plants a bug in shrink(). Of SEARCHES runs of each_moment(), one must find it."""
    survivor = survivors._Survivor
    say = survivor._say

    def complete(self):
        return self._part is not None and len(set(self._members) - set(self._votes())) <= 1

    def say_own_vote(self):
        heard, self._heard = self._heard, {}
        say(self)
        self._heard = heard

    name, planted = {
        "one vote missing": ("_is_complete", complete),
        "votes not relayed": ("_say", say_own_vote),
    }[bug]
    setattr(survivor, name, planted)


def main():
    what, number, *bugs = sys.argv[1:]
    # No rank is to import later.
    kccl.init(backend="host").close()
    for bug in bugs:
        plant(bug)
    if what == "soak":
        jobs = random_moments(float(number), time.time())
    else:
        searches = SEARCHES if bugs else 1
        jobs = itertools.chain.from_iterable(each_moment(int(number)) for _ in range(searches))
    count, bad, started = 0, 0, time.monotonic()
    for lasts, lived, error in jobs:
        count += 1
        if error:
            bad += 1
            print(json.dumps({"killed before send": lasts, "lived": sorted(lived), "wrong": error}))
            if bugs:
                break
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"jobs": count, "wrong": bad, "seconds": seconds}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
