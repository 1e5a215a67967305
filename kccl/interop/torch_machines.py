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

from ..base import dtypes, extras
from ..base.errors import BackendError, Error, InvalidArgument
from ..comm import Communicator
from ..plan.ops import Op, check_op
from .torch_far_messages import bytes_of, of_gloo

# How many bytes of text ranks compare before a call, with KCCL_CHECK=1.
_TEXT_BYTES = 256

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
        *,
        checks: bool = False,
    ) -> None:
        """Connects the machines. Collective.

        Args:
            near: The communicator of the ranks of this machine, in their order.
            machines: The ranks of each machine.
            rank: This rank.
            store: A store that nothing else uses.
            timeout: How long ranks wait for each other.
            checks: Whether all ranks compare each call before they make it.

        Raises:
            Timeout, PeerLost, BackendError: Gloo could not connect the ranks.
        """
        self.near, self.rank = near, rank
        self.world_size = sum(map(len, machines))
        self._machines = machines
        self._checks = checks
        self._is_closed = False
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
        self._compare("barrier")
        with self._told():
            self.far.barrier().wait()

    def all_reduce(self, x: Any, *, op: Op, out: Any = None) -> None:
        """Reduces all ranks' x into x, or into out."""
        result = x if out is None else out
        check_op(op, dtypes.of(x.dtype))
        self._compare(f"all_reduce by {op if isinstance(op, str) else 'premul_sum'}", x)
        # The average of a machine's ranks does not overflow where their sum of short floats would.
        self.near.reduce(x, 0, out=result, op=op)
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
        self._compare(f"broadcast from rank {root}", x)
        place = next(n for n, ranks in enumerate(self._machines) if root in ranks)
        if self._place == place:
            self.near.broadcast(x, self._machines[place].index(root))
        if self._among is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = place, 0
            with self._told():
                self._among.broadcast([bytes_of(x)], options).wait()
        if self._place != place:
            self.near.broadcast(x, 0)

    def all_gather(self, x: Any, *, out: Any, counts: Sequence[int] | None = None) -> None:
        """Copies all ranks' x into out, in rank order."""
        self._compare("all_gather" if counts is None else f"all_gather of {counts}", x, out)
        parts = _parts(out, counts or [x.size] * self.world_size)
        _check_as_long(x, parts[self.rank], out, sum(map(len, parts)))
        if counts is None:
            with self._told():
                self.far.allgather([[bytes_of(part) for part in parts]], [bytes_of(x)]).wait()
            return
        parts[self.rank][:] = x.reshape(-1)
        for root, part in enumerate(parts):
            self.broadcast(part, root)

    def gather(self, x: Any, root: int, *, out: Any = None) -> None:
        """Copies all ranks' x into the root's out, in rank order."""
        self._compare(f"gather to rank {root}", x)
        outs = []
        if self.rank == root:
            parts = _parts(out, [x.size] * self.world_size)
            _check_as_long(x, parts[root], out, sum(map(len, parts)))
            outs = [[bytes_of(part) for part in parts]]
        options = dist.GatherOptions()
        options.rootRank = root
        with self._told():
            self.far.gather(outs, [bytes_of(x)], options).wait()

    def scatter(self, x: Any, root: int, *, out: Any) -> None:
        """Copies a part of the root's x to each rank's out."""
        self._compare(f"scatter from rank {root}", out)
        ins = []
        if self.rank == root:
            parts = _parts(x, [out.size] * self.world_size)
            _check_as_long(out, parts[root], x, sum(map(len, parts)))
            ins = [[bytes_of(part) for part in parts]]
        options = dist.ScatterOptions()
        options.rootRank = root
        with self._told():
            self.far.scatter([bytes_of(out)], ins, options).wait()

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> None:
        """Copies a part of each rank's x to each rank's out."""
        self._compare("all_to_all")
        sends, receives = (
            [each * x.itemsize for each in counts or ()] for counts in (send_counts, recv_counts)
        )
        with self._told():
            self.far.alltoall_base(bytes_of(out), bytes_of(x), receives, sends).wait()

    def _add(self, x: Any, op: Op) -> None:
        """On leaders, reduces the machines' x into x, in the machines' order."""
        if self._among is None:
            return
        with self._told():
            every = [np.empty_like(x) for _ in self._machines]
            self._among.allgather([[bytes_of(each) for each in every]], [bytes_of(x)]).wait()
            x.reshape(-1)[:] = _reduced(every, op, [*map(len, self._machines)]).reshape(-1)

    def _compare(self, call: str, *arrays: Any) -> None:
        """Raises InvalidArgument on all ranks unless all are about to make the same call."""
        if not self._checks:
            return
        of_arrays = "".join(f", {each.size} elements of {each.dtype}" for each in arrays)
        text = f"{call}{of_arrays}".encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._told():
            self.far.allgather([every], [mine]).wait()
        calls = [bytes(each.tolist()).decode().rstrip() for each in every]
        other = next((rank for rank, each in enumerate(calls) if each != calls[0]), None)
        if other is not None:
            raise InvalidArgument(
                f"the ranks' calls differ: rank 0 calls {calls[0]}, and rank {other} calls "
                f"{calls[other]}"
            )

    # ---- The rest of what a group calls ------------------------------------------------------

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Returns a context in which gloo is called. Its errors become KCCL's. Any error ends the
        calls of this machine's other ranks.
        """
        if self._is_closed:
            raise Error(f"the process group is closed on rank {self.rank}")
        try:
            yield
        except BaseException as error:
            self.near.abort()
            if isinstance(error, RuntimeError) and not isinstance(error, Error):
                raise of_gloo(error, self.rank) from error
            raise

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
        """Makes the waits of this machine's ranks for each other fail. Waits within gloo, here and
        on other machines, end at their limit.
        """
        self.near.abort()

    def close(self) -> None:
        """Closes this rank's part. Idempotent."""
        self._is_closed = True
        self.near.close()


