"""A communicator that is dropped without close() gives its descriptors back."""

import gc
import os

from ranks import run

import kccl

COUNT = """
def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
"""

DROPPED = """
import gc
comm = kccl.init()
comm.barrier()
before = count()
for number in range(100):
    part = comm.split(0)
    x = part.all_reduce(np.ones(4, np.float32))
    assert x[0] == comm.world_size
    if number % 2 == 0:
        part.all_reduce.prepare(x)()
del part
comm.barrier()
after = count()
say(rank=comm.rank, before=before, after=after)
comm.barrier()
"""


def test_dropped_parts_of_processes():
    code, said, err = run(3, COUNT + DROPPED)
    assert code == 0, err
    assert sorted(said) == [0, 1, 2]
    for fact in said.values():
        assert fact["after"] == fact["before"]


def test_dropped_communicators_of_threads():
    def open_now():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def main(comm):
        for _ in range(20):
            comm.split(0).barrier()

    kccl.run_threads(main, 2)
    before = open_now()
    kccl.run_threads(main, 3)
    assert open_now() == before


def test_a_prepared_call_keeps_what_it_uses():
    """It works, and hears of the end of a peer, when the communicator itself is dropped."""
    program = """
import gc
comm = kccl.init()
x = np.ones(4, np.float32)
call = comm.split(0).all_reduce.prepare(x)
gc.collect()
call()
comm.barrier()
if comm.rank == 0:
    os._exit(3)
try:
    call()
except kccl.PeerLost as error:
    say(rank=comm.rank, peer=error.peer, sum=float(x[0]))
"""
    code, said, err = run(2, program)
    assert code == 3, err
    assert said == {1: {"rank": 1, "peer": 0, "sum": 2.0}}
