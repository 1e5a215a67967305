"""A program of NCCL's that knows nothing of KCCL: PyTorch with backend "nccl", and NCCL by ctypes,
as vLLM calls it. It checks results, and times calls and a tensor-parallel decode loop. The times
are those of the slowest rank. tests/hardware/test_nccl_api.py runs it without and with KCCL.

    torchrun --nproc-per-node 2 nccl_in_pytorch.py out

Rank 0 writes out.json, with the times, and out.pt, with results whose bits can be compared.
"""

import ctypes
import json
import os
import sys
import time
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

BF16, F32 = 9, 7
began = time.monotonic()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rows = []


def say(text):
    if rank == 0:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)


def note(by, call, nbytes, mode, found):
    row = {"by": by, "call": call, "bytes": nbytes, "mode": mode}
    rows.append(row | {"time_us": found[0], "p99_us": found[1]})


def times(run, calls, samples):
    """Median and 99th percentile of the microseconds of a call, of the slowest rank."""
    for _ in range(3):
        run()
    dist.barrier()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    us = sorted(a.elapsed_time(b) * 1e3 / calls for a, b in pairwise(events))
    middle, late = us[len(us) // 2], us[int(0.99 * len(us))]
    found = torch.tensor([middle, late], dtype=torch.float64, device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [round(each, 3) for each in found.tolist()]


def captured(work):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def measure(by, call, nbytes, work):
    """Times calls in a graph, and one by one."""
    calls = 20
    graph = captured(lambda: [work() for _ in range(calls)])
    for mode, found in (
        ("graph", times(graph.replay, calls, 200)),
        ("eager", times(lambda: [work() for _ in range(10)], 10, 60)),
    ):
        note(by, call, nbytes, mode, found)
        say(f"{by}, {call}, {nbytes} bytes, {mode}: {found[0]} us, p99 {found[1]}")


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Nccl:
    """A communicator of NCCL's, without PyTorch."""

    def __init__(self):
        self.lib = ctypes.CDLL(os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2")
        self.lib.ncclGetLastError.restype = ctypes.c_char_p
        self.lib.ncclGetLastError.argtypes = [ctypes.c_void_p]
        number = UniqueId()
        if rank == 0:
            self.must(self.lib.ncclGetUniqueId(ctypes.byref(number)))
        told = torch.frombuffer(bytearray(bytes(number)), dtype=torch.uint8).cuda()
        dist.broadcast(told, src=0)
        ctypes.memmove(ctypes.byref(number), bytes(told.cpu().tolist()), 128)
        self.comm = ctypes.c_void_p()
        self.must(self.lib.ncclCommInitRank(ctypes.byref(self.comm), world, number, rank))

    def must(self, code):
        if code != 0:
            raise RuntimeError(f"NCCL's {code}: {self.lib.ncclGetLastError(None)}")

    def all_reduce(self, x, out=None):
        out = x if out is None else out
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        kind = BF16 if x.dtype == torch.bfloat16 else F32
        at, to = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        count = ctypes.c_size_t(x.numel())
        self.must(self.lib.ncclAllReduce(at, to, count, kind, 0, self.comm, stream))

    def broadcast(self, x, out, root):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        at, to = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        count = ctypes.c_size_t(x.numel())
        self.must(self.lib.ncclBroadcast(at, to, count, F32, root, self.comm, stream))

    def destroy(self):
        self.must(self.lib.ncclCommDestroy(self.comm))


def check_one_by_one():
    """Exact sums, at odd addresses."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in (1, 5, 4096, 4097, 100_000, 600_000):
            whole = torch.zeros(n + 8, device="cuda", dtype=dtype)
            x = whole[rank + 1 : rank + 1 + n]
            x.copy_((torch.arange(n, device="cuda") % 50) * (rank + 1))
            want = (torch.arange(n, device="cuda") % 50).to(dtype) * (world * (world + 1) // 2)
            dist.all_reduce(x)
            assert torch.equal(x, want), (dtype, n)
            out = torch.empty(world * n, device="cuda", dtype=dtype)
            dist.all_gather_into_tensor(out, x)
            assert torch.equal(out, want.repeat(world)), (dtype, n)
            part = torch.empty(n, device="cuda", dtype=dtype)
            dist.reduce_scatter_tensor(part, out)
            assert torch.equal(part, want * world), (dtype, n)
            y = torch.full((n,), rank, device="cuda", dtype=dtype)
            dist.broadcast(y, src=world - 1)
            assert torch.equal(y, torch.full_like(y, world - 1)), (dtype, n)
    say("right: collectives one by one")


def check_graph_beside_eager():
    x = torch.zeros(4096, device="cuda", dtype=torch.bfloat16)
    graph = captured(lambda: dist.all_reduce(x))
    for round in range(5):
        x.fill_(rank + 1 + round)
        graph.replay()
        z = torch.full((512,), float(rank), device="cuda")
        dist.all_reduce(z)
        assert (x == world * (world + 1) // 2 + world * round).all()
        assert (z == world * (world - 1) // 2).all()
    say("right: a graph and eager calls")


def check_streams_of_a_capture(nccl):
    """Calls on two streams in one capture, which no edge but NCCL's or KCCL's orders. These sizes
    were not called before, so nothing is warm.
    """
    x, y, z, w = (torch.zeros(n, device="cuda") for n in (777, 555, 555, 333))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=one):
        two.wait_stream(one)
        nccl.all_reduce(x)
        x.add_(1)
        nccl.all_reduce(x)
        nccl.broadcast(y, z, 0)
        nccl.all_reduce(z)
        with torch.cuda.stream(two):
            nccl.all_reduce(w)
            w.mul_(2)
        nccl.all_reduce(y)
        with torch.cuda.stream(two):
            nccl.all_reduce(w)
        one.wait_stream(two)
    for round in range(200):
        for each in (x, y, z, w):
            each.fill_(rank + 1 + round)
        graph.replay()
        total = world * (world + 1) // 2 + world * round
        assert (x == world * (total + 1)).all() and (y == total).all(), "one stream"
        assert (z == world * (1 + round)).all() and (w == world * 2 * total).all(), "two streams"
    say("right: two streams in a capture")


def check_eager_during_capture(nccl):
    """A call on a stream that is not captured, while another one is."""
    x, y = torch.full((100,), 1.0, device="cuda"), torch.full((100,), 1.0, device="cuda")
    other = torch.cuda.Stream()
    nccl.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # In other modes an eager call of NCCL ends the capture.
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        nccl.all_reduce(y)
        with torch.cuda.stream(other):
            nccl.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    assert (x == world * world).all() and (y == world).all()
    say("right: an eager call during a capture")


def decode(results):
    """A tensor-parallel decode loop: layers of two products with a sum over the ranks."""
    torch.manual_seed(1)
    d, layers = 4096, 16
    shard = d // world
    weights = []
    for _ in range(layers):
        a = torch.randn(d, d, device="cuda", dtype=torch.bfloat16) / 64
        b = torch.randn(d, d, device="cuda", dtype=torch.bfloat16) / 64
        mine = slice(rank * shard, (rank + 1) * shard)
        weights.append((a[:, mine].contiguous(), b[mine].contiguous()))
    h = torch.randn(1, d, device="cuda", dtype=torch.bfloat16)
    first = h.clone()

    def step():
        for a, b in weights:
            y = torch.nn.functional.silu(torch.nn.functional.rms_norm(h, (d,)) @ a) @ b
            dist.all_reduce(y)
            h.add_(y)

    graph = captured(step)
    h.copy_(first)
    for _ in range(10):
        graph.replay()
    results["decoded"] = h.cpu()
    other = h.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(other, h), "the ranks' states differ"
    found = times(graph.replay, 1, 100)
    note("torch", "decode", 2 * d, "graph", found)
    say(f"decode: {found[0]} us a token, p99 {found[1]}, {layers} layers of {d}")


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    results = {}
    check_one_by_one()
    generator = torch.Generator("cuda").manual_seed(rank)
    random = torch.randn(4096, device="cuda", dtype=torch.bfloat16, generator=generator)
    dist.all_reduce(random)
    results["random"] = random.cpu()
    check_graph_beside_eager()
    nccl = Nccl()
    check_streams_of_a_capture(nccl)
    for nbytes in (8, 1024, 8192, 65536, 1 << 20):
        x = torch.zeros(nbytes // 2, device="cuda", dtype=torch.bfloat16)
        measure("torch", "all_reduce", nbytes, partial(dist.all_reduce, x))
        measure("ctypes", "all_reduce", nbytes, partial(nccl.all_reduce, x))
    part = torch.zeros(16384, device="cuda", dtype=torch.bfloat16)
    whole = torch.zeros(16384 * world, device="cuda", dtype=torch.bfloat16)
    nbytes = 2 * whole.numel()
    measure("torch", "all_gather", nbytes, lambda: dist.all_gather_into_tensor(whole, part))
    measure("torch", "reduce_scatter", nbytes, lambda: dist.reduce_scatter_tensor(part, whole))
    decode(results)
    if rank == 0:
        torch.save(results, f"{sys.argv[1]}.pt")
        with open(f"{sys.argv[1]}.json", "w") as file:
            json.dump(rows, file)
    check_eager_during_capture(nccl)
    torch.cuda.synchronize()
    nccl.destroy()
    group = dist.new_group(ranks=list(range(world)))
    x = torch.ones(10, device="cuda")
    dist.all_reduce(x, group=group)
    assert (x == world).all()
    dist.destroy_process_group(group)
    dist.all_reduce(x)
    assert (x == world * world).all()
    dist.destroy_process_group()
    say("right: ended")


if __name__ == "__main__":
    main()
