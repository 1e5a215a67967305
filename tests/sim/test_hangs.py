"""Kernels that never come back, Ctrl-C in them, and what a time-out says."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from long import long_after
from worlds import World

import kccl
from kccl.sim.machine import Simulation

SOURCE = """
#include <kccl/kccl.cuh>

KCCL_KERNEL void reads(uint32_t* words) {
    while (words[0] == 0) {
    }
}
KCCL_KERNEL void reads_volatile(uint32_t* words) {
    while (*static_cast<volatile uint32_t*>(words) == 0) {
    }
}
KCCL_KERNEL void writes(uint32_t* words) {
    while (true) words[1] += 2;
}
KCCL_KERNEL void counts(uint32_t* words) {
    uint32_t i = 1;
    while (i != 0) {
        i += 2;
        asm volatile("" : "+r"(i));
    }
    words[0] = i;
}
KCCL_KERNEL void looks_at_the_clock(uint32_t* words) {
    while (kccl::mem::clock_ns() < 1000000000u) {
    }
    words[0] = 1;
}
// Long, but it ends.
KCCL_KERNEL void works(uint32_t* words) {
    for (uint32_t i = 0; i < 200000 && kccl::leads(kccl::block()); ++i) words[0] += i;
}

KCCL_KERNEL void never_signalled(kccl::DeviceComm comm, float* x) {
    if (comm.rank == 0) kccl::wait(kccl::block(), comm, 1, 3, 2);
    kccl::all_reduce<float>(kccl::block(), comm, x, x, 4);
}
// Rank 0 waits for rank 1, which would signal it behind its own wait. With `forgets` rank 2
// signals nobody, or else it waits for rank 0.
KCCL_KERNEL void in_a_row(kccl::DeviceComm comm, float* x, int forgets) {
    if (forgets != 0 && comm.rank == 2) {
        kccl::all_reduce<float>(kccl::block(), comm, x, x, 8);
        return;
    }
    kccl::wait(kccl::block(), comm, (comm.rank + 1) % 3, 3, 1);
    kccl::signal(kccl::block(), comm, (comm.rank + 2) % 3, 3);
}
KCCL_KERNEL void other_barriers(float*) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        kccl::platform::sync_block_any(false);
    }
}
KCCL_KERNEL void own_barrier(uint32_t* words) {
    using namespace kccl::mem;
    if (threadIdx.x == 0) add<Order::kRelease, Scope::kDevice>(words, 1u);
    while (kccl::platform::warp_any(load<Order::kAcquire, Scope::kDevice>(words) < gridDim.x)) {
        poll_pause();
    }
}
"""
HANGS = ["reads", "reads_volatile", "writes", "counts", "looks_at_the_clock"]
NAMES = re.findall(r"KCCL_KERNEL void (\w+)\(", SOURCE)


SUM = """
#include <kccl/kccl.cuh>
KCCL_KERNEL void total(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm, float* x) {
    kccl::all_reduce<float, kccl::Sum>(kccl::block(), comm, x, x, 4);
}
"""


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, NAMES)


def lines_of(kernel):
    """The lines of a kernel, as reports name them."""
    lines = SOURCE.splitlines()
    (first,) = [n for n, line in enumerate(lines, 1) if f"void {kernel}(" in line]
    last = next(n for n in range(first, len(lines) + 1) if lines[n - 1] == "}")
    return {f"source:{n}" for n in range(first, last + 1)}


def findings(module, kernel, hang_s):
    with World(1, Simulation(hang_s=hang_s)) as world:
        window = world.window(256)
        launch = world.launch(0, module.kernel(kernel), window.ctypes.data, block=32)
        return world.run([[launch]], 0).findings


@pytest.mark.parametrize("kernel", HANGS)
def test_a_loop_without_a_step_ends(module, kernel):
    (finding, *_) = findings(module, kernel, 0.2)
    assert finding.kind == "endless"
    told = re.fullmatch(
        r"endless: rank 0 block 0 thread \d+ runs on at (source:\d+) and makes no step for longer "
        r"than Simulation.hang_s. A loop that waits must read with kccl::mem::load\(\) and call "
        r"kccl::mem::poll_pause\(\): no other thread moves while one reads plainly; step \d+ of "
        r"seed 0, which replays it",
        str(finding).splitlines()[0],
    )
    assert told[1] in lines_of(kernel)


def test_a_machine_goes_on_behind_one_that_was_left(module):
    """The thread that was stopped in its loop, and the fiber's stack, are used again."""
    for _ in range(2):
        assert findings(module, "counts", 0.1)[0].kind == "endless"
        assert not findings(module, "works", 60)


