"""What a captured graph has between its nodes, and what it should have."""

import ctypes

import pytest

from kccl import gpu, gpu_graph


def need_edges():
    """Skips the test where the driver does not tell of them."""
    if gpu.call("cuDriverGetVersion") < gpu_graph.WITH_EDGES:
        pytest.skip("the driver is older than CUDA 12.3")


def of_dependent(ordinal):
    """The type of an edge between two calls of one stream on a device."""
    return int(gpu_graph.launches_dependents(gpu.device(ordinal)))


def edge_kinds(graph):
    """The type of each edge of a CUgraph: 1 is a programmatic dependent's, 0 an ordinary one."""
    # By ctypes: cuda.bindings 13.0 gives memory back that its edges are read from.
    signature = (ctypes.c_int, ctypes.c_uint64, *[ctypes.c_void_p] * 4)
    address = gpu.function_address("cuGraphGetEdges", gpu_graph.WITH_EDGES)
    get_edges, count = ctypes.CFUNCTYPE(*signature)(address), ctypes.c_size_t()
    assert get_edges(int(graph), None, None, None, ctypes.byref(count)) == 0
    from_nodes, to_nodes, edges = ((ctypes.c_uint64 * count.value)() for _ in range(3))
    assert get_edges(int(graph), from_nodes, to_nodes, edges, ctypes.byref(count)) == 0
    # CUgraphEdgeData: from_port, to_port, type.
    return [edge >> 16 & 0xFF for edge in edges]
