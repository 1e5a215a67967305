"""grid_sync: no block of a GPU's kernel goes on before the last has arrived. In kernels only."""

from __future__ import annotations

from typing import Any

from .collective import Buffers, Call, Collective, Comm, Gather, Problem


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    # The kernel checks itself, which its contender counts.
    call()
    return 0


def _none(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("grid_sync is called in kernels only")


def _direct(comm: Comm, buffers: Buffers, problem: Problem) -> Call:
    return _none


COLLECTIVE = Collective(
    name="grid_sync",
    order="acq_rel",
    has_data=False,
    has_op=False,
    has_root=False,
    has_out=False,
    waits_for_all=True,
    busbw_factor=lambda world_size: None,
    check=_check,
    prepare=_none,
    direct=_direct,
    mpi=_none,
)
