"""backend="sim": the Python API on the simulated machine; one seed is one run."""

import itertools
import signal
import threading
import time

import numpy as np
import oracle
import pytest
from long import long_after

import kccl
from kccl.plan.lookup import algorithms
from kccl.sim.machine import Machine


def on_sim(main, world_size, **options):
    return kccl.run_threads(main, world_size, backend="sim", **options)


def test_ranks_and_backend():
    def main(comm):
        assert (comm.backend, comm.launcher) == ("sim", "threads")
        return comm.rank, comm.world_size

    assert on_sim(main, 3) == [(0, 3), (1, 3), (2, 3)]


# test_types.py in collectives has the others.
@pytest.mark.parametrize("name", long_after(1, ["float32", "bfloat16"]))
def test_all_reduce(name):
    """Every operator, with lengths below a word of 8 bytes, of a few words, and beyond a warp's."""
    cases = list(itertools.product(oracle.ops_of(name), (1, 5, 150)))

    def main(comm):
        for op, count in cases:
            inputs = [oracle.exact(name, op, count, rank) for rank in range(comm.world_size)]
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, op=op)
            oracle.assert_same(x, oracle.all_reduce(inputs, op), op, count, comm.rank)

    on_sim(main, 3, seed=len(name))


@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_every_algorithm_runs_or_says_why_not(algorithm):
    def main(comm):
        inputs = [oracle.exact("float32", "sum", 300, rank) for rank in range(comm.world_size)]
        x, out = inputs[comm.rank].copy(), np.zeros(300, np.float32)
        if "pull" in algorithm or "cma" in algorithm:
            with pytest.raises(kccl.InvalidArgument, match="cannot run this: "):
                comm.all_reduce(x, out=out, algorithm=algorithm)
            return
        comm.all_reduce(x, out=out, algorithm=algorithm)
        oracle.assert_same(out, oracle.all_reduce(inputs, "sum"), comm.rank)
        oracle.assert_same(x, inputs[comm.rank], comm.rank)

    on_sim(main, 2)


@pytest.mark.parametrize(
    ("world_size", "warp_size", "model"),
    long_after(1, [(2, 64, "gfx942"), (1, 32, "sm_90"), (4, 32, "gfx942"), (2, 64, "sm_90")]),
)
def test_calls_of_all_kinds(world_size, warp_size, model):
    def main(comm):
        x = np.arange(40, dtype=np.float64) + comm.rank
        op = comm.all_reduce.prepare(x, op="max")
        for root in range(comm.world_size):
            op()
            assert (x == np.arange(40) + root + comm.world_size - 1).all()
            comm.barrier()
            x += comm.rank + 1
            comm.broadcast(x, root)
            assert (x == np.arange(40) + 2 * root + comm.world_size).all()
            x[:] = np.arange(40) + root + 1 + comm.rank
        comm.all_reduce(np.zeros(0, np.float32))
        assert comm.gather_objects(comm.rank) == list(range(comm.world_size))

    on_sim(main, world_size, seed=world_size, warp_size=warp_size, model=model)


def test_messages_longer_than_a_slot():
    def main(comm):
        x = np.full(3000, comm.rank + 1, np.float32)
        comm.all_reduce(x)
        assert (x == 3).all()
        x[:] = comm.rank
        comm.broadcast(x, 1)
        assert (x == 1).all()

    on_sim(main, 2)


def test_epochs_wrap(monkeypatch):
    monkeypatch.setenv("KCCL_EPOCH_BITS", "4")

    def main(comm):
        for step in range(40):
            x = np.array([comm.rank + step], np.int32)
            comm.all_reduce(x)
            assert x[0] == 2 * step + 1

    on_sim(main, 2, seed=3)


def test_one_sided():
    """put, signal and wait as in examples/03_put_signal.py; then get reads the data back."""

    def main(comm):
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        window = comm.window(64)
        mail = np.frombuffer(window.local, np.int64)
        for step in range(3):
            comm.put(np.full(8, 100 * step + comm.rank), right, window)
            comm.signal(right)
            comm.wait(peer=left)
            assert (mail == 100 * step + left).all()
            comm.signal(left, signal_id=1)
            comm.wait(signal_id=1, peer=right)
        comm.barrier()
        theirs = comm.get(np.zeros(8, np.int64), right, window)
        assert (theirs == 200 + comm.rank).all()
        assert comm.empty((2, 3)).sum() == 0

    on_sim(main, 3, seed=2)