def test_an_interrupt_ends_one_run_only(module):
    with World(1, Simulation(hang_s=0.2)) as world:
        window = world.window(256)
        launch = world.launch(0, module.kernel("counts"), window.ctypes.data, block=32)
        world._machine.interrupt()
        assert world.run([[launch]], 0).findings[0].kind == "endless"


def test_a_loop_in_a_forked_child_ends_too(module):
    assert findings(module, "counts", 0.1)[0].kind == "endless"
    child = multiprocessing.get_context("fork").Process(
        target=findings, args=(module, "counts", 0.1)
    )
    child.start()
    child.join(60)
    is_alive = child.is_alive()
    child.kill()
    assert not is_alive
    assert child.exitcode == 0


def test_a_kernel_that_only_takes_long_ends(module):
    assert not findings(module, "works", 60)


@pytest.mark.parametrize("hang_s", [0, -1, float("nan")])
def test_the_limit_must_be_a_time(hang_s):
    with pytest.raises(kccl.InvalidArgument, match=r"hang_s is .*, must be 0.001 to 1e9 seconds"):
        Simulation(hang_s=hang_s)


@pytest.mark.parametrize("kernel", long_after(1, ["reads", "counts"]))
def test_ctrl_c_ends_it(kernel, tmp_path):
    program = f"""
    import kccl, numpy as np
    module = kccl.compile({SOURCE!r}, {NAMES!r})
    def main(comm):
        print("launched", flush=True)
        module.kernel({kernel!r})(comm, np.zeros(4, np.uint32), block=32)
    kccl.run_threads(main, 1, backend="sim")
    """
    running = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout.readline() == "launched\n"
        used_s = cpu_s(running.pid)
        while cpu_s(running.pid) < used_s + 0.3:  # by then it loops
            time.sleep(0.02)
        used_s = cpu_s(running.pid)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert errors.splitlines()[-1] == "KeyboardInterrupt"


