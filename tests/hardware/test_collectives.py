"""Collectives, put, get, signal, wait on GPUs give the bits of the host backend or the oracle."""

import numpy as np
import oracle
import pytest
from gpu_algorithms import of_gpus, reductions
from gpu_arrays import bits_of, to_gpu
from gpu_vendor import BACKEND

import kccl
from kccl import gpu
from kccl.tools import warm

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

COUNTS = (1, 2, 3, 5, 33, 500, 4099, 40000)
WORLD_SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def kernels_are_warm():
    """Compiles the kernels in parallel, because one by one they take minutes."""
    sizes = [size for size in WORLD_SIZES if size <= gpu.num_devices()]
    warm.warm(warm.instances(sizes))


def random_input(dtype, count, rank):
    """Ordinary values, with special values in some places."""
    rng = np.random.default_rng([count, rank])
    if dtype in oracle.INTEGERS:
        return rng.integers(-(2**31), 2**31, count).astype(dtype)
    x = (rng.standard_normal(count) * 3).astype(oracle.numpy_dtype(dtype))
    x[rng.random(count) < 0.02] = np.nan
    x[rng.random(count) < 0.02] = np.inf
    x[rng.random(count) < 0.02] = -0.0
    return x


def scatters_and_gathers(world_size):
    """All algorithms of reduce_scatter and of all_gather, in as few pairs as have all."""
    scatters, gathers = of_gpus("reduce_scatter", world_size), of_gpus("all_gather", world_size)
    for number in range(max(len(scatters), len(gathers))):
        yield scatters[number % len(scatters)], gathers[number % len(gathers)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_gives_the_bits_of_the_host(world_size, kernels_are_warm):
    inputs = {
        (dtype, count, rank): random_input(dtype, count, rank)
        for dtype in oracle.DTYPES
        for count in COUNTS
        for rank in range(world_size)
    }

    def on_host(comm):
        results = {}
        for dtype in oracle.DTYPES:
            for op in oracle.ops_of(dtype):
                for count in COUNTS:
                    x = inputs[dtype, count, comm.rank].copy()
                    comm.all_reduce(x, op=op)
                    results[dtype, op, count] = x.view(f"int{8 * x.dtype.itemsize}")
        return results

    (want, *_) = kccl.run_threads(on_host, world_size, backend="host")

    def on_gpu(comm):
        torch.cuda.set_device(comm.rank)
        wrong = []
        for dtype, op, algorithm in reductions(world_size):
            for count in COUNTS:
                x = to_gpu(inputs[dtype, count, comm.rank], comm.rank)
                out = torch.empty_like(x)
                comm.all_reduce(x, op=op, algorithm=algorithm, out=out)
                comm.all_reduce(x, op=op, algorithm=algorithm)
                for each in (x, out):
                    different = int((bits_of(each) != want[dtype, op, count]).sum())
                    if different:
                        wrong.append((dtype, op, algorithm, count, different))
        comm.check()
        return wrong

    for rank, wrong in enumerate(kccl.run_threads(on_gpu, world_size, backend=BACKEND)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_unaligned_arrays(world_size):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        base = torch.zeros(4003, dtype=torch.bfloat16, device=f"cuda:{comm.rank}")
        for begin in range(1, 5):
            x = base[begin : begin + 3001]
            x.fill_(comm.rank + 1)
            comm.all_reduce(x)
            assert (x == world_size * (world_size + 1) / 2).all()
            assert (base[:begin] == 0).all()
            assert (base[begin + 3001 :] == 0).all()
            base.zero_()
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("windows", ["vmm", "peer"])
@pytest.mark.parametrize(
    ("world_size", "algorithm"),
    [(size, name) for size in WORLD_SIZES for name in of_gpus("broadcast", size)],
)
def test_broadcast_and_barrier(world_size, algorithm, windows, monkeypatch):
    monkeypatch.setenv("KCCL_WINDOWS", windows)

    def main(comm):
        torch.cuda.set_device(comm.rank)
        for root in range(world_size):
            for count in (1, 7, 1000, 300001):
                want = torch.arange(count, dtype=torch.int32) * (root + 1)
                x = want.cuda() if comm.rank == root else torch.zeros_like(want).cuda()
                comm.broadcast(x, root, algorithm=algorithm)
                comm.barrier()
                assert torch.equal(x.cpu(), want)
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", [2, 4])
def test_put_get_signal_wait(world_size):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        window = comm.window(8 * 1000)
        mine = torch.from_dlpack(window.array((1000,), kccl.int64))
        nxt, before = (comm.rank + 1) % world_size, (comm.rank - 1) % world_size
        for turn in range(5):
            x = torch.full((500,), 100 * comm.rank + turn, dtype=torch.int64, device="cuda")
            comm.put(x, nxt, window, 8 * 250)
            comm.signal(nxt, 3)
            comm.wait(3, peer=before)
            assert (mine[250:750] == 100 * before + turn).all()
            assert (mine[:250] == 0).all() and (mine[750:] == 0).all()
            comm.barrier()
            got = comm.get(torch.zeros_like(x), nxt, window, 8 * 250)
            assert (got == 100 * comm.rank + turn).all()
            comm.barrier()
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", [2, 4])
def test_arrays_of_every_library(world_size):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        cupy.cuda.Device(comm.rank).use()
        total = world_size * (world_size + 1) / 2
        # By copies, because CuPy takes seconds to compile a kernel.
        x = cupy.asarray(np.full(777, comm.rank + 1, np.float32))
        with cupy.cuda.Stream(non_blocking=True):
            comm.all_reduce(x)
            assert (x.get() == total).all()

        own = comm.empty((3, 100), kccl.bfloat16)
        x = torch.from_dlpack(own)
        assert x.shape == (3, 100) and x.dtype == torch.bfloat16 and (x == 0).all()
        x += comm.rank + 1
        assert comm.all_reduce(own) is own
        assert (x == total).all()

        x = torch.full((50,), comm.rank + 1.0, device="cuda")
        holder = type("Holder", (), {
            "__dlpack__": lambda self, **how: x.__dlpack__(**how),
            "__dlpack_device__": lambda self: x.__dlpack_device__(),
        })()  # fmt: skip
        comm.all_reduce(holder)
        assert (x == total).all()
        for dtype in (torch.float8_e4m3fn, torch.complex64):
            x = torch.full((50,), comm.rank + 1.0, device="cuda").to(dtype)
            comm.all_reduce(x)
            assert (x.to(torch.complex64) == total).all()
        comm.check()

        with pytest.raises(kccl.InvalidArgument, match="GPU memory"):
            comm.all_reduce(np.zeros(4, np.float32))
        with pytest.raises(kccl.InvalidArgument, match="GPU memory"):
            comm.all_reduce(torch.zeros(4))
        with pytest.raises(kccl.InvalidArgument, match="contiguous"):
            comm.all_reduce.prepare(torch.zeros((4, 4), device="cuda").t()[1:])
        with pytest.raises(kccl.InvalidArgument, match=r"dtype is complex32, .* because this call"):
            comm.all_reduce(torch.zeros(4, dtype=torch.complex32, device="cuda"))
        with pytest.raises(kccl.InvalidArgument, match=r"must be on the communicator's"):
            comm.all_reduce(torch.zeros(4, device=f"cuda:{(comm.rank + 1) % world_size}"))

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", [2, 4])
def test_prepared_calls_streams_and_channels(world_size):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        total = world_size * (world_size + 1) / 2
        streams = [torch.cuda.Stream() for _ in range(comm.num_channels)]
        xs = [torch.full((5000,), comm.rank + 1.0, device="cuda") for _ in streams]
        torch.cuda.synchronize()
        for _ in range(3):
            for channel, (stream, x) in enumerate(zip(streams, xs, strict=True)):
                comm.all_reduce(x, stream=stream, channel=channel)
        torch.cuda.synchronize()
        assert all((x == total * world_size**2).all() for x in xs)

        x = torch.full((100,), 1.0, device="cuda")
        op = comm.all_reduce.prepare(x)
        root = comm.broadcast.prepare(x, root=0)
        for _ in range(20):
            op()
            root()
            x /= world_size
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            op()
        side.synchronize()
        assert (x == world_size).all()
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_time_of_prepared_calls(world_size):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        x = torch.zeros(100, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        ops = comm.all_reduce.prepare(x), comm.all_reduce.prepare(x, stream=side), comm.barrier
        for op in ops:
            us = op.time(1250, warmup=250)
            assert us.shape == (1250,) and (us > 0.5).all() and np.median(us) < 100
        # The calls are timed alone, whatever the stream does before them.
        torch.cuda._sleep(100_000_000)
        assert np.median(ops[0].time(200)) < 100
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", [2])
def test_narrow_epochs_wrap(world_size, monkeypatch):
    monkeypatch.setenv("KCCL_EPOCH_BITS", "4")
    algorithms = of_gpus("all_reduce", world_size, "float32")

    def main(comm):
        torch.cuda.set_device(comm.rank)
        rng = np.random.default_rng(7)
        for turn in range(200):
            count = int(rng.integers(1, 3000))
            x = torch.full((count,), float(turn + comm.rank), device="cuda")
            if turn % 5 == 0:
                comm.broadcast(x, turn % world_size)
                wanted = turn + turn % world_size
            else:
                comm.all_reduce(x, algorithm=algorithms[turn % len(algorithms)])
                wanted = 2 * turn + 1
            is_right = (x == wanted).all().item()
            comm.check()
            assert is_right, turn

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize(
    ("world_size", "scatter", "gather"),
    [(size, *pair) for size in WORLD_SIZES for pair in scatters_and_gathers(size)],
)
def test_all_gather_and_reduce_scatter_give_the_bits_of_the_oracle(
    world_size, scatter, gather, kernels_are_warm
):
    """In place and out of place, and with chunks that begin between words."""
    inputs = {
        (dtype, count): [
            random_input(dtype, count * world_size, rank) for rank in range(world_size)
        ]
        for dtype in oracle.DTYPES
        for count in COUNTS
    }
    reduced = {
        (dtype, count, op): oracle.all_reduce(all_ranks, op)
        for (dtype, count), all_ranks in inputs.items()
        for op in ("sum", "max")
    }

    def main(comm):
        torch.cuda.set_device(comm.rank)
        wrong = []
        for (dtype, count), all_ranks in inputs.items():
            chunk = slice(comm.rank * count, (comm.rank + 1) * count)
            for op in ("sum", "max"):
                x = to_gpu(all_ranks[comm.rank], comm.rank)
                out = comm.reduce_scatter(x, op=op, algorithm=scatter)
                comm.reduce_scatter(x, out=x[chunk], op=op, algorithm=scatter)
                want = reduced[dtype, count, op]
                gathered = comm.all_gather(out, algorithm=gather)
                assert out.shape == (count,) and gathered.shape == (world_size, count)
                whole = torch.zeros_like(x)
                whole[chunk] = x[chunk]
                comm.all_gather(whole[chunk], out=whole, algorithm=gather)
                bits = want.view(f"int{8 * want.itemsize}")
                for name, each in (("given", gathered.view(-1)), ("in place", whole)):
                    different = int((bits_of(each) != bits).sum())
                    if different:
                        wrong.append((dtype, op, count, name, different))
        comm.check()
        return wrong

    for rank, wrong in enumerate(kccl.run_threads(main, world_size, backend=BACKEND)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.parametrize("shape", [(1, 64), (3, 512)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_long_messages_take_many_rounds(world_size, shape):
    """Few threads take several turns; the last turn is short and ends between lines."""
    count = (1 << 20) + 13
    few = dict(zip(("blocks", "threads"), shape, strict=True))
    how = {name: few | {"algorithm": f"{name}_push_simple"} for name in ("all_gather", "broadcast")}
    how["reduce_scatter"] = few | {"algorithm": "reduce_scatter_push_simple"}
    how["all_reduce"] = few | {"algorithm": "all_reduce_two_shot_push_simple"}

    def main(comm):
        torch.cuda.set_device(comm.rank)
        values = torch.arange(count * world_size, dtype=torch.int32, device="cuda")
        given = [values % (251 + rank) for rank in range(world_size)]
        total = sum(given)
        mine = slice(comm.rank * count, (comm.rank + 1) * count)

        def made(call, *arrays, **options):
            getattr(comm, call).prepare(*arrays, **options, **how[call])()

        for _ in range(2):
            x, out = given[comm.rank].clone(), torch.zeros_like(total)
            made("all_reduce", x, out=out)
            made("all_reduce", x)
            assert torch.equal(out, total) and torch.equal(x, total)

            x, out = given[comm.rank].clone(), torch.zeros(count, dtype=torch.int32, device="cuda")
            made("reduce_scatter", x, out=out)
            made("reduce_scatter", x, out=x[mine])
            assert torch.equal(out, total[mine]) and torch.equal(x[mine], total[mine])

            whole = torch.zeros_like(total)
            made("all_gather", out, out=whole)
            assert torch.equal(whole, total)
            whole = torch.zeros_like(total)
            whole[mine] = out
            made("all_gather", whole[mine], out=whole)
            assert torch.equal(whole, total)

            for root in range(world_size):
                x = given[root].clone() if comm.rank == root else torch.zeros_like(total)
                made("broadcast", x, root)
                assert torch.equal(x, given[root])
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_allocated_is_of_the_arrays_library(world_size):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        cupy.cuda.Device(comm.rank).use()
        x = cupy.full((3, 5), comm.rank, cupy.float32)
        gathered = comm.all_gather(x)
        assert isinstance(gathered, cupy.ndarray) and gathered.shape == (world_size, 3, 5)
        assert (gathered == cupy.arange(world_size)[:, None, None]).all()
        own = comm.empty((world_size,), kccl.float32)
        with pytest.raises(kccl.InvalidArgument, match="out must be given"):
            comm.reduce_scatter(own)
        out = torch.zeros(1, device="cuda")
        torch.from_dlpack(own).fill_(comm.rank)
        assert comm.reduce_scatter(own, out=out) is out
        assert out == world_size * (world_size - 1) / 2
        gather = comm.all_gather.prepare(out)
        for _ in range(20):
            assert (gather() == out).all()
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)
