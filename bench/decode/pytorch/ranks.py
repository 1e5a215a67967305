"""The communication of a decode step in PyTorch, by one rank alone, by NCCL, or by KCCL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kccl
import kccl.interop.torch as kccl_torch

from ...peers.torch import ProcessGroup

# The name under which KCCL's communicator is registered with kccl.interop.torch.
_NAME = "kccl bench decode"


class Ranks(ABC):
    """One library's calls. All methods are collective.

    Attributes:
        name: The name of the library; "" for one rank.
        version: The version of the library.
        rank, world_size: This process's rank, and the number of ranks.
    """

    name: str
    version: str
    rank: int
    world_size: int

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x. May overwrite x."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' x along a new first axis."""

    @abstractmethod
    def of_rank_0(self, value: Any) -> Any:
        """Returns rank 0's value on all ranks. It must be representable in JSON."""

    @abstractmethod
    def close(self) -> None:
        """Closes the library. Graphs with its calls must be freed before, or NCCL hangs."""

    def best(self, mine: Tensor, first_id: int) -> Tensor:
        """Returns the id of the largest logit of all ranks: int64 [1].

        Args:
            mine: This rank's largest logit and its index; see layers.best().
            first_id: The id of this rank's first logit.
        """
        mine = torch.stack((mine[0], mine[1] + first_id))
        logits, ids = self.gather(mine).unbind(1)
        # gather() keeps the index on the GPU. ids[index] would copy it to the host.
        return ids.gather(0, logits.argmax(0, keepdim=True)).long()

    def meet(self, device: torch.device) -> None:
        """Makes the current stream wait until all ranks' streams have reached this call."""
        self.gather(torch.zeros(1, device=device))


class Alone(Ranks):
    """One rank, which has all lanes."""

    name = version = ""
    rank, world_size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x[None]

    def best(self, mine: Tensor, first_id: int) -> Tensor:
        return (mine[1:] + first_id).long()

    def meet(self, device: torch.device) -> None:
        pass

    def of_rank_0(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        pass


class _Job(Ranks):
    """Ranks that are the processes of a job."""

    def __init__(self, comm: kccl.Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self._comm = comm

    def of_rank_0(self, value: Any) -> Any:
        return self._comm.gather_objects(value)[0]


class Nccl(_Job):
    """NCCL, through torch.distributed, without multicast."""

    name = "nccl"

    def __init__(self, comm: kccl.Communicator, ordinal: int) -> None:
        self.version = ".".join(map(str, torch.cuda.nccl.version()))
        super().__init__(comm)
        self._group = ProcessGroup(comm, ordinal)

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.world_size, *x.shape)
        dist.all_gather_into_tensor(out, x)
        return out

    def close(self) -> None:
        self._group.close()


class Kccl(_Job):
    """KCCL, through kccl.interop.torch."""

    name = "kccl"
    # Left empty: a checkout that is not installed has no version, and records have the commit.
    version = ""

    def __init__(self, comm: kccl.Communicator) -> None:
        super().__init__(comm)
        kccl_torch.register(comm, _NAME)

    def sum(self, x: Tensor) -> Tensor:
        return kccl_torch.all_reduce_(x, comm=_NAME)

    def gather(self, x: Tensor) -> Tensor:
        return kccl_torch.all_gather(x, comm=_NAME)

    def close(self) -> None:
        kccl_torch.unregister(_NAME)
