"""The monokernel compiled for one model and machine: usual kernels, and other decode kernels."""

import kccl

from ..model.program import Program
from ..model.sample import SamplingParams
from ..model.variant import USUAL, Variant
from . import loading
from .launching import Compiled, Launcher
from .memory import Arena
from .shape import Tuning
from .source import kernels_of, source_of
from .tuning import with_variant


class Kernels:
    """A rank's kernels. One that is not usual is compiled when it is first needed.

    All of them use the same memory.

    Attributes:
        usual: Has all kernels; its decode overlaps and takes the most likely tokens.
    """

    def __init__(
        self,
        program: Program,
        comm: kccl.Communicator,
        launcher: Launcher,
        arena: Arena,
        tuning: Tuning,
        context: int,
        dtype: str,
    ) -> None:
        """Compiles the usual kernels.

        Args:
            program: The model's.
            comm: The ranks.
            launcher: The rank's.
            arena: The rank's.
            tuning: How the device is used.
            context: Positions that the KV cache has room for.
            dtype: Of the weights.

        Raises:
            BackendError: There is no compiler, or it refused.
        """
        self._program, self._comm, self._tuning = program, comm, tuning
        self._launcher, self._arena = launcher, arena
        self._context, self._dtype = context, dtype
        self._numbers = arena.allocate(loading.SIZES_BYTES)
        # By variant, whether it samples, and whether it overlaps.
        self._known: dict[tuple[Variant, bool, bool], Compiled] = {}
        self.usual = self.get()

    def has(self, variant: Variant, *, samples: bool, overlaps: bool) -> bool:
        """Whether get() need not compile."""
        return (variant, samples, overlaps) in self._known

    def get(
        self, variant: Variant = USUAL, *, samples: bool = False, overlaps: bool = True
    ) -> Compiled:
        """The kernels of a variant. `samples` and `overlaps` are source_of()'s."""
        key = variant, samples, overlaps
        if key not in self._known:
            tuning = with_variant(self._tuning, variant)
            text = source_of(
                self._program,
                self._comm.world_size,
                self._context,
                tuning,
                self._dtype,
                rank=self._comm.rank,
                samples=samples,
                traces=variant.traces,
                overlaps=overlaps,
            )
            names = kernels_of(tuning, traces=variant.traces)
            if samples or not overlaps:
                names = ["decode", "describe"]
            module = self._launcher.compile(text, names)
            self._launcher.launch(module.kernel("describe"), self._numbers, grid=1, warps=1)
            self._launcher.wait()
            sizes = loading.sizes_of(self._arena.read(self._numbers, loading.SIZES_BYTES))
            self._known[key] = Compiled(module, sizes)
        return self._known[key]


def wants_sampling(params: SamplingParams) -> bool:
    """Whether a request needs the kernel that samples. The other one only takes the most likely
    tokens, and has more registers for the rest.
    """
    return params.temperature > 0 or params.repetition_penalty != 1 or params.logprobs
