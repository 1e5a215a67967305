"""The part of a communicator that its calls use.

Collectives, prepared calls, one-sided calls and launches of users' kernels get a Context. They do
not know the communicator itself.
"""

from typing import Any

from ..backends.base import Backend
from ..base.abi import lib
from ..base.arrays import ArrayView
from ..base.dtypes import Dtype
from ..base.env import Env
from ..base.errors import InvalidArgument
from ..base.failure import error_of, unfinished_reset
from ..plan.choice import Plan, choose
from ..plan.specs import Request
from ..plan.tuning import tuning_for
from ..ranks.mesh import Mesh

# Number of plans that a communicator keeps. When there are more, all are dropped and made again.
_KNOWN_PLANS = 1024


class Context:
    """The part of a communicator that its calls use.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        num_channels: Number of channels. Calls on different channels are independent.
        checks: True under KCCL_CHECK=1: the ranks compare their calls before each one.
        mesh: The out-of-band connection of the ranks.
        backend: Prepares and runs calls.
    """

    def __init__(self, mesh: Mesh, backend: Backend, env: Env, num_channels: int) -> None:
        self.rank = mesh.rank
        self.world_size = mesh.world_size
        self.num_channels = num_channels
        self.checks = bool(env.check)
        self.mesh = mesh
        self.backend = backend
        self._env = env
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def plan(
        self, collective: str, nbytes: int = 0, dtype: Dtype | None = None, algorithm: str = ""
    ) -> Plan:
        """The plan of a call. `algorithm` forces an algorithm by name; "" lets the plan choose.

        Raises:
            InvalidArgument: There is no such collective, or the algorithm cannot run the call.
        """
        key = (collective, nbytes, dtype, algorithm)
        if key in self._plans:
            return self._plans[key]
        request = Request(
            collective,
            nbytes,
            self.world_size,
            self.backend.name,
            dtype,
            can_attach=self.backend.can_attach,
        )
        if len(self._plans) >= _KNOWN_PLANS:
            self._plans.clear()
        self._plans[key] = choose(
            request,
            tuning_for(self.backend.name, self._env.tuning),
            forced=algorithm,
            preferred=self._env.algorithm,
        )
        return self._plans[key]

    def launch(
        self, kernel: Any, data: bytes, view: ArrayView | None, *, stream: Any, **shape: int
    ) -> None:
        """Runs a module.Kernel to its end, or enqueues it on a GPU.

        Args:
            kernel: The kernel.
            data: The bytes of its arguments.
            view: The first array among the arguments.
            stream: The stream. When None, the current stream of that array's library.
            shape: grid, block, shared_bytes.
        """
        stream = self.backend.stream(stream, view)
        self.check_usable()
        self.backend.launch(kernel, data, stream=stream, **shape)
        self.check_usable()

    # ---- Checks and failures -----------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises if an earlier call is known to have failed. Does not wait."""
        if self.backend.state.status != lib.kKcclOk:
            self.raise_failure()

    def check_agreement(self, signature: str) -> None:
        """Under KCCL_CHECK=1: raises on every rank if the ranks are about to make different calls.

        Args:
            signature: The call in words, for the comparison.
        """
        if not self.checks:
            return
        self.check_usable()
        limit_s = self.backend.state.limit_ns / 1e9
        replies = self.mesh.allgather(signature.encode(), "KCCL_CHECK", limit_s)
        calls = [reply.decode() for reply in replies]
        if len(set(calls)) > 1:
            listing = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise InvalidArgument(f"the ranks disagree about this call: {listing}")

    def raise_failure(self) -> None:
        """Raises the exception for this rank's status."""
        cause = self.backend.failure()
        if cause is not None:
            raise cause
        state = self.backend.state
        if self.mesh.is_resetting and not self.has_left():
            raise unfinished_reset(self.rank)
        raise error_of(state.status, state.record, self.rank, self.backend.caveat)

    def has_left(self) -> bool:
        """Whether the communicator is closed, or this process is a fork of the rank's process."""
        return self.backend.state.status in (lib.kKcclClosed, lib.kKcclForked)

    def give_up(self) -> None:
        """Makes the peers' waits in calls fail, because this rank will not go on."""
        if self.mesh.is_resetting:
            # reset() set a failed status without telling the peers. With a failed status abort()
            # would not tell them either.
            self.backend.state.status = lib.kKcclOk
        self.backend.abort()
