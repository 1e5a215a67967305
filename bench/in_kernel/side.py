"""Benches calls inside kernels on GPUs. On the simulator it only checks them."""

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

from ..gpu.device import Gpu
from ..gpu.kernels import LINES_BYTES, NAMES, SOURCE, BlockPingPong, PingPong
from ..gpu.side import describe
from ..harness.collective import Collective
from ..harness.forms import DELAYS_ALONE, OF_SUMS, Form
from ..harness.measure import Contender, Row
from ..harness.problem import Array, Buffers, Comm, Problem, buffers
from ..host.side import Floors
from .chained import Chained
from .contenders import (
    BarrierForm,
    InKernel,
    Notebook,
    Runner,
    Shape,
    contender,
    forms,
    shape,
)
from .exchange import ExchangedSums, Exchanging, exchange_bytes, exchange_shape, sums_shape

FOLDER = Path(__file__).parent
_PEERS_KERNELS = FOLDER / "cooperative.cuh"
_PEER = Form(
    "grid_sync",
    "in_kernel::barriers_cooperative<{notes}>",
    "message",
    "acq_rel",
    library="cooperative_groups",
    is_within=True,
)
_SIM_BLOCKS = 4
_LEAST_BYTES = 16
_LINE_BYTES = 64


class _Reach:
    """State that rows share. There is one object for all forms whose calls stay within a GPU, and
    one for all forms whose calls are among the ranks.

    Attributes:
        notebook: The arrays of these forms' launches.
        probe: What Runner.probe() has returned: measures a latency.
        floors: The latencies that were probed during the run.
    """

    def __init__(self, runner: Runner, module: Any, *, within: bool) -> None:
        """Makes the object. Collective."""
        comm = runner.comm
        parties = (runner.most_blocks, None) if within else (comm.world_size, comm.rank)
        self.notebook = Notebook(runner, module, *parties)
        self.probe = runner.probe(within=within)
        self.floors = Floors()


