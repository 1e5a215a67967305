"""The communicator: what ranks do together.

The main path of a call: `comm.all_reduce(x)` is collectives/all_reduce.py, which checks x; calls.py
asks plan.choose for an algorithm and backends/host.py for a call struct, and hands that to
kccl._fastcall. From there it is csrc/host/core.cpp, then the kernel file that bears the plan's
name, then exchange.cuh or barrier.cuh, then mem.cuh.
"""

import contextlib
import json
import math
import os
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .backends.base import Backend, DeviceComm, Settings
from .backends.host import HostBackend
from .base import abi, arguments, dtypes
from .base.abi import lib
from .base.env import Env
from .base.errors import Error, InvalidArgument, PeerLost
from .base.failure import error_of, unfinished_reset
from .collectives.all_gather import AllGather
from .collectives.all_reduce import AllReduce
from .collectives.barrier import Barrier, BarrierOnStream, CheckedBarrier
from .collectives.broadcast import Broadcast
from .collectives.one_sided import OneSided
from .collectives.prepared import Prepared, prepared
from .collectives.reduce_scatter import ReduceScatter
from .plan.choice import Plan, Request, choose, tuning_for
from .plan.choice import algorithms as algorithms_of
from .ranks import agreement, mesh, windows

if TYPE_CHECKING:
    from .module import Kernel
    from .topology import Machine

# Plans a communicator remembers; a program that uses more sizes makes some of them again.
_KNOWN_PLANS = 1024

_open: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
_fork_hook_registered = False


def _disown_after_fork() -> None:
    for comm in list(_open):
        comm._disown()


