"""all_reduce_rms_norm: the sum of all ranks' rows, with a residual, normalised, in one call.

The peers are the calls that it replaces, NCCL's or MPI's sum and then the norm of PyTorch or NumPy,
and FlashInfer's fused call. A row has 4,096 elements. A shorter message is one row, and a longer
one that is no multiple of 4,096 has shorter rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from math import gcd
from typing import Any

import numpy as np

from ..harness.collective import Collective, OnGpus
from ..harness.data import make_input
from ..harness.problem import Array, Buffers, Call, Gather, Problem

_WIDTH, _EPS = 4096, 1e-6


def _width(problem: Problem) -> int:
    """Returns the number of elements in a row."""
    return problem.count if problem.count <= _WIDTH else gcd(problem.count, _WIDTH)


def _weight(problem: Problem) -> Array:
    assert problem.np_dtype is not None
    return (1 + np.arange(_width(problem)) % 4).astype(problem.np_dtype)


def _zeros(problem: Problem) -> Array:
    return np.zeros(problem.count, problem.np_dtype)


def _input(problem: Problem, rank: int, seed: int) -> Array:
    """Returns a rank's input for one check: integers so small that their sum over the ranks stays
    exact in a residual to which four calls add it. In a graph a check makes several calls.
    """
    values = make_input(replace(problem, op="sum"), rank, seed)
    return np.trunc(values.astype(np.float64) / 4).astype(values.dtype)


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    """Returns the number of elements that differ from the exact result by more than four units in
    the last place. Libraries round intermediate values differently, so bits are not compared.

    Each call adds the sum to the residual, which must be zero before. The second call, with negated
    inputs, makes it zero again for the next check and for the timed calls, whose inputs are zeros.
    """
    values = _input(problem, rank, seed)
    buffers.load(values)
    call()
    found = buffers.result().astype(np.float64)
    buffers.load(-values)
    call()
    shape = -1, _width(problem)
    inputs = [_input(problem, each, seed) for each in range(problem.world_size)]
    total = np.sum([each.astype(np.float64) for each in inputs], axis=0).reshape(shape)
    mean = (total * total).mean(axis=1, keepdims=True)
    wanted = total / np.sqrt(mean + _EPS) * _weight(problem).astype(np.float64)
    unit = np.spacing(np.abs(wanted).astype(problem.np_dtype)).astype(np.float64)
    return int((~(np.abs(found.reshape(shape) - wanted) <= 4 * unit)).sum())


def _arguments(buffers: Buffers, problem: Problem) -> tuple[Any, ...]:
    shape = -1, _width(problem)
    residual = buffers.like(_zeros(problem)).reshape(shape)
    return buffers.x.reshape(shape), residual, buffers.like(_weight(problem)), _EPS


def _out(buffers: Buffers, problem: Problem) -> dict[str, Any]:
    return {} if problem.in_place else {"out": buffers.out.reshape(-1, _width(problem))}


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    given = _arguments(buffers, problem)
    return comm.all_reduce_rms_norm.prepare(*given, **_out(buffers, problem), **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    given = _arguments(buffers, problem)
    return partial(comm.all_reduce_rms_norm, *given, **_out(buffers, problem))


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    x, residual, weight, eps = _arguments(buffers, problem)
    out = buffers.out.reshape(x.shape)
    source = mpi.IN_PLACE if problem.in_place else buffers.x

    def call() -> object:
        comm.Allreduce(source, buffers.out, mpi.SUM)
        np.add(residual, out, out=residual)
        mean = np.mean(residual * residual, axis=1, keepdims=True)
        return np.multiply(residual / np.sqrt(mean + eps), weight, out=out)

    return call


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    torch, x = import_module("torch"), buffers.x
    rows = x.view(-1, _width(problem))
    residual = torch.zeros_like(rows)
    weight = 1 + (torch.arange(rows.shape[1], device=x.device) % 4).to(x.dtype)
    norm = torch.nn.functional.rms_norm

    def call() -> object:
        dist.all_reduce(x)
        residual.add_(rows)
        return rows.copy_(norm(residual, weight.shape, weight, _EPS))

    return call


def _flashinfer(module: Any, scratch: Any, x: Any, out: Any) -> dict[str, Call]:
    torch = import_module("torch")
    residual = torch.zeros_like(x)
    weight = 1 + (torch.arange(x.shape[1], device=x.device) % 4).to(x.dtype)
    call = partial(
        module.allreduce_fusion,
        x,
        scratch,
        module.AllReduceFusionPattern.kARResidualRMSNorm,
        launch_with_pdl=True,
        residual_in=residual,
        residual_out=residual,
        norm_out=out,
        rms_gamma=weight,
        rms_eps=_EPS,
        use_oneshot=True,
    )
    return {"one_shot": call}


COLLECTIVE = Collective(
    name="all_reduce_rms_norm",
    order="relaxed",
    has_data=True,
    has_op=False,
    has_root=False,
    has_out=True,
    waits_for_all=True,
    busbw_factor=lambda world_size: 2 * (world_size - 1) / world_size,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    mpi_default="allreduce_numpy",
    nccl=_nccl,
    flashinfer=_flashinfer,
    is_planned=False,
    on_gpus=OnGpus(sizes=("--sizes", "8K", "16K", "32K", "64K", "-d", "bfloat16")),
)
