"""The parts of the GPU benchmarks that need no GPU: schedule, clock, rows, kernels, peers."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from bench_world import FakeComm, FakeWorld, problem, row, screen_of
from device_compilers import find_nvrtc
from gpu_bench_world import NODE_US, Call, FakeBuffers, FakeGpu, FakeModule

import kccl
from kccl.bench import collectives
from kccl.bench.gpu import clock as gpu_clock
from kccl.bench.gpu import kernels
from kccl.bench.harness import measure
from kccl.bench.harness import problem as problems
from kccl.bench.peers import notes as peer_notes
from kccl.bench.peers import torch
from kccl.gpu.arrays import DeviceArray

# The schedule of a skewed run


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_one_random_rank_is_late_at_each_step(world_size):
    delays = gpu_clock.delays_ns(200, world_size, 3)
    assert delays.shape == (world_size, 200) and delays.dtype == np.int32
    assert ((delays > 0).sum(axis=0) <= 1).all()
    assert delays.min() >= 0 and delays.max() <= gpu_clock.LONGEST_DELAY_NS
    # Every rank is late now and then. The mean delay is about 2.5 us.
    assert ((delays > 0).sum(axis=1) > 200 / world_size / 3).all()
    assert 2000 < delays.sum(axis=0).mean() < 3000


def test_the_schedule_is_the_same_on_every_rank_and_another_for_another_seed():
    assert (gpu_clock.delays_ns(50, 4, 1) == gpu_clock.delays_ns(50, 4, 1)).all()
    assert (gpu_clock.delays_ns(50, 4, 1) != gpu_clock.delays_ns(50, 4, 2)).any()


def test_long_messages_have_shorter_graphs():
    counts = [gpu_clock.calls_in_graph(nbytes) for nbytes in (0, 8, 1 << 20, 1 << 30)]
    assert counts == [200, 200, 64, 4]


# The clock, in virtual time


def clocked(rank=0):
    gpu = FakeGpu(rank)
    return gpu, gpu_clock.GpuClock(gpu, FakeModule(gpu))


def in_graph(us, slow_us=0.0, rank=0):
    gpu, clock = clocked(rank)
    call = Call(gpu, us, slow_us)
    return gpu, call, gpu_clock.InGraph(clock, FakeBuffers(gpu), call, gpu.capture)


def test_a_graphs_time_is_the_mean_of_its_calls_and_nothing_else():
    gpu, _, graph = in_graph(2.5)
    mean_us, single_us = graph.time(1000, 10)
    assert mean_us.shape == (5,) and mean_us == pytest.approx(2.5)
    assert single_us.shape == (200,) and single_us == pytest.approx(2.5, abs=0.01)
    # Before each interval the host has enqueued all calls, and a barrier has brought the ranks
    # together.
    assert gpu.log[-404:-401] == ["pause", "barrier", "pause"]


def test_single_calls_show_what_the_mean_hides():
    _, _, graph = in_graph(2.0, slow_us=8.0)
    mean_us, single_us = graph.time(200, 0)
    assert mean_us == pytest.approx(2.8)
    assert np.median(single_us) == pytest.approx(2.0, abs=0.01)
    assert np.percentile(single_us, 99) == pytest.approx(10.0, abs=0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_skewed_run_counts_from_the_last_arrival(rank):
    _, call, graph = in_graph(2.5, rank=rank)
    call.when_skewed()
    assert graph.skewed_us(200) == pytest.approx(2.5, abs=0.01)


def test_a_call_that_does_not_wait_for_its_peers_shows_in_a_skewed_run():
    _, _, graph = in_graph(2.5)
    assert graph.skewed_us(200) < 2.5 - NODE_US


def test_a_checked_graph_runs_several_calls_each_on_its_input():
    gpu, _, graph = in_graph(2.5)
    gpu.log.clear()
    graph.run()
    assert gpu.log == ["capture"] + ["restore", "call"] * 3 + ["wait"]


def test_eager_calls_are_timed_in_blocks_without_a_lead():
    gpu, clock = clocked()
    eager = gpu_clock.Eager(clock, Call(gpu, 4.0, slow_us=6.0))
    gpu.log.clear()
    blocks_us, singles_us = eager.time(400, 20)
    assert blocks_us == pytest.approx([4.6, 4.6])
    assert np.percentile(singles_us, 50) == pytest.approx(4.0)
    assert np.percentile(singles_us, 99) == pytest.approx(10.0)
    assert "pause" not in gpu.log and gpu.log.count("barrier") == 2
    assert 0 < eager.host_us(100) < 1000


# Rows


def contender(clock_us, **further):
    def clock(iterations, warmup):
        return np.full(3, clock_us), np.full(3, 2 * clock_us)

    mine = problems.buffers(problem(n=2))
    return measure.Contender(
        *("kccl", "all_reduce_one_shot_ll16", "graph", "prepared", mine, lambda: None, clock),
        further=further,
    )


def measured(comm: FakeComm, *contenders):
    table = replace(collectives.load("all_reduce"), check=lambda *_: 0)
    return measure.measure(
        table,
        problem(n=2),
        contenders,
        rank=comm.rank,
        gather=comm.gather_objects,
        repeats=3,
        iterations=4,
    )


def test_further_columns_are_medians_of_the_slowest_rank():
    def main(comm):
        values = iter([[3.0, 9.0, 4.0], [5.0, 2.0, 6.0]][comm.rank])
        return measured(comm, contender(2.5, skewed_us=lambda _: next(values)), contender(1.0))

    first, second = FakeWorld(2).run(main)
    assert first == second
    assert [each["skewed_us"] for each in first] == [6.0, None]
    assert [each["time_us"] for each in first] == [2.5, 1.0]
    assert [each["p99_us"] for each in first] == [5.0, 2.0]


def test_both_modes_have_their_own_columns():
    gpu, clock = clocked()
    buffers = FakeBuffers(gpu)
    names = ("kccl", "some", "prepared")
    make = partial(gpu_clock.both_modes, clock)
    for name, columns in (
        ("all_reduce", ["skewed_us"]),
        ("broadcast", []),
        ("barrier", ["skewed_us"]),
    ):
        table = collectives.load(name)
        graph, eager = make(table, names, buffers, lambda: None, gpu.capture)
        assert (graph.mode, list(graph.further)) == ("graph", columns)
        assert (eager.mode, list(eager.further)) == ("eager", ["host_us"])
    buffers.problem.world_size = 1
    graph, _ = make(collectives.load("all_reduce"), names, buffers, lambda: None, gpu.capture)
    assert graph.further == {}


@pytest.mark.parametrize("in_place", [True, False])
def test_calls_over_rows_take_the_arrays_of_a_gpu(in_place):
    """With kccl's arrays, which have less than NumPy's. No call is made."""

    def array(values):
        return DeviceArray(0x1000, (values.size,), kccl.float32, 0, None)

    taken = {}

    def prepare(x, residual, weight, eps, *, out=None):
        taken.update(x=x.shape, residual=residual.shape, weight=weight.shape)
        taken["out"] = None if out is None else out.shape

    what = replace(problem(count=8192), in_place=in_place)
    x = array(np.zeros(what.count, np.float32))
    buffers = SimpleNamespace(x=x, out=x, like=array)
    comm = SimpleNamespace(all_reduce_rms_norm=SimpleNamespace(prepare=prepare))
    collectives.load("all_reduce_rms_norm").prepare(comm, buffers, what)
    rows = 2, 4096
    out = None if in_place else rows
    assert taken == {"x": rows, "residual": rows, "weight": (4096,), "out": out}


def test_a_check_of_several_calls_leaves_no_residual():
    """In a graph a check makes three calls. What they left in the residual spoiled later checks."""
    what = problem("bfloat16", count=4096, n=1)
    buffers = problems.buffers(what)
    table = collectives.load("all_reduce_rms_norm")
    comm = SimpleNamespace(all_reduce_rms_norm=SimpleNamespace(prepare=lambda *given: given))
    x, residual, weight, eps = table.prepare(comm, buffers, what)

    def call():
        loaded = x.copy()
        for _ in range(gpu_clock._CHECKED_CALLS):
            x[:] = loaded
            kccl.rms_norm(x, weight, eps, residual=residual)

    for seed in range(3):
        assert table.check(what, buffers, call, 0, None, seed) == 0
        assert not residual.any()


def gpu_rows():
    ours = {
        "mode": "graph",
        "dtype": "bfloat16",
        "time_us": 2.5,
        "skewed_us": 2.25,
        "floor_us": 0.755,
    }
    peer = {"library": "nccl", "algorithm": "symmetric_window", "call": "direct", "time_us": 10.0}
    return [
        row(**ours),
        row(**ours | {"mode": "eager", "host_us": 3.25, "skewed_us": None}),
        row(**ours | peer),
        row(**ours | {"bytes": 65536}),
        row(**ours | peer | {"bytes": 65536}),
        # The longest names and figures that a run has had.
        row(**ours | peer | {"bytes": 65536, "library": "torch_symm_mem", "time_us": 444.25})
        | {"mode": "eager", "p99_us": 111.5, "host_us": 45.25, "busbw_gbps": 123.4},
    ]


def test_the_table_shows_what_gpus_have():
    lines = screen_of(gpu_rows(), verbose=True, width=120)
    printed = "\n".join(lines)
    assert max(map(len, lines)) <= 120
    assert "skewed" in printed and "host" in printed and "4.00x" in printed
    assert "one-way latency of a word" in printed and "MPI" not in printed


# Kernels


@pytest.mark.skipif(find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed")
def test_the_kernels_compile_for_gpus():
    module = kccl.compile(kernels.SOURCE, kernels.NAMES, target="cuda", arch="sm_90a")
    assert module.names == kernels.NAMES


def on_simulator(main, world_size=2, **options):
    module = kccl.compile(kernels.SOURCE, kernels.NAMES)
    return kccl.run_threads(partial(main, module), world_size, backend="sim", **options)


@pytest.mark.parametrize("seed", range(5))
def test_the_ping_pong_goes_to_and_fro(seed):
    def main(module, comm):
        ping_pong = kernels.PingPong(comm, module)
        elapsed_ns = np.zeros(1, np.uint64)
        found = []
        for _ in range(2):
            ping_pong.enqueue(elapsed_ns, rounds=20)
            found.append(ping_pong.one_way_us(int(elapsed_ns[0]), rounds=20))
        return found

    first, second, third = on_simulator(main, 3, seed=seed)
    assert first == second == third
    assert all(us > 0 for us in first)


@pytest.mark.long
def test_a_ping_pong_without_an_answer_ends_and_says_so(monkeypatch):
    monkeypatch.setattr(kernels, "_LIMIT_NS", 10_000)

    def main(module, comm):
        ping_pong = kernels.PingPong(comm, module)
        elapsed_ns = np.ones(1, np.uint64)
        if comm.rank == 0:
            ping_pong.enqueue(elapsed_ns, rounds=20)
            assert elapsed_ns[0] == 0
        with pytest.raises(kccl.Timeout, match="did not answer each other"):
            ping_pong.one_way_us(int(elapsed_ns[0]), rounds=20)

    on_simulator(main)


def test_stamps_are_in_order():
    def main(module, comm):
        pause = module.kernel("pause_step")
        delays, stamps = np.zeros(3, np.uint32), np.full(3, 2**63, np.uint64)
        for step in (0, 2):
            pause(comm, delays, stamps, np.uint32(step), block=32)
        assert stamps[0] <= stamps[2] < 2**63 and stamps[1] == 2**63

    on_simulator(main, 1)


# Peers


def test_peers_that_cannot_be_measured_are_named_once_with_their_cause(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(torch, "_import_torch", missing)

    def main(comm):
        peers = torch.TorchPeers(SimpleNamespace(comm=comm), None)
        found = peers.contenders(collectives.load("all_reduce"), problem(n=2))
        peers.close()
        return found, peers.notes(), peers.libraries

    for found, notes, libraries in FakeWorld(2).run(main):
        assert found == [] and libraries == {}
        assert notes == [
            "no NCCL and torch_symm_mem rows: ModuleNotFoundError: No module named 'torch'"
        ]
    for name, value in torch.NO_MULTICAST.items():
        assert os.environ[name] == value


def test_a_peer_that_fails_on_one_rank_is_left_out_on_all():
    def only_on_rank_1(rank):
        if rank == 1:
            raise RuntimeError("not aligned\nC++ stack")

    def main(comm):
        notes = peer_notes.PeerNotes(comm)
        agreed = [
            notes.agree("two_shot", size, partial(only_on_rank_1, comm.rank)) for size in (8, 16)
        ]
        return agreed, notes.take()[-1]

    for agreed, note in FakeWorld(2).run(main):
        assert agreed == [False, False]
        assert note == "no two_shot rows at 8, 16 bytes: RuntimeError: not aligned"


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all", "send_recv"])
@pytest.mark.parametrize("in_place", [True, False])
def test_nccl_is_measured_in_place_where_its_call_is(name, in_place):
    """NCCL exchanges chunks and messages between two arrays only."""

    def main(comm):
        peers = torch.TorchPeers(SimpleNamespace(comm=comm), None)
        peers._torch, made = object(), []
        peers._nccl = peers._nccl_window = peers._symm_mem = lambda *_: made.append(1) or []
        what = replace(problem(n=2), in_place=in_place)
        peers.contenders(collectives.load(name), what)
        return len(made), peers.notes()

    for made, notes in FakeWorld(2).run(main):
        if in_place == (name == "all_reduce"):
            assert made == 3 and not any("measured" in note for note in notes)
        else:
            assert made == 0 and "measured" in notes[-1]


def test_nccl_exchanges_messages_by_parts_of_one_length():
    calls = []
    dist = SimpleNamespace(get_rank=lambda: 2, all_to_all_single=lambda *args: calls.append(args))
    mine = problems.Buffers("x", "out")
    collectives.load("send_recv").nccl(dist, mine, problem(count=64, n=4))()
    collectives.load("all_to_all").nccl(dist, mine, problem(count=64, n=4))()
    lengths = [0, 0, 0, 64]
    assert calls == [("out", "x", lengths, lengths), ("out", "x")]


# Without a GPU


def test_the_command_says_that_there_is_no_gpu():
    try:
        kccl.gpu.num_devices()
        pytest.skip("there is a GPU")
    except kccl.BackendError:
        pass
    command = [sys.executable, "-m", "kccl", "bench", "all_reduce", "--backend", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "driver" in done.stderr or "cuda.bindings" in done.stderr


def test_the_hosts_probe_refuses_gpu_memory():
    with pytest.raises(kccl.InvalidArgument, match='must have "host"'):
        kccl.probe.one_way_latency_us(SimpleNamespace(backend="cuda", world_size=2))
