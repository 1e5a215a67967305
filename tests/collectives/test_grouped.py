"""Collectives of more than 8 ranks on the host; tests/support/groups.py has their results. The same
checks at 8 ranks or fewer.
"""

from functools import cache

import numpy as np
import oracle
import pytest
from groups import (
    check_all,
    check_reductions,
    check_to_root_and_lower,
    groups_of,
    reduced,
    same,
)
from long import long_after

import kccl
from kccl.base import dtypes
from kccl.plan.ops import ops_of
from kccl.topology import placement

INTERLEAVED = tuple(tuple(range(first, 12, 3)) for first in range(3))
UNEVEN_AND_MIXED = ((0, 2, 4, 6, 8), (1, 3, 9), (5,), (7, 10))


@pytest.mark.takes(20)
@pytest.mark.parametrize("world_size", long_after(1, [9, 16, 1]))
def test_every_collective(world_size):
    kccl.run_threads(check_all, world_size, timeout=60)


@pytest.mark.parametrize("groups", long_after(0, [(UNEVEN_AND_MIXED,)]))
def test_groups_whose_ranks_are_not_consecutive(monkeypatch, groups):
    monkeypatch.setattr(placement, "groups", lambda *_: groups)
    kccl.run_threads(check_all, sum(map(len, groups)), timeout=60)


@pytest.mark.parametrize("name", long_after(0, oracle.EVERY_DTYPE[::-1]))
def test_every_type_and_operator_of_16_ranks(name):
    def main(comm):
        for op in oracle.ops_of(name):
            check_reductions(comm, name, op, lengths=(33,))
            # The longer one is a scan of several pieces.
            check_to_root_and_lower(comm, name, op, lengths=(33, 300))

    kccl.run_threads(main, 16, timeout=60)


@pytest.mark.long
def test_every_form_has_its_steps_for_every_type_and_operator():
    def main(comm):
        for dtype in dtypes.ALL:
            x = np.ones(18, dtypes.to_numpy(dtype))
            for op in ops_of(dtype):
                for name in ("all_reduce", "reduce_scatter", "reduce", "scan"):
                    for algorithm in comm.algorithms(name):
                        getattr(comm, name).prepare(x, op=op, algorithm=algorithm)

    kccl.run_threads(main, 9, timeout=60)


def test_a_prepared_call_and_a_repeated_one():
    def main(comm):
        x = np.empty(5, np.float32)
        op = comm.all_reduce.prepare(x)
        assert op.plan.name == "all_reduce_grouped_whole"
        barrier = comm.barrier.prepare(channel=2)
        for number in range(50):
            x[:] = comm.rank + number
            assert (op() == 45 + 10 * number).all() and op() is x
            x[:] = 1
            assert (comm.all_reduce(x) == 10).all()
            barrier()
        assert op.time(5, warmup=2).shape == (5,)
        assert comm.all_reduce(np.empty(0, np.float32)).size == 0

    kccl.run_threads(main, 10, timeout=60)


def test_channels_do_not_mix():
    def main(comm):
        for channel in (3, 0, 1, 3, 2):
            x = np.full(9, comm.rank, np.int32)
            assert (comm.all_reduce(x, channel=channel) == 36).all()

    kccl.run_threads(main, 9, timeout=60)


def test_put_and_get_reach_every_rank():
    def main(comm):
        window, size = comm.window(comm.world_size * 8), comm.world_size
        comm.barrier()
        for peer in range(size):
            comm.put(np.array([100 * comm.rank + peer]), peer, window, 8 * comm.rank)
        comm.barrier()
        found = np.frombuffer(window.local, np.int64)
        assert (found == 100 * np.arange(size) + comm.rank).all()
        peer = (comm.rank + 8) % size
        taken = comm.get(np.zeros(size, np.int64), peer, window)
        assert (taken == 100 * np.arange(size) + peer).all()
        comm.barrier()
        for refused in (lambda: comm.signal(0), comm.wait, comm.device_comm):
            with pytest.raises(kccl.InvalidArgument, match=r"for at most 8 ranks.*comm\.split"):
                refused()
        comm.barrier()

    kccl.run_threads(main, 10, timeout=60)


