"""Compiles and launches a rank's kernels on its device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import kccl

from ..base.core import as_argument
from ..formats.base import Format
from ..formats.nested import Nested
from .layout import TILE
from .loading import Sizes
from .made import DrawnProduct, NestedPart, PairedProduct
from .shape import Tuning
from .source import KERNELS
from .task import has_squads

# How many warps a block of the kernels pack and copy_cache has.
_PACKERS = 8
DRAW = f"""
#include "draw.cuh"
KCCL_KERNEL void draw(uint8_t* out, uint64_t rows, uint64_t lanes, uint64_t blocks, uint64_t first,
                      uint64_t keys, uint64_t scales, uint64_t has_two) {{
    kccl::decode::draw<{TILE // 2}>(out, rows, lanes, blocks, first, keys, scales, has_two);
}}
"""
"""The source of a kernel that draws products of random numbers."""


PAIR = f"""
#include "pair.cuh"
KCCL_KERNEL void pair(uint8_t* out, const uint8_t* pairs, const uint8_t* scales, uint64_t rows,
                      uint64_t lanes, uint64_t blocks, uint64_t has_two) {{
    kccl::decode::pair<{TILE // 2}>(out, pairs, scales, rows, lanes, blocks, has_two);
}}
"""
"""The source of a kernel that converts products from Hugging Face's layout of MXFP4."""


def nest_source(stored: Format, form: Format) -> tuple[str, str]:
    """Returns the source and the name of a kernel that converts rows from a format of GGUF to one
    of formats/nested.py.
    """
    name = f"nest_{stored.name}_{form.name}"
    types = (
        f"kccl::decode::File{stored.in_files.replace('_', '')}, "
        f"kccl::decode::{form.family.title()}<{form.block}, 2>"
    )
    text = f"""
#include "nest.cuh"
KCCL_KERNEL void {name}(uint8_t* out, const uint8_t* blocks, uint64_t rows, uint64_t columns,
                        uint64_t first, uint64_t group, uint64_t stride, uint64_t offset,
                        uint64_t head) {{
    kccl::decode::nest<{types}>(
        out, blocks, rows, columns, first, {{group, stride, offset, head}});
}}
"""
    return text, name


class Compiled(NamedTuple):
    """A compiled module of source.py, the sizes that its kernel `describe` reports, and the size of
    a block's shared memory in prefill with squads.
    """

    module: Any
    sizes: Sizes
    squad_shared: int = 0


class Launcher:
    """A rank's device, and the stream on which its kernels run one after the other.

    Attributes:
        device: The GPU. None in the simulator.
    """

    def __init__(self, comm: kccl.Communicator, warp_size: int) -> None:
        """Makes a stream on the rank's device.

        Args:
            comm: A communicator of backend "cuda", "hip" or "sim".
            warp_size: The threads of a warp of the simulated device.
        """
        self._comm = comm
        # compile() passes the warp size to the simulator. A GPU has a fixed one.
        self._warp_size = warp_size if comm.backend == "sim" else None
        self.device: kccl.gpu.Device | None = None
        self._stream: Any = None
        if comm.backend != "sim":
            self.device = kccl.gpu.device(comm.empty(1).device)
            with self._current():
                self._stream = kccl.gpu.make_stream()

    def compile(self, source: str, names: Sequence[str]) -> Any:
        """Compiles a source of source_of() into a module with the named kernels."""
        return kccl.compile(
            source,
            list(names),
            target=self._comm.backend,
            warp_size=self._warp_size,
            arch="" if self.device is None else self.device.arch,
            include_dirs=[KERNELS],
        )

    def launch(self, kernel: Any, *args: Any, grid: int, warps: int, shared_bytes: int = 0) -> None:
        """Launches a kernel. Returns at once on a GPU, and after its end in the simulator."""
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
        """Waits for the kernels that this rank has launched. Does not wait for other ranks'."""
        if self.device is not None:
            with self._current():
                kccl.gpu.synchronize_stream(self._stream)

    def meet(self) -> None:
        """Waits until the devices of all ranks have reached this call. Collective.

        The barrier must run on this rank's own stream. Ranks that share a GPU share its default
        stream. On that stream one rank's barrier would wait for the other's to end: a deadlock.
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


class Grids:
    """Launches a rank's kernels, each with Tuning.blocks blocks. They run in order."""

    def __init__(
        self, launcher: Launcher, comm: kccl.Communicator, tuning: Tuning, usual: Compiled
    ) -> None:
        """Takes the arguments that all launches share.

        Args:
            launcher: Launches the kernels.
            comm: The communicator of all ranks. Collective: all of them must call this.
            tuning: How the device is used.
            usual: The module with all kernels.
        """
        self._launcher, self._tuning, self._usual = launcher, tuning, usual
        self._comm = comm
        self._drawer: Any = None
        self._pairer: Any = None
        # Source and name of a kernel that converts blocks -> the kernel.
        self._nesters: dict[tuple[str, str], Any] = {}
        # Kernels only wait with this DeviceComm, and send nothing through its buffers. So the
        # smallest buffers are enough.
        self._device_comm = comm.device_comm(channels=1, max_bytes=64, exchange_bytes=128)

    def pack(self, *place: int) -> None:
        """Packs a matrix, and returns when the kernel has ended. load() says what the arguments
        are.
        """
        self._launch_packers("pack", *place)
        # load() then copies the next matrix into the same staging memory.
        self._launcher.wait()

    def locate(self, to: int) -> None:
        """Writes to an address where packed weights lie (locate() in kernels/pack.cuh)."""
        kernel = self._usual.module.kernel("locate")
        self._launcher.launch(kernel, to, grid=1, warps=1)
        self._launcher.wait()

    @property
    def target(self) -> list[str | int]:
        """Returns for what kernels are compiled: the vendor, the architecture, the warp's size."""
        device, module = self._launcher.device, self._usual.module
        return [self._comm.backend, "" if device is None else device.arch, module.warp_size]

    def draw(self, to: int, product: DrawnProduct) -> None:
        """Draws a product of random numbers. pack() then waits for it."""
        if self._drawer is None:
            self._drawer = self._launcher.compile(DRAW, ["draw"])
        numbers = (to, *product[1:])
        kernel = self._drawer.kernel("draw")
        self._launcher.launch(kernel, *numbers, grid=self._tuning.blocks, warps=_PACKERS)

    def pair(self, to: int, pairs: int, product: PairedProduct) -> None:
        """Converts a product, whose pairs and then scales lie at an address. pack() then waits for
        it.
        """
        if self._pairer is None:
            self._pairer = self._launcher.compile(PAIR, ["pair"])
        numbers = (to, pairs, pairs + product.pairs.nbytes, *product[2:])
        kernel = self._pairer.kernel("pair")
        self._launcher.launch(kernel, *numbers, grid=self._tuning.blocks, warps=_PACKERS)

    def nest(self, to: int, blocks: int, form: Nested, part: NestedPart) -> None:
        """Converts rows of a product from blocks at an address, and returns when the kernel has
        ended.
        """
        key = text, name = nest_source(part.format, form)
        if key not in self._nesters:
            self._nesters[key] = self._launcher.compile(text, [name]).kernel(name)
        numbers = (to, blocks, len(part.blocks), *part[2:])
        kernel = self._nesters[key]
        self._launcher.launch(kernel, *numbers, grid=self._tuning.blocks, warps=_PACKERS)
        self._launcher.wait()

    def copy_cache(self, to: int, source: int, num: int) -> None:
        """Copies the first `num` positions between two slots of the KV cache."""
        self._launch_packers("copy_cache", to, source, num)

    def prefill(self, task: Any) -> None:
        """Runs a task's ids in chunks, which fills the KV cache."""
        tuning, usual = self._tuning, self._usual
        if has_squads(task, tuning):
            return self._prefill_in_squads(task)
        warps = tuning.chunk_warps + tuning.chunk_others
        self._launch(usual.module, "prefill", task, warps, usual.sizes.prefill_shared)

    def _prefill_in_squads(self, task: Any) -> None:
        warps = self._tuning.squad_warps + self._tuning.squad_others
        shared = self._usual.squad_shared
        self._launch(self._usual.module, "prefill_in_squads", task, warps, shared)

    def load_prefill(self, task: Any) -> None:
        """Launches the kernels of prefill, if there are any, with a task that has no ids."""
        if self._tuning.chunk > 1:
            self.prefill(task)
        if self._tuning.chunk > 1 and self._tuning.squads > 1:
            self._prefill_in_squads(task)

    def decode(self, decoder: Compiled, task: Any) -> None:
        """Runs a task with the decode kernel of a module."""
        warps = self._tuning.warps + self._tuning.others
        self._launch(decoder.module, "decode", task, warps, decoder.sizes.shared)

    def _launch(self, module: Any, name: str, task: Any, warps: int, nbytes: int) -> None:
        shape = {"grid": self._tuning.blocks, "warps": warps, "shared_bytes": nbytes}
        arguments = self._device_comm, as_argument(task)
        self._launcher.launch(module.kernel(name), *arguments, **shape)

    def _launch_packers(self, name: str, *numbers: int) -> None:
        kernel = self._usual.module.kernel(name)
        self._launcher.launch(kernel, *numbers, grid=self._tuning.blocks, warps=_PACKERS)
