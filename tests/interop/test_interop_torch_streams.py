"""On which streams the calls of a group run, and what waits for what. The streams are fakes, so no
GPU is needed. tests/hardware/test_torch.py has tests on GPUs.
"""

import gc
import sys
from types import SimpleNamespace

import pytest

import kccl

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
dist = torch.distributed

from fake_streams import GPU, Event, Group, Stream, Tensor, fake_cuda  # noqa: E402

pytestmark = pytest.mark.long

SYNC = SimpleNamespace(asyncOp=False)


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda(monkeypatch)


@pytest.fixture
def group(cuda):
    made = Group(cuda)
    yield made
    dist.destroy_process_group()


def test_an_asynchronous_call_runs_beside_the_program(cuda, group):
    x, main = Tensor(), cuda.current
    main.run("forward")
    work, before = group.call("first", [x])
    assert before == {"forward"}
    # Backward goes on while the call is under way.
    assert main.run("backward") == {"forward"}
    second, before = group.call("second", [x])
    assert before == {"forward", "first", "backward"}
    assert main.run("more") == {"forward", "backward"}
    assert work.wait()
    # It waits for its own call, and not for the later one.
    assert "first" in main.done and "second" not in main.done
    assert second.wait() and "second" in main.done
    assert x.used_on == [] and len(cuda.made) == 2


def test_calls_that_wait_run_on_the_current_stream(cuda, group):
    """All calls of a group follow each other, whichever stream they are on."""
    side = Stream(cuda, 77)
    _, before = group.call("sync", [Tensor()], SYNC)
    assert before == set() and "sync" in cuda.current.done
    _, before = group.call("async", [Tensor()])
    assert before == {"sync"} and "async" not in cuda.current.done
    _, before = group.call("again", [Tensor()], SYNC)
    assert before == {"sync", "async"} and "again" in cuda.current.done
    with cuda.on(side):
        work, before = group.call("on a side", [Tensor()], SYNC)
        assert before == {"sync", "async", "again"} and "on a side" in side.done
        assert work.wait()


def test_memory_is_not_reused_while_a_call_uses_it(cuda, group):
    """A handle that is dropped, or that another stream has waited for, leaves it to PyTorch."""
    x, out = Tensor(), Tensor()
    own = cuda.made[0]
    work, _ = group.call("waited for", [x], results=[out])
    assert work._kept == [x, out]
    work.wait()
    assert work._kept == []
    del work
    work, _ = group.call("elsewhere", [x], results=[out])
    with cuda.on(Stream(cuda, 77)):
        work.wait()
    del work
    gc.collect()
    assert x.used_on == out.used_on == [own]
    group.call("dropped", [x], results=[out])
    gc.collect()
    assert x.used_on == out.used_on == [own, own]
    # The program may change its own list, here that of tensors that a call changes in place.
    y = Tensor()
    mine = [y]
    work = group.group.run(mine, mine, None, lambda comm: None)
    mine.clear()
    del work
    gc.collect()
    assert y.used_on == [own]
    # DistributedDataParallel keeps the future alone.
    future = group.call("of a future", [x])[0].get_future()
    gc.collect()
    assert len(x.used_on) == 3 and "of a future" in future.event.what[0]


def test_a_capture_forks_and_joins(cuda, group):
    """Each capture joins its own streams: what is captured does not wait for what is not."""
    for turn in range(2):
        stream = Stream(cuda, 50 + turn)
        group.call(f"eager {turn}", [Tensor()])
        with cuda.graph(stream):
            stream.run(f"captured {turn}")
            first, before = group.call(f"first {turn}", [Tensor()])
            assert f"captured {turn}" in before and f"eager {turn}" not in before
            second, before = group.call(f"second {turn}", [Tensor()], SYNC)
            assert f"first {turn}" in before
            third, _ = group.call(f"third {turn}", [Tensor()])
            # In another order than they were made in.
            for work in (third, first, second):
                assert work.wait()
        assert cuda.made[1].graph is None


