"""The simulator's reports of wrong kernels: the verdict, the threads, and the last steps."""

import re

import numpy as np
import pytest
from worlds import World

import kccl
from kccl.sim.machine import Simulation

SOURCE = """
#include <kccl/kccl.cuh>

using kccl::mem::Order;
using kccl::mem::Scope;
using Words = uint32_t*;

// Waits without a pause.
KCCL_KERNEL void spin(Words flag) {
    while (kccl::mem::load<Order::kAcquire, Scope::kSystem>(flag) == 0) {
    }
}

// Looks at the clock, and waits on.
KCCL_KERNEL void wait_on(Words flag) {
    while (kccl::mem::load<Order::kAcquire, Scope::kSystem>(flag) == 0) {
        (void)kccl::mem::clock_ns();
        kccl::mem::poll_pause();
    }
}

KCCL_KERNEL void read_null(Words out, const uint32_t* in) { *out = in[1]; }
KCCL_KERNEL void write_null(Words, Words out) { out[1] = 1; }

// The first thread of each block claims a word, and all of them write another.
KCCL_KERNEL void claim(Words words) {
    if (!kccl::leads(kccl::block())) return;
    (void)kccl::mem::claim(words, 7u + kccl::platform::block_in_grid());
    words[32] = 1;
}

KCCL_KERNEL void copy(Words words, const uint32_t* from) {
    KCCL_BLOCK_SHARED(kccl::mem::CopyBarrier, barrier);
    KCCL_BLOCK_SHARED(kccl::mem::Line, line);
    if (kccl::leads(kccl::block())) {
        kccl::mem::init_copies(&barrier, 1);
        kccl::mem::fence_copies();
    }
    kccl::block().sync();
    if (kccl::leads(kccl::block())) kccl::mem::arrive_expecting(&barrier, 16);
    if (kccl::block().index() < kccl::platform::kWarpSize) {
        kccl::mem::copy_async(&line, from, 16, &barrier, kccl::block().index(), 32);
    }
    while (!kccl::mem::has_completed(&barrier, 0)) kccl::mem::poll_pause();
    words[kccl::block().index()] = static_cast<uint32_t>(line.word[0]);
}

// Behind a call of the library a race that is the kernel's own.
KCCL_KERNEL void race_after(kccl::DeviceComm comm, Words words) {
    (void)kccl::grid_sync(comm);
    words[kccl::block().index()] += 1;
}

// More calls than the machine remembers, of channels 1 and 2; then a race.
KCCL_KERNEL void call_often(Words words, uint32_t count) {
    if (!kccl::leads(kccl::block())) return;
    kccl::platform::enter_call(1, kKcclPut, 2, 1);
    for (uint32_t epoch = 1; epoch <= count; ++epoch) {
        kccl::platform::enter_call(1, kKcclPut, 1, epoch);
    }
    if (kccl::platform::block_in_grid() == 1) kccl::platform::enter_call(1, kKcclPut, 2, 1);
    words[0] = 1;
}

KCCL_KERNEL void read_misaligned(Words words) {
    const auto* at = reinterpret_cast<const uint64_t*>(words + 1);
    if (kccl::leads(kccl::block())) words[0] = static_cast<uint32_t>(kccl::mem::load_plain(at));
}

KCCL_KERNEL void write_misaligned(Words words) {
    auto* at = reinterpret_cast<uint64_t*>(words + 1);
    if (kccl::leads(kccl::block())) kccl::mem::store_plain(at, uint64_t{1});
}

KCCL_KERNEL void write(Words words) {
    if (kccl::leads(kccl::block())) words[0] = 1;
}
KCCL_KERNEL void raise(Words words) {
    if (!kccl::leads(kccl::block())) return;
    kccl::mem::store<Order::kRelaxed, Scope::kSystem>(words + 32, 1u);
}
KCCL_KERNEL void read_when_raised(Words words, Words out) {
    if (!kccl::leads(kccl::block())) return;
    while (kccl::mem::load<Order::kRelaxed, Scope::kSystem>(words + 32) == 0) {
        kccl::mem::poll_pause();
    }
    out[0] = words[0];
}
"""
NAMES = re.findall(r"KCCL_KERNEL void (\w+)\(", SOURCE)


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, NAMES)


def line_of(text):
    """The line of the source that contains `text`, as reports name it."""
    (number,) = [n for n, line in enumerate(SOURCE.splitlines(), 1) if text in line]
    return f"source:{number}"


