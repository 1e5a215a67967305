"""The parts of `kccl bench --in-kernel` that need no GPU: chains, shapes, simulated kernels."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from device_compilers import find_nvrtc
from long import hunted, long_after

import kccl
from kccl.bench import collectives
from kccl.bench.collectives import all_reduce
from kccl.bench.gpu import kernels
from kccl.bench.harness import measure
from kccl.bench.in_kernel import contenders, data
from kccl.bench.in_kernel import side as in_kernel_side
from kccl.gpu import driver

TABLES = [collectives.load(name) for name in collectives.NAMES]
DATA = [table.name for table in TABLES if table.chain]
# exchange has tests of its own.
ALL = [table.name for table in TABLES if table.forms and table.name != "exchange"]


def problem(name, n, dtype="float32", nbytes=256):
    table = collectives.load(name)
    (found,) = table.problems(
        [nbytes],
        dtype=dtype,
        np_dtype=kccl.dtypes.to_numpy(dtype),
        op="sum",
        root=0,
        in_place=not table.is_apart_in_kernels,
        world_size=n,
    )
    return found


# What a chain of calls ends with


@pytest.mark.parametrize("n", range(1, 9))
def test_periods(n):
    period = data.period(n)
    assert period >= 20 and period * np.log2(n) <= 100
    # A broadcast's data change once a period. Each rank is the root at one of these changes.
    assert n == 1 or {period * k % n for k in range(n)} == set(range(n))
    short = data.short_period(n)
    assert 2 <= short <= 5 and (n == 1 or {short * k % n for k in range(n)} == set(range(n)))
    chain, given = collectives.load("all_reduce").chain, problem("all_reduce", n)
    for length in (period, short):
        factors = [chain.factor(given, rank, length) for rank in range(n)]
        assert sum(factors) * n ** (length - 1) == pytest.approx(1)
        assert len(set(factors)) == n


@pytest.mark.long
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_values_stay_in_range_and_every_call_counts(name, n, dtype):
    chain, long = collectives.load(name).chain, problem(name, n, dtype)
    for length in (data.period(n), data.short_period(n)):
        for calls in (6001, 6000 // length * length):
            end, further = (
                chain.end(long, 0, count, length).astype(float) for count in (calls, calls + 1)
            )
            assert np.isfinite(end).all() and np.abs(end).max() < 1e37
            # Not every element changes, because some of the values added are zero.
            assert (end != further).mean() > 0.5


@pytest.mark.parametrize("n", [2, 3, 8])
def test_chunks_move_around(n):
    chain, few = collectives.load("all_gather").chain, problem("all_gather", n)
    start = chain.start(few, 0)
    moved = [
        next(by for by in range(n) if (np.roll(start, -few.count // n * by) == end).all())
        for end in (chain.end(few, 1, calls, 50) for calls in range(200))
    ]
    assert moved[0] == 0 and set(moved) == set(range(n))
    # In about half of the calls a slot's contents differ from those of two calls before.
    assert np.mean([a != b for a, b in zip(moved, moved[2:], strict=False)]) > 0.4


def test_messages_of_one_pattern_are_computed_once():
    all_reduce._sum_of_sums.cache_clear()
    ends = [
        collectives.load("all_reduce").chain.end(problem("all_reduce", 2, nbytes=nbytes), 0, 50, 30)
        for nbytes in (8192, 65536)
    ]
    assert all_reduce._sum_of_sums.cache_info().misses == 1
    assert (ends[1][: ends[0].size] == ends[0]).all()


# Shapes


@pytest.mark.parametrize(
    ("nbytes", "blocks", "threads"),
    [(8, 1, 32), (1024, 1, 128), (2048, 2, 128), (65536, 64, 128), (1 << 20, 132, 128)],
)
def test_a_thread_has_one_packet_while_there_are_blocks(nbytes, blocks, threads):
    shape = contenders.shape(problem("all_reduce", 2, nbytes=nbytes), 132)
    assert (shape.blocks, shape.threads) == (blocks, threads)


def test_every_block_has_a_slice_and_all_elements_are_in_one():
    for name, n, nbytes in (
        (name, n, nbytes) for name in DATA for n in (1, 2, 3, 8) for nbytes in range(4, 20000, 236)
    ):
        made = problem(name, n, nbytes=nbytes)
        length = made.count // made.num_chunks
        shape = contenders.shape(made, 7)
        assert 1 <= shape.blocks <= 7 and shape.each * 4 % 16 == 0
        assert (shape.blocks - 1) * shape.each < length <= shape.blocks * shape.each


def test_grid_sync_takes_all_blocks():
    shape = contenders.shape(problem("grid_sync", 2), 132)
    assert (shape.blocks, shape.threads) == (132, 160)
    assert contenders.shape(problem("barrier", 2), 132) == contenders.Shape(1, 32, 0)


# On the simulator


def measured(name, comm, *, dtype="float32", nbytes=256, iterations=3):
    made = problem(name, comm.world_size, dtype, nbytes)
    table = collectives.load(name)
    side = in_kernel_side.InKernelSide(comm, table, [made])
    rows = measure.measure(
        table,
        made,
        side.contenders(made),
        rank=comm.rank,
        gather=comm.gather_objects,
        repeats=1,
        iterations=iterations,
    )
    side.fill(rows)
    notes = side.notes()
    side.close()
    return rows, notes


def on_simulator(name, world_size=2, seed=0, **options):
    return kccl.run_threads(
        partial(measured, name, **options), world_size, backend="sim", seed=seed
    )[0]


WANTED = {
    # The last row is that of grid_exchange.
    "all_reduce": [("slice", "relaxed", 2), ("message", "relaxed", 2), ("message", "relaxed", 2)],
    "barrier": [("message", "relaxed", 1), ("message", "acq_rel", 1)],
    "grid_sync": [("message", "relaxed", 4), ("message", "acq_rel", 4)],
}


@pytest.mark.parametrize("name", long_after(1, ALL))
def test_rows(name):
    nbytes = 2048 if name == "all_reduce" else 256
    rows, notes = on_simulator(name, nbytes=nbytes)
    shapes = [(found["complete"], found["order"], found["blocks"]) for found in rows]
    assert shapes == WANTED.get(name, [("slice", "relaxed", 1)])
    for found in rows:
        assert tuple(found) == measure.COLUMNS
        assert (found["library"], found["mode"], found["wrong"]) == ("kccl", "in_kernel", 0)
        assert found["time_us"] > 0 and found["p99_us"] > 0
        # The simulator measures no machine.
        assert found["floor_us"] is found["busbw_gbps"] is found["skewed_us"] is None
        table = collectives.load(name)
        assert found["in_place"] is (not table.is_apart_in_kernels if table.has_data else None)
    why = ["no row of cooperative groups: backend sim has none"]
    assert notes == (why if name == "grid_sync" else [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world_size", "dtype"),
    [("all_reduce", 1, "float64"), *((name, 3, "bfloat16") for name in DATA)],
)
def test_chains_over_several_periods(name, world_size, dtype):
    rows, _ = on_simulator(name, world_size, 1, dtype=dtype, nbytes=72, iterations=210)
    assert all(row["wrong"] == 0 for row in rows)


@pytest.fixture
def spoiled(monkeypatch, tmp_path):
    """spoiled(name, old, new, ...): replaces each old text in the kernels of a collective, and in
    what they include, by the new one.
    """

    def spoil(name, *texts):
        sources = {path.name: path.read_text() for path in in_kernel_side.FOLDER.glob("*.cuh")}
        for old, new in zip(texts[::2], texts[1::2], strict=True):
            found = [each for each in (f"{name}.cuh", "chains.cuh") if old in sources[each]]
            assert len(found) == 1 and sources[found[0]].count(old) == 1, old
            sources[found[0]] = sources[found[0]].replace(old, new)
        for file, text in sources.items():
            (tmp_path / file).write_text(text)
        monkeypatch.setattr(in_kernel_side, "FOLDER", tmp_path)

    return spoil


CALL = "const Status status = call();"
# What is wrong with the kernel -> a text and its replacement.
BROKEN = {
    "a call is left out": (CALL, "if (k == 7) continue; " + CALL),
    "a call is made twice": (CALL, "if (k == 7) call(); " + CALL),
    "a peer is ignored": (
        "return kccl::all_reduce<T>(channel_, slice_, slice_, count_);",
        "const bool is_one = leads(block()); T own = is_one ? *slice_ : T(); "
        "const Status done = kccl::all_reduce<T>(channel_, slice_, slice_, count_); "
        "if (is_one) *slice_ = own * channel_.world_size(); block().sync(); return done;",
    ),
    "a slice is not changed": ("{ multiply(slice_, count_, factor_); }", "{}"),
}


@pytest.mark.parametrize("what", hunted(BROKEN))
def test_a_launch_that_goes_wrong_has_no_time(what, spoiled):
    spoiled("all_reduce", *BROKEN[what])
    (first, *_), _ = on_simulator("all_reduce", iterations=140)
    assert first["wrong"] > 0 and first["time_us"] is None


@pytest.mark.parametrize("name", hunted(["reduce_scatter", "all_gather"]))
def test_a_call_that_is_left_out_shows(name, spoiled):
    spoiled(name, *BROKEN["a call is left out"])
    rows = [on_simulator(name, iterations=iterations)[0][0] for iterations in (15, 17)]
    assert any(row["wrong"] > 0 and row["time_us"] is None for row in rows)


MEMBERS = "\n    T before_[2] = {};\n    uint32_t calls_ = 0;\n"


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "call"), [(2, 13), (3, 17)])
def test_an_old_word_of_a_broadcast_shows(world_size, call, spoiled):
    """Rank 0, the next root, gets the first element that it had two calls before."""
    text = "return kccl::broadcast<T>(channel_, slice_, slice_, count_, root);"
    stale = """const Status done = CALL
        if (leads(block()) && channel_.comm().rank == 0) {
            const T is = *slice_;
            if (calls_ == WHICH) *slice_ = before_[calls_ % 2];
            before_[calls_++ % 2] = is;
        }
        block().sync();
        return done;"""
    stale = stale.replace("CALL", text.removeprefix("return ")).replace("WHICH", str(call))
    spoiled("broadcast", text, stale, "    int root_ = 0;\n", "    int root_ = 0;" + MEMBERS)
    (row,), _ = on_simulator("broadcast", world_size, iterations=29)
    assert row["wrong"] > 0 and row["time_us"] is None


@pytest.mark.parametrize("world_size", hunted([2, 3]))
def test_an_old_word_of_reduce_scatter_shows(world_size, spoiled):
    """Rank 1 sends rank 0 the first element that it sent two calls before."""
    text = "return kccl::reduce_scatter<T>(channel_, own_, in_, count_, stride_);"
    stale = """const bool spoils = leads(block()) && channel_.comm().rank == 1;
        T sent = {};
        if (spoils) {
            sent = *in_;
            if (calls_ == 13) *in_ = before_[calls_ % 2];
            before_[calls_++ % 2] = sent;
        }
        block().sync();
        const Status done = CALL
        block().sync();
        if (spoils) *in_ = sent;
        block().sync();
        return done;""".replace("CALL", text.removeprefix("return "))
    spoiled("reduce_scatter", text, stale, "    T* const own_;\n", "    T* const own_;" + MEMBERS)
    (row,), _ = on_simulator("reduce_scatter", world_size, iterations=29)
    assert row["wrong"] > 0 and row["time_us"] is None


@pytest.mark.long
def test_a_broadcast_that_does_not_arrive_shows(spoiled):
    call = "return kccl::broadcast<T>(channel_, slice_, slice_, count_, root);"
    spoiled("broadcast", call, call.replace("count_", "count_ / 2"))
    (row,), _ = on_simulator("broadcast", iterations=15)
    assert row["wrong"] > 0 and row["time_us"] is None


@pytest.mark.long
def test_a_message_that_is_taken_before_all_blocks_are_there_is_found(spoiled):
    spoiled("all_reduce", "status : blocks_.sync();", "status : kKcclOk;")
    with pytest.raises(kccl.ProtocolError):
        on_simulator("all_reduce", nbytes=2048)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("barrier", "return kccl::barrier<ORDER>(channel_);"),
        ("grid_sync", "return barrier_.template sync<ORDER>();"),
    ],
)
def test_barriers_that_do_not_wait_are_found(name, call, spoiled):
    spoiled(name, call, "return kKcclOk;")
    rows, _ = on_simulator(name)
    assert all(row["wrong"] > 0 and row["time_us"] is None for row in rows)


@pytest.mark.long
def test_a_relaxed_barrier_orders_nothing_else(spoiled):
    """Without fences the words that the bench checks may arrive late. The check finds that."""
    spoiled("barrier", "ORDER == Order::kAcqRel", "true")
    found = []
    for seed in range(20):
        (relaxed, acq_rel), _ = on_simulator("barrier", seed=seed)
        assert acq_rel["wrong"] == 0
        found.append(relaxed["wrong"])
    assert any(found)


def test_blocks_of_a_gpu_play_ping_pong():
    module = kccl.compile(kernels.SOURCE, kernels.NAMES)

    def main(comm):
        words = np.zeros(2 * kernels.LINES_BYTES // 4, np.int32)
        elapsed_ns = np.zeros(2, np.int64)
        ping_pong = kernels.BlockPingPong(comm, module, words)
        for _ in range(2):
            ping_pong.enqueue(elapsed_ns, rounds=20)
            assert ping_pong.one_way_us(elapsed_ns, rounds=20) > 0
        with pytest.raises(kccl.Timeout, match="two blocks of a GPU did not answer"):
            ping_pong.one_way_us(np.array([0, 5]))

    kccl.run_threads(main, 1, backend="sim")


# For GPUs


@pytest.mark.skipif(find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed")
@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_the_kernels_compile_for_gpus(name):
    world_size = 8 if name == "barrier" else 2
    source, names = in_kernel_side.kernels_of(collectives.load(name), "bfloat16", world_size)
    kccl.compile(source, names, target="cuda", arch="sm_90a")


@pytest.mark.skipif(find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed")
def test_the_peer_of_grid_sync_compiles_where_cudas_headers_are():
    folders = in_kernel_side.cooperative_groups()
    if not folders:
        pytest.skip("no folder has cooperative_groups.h and nv/target")
    names = in_kernel_side._PEER.names(None, 2)
    source = in_kernel_side._PEERS_KERNELS
    kccl.compile(source, names, target="cuda", arch="sm_90a", include_dirs=folders)


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_cooperative_launch_is_the_drivers(cooperative, monkeypatch):
    calls = []
    monkeypatch.setattr(
        driver.table(), "call", lambda name, *args, note: calls.append((name, args))
    )
    kccl.gpu.launch(
        7, [b"abcd"], grid=3, block=64, shared_bytes=0, stream=5, cooperative=cooperative
    )
    ((name, args),) = calls
    assert args[:9] == (7, 3, 1, 1, 64, 1, 1, 0, 5)
    wanted = ("cuLaunchCooperativeKernel", 10) if cooperative else ("cuLaunchKernel", 11)
    assert (name, len(args)) == wanted


def test_cudas_headers_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(
        in_kernel_side, "_include_folders", lambda: iter([tmp_path / "a", tmp_path / "b"])
    )
    assert in_kernel_side.cooperative_groups() == []
    for file in ("a/cooperative_groups.h", "b/cooperative_groups.h", "b/cccl/nv/target"):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert in_kernel_side.cooperative_groups() == [tmp_path / "b", tmp_path / "b/cccl"]
    (tmp_path / "a/nv").mkdir()
    (tmp_path / "a/nv/target").touch()
    assert in_kernel_side.cooperative_groups() == [tmp_path / "a", tmp_path / "a"]
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert next(in_kernel_side._include_folders()) == tmp_path / "include"


def test_device_code_of_the_bench_includes_public_headers_only():
    own = {"beside.cuh", "chains.cuh", "exchange.cuh", "grid_sync.cuh"}
    for path in Path(contenders.__file__).parent.glob("*.cuh"):
        included = re.findall(r"#include [<\"](\S+)[>\"]", path.read_text())
        assert included and set(included) - own <= {"kccl/kccl.cuh", "cooperative_groups.h"}
