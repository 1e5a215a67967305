"""barrier: no rank leaves before the last one has arrived."""

from typing import Any

from ..calls import Checked, OnStream, Prepared


class Barrier(Prepared):
    """barrier(): returns when every rank has called it; orders earlier puts and ordinary stores."""

    def prepare(self, *, stream: Any = None, channel: int = 0) -> Prepared:
        """A barrier to be called many times, on the given channel, on a GPU on the given stream."""
        barrier: Prepared = self._comm._prepared_barrier(stream, channel)
        return barrier


class CheckedBarrier(Checked, Barrier):
    """The same under KCCL_CHECK=1."""


class BarrierOnStream(OnStream, Barrier):
    """The same on a GPU: orders what its stream did before, on all ranks."""

    def __call__(self, *, stream: Any = None) -> Any:
        self._stream = stream
        return super().__call__()
