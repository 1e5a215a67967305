"""The communicator: what ranks do together.

The path of `comm.all_reduce(x)`, file by file. C answers a call that it knows; the first call with
such arguments is checked in Python and taught to C.

    csrc/host/dispatcher.cpp      does C know the call?  yes ----------------.
      | no                                                                   |
    collectives/all_reduce.py     checks x, out and op                       |
    collectives/prepared.py       plans the call, keeps it, teaches it       |
    plan/choice.py                chooses a kernel of plan/specs.py          |
    backends/host.py or cuda.py   fills a KcclHostOp or a KcclGpuOp          |
      |                                                                      |
    csrc/host/core.cpp <-----------------------------------------------------'
      | on the host calls the kernel; for a GPU csrc/host/gpu.cpp enqueues it on the stream
      v
    csrc/include/kccl/kernels/all_reduce_one_shot_ll16.cuh        the algorithm
      channel.cuh     which slots the call uses, and why they may be used again
      exchange.cuh    how packets go to the peers and are waited for
      mem.cuh         one store instruction, one load instruction
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
from .collectives.all_gather import AllGather
from .collectives.all_reduce import AllReduce
from .collectives.barrier import Barrier, barrier
from .collectives.broadcast import Broadcast
from .collectives.context import Context
from .collectives.one_sided import OneSided
from .collectives.reduce_scatter import ReduceScatter
from .plan import specs
from .plan.choice import Plan
from .ranks import agreement, windows
from .ranks.mesh import Mesh

if TYPE_CHECKING:
    from .topology import Machine

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
        context: What calls are given of this rank; for modules of the library.
        all_gather, all_reduce, barrier, broadcast, reduce_scatter: See the folder collectives.
        put, get, signal, wait: See collectives/one_sided.py.
    """

    # What help() says of these; C answers them, without a Python frame in between.
    __slots__ = {
        "all_gather": AllGather.__doc__,
        "all_reduce": AllReduce.__doc__,
        "barrier": Barrier.__doc__,
        "broadcast": Broadcast.__doc__,
        "reduce_scatter": ReduceScatter.__doc__,
    }
    all_gather: AllGather
    all_reduce: AllReduce
    barrier: Barrier
    broadcast: Broadcast
    reduce_scatter: ReduceScatter

    def __init__(
        self,
        ranks: Mesh,
        env: Env,
        *,
        launcher: str,
        local_rank: int,
        settings: Settings,
        opens: type[Backend] = HostBackend,
    ) -> None:
        """Connects windows and checks that all ranks mean the same. Collective; see kccl.init()."""
        global _fork_hook_registered
        if ranks.world_size > abi.MAX_WORLD_SIZE:
            raise InvalidArgument(
                f"world_size is {ranks.world_size}, must be at most {abi.MAX_WORLD_SIZE}"
            )
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank = local_rank
        self.launcher = launcher
        self.backend = opens.name
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
        self.context = Context(ranks, self._backend, env, settings.num_channels)
        self.checks = self.context.checks
        super().__init__(self.context)
        self.all_gather = AllGather(self.context)
        self.all_reduce = AllReduce(self.context)
        self.broadcast = Broadcast(self.context)
        self.reduce_scatter = ReduceScatter(self.context)
        self.barrier = barrier(self.context)
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
            self.abort()
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
        self.context.check_usable()
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
        self.context.check_usable()
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
        self.context.check_usable()

    # ---- Plans -------------------------------------------------------------------------------

    def plan(self, collective: str, nbytes: int = 0, dtype: Any = None) -> Plan:
        """How a call would run; `.explain()` says why."""
        nbytes = arguments.not_negative("nbytes", nbytes)
        return self.context.plan(collective, nbytes, None if dtype is None else dtypes.of(dtype))

    def algorithms(self, collective: str) -> list[str]:
        """Names of the algorithms of a collective, for the `algorithm` keywords."""
        return specs.algorithms(collective)

    def _disown(self) -> None:
        """In a forked child: every use is an error, and the parent's peers do not hear from it."""
        self._backend.state.status = lib.kKcclForked
        self._mesh.close()

    # ---- Groups, recovery, end ---------------------------------------------------------------

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` that JSON can carry, in rank order. Out of band: slow, sleeps."""
        self._check_open()
        if self._mesh.is_resetting:
            self.context.raise_failure()
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
        self.context.check_usable()
        ranks = agreement.split(self._mesh, color, key, self._env.first_timeout)
        return None if ranks is None else self._part(ranks)

    def reset(self) -> None:
        """After a time-out: forgets all calls and starts afresh. Collective, all ranks alive.

        Until it has succeeded every other call but shrink() and close() fails.

        Raises:
            PeerLost: A rank is gone; use shrink().
            Timeout: A rank did not call reset() in time; it may be called again.
        """
        self._check_open()
        state = self._backend.state

        def clear() -> None:
            self._backend.clear()
            state.status = lib.kKcclAborted

        # Until all have come, every call fails here: the others count on it, see Mesh.reset.
        if state.status == lib.kKcclOk:
            state.status = lib.kKcclAborted
        self._mesh.reset(clear, self._env.first_timeout)
        state.status = lib.kKcclOk

    def shrink(self) -> "Communicator":
        """After a rank was lost: the survivors' communicator. Collective among them.

        The survivors keep their order. This communicator is closed; windows and arrays in them stay
        readable.

        Raises:
            Timeout: A rank that is alive did not call shrink() in time.
        """
        self._check_open()
        # Peers that still wait in a call, perhaps for this rank, leave it and come too.
        self.context.give_up()
        smaller = agreement.shrink(self._mesh, self._part, self._env.first_timeout)
        self.close()
        return smaller

    def _part(self, ranks: Mesh) -> "Communicator":
        """The communicator of some of the ranks, which `ranks` connects. Collective among them."""
        try:
            part = type(self)(
                ranks,
                self._env,
                launcher=self.launcher,
                local_rank=ranks.rank,
                settings=self._settings,
                opens=self._opens,
            )
        except BaseException:
            # The peers hear at once that this rank gave up, and do not wait for it in vain.
            ranks.close()
            raise
        # A new list each time, because another thread may be going through the old one.
        known = [each for each in self._parts if each() is not None]
        self._parts = [*known, weakref.ref(part)]
        return part

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
        if self.context.has_left():
            self.context.raise_failure()
        if self._is_closed:
            raise Error(f"the communicator is closed on rank {self.rank}")

    def abort(self) -> None:
        """Makes all the peers' waits fail, here and in parts split off. Any thread may call it.

        For a rank that cannot go on. The communicator stays to be closed.
        """
        for part in [known() for known in self._parts]:
            if part is not None:
                part.abort()
        if not self.context.has_left():
            self.context.give_up()
            self._mesh.hang_up()
