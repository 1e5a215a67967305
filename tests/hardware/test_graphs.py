"""Calls in CUDA graphs, of ranks that are processes, and of ranks that are threads."""

import threading

import pytest
from gpu_ranks import ranks
from gpu_vendor import BACKEND
from graph_edges import edge_kinds, need_edges, num_told, of_dependent

import kccl
from kccl import gpu

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_graphs_replay_and_mix_with_eager_calls(world_size):
    ranks(world_size, """
x, y = filled(), filled(dtype=torch.bfloat16)
comm.all_reduce(x); comm.all_reduce(y); comm.broadcast(x); comm.barrier()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(10):
        comm.all_reduce(x, op="avg")
        comm.all_reduce(y, op="max")
        comm.broadcast(x, root=comm.world_size - 1)
        comm.barrier()
        x += 1
for turn in range(3):
    x.fill_(comm.rank + 1); y.fill_(comm.rank + 1)
    for _ in range(2):
        graph.replay()
    assert (x == total / comm.world_size + 20).all(), x
    assert (y == comm.world_size).all()
    z = filled()
    comm.all_reduce(z)
    assert (z == total).all()
comm.check()
say(rank=comm.rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
def test_a_prepared_call_is_launched_as_a_graph_and_captured_as_a_kernel(world_size):
    ranks(world_size, """
from kccl.base.abi import ffi
x = filled()
op = comm.all_reduce.prepare(x)
assert ffi.cast("KcclGpuOp *", op._handle).graph != 0
op()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    op()
    op()
assert (x == total).all()
graph.replay()
op()
graph.replay()
assert (x == total * comm.world_size**5).all(), x
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    op()
side.synchronize()
assert (x == total * comm.world_size**6).all(), x
# The graphs of calls that are dropped go while others are captured.
for _ in range(20):
    comm.all_reduce.prepare(x, op="max")()
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    op()
comm.check()
say(rank=comm.rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_of_a_graph_begin_while_the_one_before_ends(world_size):
    """This holds behind each other. Behind other nodes of a graph they are launched as usual."""
    need_edges()
    ranks(world_size, """
from graph_edges import edge_kinds, num_told, of_dependent
from kccl import gpu
x, y = filled(), torch.zeros(4000, device="cuda")
long = filled(1 << 20)
window = comm.window(4096)
mine = torch.from_dlpack(window.array((1024,), kccl.float32))
peer = (comm.rank + 1) % comm.world_size
stream = gpu.make_stream()
def calls():
    comm.all_reduce(x, op="avg", stream=stream)
    comm.put(x[:1024], peer, window, stream=stream)
    comm.signal(peer, stream=stream)
    comm.wait(stream=stream)
    comm.all_reduce(long, op="avg", stream=stream)
    comm.broadcast(long, root=comm.world_size - 1, stream=stream)
    comm.barrier(stream=stream)
calls()
torch.cuda.synchronize()
mode = gpu.constant("CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL")
gpu.call("cuStreamBeginCapture", stream, mode)
calls()
graph = gpu.call("cuStreamEndCapture", stream)
kinds = edge_kinds(graph)
assert kinds == [of_dependent(comm.rank)] * 6, kinds
# put, signal and wait: put comes early. Long calls do not, nor does what follows one.
assert num_told(graph) == 3 * of_dependent(comm.rank)
ready = gpu.call("cuGraphInstantiate", graph, 0)
x.fill_(comm.rank + 1); long.fill_(comm.rank + 1)
torch.cuda.synchronize()
for _ in range(10):
    gpu.call("cuGraphLaunch", ready, stream)
gpu.call("cuStreamSynchronize", stream)
assert all((each == total / comm.world_size).all() for each in (x, long, mine))

main, side = torch.cuda.Stream(), torch.cuda.Stream()
torch.cuda.synchronize()
with torch.cuda.stream(main):
    gpu.call("cuStreamBeginCapture", main.cuda_stream, mode)
    for _ in range(20):
        x.fill_(comm.rank + 1)
        y.zero_()
        y.copy_(x)
        comm.all_reduce(y)
        comm.all_reduce(y, op="avg")
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            x.mul_(2)
        here.wait_stream(side)
        comm.all_reduce(x)
        comm.barrier()
    graph = gpu.call("cuStreamEndCapture", main.cuda_stream)
# all_reduce behind all_reduce, and barrier behind all_reduce; not behind copies, fills and joins.
assert sum(edge_kinds(graph)) == num_told(graph) == 20 * 2 * of_dependent(comm.rank)
ready = gpu.call("cuGraphInstantiate", graph, 0)
for _ in range(5):
    gpu.call("cuGraphLaunch", ready, main.cuda_stream)
    torch.cuda.synchronize()
    assert (x == 2 * total).all() and (y == total).all()
comm.check()
say(rank=comm.rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
def test_graphs_on_channels_of_their_own(world_size):
    ranks(world_size, """
xs = [filled() for _ in range(3)]
graphs, streams = [], []
for channel, x in enumerate(xs):
    comm.all_reduce(x, op="avg", channel=channel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            comm.all_reduce(x, op="avg", channel=channel)
            x += channel
    graphs.append(graph)
    streams.append(torch.cuda.Stream())
for turn in range(4):
    for graph, stream in zip(graphs, streams):
        with torch.cuda.stream(stream):
            graph.replay()
torch.cuda.synchronize()
for channel, x in enumerate(xs):
    assert (x == 1.5 + 200 * channel).all()
comm.check()
say(rank=comm.rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("count", [1 << 13, 1 << 16, 1 << 17])
def test_chains_of_calls_run_beside_each_other(world_size, count):
    """Each rank begins three chains, on three channels and streams, in another order.

    A call has few blocks, or as many as leave room for three chains with early calls, or more.
    """
    ranks(world_size, f"count = {count}" + """
xs = [filled(count) for _ in range(3)]
graphs, streams = [], [torch.cuda.Stream() for _ in xs]
for channel, x in enumerate(xs):
    comm.all_reduce(x.clone(), channel=channel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            comm.all_reduce(x, channel=channel)
            comm.all_reduce(x, op="avg", channel=channel)
    graphs.append(graph)
order = [0, 1, 2] if comm.rank == 0 else [2, 1, 0]
for _ in range(4):
    for each in order:
        with torch.cuda.stream(streams[each]):
            graphs[each].replay()
torch.cuda.synchronize()
for x in xs:
    # Exact: the first call sums, and each of the further ones doubles.
    assert (x == total * comm.world_size**79).all(), x
comm.check()
say(rank=comm.rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
def test_dependents_can_be_switched_off(world_size):
    need_edges()
    program = """
from graph_edges import edge_kinds, num_told
from kccl import gpu
x = filled()
stream = gpu.make_stream()
comm.all_reduce(x, stream=stream)
torch.cuda.synchronize()
mode = gpu.constant("CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL")
gpu.call("cuStreamBeginCapture", stream, mode)
for _ in range(3):
    comm.all_reduce(x, stream=stream)
graph = gpu.call("cuStreamEndCapture", stream)
assert edge_kinds(graph) == [0, 0] and num_told(graph) == 0
comm.check()
say(rank=comm.rank)
"""
    ranks(world_size, program, KCCL_DEPENDENTS="0")


@pytest.mark.parametrize("world_size", [2])
def test_calls_that_fork_behind_one_read_what_it_wrote(world_size):
    need_edges()
    ranks(world_size, """
from graph_edges import edge_kinds, num_told, of_dependent
from kccl import gpu
x, first, second, last = (filled(1 << 14) for _ in range(4))
stream, side = gpu.make_stream(), gpu.make_stream()
forked, joined = gpu.call("cuEventCreate", 2), gpu.call("cuEventCreate", 2)
def calls():
    comm.all_reduce(x, out=first, stream=stream)
    gpu.call("cuEventRecord", forked, stream)
    gpu.call("cuStreamWaitEvent", side, forked, 0)
    comm.all_reduce(first, out=second, channel=1, stream=side)
    gpu.call("cuEventRecord", joined, side)
    comm.all_reduce(first, out=last, stream=stream)
    gpu.call("cuStreamWaitEvent", stream, joined, 0)
    comm.all_reduce(second, op="avg", stream=stream)
calls()
torch.cuda.synchronize()
mode = gpu.constant("CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL")
gpu.call("cuStreamBeginCapture", stream, mode)
calls()
graph = gpu.call("cuStreamEndCapture", stream)
# The first of the two comes early, the other not at all.
assert sorted(edge_kinds(graph)) == [0, 0, 0, of_dependent(comm.rank)]
assert num_told(graph) == of_dependent(comm.rank)
ready = gpu.call("cuGraphInstantiate", graph, 0)
for turn in range(20):
    x.fill_(comm.rank + turn)
    torch.cuda.synchronize()
    gpu.call("cuGraphLaunch", ready, stream)
    gpu.call("cuStreamSynchronize", stream)
    want = comm.world_size * (total + comm.world_size * (turn - 1))
    assert (last == want).all() and (second == want).all(), turn
comm.check()
say(rank=comm.rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
def test_a_call_behind_one_of_another_gpu_is_no_dependent(world_size):
    need_edges()
    done = []
    meet = threading.Barrier(world_size)

    def main(comm):
        torch.cuda.set_device(comm.rank)
        stream = gpu.make_stream()
        event = gpu.call("cuEventCreate", 2)
        comm.barrier(stream=stream)
        torch.cuda.synchronize()
        if comm.rank == 0:
            mode = gpu.constant("CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED")
            gpu.call("cuStreamBeginCapture", stream, mode)
            comm.signal(1, stream=stream)
            gpu.call("cuEventRecord", event, stream)
            done.append(event)
        meet.wait(20)
        if comm.rank == 1:
            gpu.call("cuStreamWaitEvent", stream, done[0], 0)
            comm.wait(stream=stream)
            comm.signal(0, stream=stream)
            gpu.call("cuEventRecord", event, stream)
            done.append(event)
        meet.wait(20)
        if comm.rank == 0:
            gpu.call("cuStreamWaitEvent", stream, done[1], 0)
            comm.wait(stream=stream)
            graph = gpu.call("cuStreamEndCapture", stream)
            # The nodes are signal, on the other GPU wait and signal, and wait behind both.
            assert sorted(edge_kinds(graph)) == [0, 0, 0, of_dependent(1)]
            assert num_told(graph) == of_dependent(1)
            ready = gpu.call("cuGraphInstantiate", graph, 0)
            for _ in range(10):
                gpu.call("cuGraphLaunch", ready, stream)
            gpu.call("cuStreamSynchronize", stream)
        meet.wait(20)
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)