@pytest.mark.parametrize("world_size", long_after(1, [23, 43, 64]))
def test_three_to_eight_groups(world_size):
    """A short call and a long one of each collective. Groups are as large as each other at 64
    ranks. tests/topology/test_groups.py divides every number of ranks.
    """
    ranks = np.arange(world_size)
    root = 37 % world_size

    @cache
    def inputs_and_sum(count, groups):
        rng = np.random.default_rng(count)
        inputs = [oracle.random_floats("float32", count, rng) for _ in ranks]
        return inputs, reduced(inputs, "sum", groups)

    def main(comm):
        rank, groups = comm.rank, groups_of(comm)
        for count in (3, 20_000):
            inputs, wanted = inputs_and_sum(count, groups)
            same(comm.all_reduce(inputs[rank].copy()), wanted)
            found = comm.reduce(inputs[rank].copy(), root)
            if rank == root:
                same(found, wanted)
            else:
                assert found is None
        for count in (1, 2200):
            x = np.full(count, rank)
            assert (comm.all_gather(x) == ranks[:, None]).all()
            assert (comm.broadcast(x.copy(), root) == root).all()
            assert (comm.scan(x.copy()) == rank * (rank + 1) // 2).all()
            found = comm.gather(x, root)
            assert found is None if rank != root else (found == ranks[:, None]).all()
        for count in (1, 40):
            table = np.repeat(ranks, count)
            x = np.full(count, rank)
            found = comm.scatter(table if rank == root else None, root, out=x)
            assert (found == rank).all()
            sent = np.repeat(ranks + 100 * rank, count)
            received = np.repeat(rank + 100 * ranks, count)
            assert (comm.all_to_all(sent) == received).all()
            counts = [count] * world_size
            again = comm.all_to_all(sent, send_counts=counts, recv_counts=counts)
            assert (again == received).all()
            found = comm.reduce_scatter(sent)
            assert (found == world_size * rank + 100 * ranks.sum()).all()
            comm.barrier()

    kccl.run_threads(main, world_size, timeout=60)


def test_what_a_plan_explains():
    def main(comm):
        return comm.plan("all_reduce", 8, "float32").explain()

    told = kccl.run_threads(main, 12)[7]
    assert "over 12 ranks on host" in told
    assert "2 groups of 6 ranks. Rank 7 is in the group 6-11 and in the team across groups" in told
    assert "step 1: all_reduce_one_shot_ll16 in the group (6 ranks, 8 bytes)" in told
    assert "step 2: all_reduce_one_shot_ll16 across groups (2 ranks, 8 bytes)" in told


@pytest.mark.parametrize(
    ("preferred", "world_size", "chosen"),
    [
        ("all_reduce_grouped_divided", 9, "all_reduce_grouped_divided"),
        # A form that cannot run, and a kernel, which the teams' steps then have.
        ("all_reduce_grouped_divided", 11, "all_reduce_grouped_whole"),
        ("all_reduce_one_shot_sentinel", 9, "all_reduce_grouped_whole"),
    ],
)
def test_kccl_algorithm_names_forms_too(monkeypatch, preferred, world_size, chosen):
    monkeypatch.setenv("KCCL_ALGORITHM", preferred)

    def main(comm):
        assert (comm.all_reduce(np.ones(20, np.float32)) == world_size).all()
        return comm.plan("all_reduce", 80, "float32").explain()

    for told in kccl.run_threads(main, world_size, timeout=60):
        _, choice, *others = told.splitlines()
        assert choice.startswith(f"  {chosen}: ")
        is_preferred = chosen == preferred
        assert ("KCCL_ALGORITHM prefers it" in choice) == is_preferred
        assert ("KCCL_ALGORITHM prefers another" in others[0]) == is_preferred
        assert preferred in told


def test_kccl_algorithm_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("KCCL_ALGORITHM", "ring")
    wanted = "KCCL_ALGORITHM is 'ring', must be one of .*all_reduce_grouped_divided"
    with pytest.raises(kccl.InvalidArgument, match=wanted):
        kccl.run_threads(lambda comm: None, 9)


@pytest.mark.parametrize("backend", ["sim", "cuda"])
def test_other_backends_have_no_groups(backend):
    with pytest.raises(kccl.InvalidArgument, match="world_size is 9, must be between 1 and 8"):
        kccl.run_threads(lambda comm: None, 9, backend=backend)
