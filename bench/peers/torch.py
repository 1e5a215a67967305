"""NCCL and PyTorch's symmetric memory as peers, in the same processes and on the same stream.

A PyTorch for AMD's GPUs has RCCL under NCCL's names; its rows are called rccl.

Only this file and gloo.py of the benchmarks start torch.distributed.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..gpu.clock import GpuClock, both_modes
from ..gpu.device import DeviceBuffers, Gpu
from ..harness.clock import uncollected
from ..harness.collective import Collective
from ..harness.measure import Contender
from ..harness.problem import Call, Comm, Problem
from .notes import PeerNotes

# NVLink multicast is off for all libraries: kccl does not use it, and not every machine has it.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_TIMEOUT = timedelta(seconds=60)
_WINDOW_BYTES = 256 << 20

Peer = tuple[str, str, DeviceBuffers, Call]


class ProcessGroup:
    """Starts torch.distributed's default group with NCCL, for the ranks of a communicator."""

    def __init__(self, comm: Comm, ordinal: int) -> None:
        """Starts the group. Collective.

        Args:
            comm: A communicator with the ranks of the group.
            ordinal: Number of this rank's GPU.
        """
        os.environ.update(NO_MULTICAST)
        import torch

        self._torch = torch
        self._store = tempfile.TemporaryDirectory() if comm.rank == 0 else None
        folder = comm.gather_objects(self._store.name if self._store is not None else None)[0]
        dist = torch.distributed
        dist.init_process_group(
            "nccl",
            store=dist.FileStore(str(Path(folder) / "store"), comm.world_size),
            rank=comm.rank,
            world_size=comm.world_size,
            device_id=torch.device("cuda", ordinal),
            timeout=_TIMEOUT,
        )

    def close(self) -> None:
        """Ends the group. Collective. Graphs with its calls must be freed before, or this hangs."""
        self._torch.cuda.synchronize()
        self._torch.distributed.destroy_process_group()
        if self._store is not None:
            self._store.cleanup()


