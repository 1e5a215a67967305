"""Defines what is measured: one problem, the arrays of its calls, and the communicator they need.

This file does not import kccl: the communicator is passed as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Call = Callable[[], object]
Gather = Callable[[Any], list[Any]]
TorchCalls = dict[str, tuple[Call, Any]]

SPOILED = 0xA5
"""An output is filled with this byte before a call, so that unwritten elements are noticed."""


class Comm(Protocol):
    """The public part of a kccl communicator that all benchmarks use."""

    rank: int
    world_size: int
    backend: str
    launcher: str
    num_nodes: int
    barrier: Any

    @property
    def layout(self) -> str: ...

    def empty(self, shape: int, dtype: Any = ..., /) -> Any: ...

    def window(self, nbytes: int, /) -> Any: ...

    def check(self) -> None: ...

    def device_comm(self, *, channels: int, max_bytes: int, exchange_bytes: int = ...) -> Any: ...

    def gather_objects(self, value: Any, /) -> list[Any]: ...

    def algorithms(self, collective: str) -> list[str]: ...


@dataclass(frozen=True)
class Problem:
    """One measurement, the same for every library: collective, size, element type and so on.

    `nbytes` is nccl-tests' size: the whole message, with the chunks of all ranks where it has
    chunks; 0 for barrier. `count` is the same in elements. `num_chunks` is the number of chunks of
    equal length in it: one for each rank, or 1 where it has none.
    """

    collective: str
    nbytes: int
    count: int
    dtype: str | None
    np_dtype: np.dtype[Any] | None
    op: str | None
    root: int | None
    in_place: bool | None
    world_size: int
    num_chunks: int = 1

    def chunk(self, rank: int) -> slice:
        """Returns the elements of a rank's chunk in the message."""
        length = self.count // self.world_size
        return slice(rank * length, (rank + 1) * length)


@dataclass(frozen=True)
class Buffers:
    """The input `x` and output `out` of one library's calls. In place, `out` is `x` itself.

    This class has NumPy arrays. A subclass has arrays that the host cannot index.
    """

    x: Any
    out: Any

    def load(self, values: Array) -> None:
        """Copies `values` to `x`. Fills an `out` other than `x` with SPOILED."""
        if self.out is not self.x:
            self.out.view(np.uint8).fill(SPOILED)
        self.x[:] = values

    def result(self) -> Array:
        """Returns the contents of `out`, in the problem's element type."""
        out: Array = self.out
        return out

    def like(self, values: Array) -> Any:
        """Returns a new array with these values, in the same memory as `x`. Collective."""
        return values.copy()

    def zero(self) -> None:
        """Fills `x` and `out` with zeros."""
        self.x.fill(0)
        self.out.fill(0)


def buffers(problem: Problem) -> Buffers:
    """Returns ordinary zeroed arrays for one library. Those of a barrier are empty."""
    dtype = problem.np_dtype if problem.np_dtype is not None else np.dtype(np.uint8)
    x = np.zeros(problem.count, dtype)
    return Buffers(x, np.zeros(problem.count, dtype) if problem.in_place is False else x)


def torch_op(dist: Any, problem: Problem) -> Any:
    """Returns torch.distributed's name of a problem's operator."""
    name = "PRODUCT" if problem.op == "prod" else str(problem.op).upper()
    return getattr(dist.ReduceOp, name)
