"""Ranks that make different calls of more than a few packets are told so, on all ranks."""

import json

import numpy as np
import pytest
from ranks import Job

import kccl

KIB, MIB = 1 << 10, 1 << 20
CMA = "all_reduce_two_shot_cma_simple"


def floats(nbytes):
    return np.ones(nbytes // 4, np.float32)


def differ(calls, world_size=2):
    """Makes calls[rank](comm), or the last one's, and returns what each rank raised."""

    def main(comm):
        comm.barrier()
        comm.barrier()
        comm.timeout = 20
        with pytest.raises(kccl.InvalidArgument) as raised:
            calls[min(comm.rank, len(calls) - 1)](comm)
            comm.barrier()
        with pytest.raises(kccl.InvalidArgument):
            comm.all_reduce(floats(8))
        comm.reset()
        x = np.full(2, comm.rank, np.int32)
        assert comm.all_reduce(x)[0] == sum(range(world_size))
        return str(raised.value)

    return kccl.run_threads(main, world_size)


# The bytes of each rank, and the algorithm on each.
LENGTHS = [
    (8 * MIB, 4 * MIB, CMA, CMA),
    (8 * MIB, 8 * MIB - 4, CMA, CMA),
    (8 * MIB, 64 * KIB, CMA, "all_reduce_two_shot_pull_simple"),
    (64 * KIB, 32 * KIB, "all_reduce_two_shot_pull_simple", "all_reduce_one_shot_pull_simple"),
    (4 * KIB, 2 * KIB, "all_reduce_one_shot_pull_simple", "all_reduce_one_shot_pull_simple"),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("first", "other", "algorithm", "others"), LENGTHS)
def test_all_reduces_of_unequal_lengths(world_size, first, other, algorithm, others):
    told = differ(
        [
            lambda comm: comm.all_reduce(floats(first), algorithm=algorithm),
            lambda comm: comm.all_reduce(floats(other), algorithm=others),
        ],
        world_size,
    )
    names = {f"{algorithm}, {first} bytes", f"{others}, {other} bytes"}
    for text in told:
        assert text.startswith("the ranks disagree about this call: rank ")
        assert all(f"rank 0: {algorithm}, {first} bytes, float32, sum" in text for text in told)
        assert all(name in text for name in names)
        assert "comm.reset()" in text


OTHERS = {
    "operator": (
        lambda comm: comm.all_reduce(floats(MIB), op="max"),
        lambda comm: comm.all_reduce(floats(MIB)),
        ["float32, max", "float32, sum"],
    ),
    "type": (
        lambda comm: comm.all_reduce(floats(MIB)),
        lambda comm: comm.all_reduce(floats(MIB).view(np.int32)),
        ["float32, sum", "int32, sum"],
    ),
    "collective": (
        lambda comm: comm.all_reduce(floats(32 * KIB)),
        lambda comm: comm.all_gather(floats(32 * KIB)),
        ["all_reduce_", "all_gather_pull_simple, 32768 bytes;"],
    ),
    "reduce_scatter": (
        lambda comm: comm.reduce_scatter(floats(512 * KIB)),
        lambda comm: comm.reduce_scatter(floats(256 * KIB)),
        ["524288 bytes, float32", "262144 bytes, float32"],
    ),
    "all_gather": (
        lambda comm: comm.all_gather(floats(256 * KIB)),
        lambda comm: comm.all_gather(floats(128 * KIB)),
        ["262144 bytes;", "131072 bytes;"],
    ),
    "broadcast": (
        lambda comm: comm.broadcast(floats(256 * KIB)),
        lambda comm: comm.broadcast(floats(128 * KIB)),
        ["262144 bytes;", "131072 bytes;"],
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_calls_of_other_kinds(what):
    *calls, words = OTHERS[what]
    for text in differ(calls):
        assert text.startswith("the ranks disagree about this call: rank ")
        assert all(word in text for word in words), text


def test_the_same_calls_agree_whatever_came_before():
    """Descriptions of earlier calls of either parity are not compared."""

    def main(comm):
        for number in range(40):
            comm.all_reduce(floats((4 + number % 7) * KIB))
            if number % 3 == 0:
                comm.all_reduce(floats(8))
            if number % 5 == 0:
                comm.broadcast(floats((1 + number) * KIB), root=number % 3)
            comm.all_gather(floats((2 + number % 4) * KIB))
            if number % 4 == 0:
                comm.barrier()

    kccl.run_threads(main, 3)


def test_processes_with_unequal_arrays_both_raise():
    program = """
comm = kccl.init()
x = np.ones((1 << 22) >> comm.rank, np.float32)
try:
    for _ in range(3):
        comm.all_reduce(x)
    say(text="no error")
except kccl.InvalidArgument as error:
    say(text=str(error))
"""
    with Job(2, program) as job:
        output, errors = job.process.communicate(timeout=60)
    told = [json.loads(line)["text"] for line in output.splitlines()]
    assert len(told) == 2, output + errors
    for text in told:
        assert "16777216 bytes" in text and "8388608 bytes" in text