class InKernelSide:
    """Does what HostSide does, for calls inside kernels.

    Attributes:
        machine: Facts about the machine that the document needs besides those of the CPU.
    """

    def __init__(
        self, comm: kccl.Communicator, collective: Collective, problems: Sequence[Problem]
    ) -> None:
        """Compiles the kernels and allocates memory for the longest problem. Collective."""
        self._collective = collective
        self._ends = ExitStack()
        self._remarks: list[str] = []
        self.machine: dict[str, Any] = {}
        self._runner: Runner
        if comm.backend != "sim":
            gpu = Gpu(comm)
            self._ends.enter_context(gpu.device.current())
            self._runner = GpuRunner(gpu)
            self.machine = describe(gpu, {})
        else:
            self._runner = SimRunner(comm)
        self._make(problems)

    def _make(self, problems: Sequence[Problem]) -> None:
        runner, first = self._runner, problems[0]
        self._is_exchange = self._collective.name == "exchange"
        self._forms = forms(self._collective, first.world_size)
        source, names = kernels_of(self._collective, first.dtype, first.world_size)
        exchanges = any(form.algorithm == OF_SUMS for form in self._forms)
        self._module = runner.compile(source, names)
        self._of_peers = self._compile_peers()
        shapes = [self._shape(problem) for problem in problems]
        itemsize = 1 if first.np_dtype is None else first.np_dtype.itemsize
        if self._is_exchange:
            most = max(exchange_bytes(each, first.world_size) for each in shapes)
            sizes = {"channels": 1, "max_bytes": _LEAST_BYTES, "exchange_bytes": most}
        else:
            sums = [sums_shape(problem, runner.most_blocks) for problem in problems]
            sizes = {
                "channels": max(each.blocks for each in shapes),
                "max_bytes": max(_LEAST_BYTES, *(each.each * itemsize for each in shapes)),
                "exchange_bytes": max(
                    exchange_bytes(each, first.world_size) if each and exchanges else _LINE_BYTES
                    for each in sums
                ),
            }
        self._device_comm = runner.comm.device_comm(**sizes)
        self._reaches = {
            within: _Reach(runner, self._module, within=within)
            for within in dict.fromkeys(form.is_within for form in self._forms)
        }

    def contenders(self, problem: Problem) -> list[Contender]:
        """Probes the floors. Returns the contenders of all forms and of peers. Collective."""
        for reach in self._reaches.values():
            one_way_us = reach.probe()
            if one_way_us is not None:
                reach.floors.one_ways_us.append(one_way_us)
        forms_of_it = [form for form in self._forms if self._has(problem, form)]
        found = [self._contender(problem, form, self._module) for form in forms_of_it]
        if self._of_peers is not None:
            found.append(self._contender(problem, _PEER, self._of_peers))
        return found

    def probe_again(self, problem: Problem) -> None:
        """Probes nothing, because a GPU's latency does not drift: see HostSide.probe_again()."""

    def fill(self, rows: Sequence[Row]) -> None:
        """See HostSide.fill()."""
        for within, reach in self._reaches.items():
            # If there are two reaches, there are several ranks. Then the rows with world_size 1 are
            # those within a GPU.
            rows_of_it = [
                row for row in rows if len(self._reaches) == 1 or (row["world_size"] == 1) == within
            ]
            if reach.floors.one_ways_us:
                reach.floors.add(rows_of_it)
            else:
                for row in rows_of_it:
                    row["algbw_gbps"] = row["busbw_gbps"] = None

    def notes(self) -> list[str]:
        """See HostSide.notes()."""
        return self._remarks

    def close(self) -> None:
        """Releases the device. Collective."""
        self._ends.close()

    def _has(self, problem: Problem, form: Form) -> bool:
        """Tells whether a problem has a row of this form. If not, a remark says why."""
        is_of_sums = form.algorithm == OF_SUMS and not self._is_exchange
        if not is_of_sums or sums_shape(problem, self._runner.most_blocks) is not None:
            return True
        self._remarks.append(f"{problem.nbytes} B have no row of {OF_SUMS}: not whole words of 8")
        return False

    def _shape(self, problem: Problem) -> Shape:
        make = exchange_shape if self._is_exchange else shape
        return make(problem, self._runner.most_blocks)

    def _contender(self, problem: Problem, form: Form, module: Any) -> Contender:
        kernels = [module.kernel(name) for name in form.names(problem.dtype, problem.world_size)]
        how, notebook = self._shape(problem), self._reaches[form.is_within].notebook
        made: InKernel
        if self._is_exchange:
            made = Exchanging(notebook, kernels, how, form, self._device_comm)
            return contender(self._collective, problem, form, made, buffers(problem))
        if problem.np_dtype is None:
            device_comm = None if form is _PEER else self._device_comm
            made = BarrierForm(notebook, kernels, how, device_comm)
            return contender(self._collective, problem, form, made, buffers(problem))
        if form.algorithm == OF_SUMS:
            sums = sums_shape(problem, self._runner.most_blocks)
            assert sums is not None
            of_sums = ExchangedSums(notebook, kernels, sums, problem, self._device_comm)
            return contender(self._collective, problem, form, of_sums, of_sums.buffers)
        made = Chained(notebook, kernels, how, problem, self._device_comm)
        return contender(self._collective, problem, form, made, made.buffers)

    def _compile_peers(self) -> Any:
        """Returns the module of grid_sync's peer. None if a rank has none; then a remark says
        why.
        """
        if self._collective.name != "grid_sync":
            return None
        comm, module, why = self._runner.comm, None, f"backend {self._runner.comm.backend} has none"
        if comm.backend == "cuda":
            source, names, folders = kernels_of_peers(comm.world_size)
            why = "" if folders else "cooperative_groups.h and nv/target are in no known folder"
            if folders:
                try:
                    module = self._runner.compile(source, names, folders)
                except kccl.CompileError as error:
                    log = str(error)
                    why = (log.partition("error:")[2] or log).strip().partition("\n")[0]
        missing = [each for each in comm.gather_objects(why) if each]
        if missing:
            self._remarks.append(f"no row of cooperative groups: {missing[0]}")
            return None
        return module


def kernels_of(
    collective: Collective, dtype: str | None, world_size: int
) -> tuple[Path, list[str]]:
    """Returns the source file and the kernel names of a collective's forms."""
    found = forms(collective, world_size)
    names = [name for form in found for name in form.names(dtype, world_size)]
    return FOLDER / f"{collective.name}.cuh", [*names, DELAYS_ALONE]


def kernels_of_peers(world_size: int) -> tuple[Path, list[str], list[Path]]:
    """Returns the kernels of grid_sync's peer, and its include folders: none if its headers are
    missing.
    """
    return _PEERS_KERNELS, _PEER.names(None, world_size), cooperative_groups()


