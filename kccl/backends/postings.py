"""The memory in which the ranks of a communicator with several teams post small parts of calls.

csrc/include/kccl/postings.cuh says how a rank posts. All ranks of such a communicator are on one
node and share this memory.
"""

from ..base.abi import ffi, lib
from ..ranks.mesh import Mesh
from ..ranks.windows import Window
from .host_memory import HostMemory


class Postings:
    """One rank's postings, and its view of the others'.

    Attributes:
        handle: The KcclPostings.
    """

    def __init__(self, mesh: Mesh, num_channels: int, timeout: float) -> None:
        """Maps the memory of all ranks. Collective."""
        nbytes = lib.kccl_host_postings_bytes(num_channels)
        self._window: Window | None = HostMemory(mesh).window(nbytes, "start-up", timeout)
        self._rank = mesh.rank
        self._parts = ffi.new("uint64_t[]", [*self._window.addresses])
        self._numbers = ffi.new("uint64_t[]", num_channels)
        self.handle = ffi.new("KcclPostings *")
        self.handle.parts = int(ffi.cast("uintptr_t", self._parts))
        self.handle.numbers = int(ffi.cast("uintptr_t", self._numbers))

    def clear(self) -> None:
        """Resets the postings to their state before the first call. Called while all ranks are
        between calls.
        """
        assert self._window is not None
        lib.kccl_host_clear_pairs(self._window.addresses[self._rank], self._window.nbytes)
        for channel in range(len(self._numbers)):
            self._numbers[channel] = 0

    def drop(self) -> None:
        """Drops the memory, which nobody uses any more."""
        self._window = None
