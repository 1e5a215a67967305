"""The monokernel compiled for one model and machine: the usual kernels, and variants of decode."""

from typing import Any

import kccl

from ..program import Program
from ..sample import SamplingParams
from . import shape


class Variants:
    """A rank's kernels. A variant of decode is compiled when a request first needs it.

    All of them use the same memory, and give the same bits.
    """

    def __init__(
        self,
        program: Program,
        comm: kccl.Communicator,
        tuning: shape.Tuning,
        context: int,
        dtype: str,
        warp_size: int,
    ) -> None:
        """Compiles the usual kernels.

        Args:
            program: The model's.
            comm: The ranks.
            tuning: How the device is used.
            context: Positions that the KV cache has room for.
            dtype: Of the weights.
            warp_size: Of the simulated device.

        Raises:
            BackendError: There is no compiler, or it refused.
        """
        self._program, self._comm, self._tuning = program, comm, tuning
        self._context, self._dtype, self._warp_size = context, dtype, warp_size
        usual = self._compile(shape.kernels_of(tuning))
        self.kernel = usual.kernel
        # By samples and overlaps.
        self._modules: dict[tuple[bool, bool], Any] = {(False, True): usual}

    def has(self, params: SamplingParams, overlaps: bool) -> bool:
        """Whether decode() need not compile."""
        return (_samples(params), overlaps) in self._modules

    def decode(self, params: SamplingParams, overlaps: bool) -> Any:
        """The kernel decode for a request. `overlaps` is source_of()'s."""
        samples = _samples(params)
        key = samples, overlaps
        if key not in self._modules:
            self._modules[key] = self._compile(["decode"], samples=samples, overlaps=overlaps)
        return self._modules[key].kernel("decode")

    def _compile(self, names: list[str], *, samples: bool = False, overlaps: bool = True) -> Any:
        return kccl.compile(
            shape.source_of(
                self._program,
                self._comm.world_size,
                self._context,
                self._tuning,
                self._dtype,
                rank=self._comm.rank,
                samples=samples,
                overlaps=overlaps,
            ),
            names,
            target=self._comm.backend,
            warp_size=self._warp_size,
            include_dirs=[shape.KERNELS],
        )


def _samples(params: SamplingParams) -> bool:
    """Whether a request needs the kernel that samples. The other one only takes the most likely
    tokens, and has more registers for the rest.
    """
    return params.temperature > 0 or params.repetition_penalty != 1 or params.logprobs
