"""Parts with lengths of their own, of more ranks than a team has."""

import numpy as np
import pytest
from long import long_after
from parts import (
    HOWS,
    check_all_gather,
    check_all_to_all,
    check_gather,
    check_reduce_scatter,
    check_scatter,
)

import kccl


@pytest.mark.parametrize("world_size", long_after(1, [11, 9, 16]))
def test_more_ranks_than_a_team_has(world_size):
    """Groups of one size and of several; small parts, long ones and none."""

    def main(comm):
        last = world_size - 1
        for counts in ([5, 0, 1, 700] * 4, [0] * 16, [3] * 16):
            given = counts[:world_size]
            for how in HOWS:
                check_all_gather(comm, how, given, "int16")
                check_reduce_scatter(comm, how, given, "float16", "sum")
                check_all_to_all(comm, how, given, "int16")
                for root in (0, last):
                    check_gather(comm, how, given, "int16", root)
                    check_scatter(comm, how, given, "int16", root)
        x = np.zeros(counts[comm.rank], np.int16)
        op = comm.all_gather.prepare(x, counts=given)
        assert op.plan.name == "all_gather_grouped_parts" and "longest" in op.plan.explain()
        assert op().size == sum(given)
        ones = [1] * world_size
        x = np.arange(world_size) + 100 * comm.rank
        op = comm.all_to_all.prepare(x, out=x, send_counts=ones, recv_counts=ones, channel=1)
        assert "each part is a message" in op.plan.explain()
        for _ in range(2):
            assert op() is x
        assert (x == np.arange(world_size) + 100 * comm.rank).all()

    kccl.run_threads(main, world_size, timeout=60)


def test_messages_of_callers_are_no_parts_of_a_call():
    """A receive of any rank with any tag takes no part, nor a part of another channel."""
    world_size = 9

    def main(comm):
        right, left = (comm.rank + 1) % world_size, (comm.rank - 1) % world_size
        counts = [20_000] * world_size
        x = np.repeat(np.arange(world_size), 20_000) + 100 * comm.rank
        wanted = np.repeat(100 * np.arange(world_size), 20_000) + comm.rank
        note = np.zeros(3)
        request = comm.irecv(note)
        for channel in (1, 0, 1):
            options = {"send_counts": counts, "recv_counts": counts, "channel": channel}
            assert (comm.all_to_all(x, **options) == wanted).all()
        comm.send(np.full(3, float(comm.rank)), right, tag=5)
        request.wait()
        assert (request.source, request.tag) == (left, 5) and (note == left).all()

    kccl.run_threads(main, world_size, timeout=60)


def test_more_ranks_than_a_team_has_name_the_parts_that_differ():
    """And go on after reset(). Rank 3 sends rank 8 one element more than that one expects."""
    world_size = 9

    def main(comm):
        sends, receives = [2] * world_size, [2] * world_size
        if comm.rank == 3:
            sends[8] = 3
        x = np.ones(sum(sends), np.float32)
        counts = {"send_counts": sends, "recv_counts": receives}
        with pytest.raises(kccl.InvalidArgument, match="rank 8 expects 8 bytes of rank 3, which "):
            for _ in range(2):
                comm.all_to_all(x, **counts)
        comm.reset()
        sends[8] = 2
        assert comm.all_to_all(x[:18], **counts).sum() == 18

    kccl.run_threads(main, world_size, timeout=60)


def test_more_ranks_than_a_team_has_name_who_is_late():
    world_size = 9

    def main(comm):
        comm.timeout = 10 if comm.rank == 4 else 0.5
        ones = [1] * world_size
        if comm.rank != 4:
            with pytest.raises(kccl.Timeout, match=r"all_to_all_parts on channel 2: .*peer 4"):
                comm.all_to_all(np.zeros(world_size), send_counts=ones, recv_counts=ones, channel=2)
        comm.timeout = 10
        comm.reset()

    kccl.run_threads(main, world_size, timeout=60)


@pytest.mark.parametrize("world_size", [9, 12])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_more_ranks_than_a_team_has_notice_other_counts(world_size, name):
    """The longest part and the sum are the same, and one rank's counts differ."""

    def main(comm):
        counts = [5, 5, 9, *[5] * (world_size - 3)]
        if comm.rank == world_size - 1:
            counts[:2] = 4, 6
        size = counts[comm.rank] if name == "all_gather" else sum(counts)
        with pytest.raises(kccl.InvalidArgument) as caught:
            for _ in range(2):
                getattr(comm, name)(np.zeros(size, np.float32), counts=counts)
        text = str(caught.value)
        assert "the ranks disagree about this call" in text and name in text, text
        assert text.count("counts with check sum") == 2, text

    kccl.run_threads(main, world_size, timeout=60)
