"""Kernels in CUDA graphs: alone in one, whose launch takes the driver less time than that of the
kernel itself; and captured behind another, as its programmatic dependent.
"""

import ctypes

from . import driver, release

WITH_EDGES = 12030
"""From this version of CUDA on the functions that tell of a graph know of such dependents."""


def launches_dependents(where: driver.Device) -> bool:
    """Whether a kernel may be captured as the programmatic dependent of the one before it."""
    has_functions = driver.call("cuDriverGetVersion") >= WITH_EDGES
    return bool(has_functions and driver.attribute(where.ordinal, "COMPUTE_CAPABILITY_MAJOR") >= 9)


class KernelGraph:
    """A kernel with its argument, to be launched again and again on any stream.

    It may not be captured. One thread at a time may launch it, and a launch waits for the one
    before, also on another stream. What runs when it is dropped ends by itself.

    Attributes:
        handle: Its CUgraphExec.
    """

    def __init__(
        self, where: driver.Device, function: int, argument: bytes, *, grid: int, block: int
    ) -> None:
        """Copies the argument.

        Raises:
            BackendError: The driver refused.
        """
        value = ctypes.create_string_buffer(argument, len(argument))
        addresses = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        node = driver.constant("CUDA_KERNEL_NODE_PARAMS")()
        node.func = function
        node.gridDimX, node.gridDimY, node.gridDimZ = grid, 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = block, 1, 1
        node.kernelParams = ctypes.addressof(addresses)
        with where.current(), driver.uncaptured():
            graph = driver.call("cuGraphCreate", 0)
            try:
                driver.call("cuGraphAddKernelNode", graph, None, 0, node)
                self.handle = int(driver.call("cuGraphInstantiate", graph, 0))
            finally:
                driver.attempt("cuGraphDestroy", graph)
        release.at_end(self, where, (("cuGraphExecDestroy", (self.handle,)),), waits=False)
