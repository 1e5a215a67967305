"""Fakes of PyTorch's streams, events, tensors and futures on a GPU, which tell what waits for what.

Only tests that have found PyTorch import this.
"""

from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

GPU = torch.device("cuda", 0)
KEY = ("stream_id", "device_index", "device_type")


class Cuda:
    """The current stream, and the graph that is being captured."""

    def __init__(self):
        self.known = {}
        self.default = self.current = Stream(self, 0)
        self.made = []

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def is_capturing(self):
        assert self.current is not self.default, "the legacy stream must not be asked"
        return self.current.graph is not None

    def set_current(self, **key):
        self.current = self.known[tuple(key[name] for name in KEY)]

    def new_stream(self, device, priority):
        assert device == GPU and priority < 0
        self.made.append(Stream(self, len(self.made) + 1))
        return self.made[-1]

    @contextmanager
    def graph(self, stream):
        """Captures a graph, with the stream as the current one."""
        graph = stream.graph = {stream}
        with self.on(stream):
            yield
        for each in graph:
            assert each.done <= stream.done, "a stream of the capture is not joined"
            each.graph = None


class Stream:
    """A fake torch.cuda.Stream. What is enqueued on it has a name.

    Attributes:
        done: The names of all that comes before what is enqueued next.
        graph: The streams of the capture in which this one is; None outside of a capture.
    """

    device, device_index, device_type = GPU, 0, 1

    def __init__(self, cuda, handle):
        self.cuda, self.cuda_stream, self.stream_id = cuda, handle, handle
        self.done, self.graph = set(), None
        cuda.known[self.key] = self

    @property
    def key(self):
        return tuple(getattr(self, name) for name in KEY)

    def run(self, name):
        """Enqueues something. Returns what comes before it."""
        before = set(self.done)
        self.done.add(name)
        return before

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        event.wait(self)

    def wait_for(self, done, graph):
        if graph is not None and self.graph is None:
            graph.add(self)
            self.graph = graph
            # The fork itself must be joined, even if nothing is enqueued behind it.
            self.run(f"fork of {self.cuda_stream}")
        assert self.graph is graph, "a captured stream and another one must not wait"
        self.done |= done

    def record_event(self):
        event = Event()
        event.record(self)
        return event


class Event:
    """A fake event of PyTorch: what came before it, and the graph in which it was recorded."""

    made = 0

    def __init__(self):
        Event.made += 1

    def record(self, stream):
        self.what = set(stream.done), stream.graph

    def wait(self, stream):
        stream.wait_for(*self.what)


class Tensor:
    """A fake tensor on the GPU. It notes on which streams its memory is in use besides."""

    device = GPU

    def __init__(self):
        self.used_on = []

    def record_stream(self, stream):
        self.used_on.append(stream)


class Future:
    """A fake future of PyTorch."""

    def __init__(self, devices):
        assert devices == [GPU]

    def set_result(self, tensors):
        self.event = torch.cuda.current_stream(GPU).record_event()


def fake_cuda(monkeypatch):
    """Puts the fakes into PyTorch, and new tables into KCCL. Returns the Cuda."""
    cuda = Cuda()
    from kccl.interop import torch_cuda, torch_streams

    fakes = {
        torch_streams: {"_own": {}, "_calls": WeakKeyDictionary(), "_forks": {}},
        torch_cuda: {"_streams": cuda.known, "_free": {}},
        torch._C: {
            "_cuda_getCurrentStream": lambda index: cuda.current.key,
            "_cuda_setStream": cuda.set_current,
            "_cuda_getDevice": lambda: 0,
            "_cuda_setDevice": lambda index: None,
            "_cuda_isCurrentStreamCapturing": cuda.is_capturing,
            "_CudaEventBase": Event,
            "Future": Future,
        },
        torch.cuda: {
            "current_stream": lambda device: cuda.current,
            "Stream": cuda.new_stream,
            "init": lambda: None,
        },
    }
    for owner, its in fakes.items():
        for name, fake in its.items():
            monkeypatch.setattr(owner, name, fake, raising=owner is not torch._C)
    monkeypatch.setattr(Event, "made", 0)
    return cuda


class Group:
    """A group of one rank, whose communicator for the GPU is one on the host."""

    def __init__(self, cuda, streams=2):
        import kccl.interop.torch
        from kccl.interop import torch_streams

        self.cuda = cuda
        dist.init_process_group("kccl", store=dist.HashStore(), rank=0, world_size=1)
        self.group = dist.group.WORLD
        self.comm = kccl.init(backend="host")
        torch_streams.give_stream(self.comm, GPU, streams)
        self.group._comms.of["cuda"] = self.comm

    def call(self, name, tensors, opts=None, results=()):
        """Makes a call of that name. Returns its Work, and what comes before it on its stream."""
        before = []

        def call(comm):
            assert comm is self.comm
            before.append(torch.cuda.current_stream(GPU).run(name))

        work = self.group.run(tensors, list(results), opts, call)
        return work, before[0]