class Communicator(OneSided):
    """The ranks of a job, or of a part of it. Several are independent; one is one thread's.

    Attributes:
        rank, world_size: This rank and their number.
        local_rank: Index within the machine.
        launcher: "mpi", "torchrun", "torch.distributed", "kccl run", "threads" or "alone".
        backend: "host", "sim" or "cuda".
        num_channels: Independent streams of calls, for the `channel` keywords.
        all_gather, all_reduce, barrier, broadcast, reduce_scatter: See the folder collectives.
        put, get, signal, wait: See one_sided.py.
    """

    def __init__(
        self,
        ranks: mesh.Mesh,
        env: Env,
        *,
        launcher: str,
        local_rank: int,
        settings: Settings,
        opens: type[Backend] = HostBackend,
    ) -> None:
        """Connects windows and checks that all ranks mean the same. Collective; see kccl.init()."""
        global _fork_hook_registered
        super().__init__()
        if ranks.world_size > abi.MAX_WORLD_SIZE:
            raise InvalidArgument(
                f"world_size is {ranks.world_size}, must be at most {abi.MAX_WORLD_SIZE}"
            )
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank = local_rank
        self.launcher = launcher
        self.backend = opens.name
        self.checks = bool(env.check)
        self.num_channels = settings.num_channels
        self._mesh = ranks
        self._env = env
        self._settings = settings
        self._opens = opens
        self._is_closed = False
        # What split() and shrink() made.
        self._parts: list[weakref.ref[Communicator]] = []
        limits = {
            "first_limit_ns": arguments.nanoseconds("KCCL_FIRST_TIMEOUT", env.first_timeout),
            "limit_ns": arguments.nanoseconds("KCCL_TIMEOUT", env.timeout),
        }
        cpus = agreement.agree_at_start(ranks, self.backend, env, settings)
        self._backend = opens(
            ranks,
            settings,
            shares_cores=self.world_size > len(cpus),
            are_threads=launcher == "threads",
            timeout=env.first_timeout,
        )
        for name, limit in limits.items():
            setattr(self._backend.state, name, limit)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self.all_gather = AllGather(self)
        self.all_reduce = AllReduce(self)
        self.broadcast = Broadcast(self)
        self.reduce_scatter = ReduceScatter(self)
        self.barrier: Barrier = self._barrier()
        self._meet_at_start()
        if not _fork_hook_registered:
            os.register_at_fork(after_in_child=_disown_after_fork)
            _fork_hook_registered = True
        _open.add(self)

    def _meet_at_start(self) -> None:
        """Holds this rank until every rank has mapped the windows and may be written to."""
        # Whoever is lost here has mapped them too. If only some ranks saw it go, only they would
        # have no communicator; so each gets one, and the first call on it says the same to all.
        with contextlib.suppress(PeerLost):
            self._mesh.allgather(b"", "start-up", self._env.first_timeout)

    def __repr__(self) -> str:
        return f"<kccl.Communicator rank {self.rank} of {self.world_size}, {self.backend}>"

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._abort()
        self.close()

    @property
    def timeout(self) -> float:
        """Seconds one wait may last, on GPUs a millisecond or more; may be set at any time, also by
        another thread.

        At first KCCL_TIMEOUT, and KCCL_FIRST_TIMEOUT for the first call and for the first after
        reset(). A value that is set here holds for these too.
        """
        return float(self._backend.state.limit_ns / 1e9)

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        limit_ns = arguments.nanoseconds("timeout", seconds)
        self._backend.state.limit_ns = self._backend.state.first_limit_ns = limit_ns

    @cached_property
    def topology(self) -> "Machine":
        """This machine's cores, caches and NUMA nodes."""
        from .topology import discover

        return discover()

    # ---- Symmetric memory --------------------------------------------------------------------

    def window(self, nbytes: int) -> windows.Window:
        """Allocates a window of `nbytes` on every rank. Collective.

        Raises:
            InvalidArgument: The size is not positive, or differs between ranks.
        """
        self._check_usable()
        nbytes = arguments.integer("nbytes", nbytes)
        return self._backend.allocate(self._mesh, nbytes, self._env.first_timeout)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = dtypes.float32) -> Any:
        """An array in symmetric memory of its own, initially zero. Collective.

        A NumPy array; on a GPU one that other libraries take, as in torch.from_dlpack(x).

        Args:
            shape: The same on every rank.
            dtype: A KCCL or NumPy element type.
        """
        kind = dtypes.of(dtype)
        shape = arguments.shape(shape)
        window = self.window(max(math.prod(shape) * kind.itemsize, 1))
        return self._backend.array(window, shape, kind)

    def device_comm(
        self, *, channels: int = 132, max_bytes: int = 65536, exchange_bytes: int = 262144
    ) -> DeviceComm:
        """What kernels of one's own take to talk to their peers: a `kccl::DeviceComm`. Collective.

        Each has 8 * world_size * channels * max_bytes + 16 * exchange_bytes bytes of its own on
        every rank until the communicator ends: kernels with different ones may run together.

        Args:
            channels: How many coops (blocks or warps) make calls; the same on all ranks, as all.
            max_bytes: Of one coop's message.
            exchange_bytes: Of all slices in publish() and collect(), each rounded up to 64 bytes.
        """
        self._check_usable()
        arguments.between("channels", channels, 1, 2**20)
        arguments.between("max_bytes", max_bytes, 1, 2**31)
        arguments.between("exchange_bytes", exchange_bytes, 1, 2**31)
        sizes = channels, max_bytes, exchange_bytes
        return self._backend.device_comm(*sizes, self._env.first_timeout)

    def check(self) -> None:
        """Raises what went wrong in calls made so far, as far as it is known; waits for nothing.

        Calls on a GPU return before they have run: once their stream has been waited for, this says
        whether they succeeded.

        Raises:
            Timeout, PeerLost: A rank did not come, or went.
        """
        self._check_usable()

    def _launch(self, kernel: "Kernel", data: bytes, **shape: int) -> None:
        self._check_usable()
        self._backend.launch(kernel, data, **shape)
        self._check_usable()

    # ---- Plans -------------------------------------------------------------------------------

    def plan(self, collective: str, nbytes: int = 0, dtype: Any = None) -> Plan:
        """How a call would run; `.explain()` says why."""
        nbytes = arguments.not_negative("nbytes", nbytes)
        return self._plan(collective, nbytes, None if dtype is None else dtypes.of(dtype), "")

    def algorithms(self, collective: str) -> list[str]:
        """Names of the algorithms of a collective, for the `algorithm` keywords."""
        return algorithms_of(collective)

    def _plan(
        self, collective: str, nbytes: int, dtype: dtypes.Dtype | None, algorithm: str
    ) -> Plan:
        key = (collective, nbytes, dtype, algorithm)
        if key in self._plans:
            return self._plans[key]
        request = Request(
            collective,
            nbytes,
            self.world_size,
            self.backend,
            dtype,
            can_attach=self._backend.can_attach,
        )
        if len(self._plans) >= _KNOWN_PLANS:
            self._plans.clear()
        self._plans[key] = choose(
            request,
            tuning_for(self.backend, self._env.tuning),
            forced=algorithm,
            preferred=self._env.algorithm,
        )
        return self._plans[key]

    def _barrier(self) -> Any:
        chosen, handle, signature = self._barrier_on(0)
        if self._backend.has_streams:
            return BarrierOnStream(signature, self, chosen, handle)
        if self.checks:
            return CheckedBarrier(signature, self, chosen, handle, None, None)
        return Barrier(self, chosen, handle, None, None)

    def _prepared_barrier(self, stream: Any, channel: int) -> Prepared:
        self._backend.stream(stream, None)
        chosen, handle, signature = self._barrier_on(channel)
        return prepared(self, signature, chosen, handle, None, (), stream)

    def _barrier_on(self, channel: int) -> tuple[Plan, Any, str]:
        channel = arguments.between("channel", channel, 0, self.num_channels - 1)
        chosen = self._plan("barrier", 0, None, "")
        handle = self._backend.op(chosen.name, channel=channel)
        return chosen, handle, f"barrier, channel {channel}, {chosen.name}"

    # ---- Checks and failures -----------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._backend.state.status != lib.kKcclOk:
            self._raise_failure()

    def _check_agreement(self, signature: str) -> None:
        """Under KCCL_CHECK=1: raises on every rank when they are about to do different things."""
        if not self.checks:
            return
        self._check_usable()
        replies = self._mesh.allgather(signature.encode(), "KCCL_CHECK", self.timeout)
        calls = [reply.decode() for reply in replies]
        if len(set(calls)) > 1:
            listing = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise InvalidArgument(f"the ranks disagree about this call: {listing}")

    def _raise_failure(self) -> None:
        cause = self._backend.failure()
        if cause is not None:
            raise cause
        state = self._backend.state
        if self._mesh.is_resetting and not self._has_left():
            raise unfinished_reset(self.rank)
        raise error_of(state.status, state.record, self.rank, self._backend.caveat)

    def _disown(self) -> None:
        """In a forked child: every use is an error, and the parent's peers do not hear from it."""
        self._backend.state.status = lib.kKcclForked
        self._mesh.close()

    # ---- Groups, recovery, end ---------------------------------------------------------------

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` that JSON can carry, in rank order. Out of band: slow, sleeps."""
        self._check_open()
        if self._mesh.is_resetting:
            self._raise_failure()
        replies = self._mesh.allgather(
            json.dumps(value).encode(), "gather_objects", self._env.first_timeout
        )
        return [json.loads(reply) for reply in replies]

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Parts the ranks into communicators of equal `color`, ordered by `key`. Collective.

        Equal keys stay in rank order.

        Returns:
            This rank's part; None for a color of None.
        """
        self._check_usable()
        return agreement.split(self, color, key)

    def reset(self) -> None:
        """After a time-out: forgets all calls and starts afresh. Collective, all ranks alive.

        Until it has succeeded every other call but shrink() and close() fails.

        Raises:
            PeerLost: A rank is gone; use shrink().
            Timeout: A rank did not call reset() in time; it may be called again.
        """
        self._check_open()
        agreement.reset(self)

    def shrink(self) -> "Communicator":
        """After a rank was lost: the survivors' communicator. Collective among them.

        The survivors keep their order. This communicator is closed; windows and arrays in them stay
        readable.

        Raises:
            Timeout: A rank that is alive did not call shrink() in time.
        """
        self._check_open()
        smaller = agreement.shrink(self)
        self.close()
        return smaller

    def close(self) -> None:
        """Ends this rank's use of the communicator. Idempotent; arrays in windows stay valid."""
        if self._is_closed:
            return
        self._is_closed = True
        self._backend.leave()
        self._mesh.close()
        self._backend.state.status = lib.kKcclClosed
        for known in (self.all_gather, self.all_reduce, self.broadcast, self.reduce_scatter):
            known.forget()
        _open.discard(self)

    def _check_open(self) -> None:
        if self._has_left():
            self._raise_failure()
        if self._is_closed:
            raise Error(f"the communicator is closed on rank {self.rank}")

    def _has_left(self) -> bool:
        return self._backend.state.status in (lib.kKcclClosed, lib.kKcclForked)

    def _give_up(self) -> None:
        """Makes the peers' waits in calls fail, because this rank will not go on."""
        if self._mesh.is_resetting:
            # It has failed without telling the peers, and they hear a rank's first failure only.
            self._backend.state.status = lib.kKcclOk
        self._backend.abort()

    def _abort(self) -> None:
        """Makes all the peers' waits fail, here and in parts split off. Any thread may call it."""
        for part in [known() for known in self._parts]:
            if part is not None:
                part._abort()
        if not self._has_left():
            self._give_up()
            self._mesh.hang_up()
