"""all_reduce_rms_norm: every rank gets the normalised rows of the sum of all ranks' arrays."""

from dataclasses import replace
from typing import Any

from ..base.dtypes import Dtype
from ..base.errors import InvalidArgument
from ..plan.choice import Plan
from ..plan.spec import GPUS, MOST_BLOCKS, Request
from .collective import ArrayT
from .norm import check
from .normed import Normed
from .prepared import Empty, Prepared

_FUSED = "all_reduce_rms_norm"


class AllReduceRmsNorm(Normed):
    """Every rank gets the normalised rows of the sum of all ranks' arrays."""

    _NAME, _SUM = _FUSED, "all_reduce"

    def __call__(
        self,
        x: ArrayT,
        residual: Any,
        weight: Any,
        eps: float,
        *,
        out: ArrayT | None = None,
        scale: Any = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> ArrayT:
        """Sums x over the ranks, adds the residual, and normalises each row.

            hidden = sum over ranks of x + residual
            out = hidden / sqrt(mean(hidden * hidden) + eps) * weight

        The bits are those of all_reduce(x) followed by kccl.rms_norm(x, weight, eps,
        residual=residual). On a GPU one kernel makes the call if x has at most 128 rows of at
        most 8 KiB (16 KiB on 2 ranks), and if all_reduce's plan for x is one_shot. Otherwise two
        kernels make it.

        No rank may give memory that another rank's call writes, in the residual or in the result,
        even if the ranks are threads: the rows would be wrong. On CPUs KCCL_CHECK=1 refuses that.

        Args:
            x: Array [..., width] of float32, float16 or bfloat16, strided ones as in all_reduce.
                The same size and type on every rank.
            residual: Array of the size and type of x, or None for no residual. `hidden` is stored
                in it, rounded to its type. Each rank has an array of its own, with the same values
                on every rank, so that the results are the same.
            weight: Array [width] of the same type, with the same values on every rank.
            eps: Number that is not negative. It is rounded to float32.
            out: Array for the result, of the size and type of x; float8_e4m3fn where scale is
                given. When None, x: the call is in place.
            scale: Array of one float32. The result is divided by it, clamped to [-448, 448], and
                rounded to float8_e4m3fn once.
            stream, channel: As in all_reduce.
            algorithm: "all_reduce_rms_norm" for one kernel, or an algorithm of all_reduce for two.
                When "", the rule above chooses, unless KCCL_ALGORITHM names one of these that can
                run.

        Returns:
            `out`, or x.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        case = check(self._context.backend.view, x, residual, weight, eps, out, scale)
        result: ArrayT = self._call_normed(case, stream, channel, algorithm)
        return result

    def prepare(
        self,
        x: ArrayT,
        residual: Any,
        weight: Any,
        eps: float,
        *,
        out: ArrayT | None = None,
        scale: Any = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Prepared | Empty:
        """Plans the call once. Calling the returned object, `op()`, runs it, any number of times.

        Arguments, result and errors are those of the call itself. The object keeps the arrays
        alive.
        """
        case = check(self._context.backend.view, x, residual, weight, eps, out, scale)
        return self._prepare_normed(case, stream, channel, algorithm)

    def algorithms(self) -> list[str]:
        """See Normed. The first one is one kernel."""
        return [_FUSED, *super().algorithms()]

    def _planned(self, nbytes: int, dtype: Dtype, row_bytes: int, algorithm: str) -> Plan:
        why_not = self._why_not_fused(row_bytes)
        if algorithm == _FUSED:
            if why_not:
                raise InvalidArgument(f"algorithm {algorithm!r} cannot run this: {why_not}")
            context = self._context
            facts = context.world_size, context.backend.name, dtype
            return Plan(_FUSED, Request(_FUSED, nbytes, *facts), "asked for by name", ())
        plan = super()._planned(nbytes, dtype, row_bytes, algorithm)
        is_small = plan.name.startswith("all_reduce_one_shot")
        # A block that takes several rows exchanges them one after another, which takes longer. So
        # the fused kernel is chosen only if each row has a block of its own.
        has_a_block_each = nbytes <= row_bytes * MOST_BLOCKS
        preferred = self._context.plan.preferred
        is_named = bool(algorithm) or plan.name == preferred
        is_chosen = not is_named and is_small and has_a_block_each
        is_preferred = preferred == _FUSED and not algorithm
        if why_not or not (is_chosen or is_preferred):
            return plan
        others = ((plan.name, "it is another kernel before the norm"), *plan.rejected)
        reason = f"all_reduce of this size is {plan.name}"
        if is_preferred:
            reason = "KCCL_ALGORITHM prefers it"
        return replace(plan, name=_FUSED, reason=reason, rejected=others, blocks=0, threads=0)

    def _why_not_fused(self, row_bytes: int) -> str:
        """Returns why one kernel cannot make the call; "" if it can."""
        backend = self._context.backend
        if backend.name not in GPUS:
            return f"for {' and '.join(GPUS)} only"
        if row_bytes > backend.longest_row:
            return f"a row has {row_bytes} bytes, and one kernel takes {backend.longest_row} here"
        return ""
