"""The part of a communicator that its calls use.

Collectives, prepared calls, one-sided calls and launches of users' kernels get a Context. They do
not know the communicator itself.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..backends.base import Backend
from ..base.abi import lib
from ..base.copying import not_copied
from ..base.descriptors import keep_standard
from ..base.env import Env
from ..base.errors import Error
from ..base.failure import error_of, unfinished_reset
from ..plan.choice import Planner
from ..plan.grouped import GroupedPlanner
from ..ranks.mesh import Mesh
from .written import NOTHING, Written, check_apart


class Context:
    """The part of a communicator that its calls use.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        num_channels: Number of channels. Calls on different channels are independent.
        checks: True under KCCL_CHECK=1: the ranks compare their calls before each one.
        compares_types: True if calls that only move data require the same element type on all
            ranks.
        copies_strided: True if calls use copies of arrays that are not C-contiguous. If not, they
            refuse them.
        mesh: The out-of-band connection of the ranks.
        backend: Prepares and runs calls.
        plan: Chooses the algorithm of a call.
        has_said_failure: True once an error has told the user that this rank has failed.
    """

    has_said_failure = False

    __reduce_ex__ = not_copied(
        "a communicator belongs to its process", "call kccl.init() in each process"
    )

    def __init__(self, mesh: Mesh, backend: Backend, env: Env, num_channels: int) -> None:
        self.rank = mesh.rank
        self.world_size = mesh.world_size
        self.num_channels = num_channels
        self.checks = bool(env.check)
        self.compares_types = self.copies_strided = True
        self._first_timeout = env.first_timeout
        self.mesh = mesh
        self.backend = backend
        # Windows and arrays keep the mesh alive after the communicator is dropped. So this
        # finalizer closes the mesh's streams, which tells peers that wait out of band.
        weakref.finalize(self, mesh.drop).atexit = False
        self.plan: Planner | GroupedPlanner
        if backend.grouping is None:
            self.plan = Planner(backend.name, self.world_size, env, can_attach=backend.can_attach)
        else:
            # Groups make their steps on the host, also where the arrays are on GPUs.
            self.plan = GroupedPlanner("host", backend.grouping, self.rank, env)

    def launch(self, kernel: Any, data: bytes, *, stream: Any, **shape: Any) -> None:
        """Runs a module.Kernel to its end, or enqueues it on a GPU.

        Args:
            kernel: The kernel.
            data: The bytes of its arguments.
            stream: The stream. When None, the current stream of the library whose array was used
                last.
            shape: grid, block, shared_bytes, and arrays: see Backend.launch().
        """
        with self.alone():
            stream = self.backend.stream(stream, None)
            self.check_usable()
            self.backend.launch(kernel, data, stream=stream, **shape)
            self.check_usable()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Reserves the communicator for a `with` block: meanwhile no other call may use it.

        It sets `is_used`, as a call does while C makes it (Use in csrc/host/fastcall.h).

        Raises:
            Error: A call is under way, in another thread or around this signal handler.
        """
        context = self.backend.context
        # CPython switches no threads between this test and the assignment below, so no other call
        # can pass the test meanwhile.
        if context.is_used:
            raise Error(
                f"rank {self.rank}: a call of this communicator is under way, in another thread or "
                "around this signal handler; nothing was sent"
            )
        try:
            context.is_used = 1
            yield
        finally:
            context.is_used = 0

    @contextmanager
    def out_of_band(self, what: str) -> Iterator[float]:
        """Wraps a collective call over the out-of-band connections; yields the timeout in seconds.

        An exception within it, as for a wrong argument, ends the call on all ranks.

        Args:
            what: The call's name.
        """
        with self.alone():
            self.check_usable()
            # The program may have closed its standard streams since the start, as a daemon does.
            keep_standard()
            with self.mesh.call(what):
                yield self.limit_s()

    def limit_s(self) -> float:
        """Returns the timeout, in seconds, of a wait for other ranks outside of kernels."""
        if self.backend.has_virtual_time:
            return self._first_timeout
        state = self.backend.state
        has_met = self.mesh.has_met or state.contacted
        return float((state.limit_ns if has_met else state.first_limit_ns) / 1e9)

    # ---- Checks and failures -----------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises if an earlier call is known to have failed. Does not wait."""
        if self.backend.state.status != lib.kKcclOk:
            self.raise_failure()

    def check_all_said(self) -> None:
        """Raises if a call on a GPU has failed and no error has been raised for it yet."""
        if self.backend.has_streams and not self.has_said_failure and not self.has_left():
            self.check_usable()

    def check_agreement(self, signature: str, written: Written = NOTHING) -> None:
        """Under KCCL_CHECK=1: raises on every rank if the ranks are about to make different calls,
        or to write memory of each other's.

        Args:
            signature: The call in words, for the comparison.
            written: This rank's arrays that no other rank may give.
        """
        if not self.checks:
            return
        self.check_usable()
        # The system tells only of host memory who shares it, and a single rank shares nothing.
        if self.backend.has_streams or self.world_size == 1:
            written = NOTHING
        # The signature is passed as the call's name, because allgather() compares the ranks' names.
        check_apart(self.mesh.allgather(written.places(), signature, self.limit_s()))

    def raise_failure(self) -> None:
        """Raises the exception for this rank's status."""
        self.has_said_failure = True
        cause = self.backend.failure()
        if cause is not None:
            raise cause
        state = self.backend.state
        if self.mesh.is_resetting and not self.has_left():
            raise unfinished_reset(self.rank)
        simulated, caveat = self.backend.simulated_waits(), self.backend.caveat
        why: dict[str, Any] = {"simulated": simulated}
        why["has_teams"] = self.backend.grouping is not None
        raise error_of(state.status, state.record, self.rank, caveat, **why)

    def has_left(self) -> bool:
        """Tells whether the communicator is closed, or this process is a fork of the rank's
        process.
        """
        return self.backend.state.status in (lib.kKcclClosed, lib.kKcclForked)

    def give_up(self) -> None:
        """Makes the peers' waits in calls fail, because this rank will not go on."""
        self.has_said_failure = True
        if self.mesh.is_resetting:
            # reset() set a failed status without telling the peers. With a failed status abort()
            # would not tell them either.
            self.backend.state.status = lib.kKcclOk
        self.backend.abort()
