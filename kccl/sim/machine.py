"""The simulated machine that all ranks of a job share, and the settings it runs by."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import arguments
from ..base.abi import ffi, lib, members
from ..base.errors import BackendError, InvalidArgument, ProtocolError
from ..jit import cache
from . import trace_file
from .library import Entry, library_kernel
from .regions import Namer, Regions
from .report import Reporter

MODELS = {"sm_90": lib.kKcclSimSm90, "gfx942": lib.kKcclSimGfx942}
SCHEDULES = {name: value for name, value in members("KcclSimSchedule", "kKcclSim").items()}


@dataclass(frozen=True)
class Simulation:
    """What decides, beside the program, what happens.

    Attributes:
        seed: Chooses the schedule and what each load sees; the same seed gives the same run.
        warp_size: 32 or 64.
        model: Memory model: "sm_90" (PTX) or "gfx942" (AMDGPU).
        schedule: Who moves next: "mixed" takes one by the seed; the others are in csrc/sim/api.inc.
        is_weak: Loads may return what the memory model allows; else always the newest.
        checks: Races, slots and writers are checked.
        ends_when_stuck: When nothing can move, that is a deadlock; else virtual time passes until
            waits time out.
        trace_events: How many of the last steps are kept, for reports and traces.
        max_steps: A run that takes more is reported as endless; so is one of which the threads go
            on for tens of millions of steps, the more the more threads there are, without a
            store or a pause of all.
    """

    seed: int = 0
    warp_size: int = 32
    model: str = "sm_90"
    schedule: str = "mixed"
    is_weak: bool = True
    checks: bool = True
    ends_when_stuck: bool = False
    trace_events: int = 4096
    max_steps: int = 2**33

    def __post_init__(self) -> None:
        arguments.between("seed", self.seed, 0, 2**64 - 1)
        if self.warp_size not in cache.WARP_SIZES:
            raise InvalidArgument(f"warp_size is {self.warp_size!r}, must be 32 or 64")
        for name, value, known in (
            ("model", self.model, MODELS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise InvalidArgument(f"{name} is {value!r}, must be one of {', '.join(known)}")


class Machine:
    """One machine: all ranks' launches, in this process.

    Attributes:
        simulation: Its settings.
        regions: Names of its memory.
        windows: What lies at the addresses of windows.
        has_left: The ranks that make no launches any more.
    """

    def __init__(self, world_size: int, simulation: Simulation, *, csrc: Path = cache.CSRC) -> None:
        """A machine of so many ranks; `csrc` is the root of the library's device source."""
        self.simulation = simulation
        self._csrc = csrc
        self._kernels: dict[tuple[str, str, str, int], Entry] = {}
        self.regions = Regions()
        self._reporter = Reporter(self.regions)
        settings = ffi.new("KcclSimSettings *")
        settings.world_size = world_size
        settings.model = MODELS[simulation.model]
        settings.schedule = SCHEDULES[simulation.schedule]
        for name in (
            *("seed", "warp_size", "is_weak", "checks", "ends_when_stuck"),
            *("trace_events", "max_steps"),
        ):
            setattr(settings, name, getattr(simulation, name))
        self._handle = lib.kccl_sim_create(settings)
        if self._handle == ffi.NULL:
            raise BackendError(f"kccl_sim_create failed for {world_size} ranks and {simulation}")
        self._lock = threading.Lock()
        self._failure: ProtocolError | None = None
        self._stats: dict[str, int] = {}
        # What kernels may reach lives as long as the machine: it knows memory by its address.
        self.windows: dict[int, Any] = {}
        self.has_left: set[int] = set()
        self._states: list[Any] = []

    @property
    def handle(self) -> Any:
        """The engine's KcclSimMachine.

        Raises:
            BackendError: The machine is gone.
        """
        if self._handle is None:
            raise BackendError("the simulated machine is gone: its run_threads() has returned")
        return self._handle

    # ---- Memory ------------------------------------------------------------------------------

    def add_window(self, rank: int, address: int, num_bytes: int, memory: Any, name: Namer) -> None:
        """Memory that kernels of several ranks use.

        Args:
            rank: The rank of the machine that has it.
            address, num_bytes: Where it lies.
            memory: Keeps it there.
            name: Names of its bytes.
        """
        lib.kccl_sim_add_window(self.handle, rank, address, num_bytes)
        self.windows[address] = memory
        self.regions.add(address, num_bytes, name)

    def forget(self, rank: int, address: int, num_bytes: int, state: Any) -> None:
        """A communicator starts afresh, with this window and state: nothing of it is in flight."""
        lib.kccl_sim_remove_window(self.handle, address)
        lib.kccl_sim_add_window(self.handle, rank, address, num_bytes)
        lib.kccl_sim_forget_calls(self.handle, int(ffi.cast("uintptr_t", state)))

    def add_state(self, state: Any, name: Namer) -> None:
        """A communicator's KcclState, which says that it is closed once the machine is gone."""
        self._states.append(state)
        address = int(ffi.cast("uintptr_t", state))
        self.regions.add(address, ffi.sizeof("KcclState"), name)

    # ---- Launches ----------------------------------------------------------------------------

    def kernel(self, name: str, dtype: str, op: str, world_size: int = 0) -> Entry:
        """One of the library's kernels, which is compiled at most once in a machine's life."""
        key = name, dtype, op, world_size
        if key not in self._kernels:
            self._kernels[key] = library_kernel(
                name,
                dtype=dtype,
                op=op,
                world_size=world_size,
                warp_size=self.simulation.warp_size,
                csrc=self._csrc,
            )
        return self._kernels[key]

    def launch(self, launch: Any) -> bool:
        """Runs a KcclSimLaunch to its end; False when the machine has found something."""
        return bool(lib.kccl_sim_launch(self.handle, launch) == 0)

    def leave(self, rank: int) -> None:
        """A rank makes no launches any more."""
        lib.kccl_sim_leave(self.handle, rank)
        self.has_left.add(rank)

    def wait_outside(self, rank: int) -> None:
        """A rank waits for other ranks' programs; until then the machine moves without it."""
        if self._handle is not None:
            lib.kccl_sim_set_outside(self._handle, rank, True)

    def return_inside(self, rank: int) -> None:
        """A rank's program goes on: the machine waits for what it does next."""
        if self._handle is not None:
            lib.kccl_sim_set_outside(self._handle, rank, False)

    def meet(self, rank: int, others: set[int]) -> None:
        """`others` wait no longer, because this rank has come: each knows what all have done."""
        if not others:
            return
        # One of them is always inside, so that the machine does not move meanwhile.
        for other in others:
            self.return_inside(other)
        for each in (rank, *others):
            self.wait_outside(each)
            self.return_inside(each)

    # ---- What was found ----------------------------------------------------------------------

    def failure(self) -> ProtocolError | None:
        """The first finding, as an exception of its own for each who asks."""
        with self._lock:
            if self._failure is None and self._handle is not None:
                if lib.kccl_sim_num_findings(self._handle) == 0:
                    return None
                finding = lib.kccl_sim_finding(self._handle, 0)
                self._failure = self._reporter.error(finding, self.events())
            known = self._failure
        return None if known is None else ProtocolError(str(known), **vars(known))

    def findings(self) -> list[ProtocolError]:
        """All findings of the last run."""
        count = lib.kccl_sim_num_findings(self.handle)
        events = self.events() if count else []
        return [
            self._reporter.error(lib.kccl_sim_finding(self.handle, index), events)
            for index in range(count)
        ]

    def events(self) -> "Events":
        """The last steps, oldest first."""
        capacity = self.simulation.trace_events
        array = ffi.new("KcclSimEvent[]", max(capacity, 1))
        return Events(array, lib.kccl_sim_events(self.handle, array, capacity))

    def stats(self) -> dict[str, int]:
        """The fields of KcclSimStats; of the last run, also when the machine is gone."""
        if self._handle is not None:
            stats = lib.kccl_sim_stats(self._handle)
            self._stats = {name: getattr(stats, name) for name, _ in ffi.typeof(stats).fields}
        return self._stats

    def write_trace(self, path: Path) -> None:
        """Writes the last steps as trace-event JSON; see trace_file.py."""
        events = self.events()
        trace_file.write(
            path, trace_file.trace_of(events, self._reporter, self.simulation.warp_size)
        )

    def forget_findings(self) -> None:
        """Another run begins."""
        with self._lock:
            self._failure = None

    def destroy(self) -> None:
        """Ends the machine; no rank is in a launch. Every communicator on it is closed."""
        if self._handle is None:
            return
        self.stats()
        for state in self._states:
            state.status = lib.kKcclClosed
        handle, self._handle = self._handle, None
        lib.kccl_sim_destroy(handle)