def findings(module, kernel, *args, grid=1, seed=0):
    """The findings of one launch on one rank; the kernel's first argument is the rank's window."""
    with World(1, Simulation()) as world:
        window = world.window(256)
        if kernel == "race_after":
            args = (world.device_comm(0), window.ctypes.data)
        else:
            args = (window.ctypes.data, *args)
        launch = world.launch(0, module.kernel(kernel), *args, grid=grid, block=32)
        return world.run([[launch]], seed).findings


@pytest.mark.long
def test_a_wait_without_a_pause_is_endless(module):
    finding = findings(module, "spin")[0]
    assert finding.kind == "endless"
    assert finding.site.startswith("source:")
    assert "poll_pause()" in str(finding)


def test_a_wait_that_looks_at_the_clock_has_a_limit(module):
    assert findings(module, "wait_on")[0].kind == "late_timeout"


@pytest.mark.parametrize("kernel", ["read_null", "write_null"])
def test_a_plain_access_through_null(module, kernel):
    finding = findings(module, kernel, 0)[0]
    assert finding.kind == "invalid_access"
    assert finding.site == line_of(f"void {kernel}")
    assert "accesses 0x4, which no GPU can" in str(finding)


@pytest.mark.parametrize("kernel", ["read_misaligned", "write_misaligned"])
def test_a_plain_access_between_words(module, kernel):
    finding = findings(module, kernel)[0]
    assert finding.kind == "invalid_access"
    assert "byte 4 of window 0 of rank 0, which no GPU can" in str(finding)


def test_a_race_names_both_threads_and_what_each_did(module):
    finding = findings(module, "claim", grid=2)[0]
    assert finding.kind == "data_race"
    place = r"rank 0 block \d thread 0 at source:\d+"
    what = "byte 128 of window 0 of rank 0"
    assert re.search(
        f"{place} plainly writes {what}, {place} plainly wrote it, and no", str(finding)
    )
    # Both blocks claimed the word, and one of them got it.
    claims = [line for line in finding.timeline.splitlines() if " byte 0 of window" in line]
    kinds = sorted(
        re.search(r"(load|store) byte 0 .* = 0x[78], relaxed, device", c)[1] for c in claims
    )
    assert kinds == ["load", "store"]
    assert len({claim.partition(" = ")[2].partition(",")[0] for claim in claims}) == 1


def test_a_trace_has_the_end_of_a_copy(module, tmp_path):
    with World(1, Simulation()) as world:
        window = world.window(1024)
        args = (window.ctypes.data, window.ctypes.data + 512)
        launch = world.launch(0, module.kernel("copy"), *args, block=64)
        report = world.run([[launch]], 0)
        assert not report.findings
        world.write_trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert "copy starts" in text
    assert "copy ends" in text


def test_a_finding_names_the_library_call_before_it(module):
    finding = findings(module, "race_after", grid=2)[0]
    assert finding.kind == "data_race"
    assert finding.kernel == "grid_sync"
    assert "; after grid_sync on channel" in str(finding)


def test_a_call_too_long_ago_is_not_named(module):
    """The machine remembers a limited number of calls."""
    count = 1 << 16
    finding = findings(module, "call_often", np.uint32(count), grid=2)[0]
    assert finding.kind == "data_race"
    known = {place.block: (place.kernel, place.epoch) for place in (finding, finding.other)}
    assert known == {0: ("put", count), 1: ("", 0)}


def test_a_new_window_does_not_clear_what_is_known_of_others(module):
    """A rank opens a window alone while another rank's kernel runs; the race is still found."""

    def main(comm):
        window = comm.window(256)
        alone = comm.split(comm.rank)
        words = window.addresses[1]
        if comm.rank == 1:
            module.kernel("read_when_raised")(comm, words, np.zeros(1, np.uint32))
            return
        module.kernel("write")(comm, words)
        alone.window(64)
        module.kernel("raise")(comm, words)

    with pytest.raises(kccl.ProtocolError) as raised:
        kccl.run_threads(main, 2, backend="sim", seed=1)
    assert raised.value.kind == "data_race"
    assert {raised.value.site, raised.value.other.site} == {
        line_of("out[0] = words[0];"),
        line_of("if (kccl::leads(kccl::block())) words[0] = 1;"),
    }
