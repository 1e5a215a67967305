"""The messages of a process group whose ranks are on several machines: gloo sends them."""

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.errors import BackendError, Error, PeerLost, Timeout
from .torch_dynamo import untraced
from .torch_errors import of_torch
from .torch_messages import Call
from .torch_moves import movable
from .torch_work import Handle

GPUS = (
    "kccl: ranks on several machines, and a tensor on a GPU, which KCCL exchanges within a machine "
    'only: name another backend for GPUs, as in "cuda:nccl,cpu:kccl"'
)


def bytes_of(x: Any) -> torch.Tensor:
    """Returns the memory of a NumPy array as a tensor of bytes."""
    return torch.from_numpy(x.reshape(-1).view(np.uint8))


def of_gloo(error: BaseException, rank: int) -> Error:
    """Returns gloo's error on a rank as one of KCCL's. Gloo's errors differ by their text alone."""
    what, text = f"rank {rank}: gloo, between machines: {error}", str(error).lower()
    if "timeout" in text or "timed out" in text:
        return Timeout(what, rank=rank)
    if any(each in text for each in ("closed", "reset", "refused", "broken pipe")):
        return PeerLost(what, rank=rank)
    return BackendError(what)


class FarWork(Handle):
    """The handle of messages that were begun together."""

    def __init__(
        self, messages: "FarMessages", works: list[Any], tensors: list[torch.Tensor]
    ) -> None:
        """Keeps gloo's handles, and the messages' tensors."""
        super().__init__()
        self._messages = messages
        self._works = works
        self._tensors = tensors
        self._is_done = False

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until sent tensors may be reused, and tensors to receive are filled.

        Raises:
            Timeout: A peer did not make its call in time, or within `timeout`.
            PeerLost: The connection to a peer has ended.
        """
        if not self._is_done:
            try:
                for work in self._works:
                    work.wait(timeout or timedelta())
            except RuntimeError as error:
                self._error = of_torch(of_gloo(error, self._messages.rank))
            self._is_done = True
            self._messages.under_way.discard(self)
        if self._error is not None:
            raise self._error
        return True

    @untraced
    def is_completed(self) -> bool:
        """Tells whether all messages have ended, as far as gloo says before wait()."""
        return self._is_done or all([work.is_completed() for work in self._works])

    @untraced
    def _source_rank(self) -> int:
        """Returns the sender of what was received from any rank."""
        source: int = self._works[0]._source_rank()
        return source


class FarMessages:
    """Begins the messages of a group whose ranks are on several machines.

    Attributes:
        rank: This rank.
        under_way: The messages that nobody has waited for. Gloo cancels one whose handle is freed.
    """

    def __init__(self, far: dist.ProcessGroupGloo, rank: int) -> None:
        self._far = far
        self.rank = rank
        self.under_way: set[FarWork] = set()

    def start(self, calls: list[Call]) -> FarWork:
        """Begins messages together.

        Raises:
            NotImplementedError: A tensor is on a GPU.
            Timeout, PeerLost, BackendError: Gloo refuses to begin.
        """
        if any(call.tensor.device.type != "cpu" for call in calls):
            raise NotImplementedError(GPUS)
        memory = [bytes_of(movable(call.tensor.detach(), "tensor")) for call in calls]
        try:
            works = [self._begin(*each) for each in zip(calls, memory, strict=True)]
        except RuntimeError as error:
            raise of_gloo(error, self.rank) from error
        work = FarWork(self, works, [call.tensor for call in calls])
        self.under_way.add(work)
        return work

    def _begin(self, call: Call, memory: torch.Tensor) -> Any:
        if not call.receives:
            return self._far.send([memory], call.peer, call.tag)
        if call.peer is None:
            return self._far.recv_anysource([memory], call.tag)
        return self._far.recv([memory], call.peer, call.tag)

    def set_timeout(self, seconds: float) -> None:
        """Does nothing: the group's Machines sets the timeout of gloo."""

    def check(self) -> None:
        """Does nothing: gloo tells of its errors where it is waited for."""

    def abort(self) -> None:
        """Does nothing: gloo's waits end at their limit."""

    def close(self) -> None:
        """Drops the messages that nobody has waited for."""
        self.under_way.clear()