class TorchPeers:
    """NCCL, NCCL on a symmetric window, and PyTorch's one-shot and two-shot, as contenders.

    Attributes:
        libraries: Name -> version of what is measured.
    """

    def __init__(self, gpu: Gpu, clock: GpuClock) -> None:
        """Starts torch.distributed. Collective. Does not raise if something is missing: notes()
        says so.
        """
        self.libraries: dict[str, str] = {}
        self._gpu = gpu
        self._clock = clock
        self._name = "rccl" if gpu.comm.backend == "hip" else "nccl"
        self._torch: Any = None
        self._group: ProcessGroup | None = None
        # Empty until it is first needed. Then [memory, pool] of NCCL's symmetric window, or [None]
        # if NCCL refused it.
        self._window: list[Any] = []
        self._missing = PeerNotes(gpu.comm)
        os.environ.update(NO_MULTICAST)
        both = f"{self._name.upper()} and torch_symm_mem"
        if not self._missing.agree(both, None, _import_torch):
            return
        import torch

        if self._missing.agree(both, None, lambda: self._start(torch)):
            self._torch = torch
            number = ".".join(map(str, torch.cuda.nccl.version()))
            self.libraries = {"torch": str(torch.__version__), self._name: number}

    def contenders(self, collective: Collective, problem: Problem) -> list[Contender]:
        """Returns the contenders of all peers that support the problem, in both modes.
        Collective.
        """
        if self._torch is None:
            return []
        is_apart = problem.in_place is False
        if is_apart != collective.is_apart_in_nccl:
            why = "measured in place only" if is_apart else "measured with --out-of-place only"
            self._missing.add("NCCL and torch_symm_mem", why, problem.nbytes)
            return []
        peers: list[Peer] = []
        for make in (self._nccl, self._nccl_window, self._symm_mem):
            peers += make(collective, problem)
        found = []
        for library, algorithm, buffers, call in peers:
            name = f"{library} {algorithm}"
            # The first call connects the ranks, which must not happen during a capture. It also
            # shows whether the peer refuses the problem.
            if not self._missing.agree(name, problem.nbytes, call):
                continue
            self._gpu.wait()
            names = (library, algorithm, "direct")
            found += both_modes(self._clock, collective, names, buffers, call, self._capture)
        return found

    def notes(self) -> list[str]:
        """See PeerNotes.take()."""
        return self._missing.take()

    def close(self) -> None:
        """Shuts torch.distributed down. Collective."""
        if self._torch is not None and self._group is not None:
            self._group.close()

    # ---- The peers ---------------------------------------------------------------------------

    def _nccl(self, collective: Collective, problem: Problem) -> list[Peer]:
        if collective.nccl is None:
            self._missing.add("NCCL", f"it has no {collective.name}", problem.nbytes)
            return []
        x = self._tensor(problem)
        out = self._tensor(problem) if collective.is_apart_in_nccl else x
        return [self._of_nccl("default", x, out, collective, problem)]

    def _nccl_window(self, collective: Collective, problem: Problem) -> list[Peer]:
        # RCCL has no symmetric windows.
        if collective.nccl is None or problem.world_size == 1 or self._name != "nccl":
            return []
        # Where the output has its own array, it begins at the window's middle.
        middle = _WINDOW_BYTES // 2 if collective.is_apart_in_nccl else 0
        if problem.nbytes > _WINDOW_BYTES - middle:
            self._missing.add("nccl symmetric_window", "larger than its window", problem.nbytes)
            return []
        if not self._window and not self._missing.agree(
            "nccl symmetric_window", None, self._register
        ):
            self._window = [None]
        memory = self._window[0]
        if memory is None:
            return []
        dtype = getattr(self._torch, str(problem.dtype))
        x, out = (memory[at : at + problem.nbytes].view(dtype) for at in (0, middle))
        return [self._of_nccl("symmetric_window", x, out, collective, problem)]

    def _of_nccl(
        self, algorithm: str, x: Any, out: Any, collective: Collective, problem: Problem
    ) -> Peer:
        assert collective.nccl is not None
        buffers = self._buffers(x, out, problem)
        return (
            *(self._name, algorithm, buffers),
            collective.nccl(self._torch.distributed, buffers, problem),
        )

    def _symm_mem(self, collective: Collective, problem: Problem) -> list[Peer]:
        if collective.symm_mem is None or problem.world_size == 1:
            return []
        torch = self._torch
        made: list[Any] = []

        def allocate() -> None:
            import torch.distributed._symmetric_memory as symmetric

            dtype = getattr(torch, problem.dtype or "int32")
            x = symmetric.empty(max(problem.count, 1), dtype=dtype, device="cuda")
            made.extend((x, symmetric.rendezvous(x, torch.distributed.group.WORLD)))

        if not self._missing.agree("torch_symm_mem", problem.nbytes, allocate):
            return []
        x, handle = made
        group = torch.distributed.group.WORLD.group_name
        calls = collective.symm_mem(
            torch.ops.symm_mem, x, handle, torch.empty_like(x), group, problem
        )
        return [
            ("torch_symm_mem", algorithm, self._buffers(x, out, problem), call)
            for algorithm, (call, out) in calls.items()
        ]

    # ---- torch -------------------------------------------------------------------------------

    def _start(self, torch: Any) -> None:
        comm, ordinal = self._gpu.comm, self._gpu.device.ordinal
        torch.cuda.set_device(ordinal)
        # From now on all work of torch in this thread is on the timed stream.
        torch.cuda.set_stream(torch.cuda.ExternalStream(self._gpu.stream))
        self._group = ProcessGroup(comm, ordinal)

    def _register(self) -> None:
        """Lets NCCL allocate memory and register it as a symmetric window."""
        torch = self._torch
        group = torch.distributed.group.WORLD
        backend = group._get_backend(torch.device("cuda", self._gpu.device.ordinal))
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            memory = torch.zeros(_WINDOW_BYTES, dtype=torch.uint8, device="cuda")
        backend.register_mem_pool(pool, symm=True)
        # Keeps the pool as long as its memory is used.
        self._window = [memory, pool]

    def _capture(self, body: Call) -> Call:
        """See Capture of bench/gpu/device.py. Captures by torch's own function, so that torch's
        allocator knows of the capture.
        """
        graph = self._torch.cuda.CUDAGraph()
        self._torch.cuda.synchronize()
        with uncollected():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        replay: Call = graph.replay
        return replay

    def _tensor(self, problem: Problem) -> Any:
        dtype = getattr(self._torch, str(problem.dtype))
        return self._torch.zeros(problem.count, dtype=dtype, device="cuda")

    def _buffers(self, x: Any, out: Any, problem: Problem) -> DeviceBuffers:
        return self._gpu.wrap(x, out, x.data_ptr(), out.data_ptr(), problem)


def _import_torch() -> None:
    import torch

    if not torch.distributed.is_nccl_available():
        raise RuntimeError(f"torch {torch.__version__} has no NCCL")
