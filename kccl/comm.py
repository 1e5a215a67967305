"""The communicator: the ranks of a job, and the calls that they make together.

The path of `comm.all_reduce(x)`, file by file. C repeats a known call without running Python, on
the host and for PyTorch's tensors on a GPU. With other arrays on a GPU Python makes each call, with
the handle of the first one. A prepared call, `op()`, begins at csrc/host/fastcall.cpp.

on the host                                        on a GPU
each call                                          each call
  csrc/host/dispatcher.cpp   is it known? yes --.    csrc/host/dispatcher.cpp   is it known? yes --.
  csrc/host/arguments.cpp    where is x?        |    csrc/host/arguments.cpp    where? which stream?
the first call of a kind                        |  the first call of a kind                        |
  collectives/all_reduce.py  checks x, out, op  |    collectives/all_reduce.py  checks x, out, op  |
  base/arrays.py             where is x?        |    gpu/arrays.py              where is x?        |
  collectives/collective.py  teaches it to C    |    collectives/collective.py  teaches it to C    |
  collectives/context.py     rank, plan, errors |    collectives/context.py     rank, plan, errors |
  plan/choice.py             chooses a kernel   |    plan/choice.py             chooses a kernel   |
  backends/host.py           makes a KcclHostOp |    backends/gpu.py            makes a KcclGpuOp  |
each call                                       |    backends/shapes.py         blocks and threads |
  csrc/host/fastcall.cpp     runs a handle  <---'    gpu/library.py             compiles the kernel|
  csrc/host/core.cpp         calls the kernel      each call                                       |
                                                     csrc/host/fastcall.cpp     runs a handle  <---'
                                                     csrc/host/gpu.cpp          launches the kernel

With more than 8 ranks on the host, plan/grouped.py chooses a list of steps and backends/grouped.py
makes a KcclHostChain of them. csrc/host/chain.cpp runs each step with one team of the rank.

The kernel is the same source for both, in csrc/include/kccl:
  kernels/all_reduce_one_shot_ll16.cuh   the algorithm; reduce.cuh reduces in rank order
  channel.cuh                            which slots the call uses, and why it may reuse them
  exchange.cuh, ll16.cuh                 push packets to all ranks and take theirs: payload.cuh has
                                         their contents, window.cuh's packet_slot() where they go
  wait.cuh                               waits for a packet, and gives up in time
  mem.cuh                                loads and stores it: by targets/mem_host.cuh's atomics, or
                                         targets/mem_cuda.cuh's ld.relaxed.sys and st.relaxed.sys
"""

import contextlib
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .backends.base import Opener
from .backends.settings import Settings
from .base import arguments, lifetime
from .base.abi import lib
from .base.copying import not_copied
from .base.env import Env
from .base.errors import BackendError, Error, InvalidArgument, PeerLost
from .collectives import TEXTS, Collectives, forget_all, make_all
from .collectives.context import Context
from .collectives.normed import algorithms_of, plan_of
from .collectives.one_sided import OneSided
from .collectives.point_to_point import PointToPoint
from .collectives.symmetric import Symmetric
from .plan.choice import Plan
from .plan.grouping import MOST_GROUPED_RANKS
from .ranks import agreement, survivors
from .ranks.mesh import Mesh

if TYPE_CHECKING:
    from .topology import Machine


