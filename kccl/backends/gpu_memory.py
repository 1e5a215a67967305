"""The ranks' windows and channels in the memory of GPUs."""

from collections.abc import Mapping

from ..base.abi import ffi
from ..gpu import driver
from ..gpu.memory import GpuWindow, Memory, shared_stream
from ..ranks.team import Connected
from ..ranks.windows import Window


class GpuMemory:
    """See scratch.Memory: memory of a GPU, which the peers' GPUs map."""

    def __init__(
        self, mesh: Connected, device: driver.Device, *, are_threads: bool, way: str
    ) -> None:
        """Allocates nothing yet.

        Args:
            mesh: The ranks.
            device: This rank's GPU.
            are_threads: The ranks are threads of this process.
            way: How ranks reach each other's memory; see sharing.Sharing.
        """
        self._mesh = mesh
        self._device = device
        self._are_threads = are_threads
        self._way = way
        self._fills = shared_stream(device, "fills")

    def window(
        self, nbytes: int, what: str, timeout: float, layout: Mapping[str, int] | None = None
    ) -> GpuWindow:
        """See scratch.Memory."""
        return GpuWindow(
            self._mesh,
            nbytes,
            what,
            timeout,
            device=self._device,
            are_threads=self._are_threads,
            way=self._way,
            stream=self._fills,
        )

    def channels(self, count: int) -> Memory:
        """See scratch.Memory."""
        return Memory(self._device, ffi.sizeof("KcclChannelState") * count, self._fills)

    def plain(self, nbytes: int) -> tuple[int, Memory]:
        """Allocates `nbytes` bytes on this rank's GPU. Returns their address and their owner."""
        with driver.uncaptured():
            memory = Memory(self._device, nbytes, None)
        return memory.address, memory

    def arm(self, window: Window, begin: int) -> None:
        """See scratch.Memory."""
        assert isinstance(window, GpuWindow)
        window.fill(begin, 0xFF)
