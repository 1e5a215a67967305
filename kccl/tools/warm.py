"""The library's kernels for GPUs compiled ahead of time, so that no program's first call does it.

A kernel takes a second to compile, and a communicator needs one for each algorithm, element type
and operator that it uses. Nothing here needs a GPU where its architecture is given. Programs find
what is compiled if they have the same KCCL_CACHE, the same KCCL in the same folder, the same NVRTC.
"""

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from ..base import dtypes
from ..base.errors import InvalidArgument
from ..gpu import cuda, driver
from ..gpu.library import compile_kernel
from ..jit import cache, names
from ..plan.specs import OPS, SPECS, Request

ELEMENT_TYPES = tuple(dtype.name for dtype in dtypes.ALL)
_ONE_SIDED = ("put", "get", "signal", "wait")

Instance = tuple[str, str, str, int]
"""Kernel, element type, operator, world size, as compile_kernel() takes them."""


def instances(
    world_sizes: Sequence[int],
    element_types: Sequence[str] = ELEMENT_TYPES,
    ops: Sequence[str] = OPS,
) -> list[Instance]:
    """What calls on GPUs can need, each once.

    Args:
        world_sizes: Of the communicators.
        element_types: Of the arrays.
        ops: Operators; an average of integers there is not.
    """
    known: dict[str, Instance] = {}
    for instance in _combinations(world_sizes, element_types, ops):
        kernel, element_type, op, world_size = instance
        name = names.expression(kernel, element_type, op, cache.CSRC, world_size)
        known.setdefault(name, instance)
    return list(known.values())


def _combinations(
    world_sizes: Sequence[int], element_types: Sequence[str], ops: Sequence[str]
) -> Iterator[Instance]:
    for world_size in world_sizes:
        for element_type in element_types:
            dtype = dtypes.of(element_type)
            allowed = [op for op in ops if dtype.is_float or op != "avg"]
            for spec in SPECS:
                request = Request(spec.collective, 0, world_size, "cuda", dtype)
                if spec.why_not(request) is None:
                    # A kernel that does not reduce is the same for all.
                    takes_op = "class Op" in names.parameters(names.path_of(spec.name, cache.CSRC))
                    for op in allowed if takes_op else OPS[:1]:
                        yield spec.name, dtype.name, op, world_size
            yield from ((name, dtype.name, OPS[0], world_size) for name in _ONE_SIDED)


def warm(wanted: Sequence[Instance], arch: str = "") -> list[Path]:
    """Sees to it that kernels are in the cache, by as many processes as there are cores.

    Args:
        wanted: As from instances(); one or more.
        arch: As in "sm_90a", what GPUs of its kind compile for; "" for that of the first GPU here.

    Returns:
        Their entries in the cache, in order.

    Raises:
        InvalidArgument: NVRTC does not know the architecture, or no GPU looks for its kernels.
        BackendError: NVRTC is not there.
    """
    arch = arch or driver.device(0).arch
    match = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    theirs = cuda.arch_of(int(match[1]), int(match[2])) if match is not None else arch
    if arch != theirs:
        raise InvalidArgument(f"arch is {arch!r}, must be {theirs!r}: what its GPUs compile for")
    num_cores = len(os.sched_getaffinity(0))
    calls = zip(*((*each, arch) for each in wanted), strict=True)
    # Not forked: the process may have threads.
    with ProcessPoolExecutor(min(num_cores, len(wanted)), get_context("spawn")) as pool:
        return list(pool.map(compile_kernel, *calls))
