"""Prepared calls on a stream. C functions replace the driver's, so no GPU is needed."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from stream_world import CALL_US, World

import kccl
from kccl.backends import gpu as on_gpus
from kccl.backends.gpu import GpuBackend
from kccl.base.abi import ffi, lib
from kccl.gpu import driver


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(driver.table(), "call", world.driver.call)
    monkeypatch.setattr(driver.table(), "attempt", world.driver.attempt)
    return world


def test_a_given_stream_stays(world):
    op = world.prepared(2**63 + 5)
    assert [op(), op()] == ["the result"] * 2
    assert world.driver.streams == [2**63 + 5] * 2


def test_else_each_run_follows_the_current_stream(world):
    op = world.prepared(lambda: world.now)
    op()
    world.now = 0
    op()
    assert world.driver.streams == [7, 0]


def test_a_recorded_call_is_launched_as_its_graph(world):
    world.graph = 77
    op = world.prepared(lambda: world.now)
    assert [op(), op()] == ["the result"] * 2
    world.now = 9
    op()
    assert world.driver.graphs == [(77, 7), (77, 7), (77, 9)]
    assert world.driver.streams == [] and world.driver.contexts == 0


@pytest.mark.parametrize("said", [(1, 0), (0, 906)], ids=["captured", "unknown"])
def test_a_stream_that_is_captured_takes_the_kernel(world, said):
    """So does a stream whose state is unknown: another stream's capture forbids the query."""
    world.graph = 77
    op = world.prepared(5)
    op()
    world.driver.capturing[5] = said
    op()
    del world.driver.capturing[5]
    op()
    assert world.driver.graphs == [(77, 5)] * 2 and world.driver.streams == [5]


def test_a_launch_takes_the_stream_that_was_queried(world):
    """Even if another run sets another stream between the query and the launch."""
    world.graph = 77
    op = world.prepared(5)
    world.driver.meanwhile = lambda: world.backend.set_stream(op._handle, 9)
    op()
    op()
    assert world.driver.graphs == [(77, 5), (77, 9)] and world.driver.streams == []


def test_two_threads_cannot_give_one_call_two_streams(world):
    """The second one comes while the first is between its query and its launch."""
    streams, errors = {"MainThread": 7, "other": 9}, []
    op = world.prepared(lambda: streams[threading.current_thread().name])

    def second():
        try:
            op()
        except kccl.Error as error:
            errors.append(str(error))

    def meanwhile():
        thread = threading.Thread(target=second, name="other")
        thread.start()
        thread.join()

    world.driver.meanwhile = meanwhile
    assert op() == "the result"
    assert world.driver.streams == [7]
    assert len(errors) == 1 and "a call of this communicator is under way" in errors[0]
    meanwhile()
    assert world.driver.streams == [7, 9]


def test_the_graph_has_the_arguments_of_the_kernel(world, monkeypatch):
    made = []

    class Graph:
        def __init__(self, *arguments, **shape):
            made.append((arguments, shape))
            self.handle = 78

    monkeypatch.setattr(on_gpus, "KernelGraph", Graph)
    handle = world.handle()
    call = ffi.cast("KcclGpuOp *", handle)
    call.function, call.num_blocks, call.threads_per_block = 55, 8, 128
    world.driver.queue.state = 0xABC000
    graph = GpuBackend.as_graph(SimpleNamespace(device="the device"), handle)
    assert call.graph == graph.handle == 78
    (((device, function, argument), shape),) = made
    assert (device, function, shape) == ("the device", 55, {"grid": 8, "block": 128})
    given = ffi.from_buffer("KcclCall *", bytearray(argument))
    assert given.comm.state == 0xABC000 and given.kernel == call.op.call.kernel
    # The host's own KcclCall is unchanged.
    assert call.op.call.comm.state == int(ffi.cast("uintptr_t", world.state))


@pytest.mark.parametrize("graph", [0, 77])
def test_a_launch_that_is_refused_says_what_was_launched(world, graph):
    world.graph = graph
    op = world.prepared(5)
    world.driver.error = 719
    with pytest.raises(kccl.BackendError, match="error 719"):
        op()
    how = world.driver.queue.how
    assert how == (lib.kKcclLaunchGraph if graph else lib.kKcclLaunchKernel)
    world.state.status = lib.kKcclOk
    world.driver.error = 0
    assert op() == "the result"
    assert len(world.driver.graphs) == (2 if graph else 0)


@pytest.mark.parametrize(
    ("stream", "error"),
    [(lambda: 1 / 0, ZeroDivisionError), (lambda: "7", TypeError), (lambda: -1, OverflowError)],
)
def test_a_stream_that_cannot_be_said_is_an_error_and_nothing_is_enqueued(world, stream, error):
    op = world.prepared(stream)
    with pytest.raises(error):
        op()
    with pytest.raises(error):
        op.time(3)
    assert world.driver.streams == []


def test_a_barrier_takes_a_stream_for_one_call(world):
    barrier = world.barrier()
    barrier()
    barrier(stream=9)
    barrier()
    assert world.driver.streams == [7, 9, 7]


def test_a_barrier_says_what_it_takes(world):
    with pytest.raises(TypeError, match=r"on backend cuda .* takes the keyword stream only"):
        world.barrier()(channel=1)
    assert world.driver.streams == []


def test_time_has_the_mean_of_each_block_of_calls(world):
    op = world.prepared(3)
    us = op.time(250, warmup=40)
    assert us.shape == (250,) and us.dtype == np.float64
    assert us == pytest.approx(CALL_US)
    assert world.driver.streams == [3] * 290 and world.driver.recorded == {3}
    assert world.driver.events == {}, "events were not destroyed"


@pytest.mark.parametrize("follows", [False, True])
def test_time_shows_a_slow_block_in_its_calls_only(world, follows, monkeypatch):
    op = world.prepared((lambda: 3) if follows else 3)
    record = world.driver.call
    stalls = iter([0, 0, 50])

    def call(name, *args):
        found = record(name, *args)
        if name == "cuEventRecord":
            world.driver.events[args[0]] += next(stalls)
        return found

    monkeypatch.setattr(driver.table(), "call", call)
    us = op.time(200)
    assert us[:100] == pytest.approx(CALL_US) and us[100:] == pytest.approx(CALL_US + 0.5)


@pytest.mark.parametrize(("iterations", "warmup"), [(0, 0), (-1, 0), (1, -1)])
def test_time_refuses_counts(world, iterations, warmup):
    with pytest.raises(kccl.InvalidArgument, match="must be positive and not negative"):
        world.prepared(3).time(iterations, warmup=warmup)
    assert world.driver.streams == []


def test_a_launch_that_is_refused_ends_time_and_destroys_events(world):
    op = world.prepared(3)
    world.driver.error = 719
    with pytest.raises(kccl.BackendError, match="error 719"):
        op.time(100)
    assert len(world.driver.streams) == 1 and world.driver.events == {}


def test_a_failure_of_timed_calls_is_raised(world, monkeypatch):
    op = world.prepared(3)
    wait = world.driver.call

    def call(name, *args):
        if name == "cuEventSynchronize":
            world.state.status = lib.kKcclTimeout
        return wait(name, *args)

    monkeypatch.setattr(driver.table(), "call", call)
    with pytest.raises(kccl.BackendError):
        op.time(10)