def test_a_call_that_is_refused_or_fails_leaves_a_capture_whole(cuda, group):
    stream = Stream(cuda, 50)

    def refuse(comm):
        raise kccl.InvalidArgument("wrong")

    def fail(comm):
        raise kccl.Timeout("late", rank=0)

    with cuda.graph(stream):
        stream.run("captured")
        with pytest.raises(kccl.InvalidArgument, match="wrong"):
            group.group.run([Tensor()], [], None, refuse)
        assert cuda.current is stream
    with cuda.graph(stream):
        work = group.group.run([Tensor()], [], None, fail)
        assert work.is_completed() and not work.is_success()
        with pytest.raises(kccl.Timeout, match="late"):
            work.wait()
    with pytest.raises(kccl.Timeout, match="late"):
        group.group.run([Tensor()], [], SYNC, fail)

    def enqueue_and_refuse(comm):
        cuda.current.run("half")
        raise kccl.InvalidArgument("wrong")

    # Beside the default stream, which nobody captures.
    with pytest.raises(kccl.InvalidArgument, match="wrong"):
        group.group.run([Tensor()], [], None, enqueue_and_refuse)
    assert cuda.current is cuda.default and "half" in cuda.default.done


@pytest.mark.parametrize(("streams", "own"), [(1, 0), (2, 1), (3, 2)])
def test_the_process_has_as_many_streams_as_fit(cuda, streams, own):
    """KCCL_STREAMS less one, however many groups there are. With 1 all calls follow the program."""
    from kccl.interop import torch_streams

    comms = [kccl.init(backend="host") for _ in range(4)]
    for comm in comms:
        torch_streams.give_stream(comm, GPU, streams)
    assert len(cuda.made) == 2 * own
    used = set()
    for comm in comms:
        place = torch_streams.enqueue(comm, GPU, lambda _: used.add(cuda.current), is_async=True)
        assert place.caller is cuda.current is cuda.default and place.stream in used
        comm.close()
    assert used == (set(cuda.made[::2]) or {cuda.default})


def test_a_new_communicator_gets_the_stream_that_the_fewest_have(cuda):
    from kccl.interop import torch_streams

    def own(comm):
        return torch_streams.enqueue(comm, GPU, lambda _: None, is_async=True).stream

    comms = [kccl.init(backend="host") for _ in range(4)]
    for comm in comms[:3]:
        torch_streams.give_stream(comm, GPU, 3)
    assert own(comms[0]) is own(comms[2]) is not own(comms[1])
    there = own(comms[0])
    for comm in (comms[0], comms[2]):
        torch_streams.free_stream(comm)
        assert own(comm) is cuda.current
    torch_streams.give_stream(comms[3], GPU, 3)
    assert own(comms[3]) is there
    for comm in comms:
        comm.close()


def test_a_call_waits_for_no_other_group_on_the_stream_that_they_share(cuda, group):
    from kccl.interop import torch_streams

    before = []
    group.call("first", [Tensor()])
    with kccl.init(backend="host") as other:
        torch_streams.give_stream(other, GPU, 2)
        place = torch_streams.enqueue(
            other, GPU, lambda _: before.append(cuda.current.run("of another")), is_async=True
        )
        assert place.stream is cuda.made[0] and before == [{"first"}]
    _, before = group.call("second", [Tensor()], SYNC)
    assert before == {"first"}


def test_captures_at_once_do_not_share_a_stream(cuda, group):
    """As with capture_error_mode="thread_local" in two threads. The later one's calls follow it."""
    from kccl.interop import torch_streams

    one, two = Stream(cuda, 50), Stream(cuda, 51)
    with kccl.init(backend="host") as other:
        torch_streams.give_stream(other, GPU, 2)

        def call(name):
            before = []
            place = torch_streams.enqueue(
                other, GPU, lambda _: before.append(cuda.current.run(name)), is_async=True
            )
            stream, caller = place.stream, place.caller
            caller.wait_stream(stream)
            return stream, before[0]

        # The communicator's last captured call was on the stream that the first capture has below.
        with cuda.graph(two):
            assert call("earlier")[0] is cuda.made[1]
        with cuda.graph(one):
            work, _ = group.call("first", [Tensor()])
            with cuda.graph(two):
                stream, before = call("second")
                assert stream is two and "first" not in before
                assert "second" in call("third")[1]
            assert work.wait()
        with cuda.graph(two):
            assert call("later")[0] is cuda.made[1]


def test_events_are_used_again_once_nothing_waits_for_them(cuda, group):
    """But not those of a capture, which stay in its graph, nor one that a handle still has."""
    kept, _ = group.call("kept", [Tensor()])
    cuda.current.run("later")
    for turn in range(5):
        group.call(f"call {turn}", [Tensor()])[0].wait()
    # One for each fork, that of the call before, and that which is kept.
    assert Event.made <= 4
    with cuda.on(Stream(cuda, 77)):
        kept.wait()
        assert cuda.current.done == {"kept"}
    made = Event.made
    with cuda.graph(Stream(cuda, 50)):
        for turn in range(2):
            group.call(f"captured {turn}", [Tensor()])[0].wait()
    assert Event.made >= made + 4
    group.call("after", [Tensor()])[0].wait()
    assert "after" in cuda.current.done


