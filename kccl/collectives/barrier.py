"""barrier: no rank leaves before the last one has arrived."""

from typing import Any

from .prepared import Checked, CheckedOnStream, Prepared


class Barrier(Prepared):
    """barrier(): returns when every rank has called it; orders earlier puts and ordinary stores."""

    def prepare(self, *, stream: Any = None, channel: int = 0) -> Prepared:
        """A barrier to be called many times, on the given channel, on a GPU on the given stream."""
        barrier: Prepared = self._comm._prepared_barrier(stream, channel)
        return barrier


class CheckedBarrier(Checked, Barrier):
    """The same under KCCL_CHECK=1."""


class BarrierOnStream(CheckedOnStream, Barrier):
    """The same on a GPU: orders what its stream did before, on all ranks."""

    def __init__(self, signature: str, comm: Any, plan: Any, handle: Any) -> None:
        self._given: Any = None
        super().__init__(signature, comm, plan, handle, None, None, self._now)

    def __call__(self, *, stream: Any = None) -> Any:
        if stream is None:
            return super().__call__()
        self._given = stream
        try:
            return super().__call__()
        finally:
            self._given = None

    def _now(self) -> int:
        return self._comm._backend.stream(self._given, None)
