"""A bench of calls inside kernels: on GPUs, and without figures of a machine on the simulator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import kccl

from .baselines import Request
from .collective import Array, Buffers, Collective, Comm, Problem, buffers
from .gpu_device import Gpu
from .gpu_kernels import LINE_BYTES, NAMES, SOURCE, BlockPingPong, PingPong
from .gpu_side import describe
from .harness import Contender, Row
from .host_side import Floors
from .in_kernel import (
    DELAYS_ALONE,
    FORMS,
    Chained,
    Form,
    InKernel,
    Meeting,
    Notebook,
    Place,
    contender,
    shape,
)
from .in_kernel import SOURCE as KERNELS

_PEERS_KERNELS = Path(__file__).with_name("in_kernel_cooperative.cuh")
_PEER = Form(
    "grid_sync",
    "in_kernel::meet_cooperative<{notes}>",
    "message",
    "acq_rel",
    library="cooperative_groups",
)
_SIM_BLOCKS = 4
_LEAST_BYTES = 16


class InKernelSide:
    """As HostSide, for calls inside kernels.

    Attributes:
        machine: What the document says of the machine besides the CPU.
    """

    def __init__(
        self, comm: kccl.Communicator, collective: Collective, problems: Sequence[Problem]
    ) -> None:
        """Compiles the kernels and takes memory for the longest problem. Collective."""
        self._collective = collective
        self._floors = Floors()
        self._ends = ExitStack()
        self._remarks: list[str] = []
        self.machine: dict[str, Any] = {}
        self._place: Place
        if comm.backend == "cuda":
            gpu = Gpu(comm)
            self._ends.enter_context(gpu.device.current())
            self._place = GpuPlace(gpu)
            self.machine = describe(gpu, {})
        else:
            self._place = SimPlace(comm)
        self._make(problems)

    def _make(self, problems: Sequence[Problem]) -> None:
        place, first = self._place, problems[0]
        self._forms = FORMS[self._collective.name]
        names = [name for form in self._forms for name in form.names(first.dtype, first.world_size)]
        self._module = place.compile(KERNELS, [*names, DELAYS_ALONE])
        self._of_peers = self._compile_peers()
        shapes = [shape(problem, place.most_blocks) for problem in problems]
        itemsize = 1 if first.np_dtype is None else first.np_dtype.itemsize
        self._device_comm = place.comm.device_comm(
            channels=max(each.blocks for each in shapes),
            max_bytes=max(_LEAST_BYTES, *(each.each * itemsize for each in shapes)),
        )
        if self._is_within_a_gpu():
            self._notebook = Notebook(place, self._module, shapes[0].blocks, None)
        else:
            self._notebook = Notebook(place, self._module, first.world_size, place.comm.rank)
        self._probe = place.probe(within=self._is_within_a_gpu())

    def contenders(self, problem: Problem) -> list[Contender]:
        """All forms of the collective, and peers; first the floor is probed. Collective."""
        one_way_us = self._probe()
        if one_way_us is not None:
            self._floors.one_ways_us.append(one_way_us)
        found = [self._contender(problem, form, self._module) for form in self._forms]
        if self._of_peers is not None:
            found.append(self._contender(problem, _PEER, self._of_peers))
        return found

    def finish(
        self, rows: Sequence[Row], request: Request, problem: Problem
    ) -> tuple[list[Row], list[str]]:
        """As HostSide.finish()."""
        found = list(rows)
        if self._floors.one_ways_us:
            self._floors.add(found)
        else:
            for row in found:
                row["algbw_gbps"] = row["busbw_gbps"] = None
        return found, self._remarks

    def close(self) -> None:
        """Gives back the device. Collective."""
        self._ends.close()

    def _is_within_a_gpu(self) -> bool:
        return self._collective.name == "grid_sync"

    def _contender(self, problem: Problem, form: Form, module: Any) -> Contender:
        kernels = [module.kernel(name) for name in form.names(problem.dtype, problem.world_size)]
        how = shape(problem, self._place.most_blocks)
        made: InKernel
        if problem.np_dtype is None:
            device_comm = None if form is _PEER else self._device_comm
            made = Meeting(self._notebook, kernels, how, device_comm)
            return contender(self._collective, problem, form, made, buffers(problem))
        made = Chained(self._notebook, kernels, how, problem, self._device_comm)
        return contender(self._collective, problem, form, made, made.buffers)

    def _compile_peers(self) -> Any:
        """The module of grid_sync's peer, on all ranks; else why there is none becomes a remark."""
        if not self._is_within_a_gpu():
            return None
        comm, module, why = self._place.comm, None, "the simulator has none"
        if comm.backend == "cuda":
            folders = cooperative_groups()
            why = "" if folders else "cooperative_groups.h and nv/target are in no known folder"
            if folders:
                try:
                    names = _PEER.names(None, comm.world_size)
                    module = self._place.compile(_PEERS_KERNELS, names, folders)
                except kccl.CompileError as error:
                    log = str(error)
                    why = (log.partition("error:")[2] or log).strip().partition("\n")[0]
        missing = [each for each in comm.gather_objects(why) if each]
        if missing:
            self._remarks.append(f"no row of cooperative groups: {missing[0]}")
            return None
        return module


