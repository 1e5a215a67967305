"""FlashInfer as a peer: its all_reduce within one machine, over NVLink without multicast.

The kernels are TensorRT-LLM's. The all_reduce is measured alone, and fused with residual and norm.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..gpu.clock import GpuClock, both_modes
from ..gpu.device import Gpu
from ..harness.collective import Collective
from ..harness.measure import Contender
from ..harness.problem import Problem
from .notes import PeerNotes

_TYPES = ("float16", "bfloat16", "float32")
_WORLD_SIZES = (2, 4, 8, 16)
# Elements of a row, which is the hidden state of a token. A cluster of blocks works on one row.
_WIDTH = 4096
# The bytes that a thread moves at a time.
_PACKET_BYTES = 16
# The longest message, because FlashInfer's workspace is over three times what all ranks send.
_LARGEST_BYTES = 16 << 20


class FlashInferPeer:
    """FlashInfer's calls as contenders.

    Attributes:
        libraries: Name -> version, once its kernels are loaded.
    """

    def __init__(self, gpu: Gpu, clock: GpuClock) -> None:
        """Loads FlashInfer. torch.distributed must have been started. Collective.

        If something is missing it does not raise, but notes() says so. FlashInfer's ranks wait for
        each other: at the start for up to 60 s, NCCL's timeout; in a kernel without a timeout.
        """
        self.libraries: dict[str, str] = {}
        self._gpu = gpu
        self._clock = clock
        self._missing = PeerNotes(gpu.comm)
        # The module flashinfer.comm; None if it could not be loaded.
        self._module: Any = None
        # Element type -> its workspace; None if the workspace could not be allocated.
        self._scratches: dict[str, Any] = {}
        loaded: list[Any] = []
        if gpu.comm.world_size > 1 and self._missing.agree(
            "flashinfer", None, lambda: loaded.append(_load())
        ):
            (self._module,) = loaded
            self.libraries = {"flashinfer": str(import_module("flashinfer").__version__)}

    def contenders(self, collective: Collective, problem: Problem) -> list[Contender]:
        """Returns its one-shot and two-shot calls, if it has them, in both modes. Collective."""
        if self._module is None:
            return []
        why_not = self._why_not(collective, problem)
        if why_not:
            self._missing.add("flashinfer", why_not, problem.nbytes)
            return []
        scratch = self._scratch(str(problem.dtype))
        if scratch is None:
            return []
        assert collective.flashinfer is not None
        gpu, found = self._gpu, []
        made: list[Any] = []
        if not self._missing.agree(
            "flashinfer", problem.nbytes, lambda: made.extend(_tensors(problem))
        ):
            return []
        x, out = made
        for algorithm, call in collective.flashinfer(self._module, scratch, x, out).items():
            # The first call loads the kernel, which must not happen during a capture.
            if not self._missing.agree(f"flashinfer {algorithm}", problem.nbytes, call):
                continue
            gpu.wait()
            buffers = gpu.wrap(x, out, x.data_ptr(), out.data_ptr(), problem)
            names = ("flashinfer", algorithm, "direct")
            found += both_modes(self._clock, collective, names, buffers, call, gpu.capture)
        return found

    def notes(self) -> list[str]:
        """See PeerNotes.take()."""
        return self._missing.take()

    def close(self) -> None:
        """Frees its workspaces. Collective."""
        if not self._scratches:
            return
        self._gpu.wait()
        # Waits for all ranks, so that no rank writes to a peer's workspace any more.
        self._gpu.comm.gather_objects(None)
        for scratch in self._scratches.values():
            if scratch is not None:
                scratch.destroy()
        self._scratches.clear()

    @staticmethod
    def _why_not(collective: Collective, problem: Problem) -> str:
        if collective.flashinfer is None:
            return f"it has no {collective.name}"
        if problem.op not in ("sum", None):
            return "it only computes sums"
        if problem.dtype not in _TYPES or problem.world_size not in _WORLD_SIZES:
            return f"not made for {problem.dtype} on {problem.world_size} GPUs"
        if problem.nbytes % _PACKET_BYTES or problem.count % _width(problem):
            return f"not whole rows of {_WIDTH} elements"
        return "larger than its workspace here" if problem.nbytes > _LARGEST_BYTES else ""

    def _scratch(self, dtype: str) -> Any:
        """Returns the workspace for an element type, shared by all ranks; None if allocation
        failed.
        """
        if dtype not in self._scratches:
            made: list[Any] = []
            act = lambda: made.append(self._make_scratch(dtype))  # noqa: E731
            is_there = self._missing.agree("flashinfer", None, act)
            self._scratches[dtype] = made[0] if is_there else None
        return self._scratches[dtype]

    def _make_scratch(self, dtype: str) -> Any:
        comm, element = self._gpu.comm, _element(dtype)
        return self._module.create_allreduce_fusion_workspace(
            # FlashInfer's other backend uses multicast.
            backend="trtllm",
            world_size=comm.world_size,
            rank=comm.rank,
            # The rows of the longest message with two-byte elements. So many suffice for wider
            # elements, too, even in versions that do not allocate more bytes for them.
            max_token_num=_LARGEST_BYTES // 2 // _WIDTH,
            hidden_dim=_WIDTH,
            dtype=element,
        )


def _load() -> Any:
    """Returns the module flashinfer.comm.

    Raises:
        ImportError: FlashInfer is not installed.
        RuntimeError: Its kernels are not compiled, or torch.distributed has not started.
    """
    module = import_module("flashinfer.comm")
    if not module.gen_trtllm_comm_module().is_compiled:
        raise RuntimeError("its kernels are not compiled: call it once, which takes minutes")
    if not import_module("torch").distributed.is_initialized():
        raise RuntimeError("torch.distributed, through which its ranks connect, has not started")
    return module


def _element(dtype: str | None) -> Any:
    """Returns the PyTorch element type of this name."""
    return getattr(import_module("torch"), str(dtype))


def _width(problem: Problem) -> int:
    """Returns the number of elements in a row."""
    return min(problem.count, _WIDTH)


def _tensors(problem: Problem) -> Any:
    """Returns the input and the output tensor, each [rows, elements]."""
    width = _width(problem)
    shape = 2, problem.count // width, width
    return import_module("torch").zeros(shape, dtype=_element(problem.dtype), device="cuda")