def test_channels_and_parts():
    def main(comm):
        part = comm.split(comm.rank % 2)
        assert part.world_size == 2
        x = np.ones(4, np.float32) * comm.rank
        part.all_reduce(x, channel=1)
        assert x[0] == (2 if comm.rank % 2 == 0 else 4)
        comm.all_reduce(x, channel=2)
        assert x[0] == 12
        pair = part.split(0, key=-part.rank)
        assert pair.rank == 1 - part.rank
        pair.barrier()
        window = pair.window(8)
        pair.put(np.array([comm.rank]), 1 - pair.rank, window)
        pair.barrier()
        assert np.frombuffer(window.local, np.int64)[0] == (comm.rank + 2) % 4
        return comm.split(0 if comm.rank == 0 else None) is None

    assert on_sim(main, 4, seed=4) == [False, True, True, True]


def test_checked_calls(monkeypatch):
    monkeypatch.setenv("KCCL_CHECK", "1")

    def main(comm):
        x = np.ones(2, np.float32)
        comm.all_reduce(x)
        with pytest.raises(kccl.InvalidArgument, match="the ranks disagree about this call"):
            comm.all_reduce(x, op="max" if comm.rank else "min")

    on_sim(main, 2)


LONE = """#include <kccl/kccl.cuh>
__global__ void alone(kccl::DeviceComm comm, int* x) {
    x[0] = kccl::all_reduce<int, kccl::Sum>(kccl::block(), comm, x, x, 1) == kKcclOk;
}"""


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_a_checked_launch_that_one_rank_makes_names_it_and_the_rank_that_did_not(
    monkeypatch, backend
):
    monkeypatch.setenv("KCCL_CHECK", "1")
    kernel = kccl.compile(LONE, ["alone"], target=backend).kernel("alone")

    def main(comm):
        device_comm = comm.device_comm(channels=2, max_bytes=64)
        if comm.rank == 0:
            told = r"^rank 0 lost rank 1 during launch of alone, grid 1, block \d+, .*: it has clos"
            with pytest.raises(kccl.PeerLost, match=told):
                kernel(comm, device_comm, np.zeros(4, np.int32))

    kccl.run_threads(main, 2, backend=backend)


# ---- Repeatable ------------------------------------------------------------------------------


def busy(comm):
    part = comm.split(comm.rank % 2, key=-comm.rank)
    x = np.ones(60, np.float32)
    for _ in range(3):
        comm.all_reduce(x)
        # The ranks' programs run at another speed in every run.
        time.sleep(np.random.default_rng().random() * 0.003)
        part.all_reduce(x)
        comm.gather_objects(comm.rank)
        comm.broadcast(x, 2)
    return comm._backend._machine


def test_a_seed_gives_one_run():
    """What the machine does depends on the seed alone, not on how fast the ranks' programs are."""
    on_sim(busy, 3)  # Compiles the kernels.
    runs = [on_sim(busy, 3, seed=seed)[0].stats() for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0]["steps"] != runs[2]["steps"]
    assert runs[0]["steps"] > 1000


def test_a_rank_that_meets_nobody_stays_inside(monkeypatch):
    """The machine moves on while a rank waits outside it for others. A rank that exchanges with
    nobody stays inside, or the run would depend on how fast it is.
    """
    outside = []
    wait_outside = Machine.wait_outside
    monkeypatch.setattr(
        Machine,
        "wait_outside",
        lambda self, rank: (outside.append(rank), wait_outside(self, rank)),
    )

    def main(comm):
        part = comm.split(comm.rank)
        count = outside.count(comm.rank)
        assert count > 0
        assert part.gather_objects("all") == ["all"]
        assert outside.count(comm.rank) == count

    on_sim(main, 2)


# ---- Failures --------------------------------------------------------------------------------


def test_a_rank_that_does_not_come():
    """Virtual time passes while no thread can move, so a time-out takes no real seconds."""

    def main(comm):
        comm.barrier()
        comm.barrier()
        if comm.rank == 1:
            done.wait(20)
            return
        with pytest.raises(kccl.Timeout, match=r"barrier_direct on channel 0: peer 1 did not"):
            comm.barrier()
        done.set()

    done = threading.Event()
    on_sim(main, 2, timeout=0.2)


