"""The edges between the nodes of a captured graph, and what they should be."""

import ctypes

import pytest

from kccl import gpu
from kccl.base.abi import ffi, lib
from kccl.gpu.cuda import CUDA

_OF_KERNELS = 0


def need_edges():
    """Skips the test where the driver cannot list edges."""
    if gpu.backend() != "cuda":
        pytest.skip("only NVIDIA's GPUs have programmatic dependents")
    if gpu.call("cuDriverGetVersion") < CUDA.dependents_version:
        pytest.skip("the driver is older than CUDA 12.3")


def of_dependent(ordinal):
    """The type that an edge between two calls of one stream must have on a device."""
    return int(CUDA.launches_dependents(ordinal))


def edge_kinds(graph):
    """The type of each edge of a CUgraph: 1 is a programmatic dependent's, 0 an ordinary one."""
    count = ctypes.c_size_t()
    _ask("cuGraphGetEdges", graph, None, None, None, ctypes.byref(count))
    from_nodes, to_nodes, edges = ((ctypes.c_uint64 * count.value)() for _ in range(3))
    _ask("cuGraphGetEdges", graph, from_nodes, to_nodes, edges, ctypes.byref(count))
    # CUgraphEdgeData: from_port, to_port, type.
    return [edge >> 16 & 0xFF for edge in edges]


def num_told(graph):
    """How many calls of a CUgraph let a dependent begin early."""
    count = ctypes.c_size_t()
    _ask("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_uint64 * count.value)()
    _ask("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    return sum(_is_told(node) for node in nodes)


def _is_told(node):
    kind, name = ctypes.c_int(), ctypes.c_char_p()
    _ask("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != _OF_KERNELS:
        return False
    # CUDA_KERNEL_NODE_PARAMS_v2 as 8-byte words: [0] is func, [5] kernelParams.
    params = (ctypes.c_uint64 * 9)()
    _ask("cuGraphKernelNodeGetParams", node, params)
    if params[0] == 0:
        return False
    _ask("cuFuncGetName", ctypes.byref(name), params[0])
    if not name.value.startswith(b"_ZN4kccl7kernels"):
        return False
    (call,) = ffi.cast("KcclCall **", params[5])[0:1]
    return call.dependent == lib.kKcclEarlyDependent


# By ctypes, because cuda.bindings 13.0 reads a graph's edges from memory that it has freed.
def _ask(name, *args):
    is_number = [isinstance(arg, int) or hasattr(arg, "getPtr") for arg in args]
    kinds = [ctypes.c_uint64 if each else ctypes.c_void_p for each in is_number]
    address = gpu.function_address(name, CUDA.dependents_version)
    values = [int(arg) if each else arg for arg, each in zip(args, is_number, strict=True)]
    assert ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(address)(*values) == 0, name
