"""Lists the kernels that calls on GPUs can need, each with its element type and operator."""

from collections.abc import Iterator, Sequence

from ..base import dtypes
from ..jit import cache, names
from ..plan.ops import OPS, ops_of
from ..plan.spec import Request
from ..plan.specs import KERNELS

ELEMENT_TYPES = tuple(dtype.name for dtype in (*dtypes.COMMON_FLOATS, dtypes.int32, dtypes.int64))
_OF_ALL_RANKS = [spec for spec in KERNELS if spec.is_collective]
# Kernels of calls that only some ranks make: one-sided calls and messages. They are the same for
# all element types. Calls between the blocks of a user's kernel have no kernels.
_OF_SOME_RANKS = [
    spec.name
    for spec in KERNELS
    if "cuda" in spec.targets
    and not spec.is_collective
    and spec.takes_type is None
    and not spec.name.startswith("grid_")
]
_OF_TYPES = {"class T", "class Op"}

Instance = tuple[str, str, str, int]
"""Kernel, element type, operator, world size, as compile_kernel() takes them."""


def instances(
    world_sizes: Sequence[int],
    element_types: Sequence[str] = ELEMENT_TYPES,
    ops: Sequence[str] = OPS,
) -> list[Instance]:
    """Returns the kernels that calls on GPUs can need, each once.

    Args:
        world_sizes: World sizes of the communicators.
        element_types: Element types of the arrays.
        ops: Operators. Those that an element type does not take are left out for it.
    """
    known: dict[str, Instance] = {}
    for instance in _combinations(world_sizes, element_types, ops):
        kernel, element_type, op, world_size = instance
        name = names.expression(kernel, element_type, op, cache.CSRC, world_size)
        known.setdefault(name, instance)
    return list(known.values())


def has_types(kernel: str) -> bool:
    """Tells whether a kernel has an instance for each element type. A kernel that has not moves
    bytes.
    """
    return bool(_OF_TYPES & set(names.parameters(names.path_of(kernel, cache.CSRC))))


def _combinations(
    world_sizes: Sequence[int], element_types: Sequence[str], ops: Sequence[str]
) -> Iterator[Instance]:
    for world_size in world_sizes:
        for element_type in element_types:
            dtype = dtypes.of(element_type)
            allowed = [op for op in ops if op in ops_of(dtype)]
            for spec in _OF_ALL_RANKS:
                # "cuda" stands for every backend on GPUs, because all have the same kernels.
                request = Request(spec.collective, 0, world_size, "cuda", dtype)
                if spec.why_not(request) is None:
                    # A kernel that does not reduce is the same for all operators.
                    takes_op = "class Op" in names.parameters(names.path_of(spec.name, cache.CSRC))
                    for op in allowed if takes_op else OPS[:1]:
                        yield spec.name, dtype.name, op, world_size
            yield from ((name, dtype.name, OPS[0], world_size) for name in _OF_SOME_RANKS)
            for spec in KERNELS:
                if spec.takes_type is not None and spec.takes_type(dtype) and "sum" in allowed:
                    yield spec.name, dtype.name, "sum", world_size