def test_other_functions_for_streams_are_refused_with_their_names(cuda, monkeypatch):
    """When a communicator is made, and not at its first call."""
    from kccl.interop import torch_cuda

    torch_cuda.check(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "Future", lambda: None)
        with pytest.raises(kccl.Error, match=r"functions for streams .*argument"):
            torch_cuda.check(0)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda stream: None)
    with pytest.raises(kccl.Error, match=r"functions for streams .*stream_id"):
        torch_cuda.check(0)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentStream")
    with pytest.raises(kccl.Error, match=r"functions for streams .*_cuda_getCurrentStream"):
        torch_cuda.check(0)


def test_calls_on_several_streams_wait_for_each_other_and_no_more(cuda, group):
    """As FSDP2 makes them: each gathers on one stream and reduces on another."""
    gather, reduce = Stream(cuda, 70), Stream(cuda, 71)
    for turn in range(3):
        for name, stream in (("gather", gather), ("reduce", reduce)):
            with cuda.on(stream):
                _, before = group.call(f"{name} {turn}", [Tensor()], SYNC)
                stream.run(f"copy {name} {turn}")
            if turn:
                other = "reduce" if name == "gather" else "gather"
                last = turn if name == "reduce" else turn - 1
                assert f"{other} {last}" in before and f"copy {other} {last}" not in before


def test_a_call_made_on_the_own_stream_stays_there(cuda, group):
    own = cuda.made[0]
    with cuda.on(own):
        work, before = group.call("there", [Tensor()])
        assert before == set() and work.wait() and work._kept == []


def test_calls_of_a_communicator_follow_each_other_across_streams(cuda):
    from kccl.interop import torch_streams

    side, graph, fork = Stream(cuda, 1), Stream(cuda, 2), Stream(cuda, 3)
    with kccl.init() as comm, kccl.init() as other:

        def call(comm, stream, name):
            with cuda.on(stream), torch_streams.Ordered(comm, GPU):
                return stream.run(name)

        assert call(comm, cuda.default, "a") == set()
        assert call(comm, side, "b") == {"a"}
        assert call(other, fork, "of another") == set()
        fork.done.clear()
        assert call(comm, cuda.default, "c") == {"a", "b"}
        # A captured call may wait only for calls of the same capture.
        with cuda.graph(graph):
            fork.wait_stream(graph)
            assert call(comm, graph, "d") == set()
            assert call(comm, fork, "e") == {"d", "fork of 3"}
            graph.wait_stream(fork)
        assert call(comm, side, "f") == {"a", "b", "c"}
        # After the capture its streams are like others; the next capture does not wait for them.
        assert "f" in call(comm, graph, "g")
        with cuda.graph(graph):
            assert "f" in call(comm, graph, "h")
        with torch_streams.Ordered(comm, torch.device("cpu")):
            pass


def test_a_call_waits_for_one_on_a_stream_that_is_captured_by_now(cuda, group):
    side = Stream(cuda, 77)
    with cuda.on(side):
        group.call("before", [Tensor()], SYNC)
    with cuda.graph(side), cuda.on(cuda.default):
        _, before = group.call("beside the capture", [Tensor()], SYNC)
        assert before == {"before"}


def test_a_call_waits_for_what_a_failed_one_has_enqueued(cuda, group):
    side = Stream(cuda, 77)

    def fail(comm):
        side.run("failed")
        raise kccl.Timeout("late", rank=0)

    with cuda.on(side), pytest.raises(kccl.Timeout, match="late"):
        group.group.run([Tensor()], [], SYNC, fail)
    with cuda.graph(side), cuda.on(cuda.default):
        assert group.call("beside the capture", [Tensor()], SYNC)[1] == {"failed"}


def test_an_event_that_cannot_be_made_is_not_given_back(cuda, monkeypatch):
    from kccl.interop import torch_cuda

    def refuse():
        raise RuntimeError("no event")

    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(torch._C, "_CudaEventBase", refuse)
    with pytest.raises(RuntimeError, match="no event"):
        torch_cuda.Mark(cuda.default)
    gc.collect()
    assert not told and torch_cuda._free == {0: []}
