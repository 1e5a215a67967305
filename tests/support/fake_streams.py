"""Fakes of PyTorch's streams, events, tensors and futures on a GPU, which tell what waits for what.

Only tests that have found PyTorch import this.
"""

from contextlib import contextmanager

import torch

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
