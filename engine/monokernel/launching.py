"""Compiles and launches a rank's kernels on its device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import kccl

from .loading import Sizes
from .source import KERNELS


class Compiled(NamedTuple):
    """A module of source.py, and what it tells of itself."""

    module: Any
    sizes: Sizes


class Launcher:
    """A rank's device, and the stream on which its kernels run one after the other.

    Attributes:
        device: The GPU; None in the simulator.
    """

    def __init__(self, comm: kccl.Communicator, warp_size: int) -> None:
        """
        Args:
            comm: Its backend is "cuda", "hip" or "sim".
            warp_size: Of the simulated device.
        """
        self._comm = comm
        # A GPU has its own.
        self._warp_size = warp_size if comm.backend == "sim" else None
        self.device: kccl.gpu.Device | None = None
        self._stream: Any = None
        if comm.backend != "sim":
            self.device = kccl.gpu.device(comm.empty(1).device)
            with self._current():
                self._stream = kccl.gpu.make_stream()

    def compile(self, source: str, names: Sequence[str]) -> Any:
        """The module of a source of source.py, with these kernels."""
        return kccl.compile(
            source,
            list(names),
            target=self._comm.backend,
            warp_size=self._warp_size,
            arch="" if self.device is None else self.device.arch,
            include_dirs=[KERNELS],
        )

    def launch(self, kernel: Any, *args: Any, grid: int, warps: int, shared_bytes: int = 0) -> None:
        """Returns at once on a GPU; in the simulator when the kernel has ended."""
        with self._current():
            kernel(
                self._comm,
                *args,
                grid=grid,
                block=warps * kernel.module.warp_size,
                shared_bytes=shared_bytes,
                stream=self._stream,
            )

    def wait(self) -> None:
        """Waits for what this rank has launched. Others may use the device, too."""
        if self.device is not None:
            with self._current():
                kccl.gpu.synchronize_stream(self._stream)

    def meet(self) -> None:
        """Waits until the devices of all ranks have come here. Collective.

        On this rank's stream: ranks that share a GPU share its default stream, where one's barrier
        would wait for the other's to end.
        """
        if self.device is None:
            self._comm.barrier()
        else:
            self._comm.barrier(stream=self._stream)
        self.wait()

    def check(self) -> None:
        """Raises BackendError if a kernel has failed on a GPU. Does not wait."""
        if self.device is not None:
            with self._current():
                kccl.gpu.has_finished(self._stream)

    def _current(self) -> AbstractContextManager[Any]:
        return self.device.current() if self.device is not None else nullcontext()
