"""Ranks that the scheduler puts on one core, although there are enough of them at the start."""

from ranks import run

PROGRAM = """
comm = kccl.init()
x = np.ones(2, np.float32)
op = comm.all_reduce.prepare(x)
op()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
batches_us = []
for _ in range(30):
    began = time.perf_counter()
    for _ in range(20):
        op()
    batches_us.append((time.perf_counter() - began) / 20 * 1e6)
say(rank=comm.rank, us=sorted(batches_us)[10])
"""


def test_a_rank_that_waits_gives_its_core_to_its_peer():
    """A rank that polls on for its time slice makes a call take milliseconds."""
    code, facts, err = run(2, PROGRAM)
    assert code == 0, err
    assert max(fact["us"] for fact in facts.values()) < 300
