"""What a call may take of a GPU, so that the calls of KCCL_STREAMS streams fit side by side."""

import json
from random import Random

import pytest

import kccl
from kccl.backends import gpu as on_gpus
from kccl.backends.shapes import launch_shape, longest_row
from kccl.backends.share import Share, agree
from kccl.base import env
from kccl.plan.specs import BY_NAME, KERNELS

H200 = 132
REGISTERS = (32, 40, 64, 96, 128, 255)
COUNTS = (1, 4000, 1 << 16, 1 << 20, 1 << 24)
# Kernels that wait for peers, and whose blocks may have any number of threads.
FREE = [
    spec
    for spec in KERNELS
    if "cuda" in spec.targets and spec.waits and not spec.takes_rows and spec.name != "send_recv"
]


def occupancy_of(registers):
    """How many blocks of so many threads a multiprocessor of an H200 runs at once."""
    of_warp = -(-registers * 32 // 256) * 256
    return lambda threads: min(2048 // threads, 32, 65536 // (of_warp * (threads // 32)))


def most_of(registers):
    return min(1024, 65536 // (-(-registers * 32 // 256) * 256) * 32)


def shape(share, kernel, registers, given=(0, 0), **fields):
    return share.shape(
        BY_NAME[kernel],
        fields,
        "float32",
        most_of(registers),
        given,
        occupancy=occupancy_of(registers),
        warp_size=32,
    )


def of(streams, multiprocessors=H200, world_size=2):
    return Share(streams, multiprocessors, longest_row(8192, world_size))


@pytest.mark.parametrize("streams", [1, 2, 3, 8])
@pytest.mark.parametrize("multiprocessors", [20, 108, H200])
def test_every_call_leaves_room_for_the_other_streams(streams, multiprocessors):
    share = of(streams, multiprocessors)
    for spec in FREE:
        for count in COUNTS:
            found = [shape(share, spec.name, each, count=count) for each in REGISTERS]
            assert len({blocks for blocks, _ in found}) == 1, "ranks may have other compilers"
            for registers, (blocks, threads) in zip(REGISTERS, found, strict=True):
                assert 1 <= blocks <= min(multiprocessors, 128)
                assert threads % 32 == 0 and threads >= 32
                assert occupancy_of(registers)(threads) >= streams, (spec.name, registers)


@pytest.mark.parametrize("streams", [1, 2])
def test_shapes_of_which_enough_fit_already_are_not_bounded(streams):
    """So with one stream, the shapes on an H200 have no bound at all."""
    for spec in FREE:
        for count in COUNTS:
            for registers in REGISTERS:
                most = most_of(registers)
                free = launch_shape(spec, count, "float32", most, warp_size=32)
                if occupancy_of(registers)(free[1]) >= streams:
                    assert shape(of(streams), spec.name, registers, count=count) == free


def test_long_calls_have_fewer_threads():
    """Where a multiprocessor would run fewer of their blocks than there are streams."""
    step = "all_reduce_two_shot_push_simple"
    assert shape(of(1), step, 80, count=1 << 22) == (128, 800)
    assert shape(of(2), step, 80, count=1 << 22) == (128, 384)
    assert shape(of(2), step, 64, count=1 << 22) == (128, 512)
    assert shape(of(8), step, 64, count=1 << 22) == (128, 128)
    assert shape(of(8), step, 255, count=1 << 22) == (128, 32)


def test_what_a_caller_asks_for_is_bounded_too():
    ll16 = "all_reduce_one_shot_ll16"
    assert shape(of(2), ll16, 64, (4, 1024), count=1 << 20) == (4, 512)
    assert shape(of(2, 20), ll16, 64, (64, 128), count=1 << 20) == (20, 512)
    assert shape(of(8), ll16, 64, (4, 64), count=256) == (2, 64)
    assert shape(of(4), "put", 32, (2, 1024), count=1 << 20) == (1, 512)


def test_too_many_streams_for_a_kernel_are_refused():
    with pytest.raises(kccl.InvalidArgument, match=r"KCCL_STREAMS is 8, must be at most 3 for put"):
        of(8).shape(BY_NAME["put"], {}, "", 64, (0, 0), occupancy=lambda _: 3, warp_size=64)


def test_kernels_that_wait_for_nobody_have_no_bounds():
    for kernel in ("scale", "narrow"):
        assert shape(of(8, 20), kernel, 64, count=1 << 22) == (128, 1024)
    assert shape(of(8, 20), "rms_norm", 126, count=128 * 4096, width=4096) == (128, 512)


def test_rows_that_fill_a_multiprocessor_share_them():
    """Rows of 8 and 16 KB on two ranks, of 4 and 8 KB on more: 256 and 512, 128 and 256 threads."""

    def rows(share, number, width):
        fields = {"count": number * width, "width": width}
        return shape(share, "all_reduce_rms_norm", 126, **fields)

    assert rows(of(2), 128, 2048) == (128, 256)
    assert rows(of(2), 128, 4096) == (66, 512)
    assert rows(of(2), 8, 4096) == (8, 512)
    assert rows(of(2, world_size=4), 128, 1024) == (128, 128)
    assert rows(of(2, world_size=4), 128, 2048) == (66, 256)
    assert rows(of(1), 128, 4096) == (128, 512)
    assert rows(of(8), 128, 512) == (128, 64)
    assert rows(of(8), 128, 1024) == (16, 128)
    assert rows(of(8, 4), 128, 1024) == (1, 128)


def test_messages_of_a_group_share_the_blocks():
    lengths = [1 << 20] * 3 + [0] * 5
    fields = {"messages": 0b111, "sends": lengths, "receives": [0] * 8, "channel": 0}
    assert shape(of(2), "send_recv", 64, **fields)[0] == 3 * 32
    assert shape(of(2, 20), "send_recv", 64, **fields)[0] == 3 * 6
    assert shape(of(8), "send_recv", 64, **fields)[1] == 128


def test_only_small_calls_may_begin_early():
    """gpu.cpp wants 4. At two streams, that is what fits at least four times, as before."""
    two, eight = of(2), of(8)
    assert [two.fit(128, each) for each in (2, 3, 4, 16)] == [0, 0, 4, 16]
    assert (two.fit(66, 2), two.fit(67, 3), two.fit(1, 16)) == (4, 0, 2112)
    # Wide rows.
    assert (two.fit(33, 1), two.fit(34, 1)) == (4, 0)
    assert (eight.fit(128, 15), eight.fit(128, 16)) == (0, 16)
    assert (eight.fit(66, 8), eight.fit(67, 8), eight.fit(8, 1), eight.fit(9, 1)) == (16, 0, 16, 0)


# ---- Placements --------------------------------------------------------------------------------

UNITS, MULTIPROCESSORS, CALLS = 48, 6, 5


class Rank:
    """A GPU that places blocks wherever there is room, and lets early calls in.

    Each stream has calls (blocks, units of a multiprocessor that a block takes).
    """

    def __init__(self, random, streams):
        self.random = random
        self.free = [UNITS] * MULTIPROCESSORS
        # Where the blocks of a stream's call lie, and those of its next one, which came early.
        self.placed = [([], []) for _ in streams]
        # Which stream's blocks come first, and whether blocks crowd together.
        self.order = random.sample(range(len(streams)), len(streams))
        self.crowds = random.random() < 0.5

    def place(self, stream, calls, admits):
        """Places one block of a stream's call, or of the next one. Returns whether it could."""
        for call, places in zip(calls, self.placed[stream], strict=False):
            blocks, units = call
            if len(places) < blocks:
                where = [i for i, room in enumerate(self.free) if room >= units]
                if not where:
                    return False
                at = self.random.choice(where)
                if self.crowds:
                    at = min(where, key=lambda i: self.free[i])
                self.free[at] -= units
                places.append(at)
                return True
            if not admits:
                return False
        return False

    def end(self, stream, units):
        current, early = self.placed[stream]
        for at in current:
            self.free[at] += units
        self.placed[stream] = (early, [])


def random_calls(random, most_units):
    blocks = random.choices((1, MULTIPROCESSORS // 2, MULTIPROCESSORS), (1, 1, 3), k=CALLS)
    return [(each, random.choice((1, 2, most_units // 2, most_units))) for each in blocks]


def largest_calls(random, most_units):
    return [(MULTIPROCESSORS, most_units)] * CALLS


def all_end(seed, num_streams, share, calls_of):
    """Runs streams of calls on two GPUs. Returns whether all calls end."""
    random = Random(seed)
    streams = [calls_of(random, UNITS // share.streams) for _ in range(num_streams)]
    ranks = [Rank(random, streams) for _ in range(2)]
    while any(streams):
        has_moved = False
        for rank in ranks:
            for stream in rank.order:
                calls = streams[stream]
                small = [share.fit(blocks, UNITS // units) > 0 for blocks, units in calls[:2]]
                while calls and rank.place(stream, calls[:2], len(small) == 2 and all(small)):
                    has_moved = True
        for stream, calls in enumerate(streams):
            if calls and all(len(rank.placed[stream][0]) == calls[0][0] for rank in ranks):
                _, units = calls.pop(0)
                for rank in ranks:
                    rank.end(stream, units)
                has_moved = True
                break  # others end later: a rank's room is free for a while
        if not has_moved:
            return False
    return True


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_streams_never_block_each_other_wherever_blocks_lie(streams):
    share = Share(streams, MULTIPROCESSORS, 0)
    assert all(all_end(seed, streams, share, random_calls) for seed in range(150))
    assert all(all_end(seed, streams, share, largest_calls) for seed in range(20))
    # With twice as many, each GPU may be full of streams that the other has not begun.
    assert not all(all_end(seed, 2 * streams, share, largest_calls) for seed in range(150))


# ---- Agreement ---------------------------------------------------------------------------------


class Mesh:
    rank = 1

    def __init__(self, *others):
        self.others = others

    def allgather(self, mine, what, timeout):
        return [json.dumps(other).encode() for other in self.others] + [mine]


def test_the_gpu_with_fewest_multiprocessors_bounds_all():
    assert agree(Mesh([2, 114]), 2, 132, 8192, 1.0) == Share(2, 114, 8192)
    with pytest.raises(kccl.InvalidArgument, match="KCCL_STREAMS is 4 on rank 1 and 2 on rank 0"):
        agree(Mesh([2, 132]), 4, 132, 8192, 1.0)


def test_the_variable_has_a_range():
    assert env.read({}).streams == 2
    assert [env.read({"KCCL_STREAMS": str(each)}).streams for each in (1, 8)] == [1, 8]
    for wrong in ("0", "9", "-1"):
        with pytest.raises(kccl.InvalidArgument, match=f"KCCL_STREAMS={wrong} must be between 1 "):
            env.read({"KCCL_STREAMS": wrong})


@pytest.mark.parametrize(("streams", "wanted"), [("1", (3, 512)), ("4", (3, 128))])
def test_a_prepared_call_keeps_its_share(toy_ranks, monkeypatch, streams, wanted):
    """On the GPUs that are made up, which have 3 multiprocessors."""
    monkeypatch.setenv("KCCL_STREAMS", streams)
    monkeypatch.setattr(on_gpus, "occupancy", lambda device, function, threads: 512 // threads)

    def main(comm):
        x = comm.empty(1 << 16)
        return comm.broadcast.prepare(x).shape

    assert toy_ranks(main) == [wanted]
