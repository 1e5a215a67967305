"""A rank's memory for the monokernel, on a GPU or in the simulator."""

import ctypes
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl


class Arena(ABC):
    """Allocates zeroed memory that kernels can access, and copies data to and from it."""

    def __init__(self, comm: kccl.Communicator) -> None:
        self._comm = comm
        self._windows: list[Any] = []

    def shared(self, nbytes: int) -> list[int]:
        """Allocates `nbytes` on every rank. Returns the addresses of all ranks' memory, which this
        rank's kernels can access. Collective.
        """
        window = self._comm.window(nbytes)
        self._windows.append(window)
        return list(window.addresses)

    def allocate(self, nbytes: int) -> int:
        """Allocates the same number of bytes on every rank, and returns this rank's address.
        Collective.
        """
        return self.shared(nbytes)[self._comm.rank]

    def place(self, array: NDArray[Any]) -> int:
        """Copies an array to newly allocated memory, and returns the address. Collective: all ranks
        must pass arrays of the same size.
        """
        address = self.allocate(array.nbytes)
        self.write(address, array)
        return address

    @abstractmethod
    def on_host(self, nbytes: int) -> int:
        """Allocates host memory that kernels can read and write at the same address as the host. It
        lives as long as this Arena.
        """

    @abstractmethod
    def write(self, address: int, array: NDArray[Any]) -> None:
        """Copies an array to an address, and returns when the copy is complete."""

    @abstractmethod
    def read_into(self, out: NDArray[np.uint8], address: int) -> None:
        """Copies the bytes at an address to an array."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Returns a copy of the bytes at an address."""
        out = np.empty(nbytes, np.uint8)
        self.read_into(out, address)
        return out.tobytes()


class SimArena(Arena):
    """The memory of the simulator, which is the host's."""

    def on_host(self, nbytes: int) -> int:
        """See Arena."""
        return self.allocate(nbytes)

    def write(self, address: int, array: NDArray[Any]) -> None:
        """See Arena."""
        array = np.ascontiguousarray(array)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read_into(self, out: NDArray[np.uint8], address: int) -> None:
        """See Arena."""
        ctypes.memmove(out.ctypes.data, address, out.nbytes)


class GpuArena(Arena):
    """The memory of a GPU."""

    def __init__(self, comm: kccl.Communicator, device: kccl.gpu.Device) -> None:
        super().__init__(comm)
        self._device = device
        self._pinned: list[Any] = []
        with device.current():
            self._stream = kccl.gpu.make_stream()

    def on_host(self, nbytes: int) -> int:
        """See Arena."""
        memory = kccl.gpu.Memory(self._device, nbytes, self._stream, on_host=True)
        self._pinned.append(memory)
        return memory.address

    def write(self, address: int, array: NDArray[Any]) -> None:
        """See Arena."""
        with self._device.current():
            kccl.gpu.write(
                address, np.ascontiguousarray(array).reshape(-1).view(np.uint8), self._stream
            )

    def read_into(self, out: NDArray[np.uint8], address: int) -> None:
        """See Arena."""
        with self._device.current():
            kccl.gpu.read_into(out, address, self._stream)
