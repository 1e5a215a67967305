"""A graph of one kernel. Launching it costs the host less than launching the kernel."""

import ctypes

from . import driver, release


class KernelGraph:
    """A kernel with its argument, to be launched again and again on any stream.

    It must not be launched on a stream that is being captured. One thread at a time may launch it.
    A launch waits for the end of the launch before it, also on another stream. This object may be
    dropped while the graph runs.

    Attributes:
        handle: The executable graph, which the driver's function launches.
    """

    def __init__(
        self, where: driver.Device, function: int, argument: bytes, *, grid: int, block: int
    ) -> None:
        """Copies the argument.

        Raises:
            BackendError: The driver refused.
        """
        gpu, names = driver.table(), driver.table().names
        value = ctypes.create_string_buffer(argument, len(argument))
        addresses = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        node = gpu.kernel_node(
            function, grid=grid, block=block, arguments=ctypes.addressof(addresses)
        )
        with where.current(), driver.uncaptured():
            graph = gpu.call(names.create_graph, 0)
            try:
                gpu.call(names.add_kernel_node, graph, None, 0, node)
                self.handle = int(gpu.call(names.instantiate_graph, graph, 0))
            finally:
                gpu.attempt(names.destroy_graph, graph)
        release.at_end(self, where, ((names.destroy_instance, (self.handle,)),), ())
