"""The calls of a process group whose ranks are on several machines, where there is no MPI.

Ranks of one machine have a communicator of KCCL. Machines exchange by gloo, PyTorch's own backend
for TCP, which is made from the group's store. A call that reduces is made within each machine
first. Then the first rank of each, its leader, exchanges what it has with the other leaders, and
all add the machines' parts in the same order: so all ranks get the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base import dtypes
from ..base.errors import BackendError, InvalidArgument, PeerLost, Timeout
from ..comm import Communicator
from ..plan.ops import Op, check_op
from .torch_messages import Call
from .torch_moves import movable
from .torch_work import CoalescedWork

GPUS = (
    "kccl: ranks on several machines, and a tensor on a GPU, which KCCL exchanges within a machine "
    'only: name another backend for GPUs, as in "cuda:nccl,cpu:kccl"'
)
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


class Machines:
    """Makes the calls of a group with host tensors, as a Communicator does.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        near: The communicator of the ranks of this machine.
        far: Gloo's group of all ranks.
    """

    def __init__(
        self,
        near: Communicator,
        machines: Sequence[Sequence[int]],
        rank: int,
        store: dist.Store,
        timeout: timedelta,
    ) -> None:
        """Connects the machines. Collective.

        Args:
            near: The communicator of the ranks of this machine, in their order.
            machines: The ranks of each machine.
            rank: This rank.
            store: A store that nothing else uses.
            timeout: How long ranks wait for each other.

        Raises:
            Timeout, PeerLost, BackendError: Gloo could not connect the ranks.
        """
        self.near, self.rank = near, rank
        self.world_size = sum(map(len, machines))
        self._machines = machines
        self._leaders = [ranks[0] for ranks in machines]
        self._place = next(n for n, ranks in enumerate(machines) if rank in ranks)
        self._among: dist.ProcessGroupGloo | None = None
        with self._told():
            self.far = dist.ProcessGroupGloo(
                dist.PrefixStore("far", store), rank, self.world_size, timeout
            )
            if rank in self._leaders:
                self._among = dist.ProcessGroupGloo(
                    dist.PrefixStore("leaders", store), self._place, len(machines), timeout
                )

    # ---- Collectives -------------------------------------------------------------------------

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        with self._told():
            self.far.barrier().wait()

    def all_reduce(self, x: Any, *, op: Op, out: Any = None) -> None:
        """Reduces all ranks' x into x, or into out."""
        result = x if out is None else out
        check_op(op, dtypes.of(x.dtype))
        self.near.reduce(x, 0, out=result, op="sum" if op == "avg" else op)
        self._add(result, op)
        self.near.broadcast(result, 0)

    def reduce(self, x: Any, root: int, *, op: Op, out: Any = None) -> None:
        """Reduces all ranks' x. Only the root's x, or out, gets the result."""
        result = np.empty_like(x)
        self.all_reduce(x, op=op, out=result)
        if self.rank == root:
            (x if out is None else out).reshape(-1)[:] = result.reshape(-1)

    def reduce_scatter(
        self, x: Any, *, out: Any, op: Op, counts: Sequence[int] | None = None
    ) -> None:
        """Reduces all ranks' x. Each rank's out gets its part."""
        result = np.empty_like(x)
        self.all_reduce(x, op=op, out=result)
        parts = _parts(result, counts or [out.size] * self.world_size)
        _check_as_long(out, parts[self.rank], result, sum(map(len, parts)))
        out.reshape(-1)[:] = parts[self.rank]

    def broadcast(self, x: Any, root: int) -> None:
        """Copies the root's x to all ranks: within its machine, among the leaders, to the rest."""
        place = next(n for n, ranks in enumerate(self._machines) if root in ranks)
        if self._place == place:
            self.near.broadcast(x, self._machines[place].index(root))
        if self._among is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = place, 0
            with self._told():
                self._among.broadcast([_bytes(x)], options).wait()
        if self._place != place:
            self.near.broadcast(x, 0)

    def all_gather(self, x: Any, *, out: Any, counts: Sequence[int] | None = None) -> None:
        """Copies all ranks' x into out, in rank order."""
        parts = _parts(out, counts or [x.size] * self.world_size)
        _check_as_long(x, parts[self.rank], out, sum(map(len, parts)))
        if counts is None:
            with self._told():
                self.far.allgather([[_bytes(part) for part in parts]], [_bytes(x)]).wait()
            return
        parts[self.rank][:] = x.reshape(-1)
        for root, part in enumerate(parts):
            self.broadcast(part, root)

    def gather(self, x: Any, root: int, *, out: Any = None) -> None:
        """Copies all ranks' x into the root's out, in rank order."""
        outs = []
        if self.rank == root:
            parts = _parts(out, [x.size] * self.world_size)
            _check_as_long(x, parts[root], out, sum(map(len, parts)))
            outs = [[_bytes(part) for part in parts]]
        options = dist.GatherOptions()
        options.rootRank = root
        with self._told():
            self.far.gather(outs, [_bytes(x)], options).wait()

    def scatter(self, x: Any, root: int, *, out: Any) -> None:
        """Copies a part of the root's x to each rank's out."""
        ins = []
        if self.rank == root:
            parts = _parts(x, [out.size] * self.world_size)
            _check_as_long(out, parts[root], x, sum(map(len, parts)))
            ins = [[_bytes(part) for part in parts]]
        options = dist.ScatterOptions()
        options.rootRank = root
        with self._told():
            self.far.scatter([_bytes(out)], ins, options).wait()

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> None:
        """Copies a part of each rank's x to each rank's out."""
        sends, receives = (
            [each * x.itemsize for each in counts or ()] for counts in (send_counts, recv_counts)
        )
        with self._told():
            self.far.alltoall_base(_bytes(out), _bytes(x), receives, sends).wait()

    def _add(self, x: Any, op: Op) -> None:
        """On leaders, reduces the machines' x into x, in the machines' order."""
        if self._among is None:
            return
        every = [np.empty_like(x) for _ in self._machines]
        with self._told():
            self._among.allgather([[_bytes(each) for each in every]], [_bytes(x)]).wait()
        x.reshape(-1)[:] = _sum(every, op, self.world_size).reshape(-1)

    # ---- The rest of what a group calls ------------------------------------------------------

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Returns a context in which gloo is called. Its errors become KCCL's, and end the calls of
        this machine's other ranks.
        """
        try:
            yield
        except RuntimeError as error:
            self.near.abort()
            what = f"rank {self.rank}: gloo, between machines: {error}"
            if "imed out" in str(error):
                raise Timeout(what, rank=self.rank) from error
            if "losed" in str(error) or "reset" in str(error):
                raise PeerLost(what, rank=self.rank) from error
            raise BackendError(what) from error

    def check(self) -> None:
        """Raises the error of an earlier call within this machine, if one has failed."""
        self.near.check()

    @property
    def timeout(self) -> float:
        """How long ranks wait for each other, in seconds."""
        return self.near.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.near.timeout = seconds
        for group in (self.far, self._among):
            if group is not None:
                group._set_default_timeout(timedelta(seconds=seconds))

    def abort(self) -> None:
        """Makes the waits of this machine's ranks fail. Other machines' end at their limit."""
        self.near.abort()

    def close(self) -> None:
        """Closes this rank's part. Idempotent."""
        self.near.close()