def test_all_ranks_wait_in_vain():
    def main(comm):
        with pytest.raises((kccl.Timeout, kccl.PeerLost)):
            comm.wait()

    started = time.perf_counter()
    on_sim(main, 3, timeout=1000)
    assert time.perf_counter() - started < 20


def test_reset_after_a_time_out():
    def main(comm):
        x = np.ones(3, np.float32)
        comm.all_reduce(x)
        if comm.rank == 1:
            with pytest.raises((kccl.Timeout, kccl.PeerLost)):
                comm.wait(peer=0)
        else:
            with pytest.raises((kccl.Timeout, kccl.PeerLost)):
                comm.barrier()
        comm.reset()
        comm.all_reduce(x)
        assert (x == comm.world_size**2).all()

    on_sim(main, 2, timeout=0.5)


class Mishap(Exception):
    pass


def test_a_rank_raises():
    def main(comm):
        comm.barrier()
        if comm.rank == 1:
            raise Mishap
        comm.all_reduce(np.ones(4))

    with pytest.raises(Mishap):
        on_sim(main, 3)


def test_a_rank_raises_while_others_make_a_window():
    def main(comm):
        if comm.rank == 1:
            raise Mishap
        comm.window(64)

    with pytest.raises(Mishap):
        on_sim(main, 3)


def test_a_rank_that_closes():
    def main(comm):
        comm.barrier()
        if comm.rank == 0:
            return
        with pytest.raises(kccl.PeerLost, match="peer 0 has closed or dropped the communicator"):
            comm.barrier()

    on_sim(main, 2)


def test_survivors_go_on():
    def main(comm):
        comm.barrier()
        comm.gather_objects(None)
        if comm.rank == 1:
            comm.abort()
            return None
        with pytest.raises(kccl.PeerLost):
            comm.barrier()
        smaller = comm.shrink()
        x = np.array([comm.rank], np.int32)
        smaller.all_reduce(x)
        return smaller.rank, int(x[0])

    assert on_sim(main, 3) == [(0, 2), None, (1, 2)]


def test_interrupt():
    """Ctrl-C ends the waits of all ranks."""
    released = threading.Event()

    def main(comm):
        if comm.rank == 1:
            comm.wait(peer=0)
        main_thread = threading.main_thread().ident
        threading.Timer(0.1, signal.pthread_kill, [main_thread, signal.SIGINT]).start()
        released.wait(1)

    on_sim(lambda comm: (comm.signal(comm.rank), comm.wait()), 2)  # Compiles.
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        on_sim(main, 2)
    assert time.perf_counter() - started < 20


def test_after_the_end_of_the_machine():
    """Arrays in windows stay readable, and calls are errors."""

    def main(comm):
        array = comm.empty(4)
        array[:] = comm.rank
        part = comm.split(0)
        return array, comm.barrier, part.barrier.prepare(channel=1), comm

    results = on_sim(main, 2)
    for rank, (array, barrier, prepared, comm) in enumerate(results):
        assert (array == rank).all()
        for call in (barrier, prepared, lambda comm=comm: comm.window(8)):
            with pytest.raises(kccl.Error, match=f"closed on rank {rank}"):
                call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed is -1, must be between 0"),
        ({"warp_size": 16}, "warp_size is 16, must be 32 or 64"),
        ({"model": "sm_80"}, "model is 'sm_80', must be one of sm_90, gfx942"),
        ({"trace": "/no/such/folder/t.json"}, "trace is /no/such/folder/t.json, which cannot be"),
    ],
    ids=lambda value: "",
)
def test_wrong_settings(options, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        on_sim(lambda comm: None, 2, **options)


def test_settings_of_a_simulation_are_refused_on_the_host():
    with pytest.raises(kccl.InvalidArgument, match="seed is 1, must be None: backend is 'host'"):
        kccl.run_threads(lambda comm: None, 2, seed=1)


def test_init_says_how_to_simulate():
    with pytest.raises(kccl.BackendError, match=r"run_threads\(main, world_size, backend=\"sim\""):
        kccl.init(backend="sim")