class Communicator(Collectives, OneSided, PointToPoint, Symmetric):
    """The ranks of a job, or of a part of it.

    One thread at a time uses a communicator. A call that another thread, or a signal handler within
    a call, makes meanwhile raises kccl.Error and sends nothing. Several communicators are
    independent of each other.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        local_rank: Index of this process within the machine. split() and shrink() keep it.
        node, num_nodes: The number of this rank's node, from 0 to 7, and the number of nodes. They
            are 0 and 1 if all ranks are on one node.
        launcher: "mpi", "torchrun", "srun", "torch.distributed", "kccl run", "threads" or "alone".
        backend: "host", "sim", "cuda" or "hip".
        num_channels: Number of channels, for the `channel` arguments.
        context: The part of the communicator that its calls use. For KCCL's own modules.
        all_reduce and every other collective: See kccl/collectives.
        put, get, signal, wait: See kccl/collectives/one_sided.py.
        send, recv, isend, irecv, group: See kccl/collectives/point_to_point.py.
        window, empty, device_comm: See kccl/collectives/symmetric.py.
    """

    __slots__ = TEXTS

    __reduce_ex__ = not_copied(
        "a communicator belongs to its process", "call kccl.init() in each process"
    )

    def __init__(
        self,
        ranks: Mesh,
        env: Env,
        *,
        launcher: str,
        local_rank: int,
        settings: Settings,
        opens: Opener,
        timeout: float,
    ) -> None:
        """Maps windows and checks that the ranks' settings agree. Collective; see kccl.init().

        `timeout` is the most seconds that each wait for other ranks may last during start-up.
        """
        most_ranks = MOST_GROUPED_RANKS if ranks.homes else opens.most_ranks
        if ranks.world_size > most_ranks:
            wrong = f"world_size is {ranks.world_size}, must be at most {most_ranks}"
            raise InvalidArgument(f"{wrong} on backend {opens.name!r}")
        if ranks.homes and not opens.spans_nodes:
            raise BackendError(
                f"the ranks are on several nodes, and backend {opens.name!r} works within one: "
                "use backend 'host', or start a job on each node"
            )
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank = local_rank
        self.node = ranks.homes[ranks.rank].node if ranks.homes else 0
        self.num_nodes = len({home.node for home in ranks.homes}) or 1
        self.launcher = launcher
        self.backend = opens.name
        self.num_channels = settings.num_channels
        self._mesh = ranks
        self._env = env
        self._settings = settings
        self._opens = opens
        self._is_closed = False
        # Weak references to the communicators that split() and shrink() made of this one: abort()
        # aborts them too.
        self._parts: list[weakref.ref[Communicator]] = []
        limits = {
            "first_limit_ns": arguments.nanoseconds("KCCL_FIRST_TIMEOUT", env.first_timeout),
            "limit_ns": arguments.nanoseconds("KCCL_TIMEOUT", env.timeout),
        }
        with ranks.call("start-up"):
            cpus = agreement.agree_at_start(ranks, self.backend, env, settings, timeout)
            self._backend = opens(
                ranks,
                settings,
                shares_cores=self.world_size > len(cpus),
                are_threads=launcher == "threads",
                timeout=timeout,
            )
            try:
                for name, limit in limits.items():
                    setattr(self._backend.state, name, limit)
                self.context = Context(ranks, self._backend, env, settings.num_channels)
                super().__init__()
                self._open_messages()
                make_all(self, self.context)
                self._meet_at_start(timeout)
            except BaseException:
                self._backend.leave()
                raise
        lifetime.add(self, Communicator._refuse_in_fork, Communicator._release_in_fork)

    def _meet_at_start(self, timeout: float) -> None:
        """Waits until every rank has mapped the windows. From then on peers may write to them."""
        # If a rank is lost here, perhaps only some ranks notice. If these raised, only they would
        # get no communicator. So all ranks get one, and its first call fails on all of them.
        with contextlib.suppress(PeerLost):
            self._mesh.allgather(b"", "start-up", timeout)

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
        """The timeout of one wait for other ranks, in seconds; on GPUs at least a millisecond.

        By default it is KCCL_TIMEOUT. Until the first call has completed it is KCCL_FIRST_TIMEOUT,
        also in kccl.init() and after reset(). On a GPU, calls that return when they are enqueued do
        not count as the first call for calls such as split(). Any thread may set a value at any
        time; it replaces both defaults. What split() and shrink() make begins with this
        communicator's values. With more than 8 ranks a call has steps, and each step with other
        ranks may wait an eighth longer than the one before. On the simulator, calls count virtual
        time, but split() and the like always have KCCL_FIRST_TIMEOUT.
        """
        return float(self._backend.state.limit_ns / 1e9)

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        limit_ns = arguments.nanoseconds("timeout", seconds)
        self._backend.state.limit_ns = self._backend.state.first_limit_ns = limit_ns

    @cached_property
    def topology(self) -> "Machine":
        """Returns this machine's cores, caches and NUMA nodes."""
        from .topology import discover

        return discover()

    @property
    def layout(self) -> str:
        """How KCCL_LAYOUT says that threads are placed on cores: "topology" or "flat"."""
        return self._env.layout

    def check(self) -> None:
        """Raises if an earlier call is known to have failed. Does not wait.

        A call on a GPU returns before it has run. To see whether it succeeded, synchronize its
        stream and then call check(). Until then, its result may still be old data.

        Raises:
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        self.context.check_usable()

    def plan(self, collective: str, nbytes: int = 0, dtype: Any = None, *, width: int = 0) -> Plan:
        """Returns the plan of a call of `nbytes`, in rows of `width` elements if it has rows."""
        return plan_of(self, collective, nbytes, dtype, width)

    def algorithms(self, collective: str) -> list[str]:
        """Returns the names of a collective's algorithms, for the `algorithm` arguments."""
        return algorithms_of(self, collective)

    def _refuse_in_fork(self) -> None:
        """In a forked child: makes every use an error, and keeps close() from telling the peers."""
        self._backend.state.status = lib.kKcclForked

    def _release_in_fork(self) -> None:
        self._mesh.close()

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in rank order. Collective, and slow.

        It works even after a call has failed, so ranks can tell each other of the failure.

        Raises:
            InvalidArgument: JSON would change some rank's value, such as a tuple or int keys. All
                ranks raise then.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        with self.context.alone():
            self._check_open()
            self.context.check_all_said()
            if self._mesh.is_resetting:
                self.context.raise_failure()
            return agreement.gather_objects(self._mesh, value, self.context.limit_s())

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Splits the ranks into communicators, one for each `color`. Collective.

        Args:
            color: An integer. Ranks with equal colors get a communicator together. With None a rank
                gets none.
            key: An integer. Orders the new ranks. Ranks with equal keys keep their order.

        Returns:
            The communicator of this rank's color; None for a color of None.

        Raises:
            InvalidArgument: color or key is no integer on some rank. No rank gets a communicator.
            BackendError: A communicator could not be made on some rank; the text has its number and
                the reason. Then no rank of any color gets one, and this communicator stays usable.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        with self.context.out_of_band("split") as limit_s:
            color = None if color is None else arguments.integer("color", color)
            key = arguments.integer("key", key)
            return agreement.split(self._mesh, color, key, self._part, limit_s)

    def reset(self) -> None:
        """Makes the communicator usable again after a time-out. Collective; needs all ranks alive.

        Drops all unfinished calls, messages and signals. Until reset() succeeds, only reset(),
        shrink() and close() work, and gather_objects() until the first reset() begins. On a GPU it
        first waits for all work on the device, including that of other libraries.

        Raises:
            PeerLost: A rank is gone; use shrink().
            Timeout: A rank did not call reset() within `timeout`, or the device's work did not end;
                call reset() again.
        """
        state = self._backend.state

        def clear() -> None:
            self._backend.clear()
            self._drop_messages()
            state.status = lib.kKcclAborted

        with self.context.alone():
            self._check_open()
            # A failed status keeps this rank's calls from sending until all ranks have called
            # reset(), which Mesh.reset() requires.
            if state.status == lib.kKcclOk:
                state.status = lib.kKcclAborted
            self.context.has_said_failure = True
            self._backend.wait_for_calls("reset()")
            self._mesh.reset(clear, self.context.limit_s())
            state.status = lib.kKcclOk
            self.context.has_said_failure = False

    def shrink(self) -> "Communicator":
        """Makes a communicator of the survivors after a rank was lost. Collective among them.

        The survivors keep their order. This communicator is closed. Its windows, and arrays in
        them, stay readable.

        Returns:
            The new communicator.

        Raises:
            Timeout: A rank that is alive did not call shrink() in time; call shrink() again.
            BackendError: The new communicator could not be made on some rank; the text has its
                number and the reason. Call shrink() again, on all survivors.
        """
        with self.context.alone():
            self._check_open()
            # Peers that still wait in a call get an error, so that they can call shrink(), too.
            self.context.give_up()
            smaller = survivors.shrink(self._mesh, self._part, self.context.limit_s())
        # Outside of alone(): within it, close() would take a call to be running and free no memory.
        self.close()
        return smaller

    def _part(self, ranks: Mesh) -> "Communicator":
        """Returns a communicator of a mesh's ranks. Collective among them."""
        try:
            part = type(self)(
                ranks,
                self._env,
                launcher=self.launcher,
                local_rank=self.local_rank,
                settings=self._settings,
                opens=self._opens,
                timeout=self.context.limit_s(),
            )
        except BaseException:
            # Closing tells the peers at once that this rank gave up.
            ranks.close()
            raise
        for name in ("limit_ns", "first_limit_ns"):
            setattr(part._backend.state, name, getattr(self._backend.state, name))
        # Makes a new list each time, because another thread may iterate over the old one.
        known = [each for each in self._parts if each() is not None]
        self._parts = [*known, weakref.ref(part)]
        return part

    def close(self) -> None:
        """Ends this rank's use of the communicator. Idempotent.

        Peers that wait for this rank get an error. File descriptors, and on the host the memory of
        calls, are freed at once. Windows and arrays in them stay valid. On a GPU it first waits for
        all work on the device, including that of other libraries, unless a call has failed. Garbage
        collection of a communicator that is not closed also makes its peers' waits fail.

        Raises:
            Timeout: The device's work did not end within `timeout`. The communicator is closed, and
                the peers' waits fail.
            Timeout, PeerLost: An earlier call on a GPU failed, and no error has been raised for it
                yet. The communicator is closed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._backend.leave()
            self.context.check_all_said()
        except BaseException:
            # Tells the peers at least that this rank will not go on.
            self.context.give_up()
            raise
        finally:
            self._mesh.close()
            self._backend.state.status = lib.kKcclClosed
            forget_all(self)
            self._forget_one_sided()
            self._forget_messages()
            lifetime.discard(self)
            if not self._backend.context.is_used:
                self._backend.drop_memory()

    def _check_open(self) -> None:
        if self.context.has_left():
            self.context.raise_failure()
        if self._is_closed:
            raise Error(f"the communicator is closed on rank {self.rank}")

    def abort(self) -> None:
        """Makes the peers' waits fail, here and in what split() and shrink() made of this one.

        It is for a rank that cannot go on. Any thread may call it. Call close() afterwards.
        """
        for part in [known() for known in self._parts]:
            if part is not None:
                part.abort()
        if not self.context.has_left():
            self.context.give_up()
            self._mesh.hang_up()