class FarMessages:
    """Begins the messages of a group whose ranks are on several machines, all by gloo."""

    def __init__(self, far: dist.ProcessGroupGloo) -> None:
        self._far = far

    def start(self, calls: list[Call]) -> Any:
        """Begins messages together. Returns gloo's Work, or one for several."""
        works = [self._begin(call) for call in calls]
        return works[0] if len(works) == 1 else CoalescedWork(works)

    def _begin(self, call: Call) -> Any:
        x = call.tensor.detach()
        if x.device.type != "cpu":
            raise NotImplementedError(GPUS)
        memory = [_bytes(movable(x, "tensor"))]
        if not call.receives:
            return self._far.send(memory, call.peer, call.tag)
        if call.peer is None:
            return self._far.recv_anysource(memory, call.tag)
        return self._far.recv(memory, call.peer, call.tag)

    def set_timeout(self, seconds: float) -> None:
        """Does nothing: the group's Machines sets the timeout of gloo."""

    def abort(self) -> None:
        """Does nothing: gloo's waits end at their limit."""

    def close(self) -> None:
        """Does nothing: what is under way ends with the group."""


def machines_of(names: Sequence[str], most: int) -> list[list[int]]:
    """Returns the ranks of each machine.

    Args:
        names: For each rank the name of its machine.
        most: KCCL_RANKS_PER_NODE, which pretends machines of at most so many ranks; 0: none.
    """
    found: dict[tuple[str, int], list[int]] = {}
    seen: dict[str, int] = {}
    for rank, name in enumerate(names):
        index = seen[name] = seen.get(name, -1) + 1
        found.setdefault((name, index // most if most else 0), []).append(rank)
    return list(found.values())


def _bytes(x: Any) -> torch.Tensor:
    """Returns the memory of a NumPy array as a tensor of bytes."""
    return torch.from_numpy(x.reshape(-1).view(np.uint8))


def _parts(x: Any, counts: Sequence[int]) -> list[Any]:
    """Returns consecutive parts of an array's memory."""
    ends = np.cumsum(counts)
    return [x.reshape(-1)[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _check_as_long(part: Any, its: Any, whole: Any, wanted: int) -> None:
    """Raises InvalidArgument unless an array has the length and type of its part of another."""
    if part.dtype != whole.dtype or part.size != its.size or whole.size != wanted:
        raise InvalidArgument(
            f"one array has {part.size} elements of {part.dtype}, and the one with all ranks' "
            f"parts {whole.size} of {whole.dtype}: must have {wanted} of the same type"
        )


def _sum(every: Sequence[Any], op: Op, ranks: int) -> Any:
    """Returns the reduction of some arrays, in their order. Short floats are added as float32."""
    kind = every[0].dtype
    wide = np.float32 if kind.itemsize < 4 and dtypes.of(kind).is_float else kind
    # The ranks have multiplied by the factor of PREMUL_SUM already.
    combine = _COMBINE[op if isinstance(op, str) else "sum"]
    found = every[0].astype(wide)
    with np.errstate(all="ignore"):
        for each in every[1:]:
            found = combine(found, each.astype(wide))
        if op == "avg":
            found = found / np.asarray(ranks, found.dtype)
    return found.astype(kind)
