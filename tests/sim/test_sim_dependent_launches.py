"""Launches that are programmatic dependents, and streams: when they begin, and what they see."""

import numpy as np
import pytest
from worlds import World

import kccl
from kccl.sim.machine import Simulation

SOURCE = """
#include <kccl/kccl.cuh>

using kccl::mem::Order;
using kccl::mem::Scope;

// Writes a word, lets dependents in and writes another.
KCCL_KERNEL void first(uint32_t* words) {
    kccl::mem::await_kernels_before();
    if (!kccl::leads(kccl::block())) return;
    kccl::mem::store_plain(words, 1u);
    kccl::mem::launch_dependents();
    kccl::mem::store_plain(words + 1, 2u);
}

// Reads one of them into a third. Waits before it, behind it, in another thread, or not at all.
KCCL_KERNEL void second(uint32_t* words, uint32_t which, uint32_t waits) {
    const bool leads = kccl::leads(kccl::block());
    if (waits == 1 || (waits == 3 && !leads)) kccl::mem::await_kernels_before();
    if (waits == 4) {
        if (!leads) kccl::mem::await_kernels_before();
        kccl::block().sync();
    }
    if (leads) kccl::mem::store_plain(words + 2, kccl::mem::load_plain(words + which));
    if (waits == 2) kccl::mem::await_kernels_before();
}

// The first `num` blocks let dependents in. Those from `end` on end; the others await the word.
KCCL_KERNEL void open(uint32_t* word, uint32_t num, uint32_t end) {
    const uint32_t block = kccl::platform::block_in_grid();
    if (!kccl::leads(kccl::block())) return;
    if (block < num) kccl::mem::launch_dependents();
    while (block < end && kccl::mem::load<Order::kAcquire, Scope::kDevice>(word) == 0) {
        kccl::mem::poll_pause();
    }
}

KCCL_KERNEL void tell(uint32_t* word, uint32_t waits) {
    if (waits != 0) kccl::mem::await_kernels_before();
    if (!kccl::leads(kccl::block())) return;
    kccl::mem::store<Order::kRelease, Scope::kDevice>(word, 1u);
}

// Lets dependents in at once and does not wait.
KCCL_KERNEL void pass() { kccl::mem::launch_dependents(); }
"""
BEFORE, BEHIND, NEVER, ELSEWHERE, ELSEWHERE_AND_SYNC = 1, 2, 0, 3, 4
SEEDS = 30


@pytest.fixture(scope="module")
def kernels():
    module = kccl.compile(SOURCE, ["first", "second", "open", "tell", "pass"])
    return {name: module.kernel(name) for name in ("first", "second", "open", "tell", "pass")}


def found(launches, **simulation):
    """The kinds of the first findings, over all seeds, "" for none; and what memory holds then."""
    with World(1, Simulation(ends_when_stuck=True, **simulation)) as world:
        words = world.window(16)[0].view(np.uint32)
        program = [[world.launch(0, *what, block=64, **how) for what, how in launches(words)]]
        reports = [world.run(program, seed) for seed in range(SEEDS)]
        kinds = {report.findings[0].kind if report.findings else "" for report in reports}
        return kinds, words.tolist()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("waits", "wanted"),
    [
        (BEFORE, ""),
        (ELSEWHERE_AND_SYNC, ""),
        (BEHIND, "data_race"),
        (NEVER, "data_race"),
        (ELSEWHERE, "data_race"),
    ],
)
def test_what_is_ordered_is_behind_the_wait(kernels, which, waits, wanted):
    """Also what was written before the dependents were let in: that orders nothing."""

    def launches(words):
        yield (kernels["first"], words), {}
        yield (kernels["second"], words, np.uint32(which), np.uint32(waits)), {"is_dependent": True}

    kinds, words = found(launches)
    assert kinds == {wanted}
    if not wanted:
        assert words[2] == which + 1


def test_an_ordinary_launch_need_not_wait(kernels):
    def launches(words):
        yield (kernels["first"], words), {}
        yield (kernels["second"], words, np.uint32(1), np.uint32(NEVER)), {}

    assert found(launches)[0] == {""}


@pytest.mark.parametrize(
    ("num", "end", "wanted"),
    [(2, 2, ""), (1, 1, ""), (1, 2, "deadlock"), (0, 2, "deadlock")],
    ids=["all let it in", "one has ended", "one has not", "none has"],
)
def test_it_begins_when_all_blocks_have_let_it_in_or_ended(kernels, num, end, wanted):
    """The launch before waits for it."""

    def launches(words):
        yield (kernels["open"], words, np.uint32(num), np.uint32(end)), {"grid": 2}
        yield (kernels["tell"], words, np.uint32(0)), {"is_dependent": True}

    assert found(launches)[0] == {wanted}


@pytest.mark.parametrize("how", [{"is_dependent": False}, {"is_dependent": True}])
def test_a_launch_that_waits_comes_behind_the_one_before(kernels, how):
    """An ordinary launch does, and a dependent from its wait on."""

    def launches(words):
        yield (kernels["open"], words, np.uint32(1), np.uint32(1)), {}
        yield (kernels["tell"], words, np.uint32(how["is_dependent"])), how

    assert found(launches)[0] == {"deadlock"}


def test_the_wait_is_for_the_launch_before_only(kernels):
    """One between that does not wait may have ended, and what it did not await is not ordered."""

    def launches(words):
        yield (kernels["first"], words), {}
        yield (kernels["pass"],), {"is_dependent": True}
        yield (kernels["second"], words, np.uint32(1), np.uint32(BEFORE)), {"is_dependent": True}

    assert found(launches)[0] == {"data_race"}


def test_streams_are_not_ordered(kernels):
    def launches(words):
        yield (kernels["first"], words), {}
        yield (kernels["second"], words, np.uint32(1), np.uint32(NEVER)), {"stream": 1}

    assert found(launches)[0] == {"data_race"}


@pytest.mark.parametrize(("most_blocks", "wanted"), [(0, ""), (2, ""), (1, "deadlock")])
def test_a_launch_begins_when_it_has_room(kernels, most_blocks, wanted):
    def launches(words):
        yield (kernels["open"], words, np.uint32(1), np.uint32(1)), {}
        yield (kernels["tell"], words, np.uint32(0)), {"is_dependent": True}

    assert found(launches, most_blocks=most_blocks)[0] == {wanted}


def test_a_launch_that_can_never_have_room_is_refused(kernels):
    with World(1, Simulation(most_blocks=2)) as world:
        launch = world.launch(0, kernels["pass"], grid=3)
        with pytest.raises(kccl.InvalidArgument, match="cannot launch such a block or grid"):
            world.run([[launch]])
