"""Long calls of more than 8 ranks whose parts are messages, by address and through the rings."""

import subprocess
import threading
import warnings

import numpy as np
import pytest
from long import long_after

import kccl
from kccl.backends import attach, routes

RANKS = 9
# Longer than the messages that go through the ring where processes may read each other's memory.
LONG = 40_000


class Unreadable(attach.Probes):
    def __init__(self, *given):
        super().__init__(*given)
        self.are_readable = False


@pytest.fixture(params=["address", "ring"])
def way(request, monkeypatch):
    if request.param == "ring":
        monkeypatch.setattr(routes, "Probes", Unreadable)
    return request.param


def test_right_results(way):
    def main(comm):
        x = (np.arange(RANKS * LONG // 4) + 1_000_003 * comm.rank).astype(np.int32)
        chunks = x.reshape(RANKS, -1)
        assert comm.plan("all_to_all", x.nbytes).name == "all_to_all_by_messages"
        wanted = np.stack([chunks[comm.rank] + 1_000_003 * (i - comm.rank) for i in range(RANKS)])
        for target in (np.zeros_like(chunks), chunks.copy()):
            source = chunks if not target.any() else target
            assert (comm.all_to_all(source, out=target) == wanted).all()
        assert comm.plan("scatter", x.nbytes).name == "scatter_by_messages"
        for root in (0, RANKS - 1):
            y = np.zeros(LONG // 4, np.int32)
            comm.scatter(x if comm.rank == root else None, out=y, root=root)
            assert (y == chunks[comm.rank] + 1_000_003 * (root - comm.rank)).all()

    kccl.run_threads(main, RANKS, timeout=60)


@pytest.mark.parametrize(
    ("dtype", "op"), long_after(2, [("float32", "sum"), ("int8", "max"), ("float16", "avg")])
)
def test_a_scan_has_the_bits_of_the_other_forms(way, dtype, op):
    def main(comm):
        x = np.random.default_rng(comm.rank).integers(-9, 9, LONG).astype(dtype)
        x[3] = x[4] / 7 if dtype != "int8" else 1
        for exclusive in (False, True):
            found = {}
            for algorithm in ("scan_grouped", "scan_by_messages", "scan_in_turn"):
                for out in (np.zeros_like(x), x.copy()):
                    source = x if not out.any() else out
                    comm.scan(source, out=out, op=op, exclusive=exclusive, algorithm=algorithm)
                    found.setdefault(out.tobytes(), algorithm)
            # Rank 0 of an exclusive scan writes nothing, so its two arrays stay as they were.
            assert len(found) == (2 if exclusive and comm.rank == 0 else 1), found.values()

    kccl.run_threads(main, RANKS, timeout=60)


def test_a_root_that_does_not_come_is_named():
    failed = threading.Barrier(RANKS)

    def main(comm):
        comm.barrier()
        comm.timeout = 0.3
        y = np.zeros(LONG, np.int8)
        told = ""
        if comm.rank != 2:
            with pytest.raises((kccl.Timeout, kccl.WaitFailed)) as error:
                comm.scatter(None, out=y, root=2)
            told = str(error.value)
        failed.wait(30)
        comm.timeout = 30
        comm.reset()
        x = np.repeat(np.arange(RANKS, dtype=np.int8), LONG)
        comm.scatter(x if comm.rank == 7 else None, out=y, root=7)
        assert (y == comm.rank).all()
        return told

    told = kccl.run_threads(main, RANKS, timeout=60)
    assert any("scatter" in each and "peer 2" in each for each in told), told


def test_a_process_that_forbids_reading_after_start_up_is_told():
    """Its messages come through the ring. Here another process, without those bytes, stands for
    it.
    """
    other = subprocess.Popen(["sleep", "60"])

    def main(comm):
        routes = comm.context.backend._routes.handle
        if comm.rank == 1:
            routes.pid[0], routes.probe[0] = other.pid, 1
        x, y = np.repeat(np.arange(RANKS, dtype=np.int8), LONG), np.zeros(LONG, np.int8)
        for _ in range(2):
            comm.scatter(x if comm.rank == 0 else None, out=y, root=0)
            assert (y == comm.rank).all()
        return bool(routes.may_attach)

    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            may_attach = all(kccl.run_threads(main, RANKS, timeout=20))
    finally:
        other.kill()
        other.wait()
    if not may_attach:
        pytest.skip("processes may not read each other's memory here")
    (text,) = (str(each.message) for each in told)
    wanted = f"rank 1 may no longer read the memory of rank 0 (process {other.pid}): "
    assert text.startswith(wanted), text


def test_calls_that_differ_are_an_error():
    def main(comm):
        x, y = np.zeros(RANKS * LONG, np.int8), np.zeros(LONG, np.int8)
        root = 6 if comm.rank == 6 else 1
        try:
            comm.scatter(x if comm.rank == root else None, out=y, root=root)
            comm.barrier()
        except kccl.Error as error:
            return str(error)
        return ""

    told = kccl.run_threads(main, RANKS, timeout=20)
    assert all(told) and any("root 6" in each for each in told), told


def test_no_rank_takes_a_part_of_another_scatter():
    """A rank that is alone with its root sends its parts; the next call has that root."""

    def main(comm):
        x, y = np.ones(RANKS * LONG, np.int8), np.zeros(LONG, np.int8)

        def scatter(root):
            comm.scatter(x if comm.rank == root else None, out=y, root=root)

        # Ranks always compare the first calls of an op.
        scatter(1)
        scatter(6)
        try:
            comm.barrier()
            x[:] = 2
            scatter(6 if comm.rank == 6 else 1)
            x[:] = 3
            scatter(6)
        except kccl.Error as error:
            return str(error)
        return f"took {y[0]}"

    told = kccl.run_threads(main, RANKS, timeout=20)
    assert all("disagree" in each for each in told), told


def test_no_rank_takes_the_sums_of_another_scan():
    def main(comm):
        x = np.ones(LONG, np.int8)

        def scan(op):
            return comm.scan(x, op=op, algorithm="scan_by_messages")

        scan("sum")
        scan("max")
        try:
            comm.barrier()
            return f"took {scan('max' if comm.rank == 6 else 'sum')[0]}"
        except kccl.Error as error:
            return str(error)

    # A lower rank needs nothing of rank 6.
    told = kccl.run_threads(main, RANKS, timeout=20)
    assert all("disagree" in each for each in told[6:]), told