def cpu_s(pid):
    """CPU seconds of a process. It has not been waited for."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_time_out_names_the_signal_that_was_never_sent(module):
    first, waits = (n for n, line in enumerate(SOURCE.splitlines(), 1) if "comm.rank == 0" in line
                    or "x, x, 4)" in line)  # fmt: skip

    def main(comm):
        with pytest.raises(kccl.Timeout) as caught:
            module.kernel("never_signalled")(comm, comm.device_comm(), np.zeros(4, np.float32))
            comm.check()
        return str(caught.value)

    for seed in range(3):
        for told in kccl.run_threads(main, 2, backend="sim", seed=seed):
            head, *table = told.splitlines()
            assert re.search(r"after [\d.]+ s of simulated time", head)
            assert table == [
                "first missing: the signal of wait(peer 1, signal_id 3, wanted 2) on rank 0, "
                f"called at source:{first}, was never sent, because rank 1, which could send it, "
                "itself waits for rank 0 in all_reduce(channel 0, count 4), called at "
                f"source:{waits}",
                "who waited for what:",
                "  rank 0 block 0: 64 threads in wait(peer 1, signal_id 3, wanted 2), called at "
                f"source:{first}",
                "  rank 1 block 0: 64 threads in all_reduce(channel 0, count 4), called at "
                f"source:{waits}",
            ]


@pytest.mark.parametrize("forgets", long_after(1, [1, 0]))
def test_a_time_out_names_the_cause_and_not_what_follows(module, forgets):
    line = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if "% 3, 3, 1)" in text)
    calls = [f"wait(peer {(r + 1) % 3}, signal_id 3, wanted 1)" for r in range(3)]
    signal = f"the signal of {calls[1]} on rank 1, called at source:{line}, was never sent"
    waits = {f"rank {r} in {calls[r]}, called at source:{line}" for r in range(3)}

    def main(comm):
        with pytest.raises(kccl.Timeout) as caught:
            x = np.zeros(8, np.float32)
            module.kernel("in_a_row")(comm, comm.device_comm(), x, forgets)
            comm.check()
        return str(caught.value)

    for seed in range(3):
        told = kccl.run_threads(main, 3, backend="sim", seed=seed)[0].splitlines()[1]
        if forgets:
            assert told.startswith(f"first missing: {signal}, because rank 2, which could ")
            assert re.search(r"itself waits for rank [01] in all_reduce\(", told)
        else:
            head, _, cycle = told.partition(", which wait for each other: ")
            assert head == "first missing: a signal of each of these ranks"
            assert set(cycle.split(" and ")) == waits


@pytest.mark.long
def test_a_rank_that_leaves_after_a_long_wait_is_lost(module):
    """The simulator's clock follows the host's while a rank's program runs for seconds. When the
    rank leaves, the others have not waited longer than they may.
    """

    def main(comm):
        comm.timeout = 5
        device_comm, x = comm.device_comm(channels=1, max_bytes=64), np.ones(4, np.float32)
        kernel = kccl.compile(SUM, ["total"]).kernel("total")
        if comm.rank == 0:
            kernel(comm, device_comm, x, grid=1, block=32)
        else:
            # Beyond the 3 s after which the others go on without it.
            time.sleep(4)

    with pytest.raises(kccl.PeerLost, match="peer 1 has closed or dropped the communicator"):
        kccl.run_threads(main, 2, backend="sim", seed=0)


def test_divergence_names_both_threads_and_lines(module):
    def main(comm):
        module.kernel("other_barriers")(comm, np.zeros(4, np.float32))

    with pytest.raises(kccl.ProtocolError) as caught:
        kccl.run_threads(main, 1, backend="sim")
    told = re.match(
        r"divergence: rank 0 block 0 thread (\d+) waits at (source:\d+), and rank 0 block 0 thread "
        r"(\d+) waits at (source:\d+). All threads of a block or warp must come to the same "
        r"barriers and calls",
        str(caught.value),
    )
    sync, vote = sorted(lines_of("other_barriers"), key=lambda line: int(line[7:]))[2:5:2]
    assert {(int(told[1]) < 32, told[2]), (int(told[3]) < 32, told[4])} == {
        (True, sync),
        (False, vote),
    }


def test_blocks_that_find_no_room_begin_later(module):
    """A user's barrier needs all blocks at once. Without a DeviceComm nobody knows it before."""

    def main(comm, blocks):
        words = np.zeros(1, np.uint32)
        # A GPU has 132 times so much shared memory.
        module.kernel("own_barrier")(comm, words, grid=blocks, block=32, shared_bytes=232448)
        return words[0]

    assert kccl.run_threads(lambda comm: main(comm, 132), 1, backend="sim", seed=0) == [132]
    told = (
        r"deadlock: 4224 threads wait and nothing can change any more.*\. A GPU runs 132 of these "
        "blocks at once, and 2 more when some have ended. Blocks that wait for each other must all"
    )
    with pytest.raises(kccl.ProtocolError, match=told):
        kccl.run_threads(lambda comm: main(comm, 134), 1, backend="sim", seed=0)


def test_a_kernel_without_the_librarys_code_has_the_name_of_its_source():
    source = "#include <kccl/kccl.cuh>\n__global__ void add(float* x) { x[0] += 1.0f; }\n"
    module = kccl.compile(source, ["add"])

    def main(comm):
        module.kernel("add")(comm, np.zeros(4, np.float32))

    with pytest.raises(kccl.ProtocolError, match=r"thread .* at source:2 plainly"):
        kccl.run_threads(main, 1, backend="sim")