@contextmanager
def simulated_machine(
    world_size: int, *, trace: str | os.PathLike[str] | None = None, **settings: Any
) -> Iterator[Machine]:
    """A machine that lives within, and leaves its last steps in a file.

    Args:
        world_size: Number of ranks.
        trace: The file; see trace_file.py.
        settings: Fields of Simulation.

    Raises:
        InvalidArgument: A setting is wrong, or the file cannot be written.
    """
    simulation = Simulation(**settings)
    path = None if trace is None else Path(trace)
    if path is not None:
        # What would fail after a long run fails before it.
        trace_file.write(path, [])
    machine = Machine(world_size, simulation)
    try:
        yield machine
    finally:
        try:
            if path is not None:
                machine.write_trace(path)
        finally:
            # A second Ctrl-C ends the wait for ranks that still run. They keep what they run on.
            if len(machine.has_left) == world_size:
                machine.destroy()


class Events(list[Any]):
    """KcclSimEvents by step, which go when this does."""

    def __init__(self, array: Any, count: int) -> None:
        # What a finding names was traced when it was found, not when it happened.
        super().__init__(sorted((array[index] for index in range(count)), key=_step))
        self._array = array


def _step(event: Any) -> int:
    return int(event.step)


def launch_of(
    rank: int, entry: Entry, data: bytes, *, grid: int, block: int, shared_bytes: int = 0
) -> tuple[Any, Any]:
    """A KcclSimLaunch, and what keeps its arguments.

    Args:
        rank: The rank of the machine.
        entry: The kernel.
        data: Its arguments, one behind the other, each at a multiple of its alignment.
        grid, block: Blocks, and threads in each.
        shared_bytes: Dynamic shared memory of a block.
    """
    arguments_ = ffi.new("uint64_t[]", -(-len(data) // 8) or 1)
    ffi.memmove(arguments_, data, len(data))
    launch = ffi.new("KcclSimLaunch *")
    launch.entry = ffi.cast("void (*)(const void *)", entry.address)
    launch.arguments = arguments_
    launch.argument_bytes = len(data)
    launch.num_blocks = grid
    launch.threads_per_block = block
    launch.shared_bytes = shared_bytes
    launch.rank = rank
    return launch, arguments_