def machines_of(names: Sequence[str], most: int) -> list[list[int]]:
    """Returns the ranks of each machine.

    Args:
        names: For each rank the name of its machine.
        most: KCCL_RANKS_PER_NODE, which pretends machines of at most so many ranks; 0: none.

    Raises:
        BackendError: Ranks of one machine are in different namespaces.
    """
    first: dict[str, int] = {}
    for peer, name in enumerate(names):
        rank = first.setdefault(name.split()[0], peer)
        if name != names[rank]:
            raise BackendError(
                f"ranks {rank} and {peer} are in containers of one machine that do not share "
                "network, process and user namespaces: share them, or start the ranks with mpirun "
                f"({extras.install('mpi')})"
            )
    found: dict[tuple[str, int], list[int]] = {}
    seen: dict[str, int] = {}
    for rank, name in enumerate(names):
        index = seen[name] = seen.get(name, -1) + 1
        found.setdefault((name, index // most if most else 0), []).append(rank)
    return list(found.values())


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


def _reduced(every: Sequence[Any], op: Op, counts: Sequence[int]) -> Any:
    """Returns the reduction of the machines' arrays, in their order. Short floats are reduced as
    float32. Each machine's array is the reduction of as many ranks' as `counts` says.
    """
    kind = every[0].dtype
    wide = np.float32 if kind.itemsize < 4 and dtypes.of(kind).is_float else kind
    # The ranks have multiplied by the factor of PREMUL_SUM already.
    combine = _COMBINE[op if isinstance(op, str) else "sum"]
    parts = [each.astype(wide) for each in every]
    with np.errstate(all="ignore"):
        if op == "avg":
            parts = [
                part * np.asarray(count, part.dtype)
                for part, count in zip(parts, counts, strict=True)
            ]
        found = parts[0]
        for part in parts[1:]:
            found = combine(found, part)
        if op == "avg":
            found = found / np.asarray(sum(counts), found.dtype)
    return found.astype(kind)
