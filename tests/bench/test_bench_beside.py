"""`python -m kccl.bench.in_kernel.beside` without a GPU: what makes a row valid, and the kernels on
the simulator.
"""

import numpy as np
import pytest

import kccl
from kccl.bench import collectives
from kccl.bench.in_kernel import beside, contenders, stream
from kccl.bench.in_kernel.side import SimRunner


def ends(*rows):
    return np.array(rows, np.uint32)


def test_a_stream_is_valid_only_if_each_block_was_told_to_end_on_its_own_multiprocessor():
    two_warps = ends((1, 0), (1, 0), (1, 7), (1, 7))
    assert stream.fault_of(two_warps, 2) == ""
    assert "4 blocks of the stream ran on 2 multi" in stream.fault_of(two_warps, 4)
    # It has reached its limit, or it has not ended at all.
    for why in (2, 0):
        assert "1 warps of the stream ended before" in stream.fault_of(ends((1, 0), (why, 1)), 2)


def test_bandwidth_counts_each_block_by_its_own_clock():
    before = np.array([[10, 1000], [20, 5000]], np.uint64)
    after = before + np.array([[100, 8192], [100, 16384]], np.uint64)
    assert stream.gbps(before, after) == pytest.approx(100 + 50)


def test_a_row_is_the_median_and_names_the_stream():
    form = dict.fromkeys(form for _, form in beside.forms())
    key = ("library", next(iter(form)), 0, 4, 32)
    times = [(us, us + 1, 4500.0, 4600.0, 0) for us in (0.7, 0.5, 0.6)]
    row = beside.row(key, times, 132)
    assert (row["time_us"], row["p99_us"], row["repeats"], row["wrong"]) == (0.6, 1.6, 3, 0)
    assert (row["blocks"], row["stream_blocks"], row["in_flight_bytes"]) == (32, 100, 32768)
    assert (row["stream_gbps"], row["stream_alone_gbps"]) == (4500.0, 4600.0)


BARRIERS = "in_kernel::barriers<in_kernel::{}, {{notes}}>"
ORDER = "kccl::mem::Order::"


def made(comm, names):
    """Launches a barrier of 4 simulated blocks, and the stream: (wrong words, why it ended)."""
    runner = SimRunner(comm)
    module = runner.compile(beside.KERNELS, [*names, beside.DELAYS_ALONE, beside.STREAM])
    device_comm = comm.device_comm(channels=1, max_bytes=16, exchange_bytes=4096)
    notebook = contenders.Notebook(runner, module, runner.most_blocks, None)
    how = contenders.Shape(runner.most_blocks, 64, 0)
    wrong = []
    for at in range(0, len(names), 3):
        kernels = [module.kernel(name) for name in names[at : at + 3]]
        barrier = contenders.BarrierForm(notebook, kernels, how, device_comm)
        barrier.time(6, 2)
        wrong.append(barrier.wrong())
    data = np.zeros(2 * 8 * stream.STAGE_BYTES, np.uint8)
    why = []
    # Two blocks of two warps, one with two copies in flight and one with one.
    for stop, limit_ns in ((1, 1 << 40), (0, 0)):
        progress, ended = np.zeros(4 * 16, np.uint8), np.zeros(4 * 8, np.uint8)
        module.kernel(beside.STREAM)(
            *(comm, data, np.uint64(8), np.uint32(3)),
            *(np.full(1, stop, np.uint32).view(np.uint8), np.uint64(limit_ns), progress, ended),
            grid=2,
            block=64,
            shared_bytes=100 << 10,
        )
        why.append((ended.view(np.uint32)[::2].tolist(), progress.view(np.uint64)[::2].tolist()))
    return wrong, why


@pytest.mark.long
@pytest.mark.takes(40)
def test_the_kernels_on_the_simulator():
    names = [
        name.format(notes=f"in_kernel::Notes::{notes}")
        for name in (
            BARRIERS.format(f"Counted<{ORDER}kAcqRel, 2, 2>"),
            BARRIERS.format(f"Flagged<{ORDER}kAcqRel>"),
        )
        for notes in contenders.NOTES
    ]
    (found,) = kccl.run_threads(lambda comm: made(comm, names), 1, backend="sim", seed=3)
    wrong, ((told, copies), (late, _)) = found
    assert wrong == [0, 0]
    # The first look at the clock is behind the first copy, and the next one 32 copies later.
    assert told == [1] * 4 and copies == [33] * 4
    assert late == [2] * 4


@pytest.mark.parametrize("wrong", ["13", "-1", "many"])
def test_no_more_copies_in_flight_than_a_block_has_stages_for(wrong, capsys):
    with pytest.raises(SystemExit):
        beside.main(["--in-flight", wrong])
    assert "must be a number of copies from 0 to 12" in capsys.readouterr().err
    assert f"kStreamStages = {stream.MOST_IN_FLIGHT}," in beside.KERNELS.read_text()


def test_the_layout_of_the_library_has_its_forms():
    flat = [form.kernel for layout, form in beside.forms() if layout == "library"]
    library = [
        form.kernel
        for name in ("grid_sync", "exchange")
        for form in collectives.load(name).forms
        if form.is_within
    ]
    assert flat == library
