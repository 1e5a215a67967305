"""What a captured graph has between its nodes."""

import ctypes

from kccl import gpu


def edge_kinds(graph):
    """The type of each edge of a CUgraph: 1 is a programmatic dependent's, 0 an ordinary one."""
    # By ctypes: cuda.bindings 13.0 gives memory back that its edges are read from.
    signature = (ctypes.c_int, ctypes.c_uint64, *[ctypes.c_void_p] * 4)
    get_edges = ctypes.CFUNCTYPE(*signature)(gpu.function_address("cuGraphGetEdges", 12030))
    count, edges = ctypes.c_size_t(64), (ctypes.c_uint64 * 64)()
    nodes = (ctypes.c_uint64 * 64)(), (ctypes.c_uint64 * 64)()
    assert get_edges(int(graph), *nodes, edges, ctypes.byref(count)) == 0
    # CUgraphEdgeData: from_port, to_port, type.
    return [edges[k] >> 16 & 0xFF for k in range(count.value)]