def cooperative_groups() -> list[Path]:
    """The folders that CUDA's cooperative_groups.h needs; none where a part is missing."""
    for folder in _include_folders():
        # From CUDA 13 on NVIDIA's own C++ library lies in a folder of its own.
        more = next((at for at in (folder, folder / "cccl") if (at / "nv/target").is_file()), None)
        if more is not None and (folder / "cooperative_groups.h").is_file():
            return [folder, more]
    return []


def _include_folders() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable]) / "include"
    compiler = shutil.which("nvcc")
    if compiler is not None:
        yield Path(compiler).resolve().parents[1] / "include"
    yield Path("/usr/local/cuda/include")
    wheels = find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob("*/include"))


class GpuPlace:
    """See Place."""

    has_clock = True

    def __init__(self, gpu: Gpu) -> None:
        self.comm = gpu.comm
        self.most_blocks = gpu.device.multiprocessors
        self._gpu = gpu

    def compile(self, source: Any, names: Sequence[str], folders: Sequence[Path] = ()) -> Any:
        """See Place."""
        arch = self._gpu.device.arch
        return kccl.compile(source, names, target="cuda", arch=arch, include_dirs=folders)

    def buffers(self, problem: Problem) -> Buffers:
        """See Place."""
        return self._gpu.buffers(problem)

    def numbers(self, values: Array) -> Any:
        """See Place."""
        return self._gpu.numbers(values)

    def address(self, array: Any) -> int:
        """See Place."""
        return int(array.address)

    def read(self, array: Any, count: int, dtype: Any) -> Array:
        """See Place."""
        return self._gpu.read(array.address, count, dtype)

    def launch(self, kernel: Any, *args: Any, grid: int, block: int) -> None:
        """See Place."""
        kernel(self.comm, *args, grid=grid, block=block, stream=self._gpu.stream)

    def launch_cooperative(self, kernel: Any, *args: Any, grid: int, block: int) -> None:
        """See Place."""
        data, keep = kernel.pack(args)
        kccl.gpu.launch(
            kernel.entry.function(),
            [data[offset : offset + size] for offset, size in kernel.entry.offsets],
            grid=grid,
            block=block,
            shared_bytes=0,
            stream=self._gpu.stream,
            cooperative=True,
        )
        del keep

    def wait(self) -> None:
        """See Place."""
        self._gpu.wait()

    def probe(self, *, within: bool) -> Callable[[], float | None]:
        """See Place."""
        gpu, comm = self._gpu, self.comm
        if not within and comm.world_size == 1:
            return lambda: 0.0
        module = self.compile(SOURCE, NAMES)
        elapsed_ns = gpu.numbers(np.zeros(2, np.int64))
        if within:
            words = gpu.numbers(np.zeros(2 * LINE_BYTES // 4, np.int32))
            blocks = BlockPingPong(comm, module, words)

            def one_way_within_us() -> float:
                blocks.enqueue(elapsed_ns, stream=gpu.stream)
                gpu.wait()
                # The slowest GPU's calls are quoted, so the floor is the best GPU's.
                mine_us = blocks.one_way_us(gpu.read(elapsed_ns.address, 2, np.int64))
                return float(min(comm.gather_objects(mine_us)))

            return one_way_within_us
        ranks = PingPong(comm, module)

        def one_way_us() -> float:
            ranks.enqueue(elapsed_ns, stream=gpu.stream)
            gpu.wait()
            return ranks.one_way_us(int(gpu.read(elapsed_ns.address, 1, np.int64)[0]))

        return one_way_us


class SimPlace:
    """See Place."""

    most_blocks = _SIM_BLOCKS
    has_clock = False

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def compile(self, source: Any, names: Sequence[str], folders: Sequence[Path] = ()) -> Any:
        """See Place."""
        return kccl.compile(source, names, include_dirs=folders)

    def buffers(self, problem: Problem) -> Buffers:
        """See Place."""
        return buffers(problem)

    def numbers(self, values: Array) -> Any:
        """See Place."""
        return values.copy()

    def address(self, array: Any) -> int:
        """See Place."""
        return int(array.ctypes.data)

    def read(self, array: Any, count: int, dtype: Any) -> Array:
        """See Place."""
        found: Array = array[:count].copy()
        return found

    def launch(self, kernel: Any, *args: Any, grid: int, block: int) -> None:
        """See Place; returns when it has ended."""
        kernel(self.comm, *args, grid=grid, block=block)

    def launch_cooperative(self, kernel: Any, *args: Any, grid: int, block: int) -> None:
        """See Place."""
        raise NotImplementedError("the simulator has no cooperative launch")

    def wait(self) -> None:
        """See Place: kernels have ended."""

    def probe(self, *, within: bool) -> Callable[[], float | None]:
        """See Place: it has nothing that a machine could be measured by."""
        return lambda: None