def cooperative_groups() -> list[Path]:
    """Returns the include folders of CUDA's cooperative_groups.h; none if one of its headers is
    missing.
    """
    for folder in _include_folders():
        # Since CUDA 13 the C++ library, which has nv/target, is in the folder cccl.
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


class GpuRunner:
    """See Runner."""

    has_clock = True

    def __init__(self, gpu: Gpu) -> None:
        self.comm = gpu.comm
        self.most_blocks = gpu.device.multiprocessors
        self._gpu = gpu

    def compile(self, source: Any, names: Sequence[str], folders: Sequence[Path] = ()) -> Any:
        """See Runner."""
        arch = self._gpu.device.arch
        target = self.comm.backend
        return kccl.compile(source, names, target=target, arch=arch, include_dirs=folders)

    def buffers(self, problem: Problem) -> Buffers:
        """See Runner."""
        return self._gpu.buffers(problem)

    def numbers(self, values: Array) -> Any:
        """See Runner."""
        return self._gpu.numbers(values)

    def address(self, array: Any) -> int:
        """See Runner."""
        return int(array.address)

    def read(self, array: Any, count: int, dtype: Any) -> Array:
        """See Runner."""
        return self._gpu.read(array.address, count, dtype)

    def launch(self, kernel: Any, *args: Any, grid: int, block: int, shared_bytes: int = 0) -> None:
        """See Runner."""
        shape = {"grid": grid, "block": block, "shared_bytes": shared_bytes}
        kernel(self.comm, *args, **shape, stream=self._gpu.stream)

    def launch_cooperative(self, kernel: Any, *args: Any, grid: int, block: int) -> None:
        """See Runner."""
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
        """See Runner."""
        self._gpu.wait()

    def probe(self, *, within: bool) -> Callable[[], float | None]:
        """See Runner."""
        gpu, comm = self._gpu, self.comm
        if not within and comm.world_size == 1:
            return lambda: 0.0
        module = self.compile(SOURCE, NAMES)
        elapsed_ns = gpu.numbers(np.zeros(2, np.int64))
        if within:
            words = gpu.numbers(np.zeros(2 * LINES_BYTES // 4, np.int32))
            blocks = BlockPingPong(comm, module, words)

            def one_way_within_us() -> float:
                blocks.enqueue(elapsed_ns, stream=gpu.stream)
                gpu.wait()
                # Takes the fastest GPU, because a floor is a lower bound. Rows show the slowest.
                mine_us = blocks.one_way_us(gpu.read(elapsed_ns.address, 2, np.int64))
                return float(min(comm.gather_objects(mine_us)))

            return one_way_within_us
        ranks = PingPong(comm, module)

        def one_way_us() -> float:
            ranks.enqueue(elapsed_ns, stream=gpu.stream)
            gpu.wait()
            return ranks.one_way_us(int(gpu.read(elapsed_ns.address, 1, np.int64)[0]))

        return one_way_us


class SimRunner:
    """See Runner."""

    most_blocks = _SIM_BLOCKS
    has_clock = False

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def compile(self, source: Any, names: Sequence[str], folders: Sequence[Path] = ()) -> Any:
        """See Runner."""
        return kccl.compile(source, names, include_dirs=folders)

    def buffers(self, problem: Problem) -> Buffers:
        """See Runner."""
        return buffers(problem)

    def numbers(self, values: Array) -> Any:
        """See Runner. Returns an array of bytes: a pointer argument of a kernel takes an array of
        bytes, or else of exactly its own type, which is not always that of `values`.
        """
        return values.copy().view(np.uint8)

    def address(self, array: Any) -> int:
        """See Runner."""
        return int(array.ctypes.data)

    def read(self, array: Any, count: int, dtype: Any) -> Array:
        """See Runner."""
        found: Array = array.view(dtype)[:count].copy()
        return found

    def launch(self, kernel: Any, *args: Any, grid: int, block: int, shared_bytes: int = 0) -> None:
        """See Runner. Returns when the kernel has ended."""
        kernel(self.comm, *args, grid=grid, block=block, shared_bytes=shared_bytes)

    def launch_cooperative(self, kernel: Any, *args: Any, grid: int, block: int) -> None:
        """See Runner."""
        raise NotImplementedError("the simulator has no cooperative launch")

    def wait(self) -> None:
        """Does nothing: launch() returns after the kernel has ended."""

    def probe(self, *, within: bool) -> Callable[[], float | None]:
        """See Runner: the simulator has no latencies of a machine."""
        return lambda: None
