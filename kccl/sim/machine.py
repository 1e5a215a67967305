"""The simulated machine that all ranks of a job share, and its settings."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import arguments
from ..base.abi import ffi, lib, members
from ..base.errors import BackendError, InvalidArgument, ProtocolError
from ..jit import cache
from ..plan.limits import LIMITS
from ..ranks.windows import Window
from . import trace_file
from .launch_arrays import LaunchArrays
from .library import Entry, library_kernel
from .regions import Namer, Regions
from .report import Reporter

MODELS = {"sm_90": lib.kKcclSimSm90, "gfx942": lib.kKcclSimGfx942}
SCHEDULES = members("KcclSimSchedule", "kKcclSim")


@dataclass(frozen=True)
class Simulation:
    """The settings of a simulation. Together with the program they determine the whole run.

    Attributes:
        seed: Determines the schedule and what each load returns. The same seed gives the same run.
        warp_size: 32 or 64.
        model: Memory model: "sm_90" (PTX) or "gfx942" (AMDGPU).
        schedule: Which thread runs next. "mixed" lets the seed choose one of the other schedules,
            which csrc/sim/api.inc lists.
        is_weak: Whether loads may return old values where the memory model allows it. If not, they
            always return the newest value.
        checks: Whether data races, reused slots and several writers of a word are findings.
        ends_when_stuck: Whether it is a deadlock, and ends the run, when no thread can go on. If
            not, virtual time passes until waits time out.
        trace_events: Number of last steps to keep, for reports and traces.
        most_blocks: Most blocks of a rank's launches that run at the same time; 0 for any number. A
            launch that finds no room waits for others to end.
        max_steps: Most steps of a run. A longer run is reported as endless. So is a run in which
            for tens of millions of steps (more with more threads) no word changes and not all
            threads pause.
        hang_s: Seconds of CPU time. A thread that takes longer from one step to the next is
            reported as endless. A step is an access through kccl::mem, or synchronisation.
    """

    seed: int = 0
    warp_size: int = 32
    model: str = "sm_90"
    schedule: str = "mixed"
    is_weak: bool = True
    checks: bool = True
    ends_when_stuck: bool = False
    trace_events: int = 4096
    most_blocks: int = 0
    max_steps: int = 2**33
    hang_s: float = 5.0

    def __post_init__(self) -> None:
        arguments.between("seed", self.seed, 0, 2**64 - 1)
        if not 0.001 <= self.hang_s <= 1e9:
            raise InvalidArgument(f"hang_s is {self.hang_s!r}, must be 0.001 to 1e9 seconds")
        if self.warp_size not in cache.WARP_SIZES:
            raise InvalidArgument(f"warp_size is {self.warp_size!r}, must be 32 or 64")
        for name, value, known in (
            ("model", self.model, MODELS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise InvalidArgument(f"{name} is {value!r}, must be one of {', '.join(known)}")


class Machine:
    """One simulated machine in this process. It runs the launches of all ranks.

    Attributes:
        simulation: Its settings.
        regions: Names of address ranges, for reports.
        arrays: The arrays among the arguments of users' kernels.
        windows: Address of a window -> an object that keeps its memory alive.
        made: The windows themselves, as long as somebody has them.
        has_left: The ranks that make no more launches.
    """

    def __init__(self, world_size: int, simulation: Simulation, *, csrc: Path = cache.CSRC) -> None:
        """Creates the machine. `csrc` is the root of KCCL's device source."""
        self.simulation = simulation
        self._csrc = csrc
        self._kernels: dict[tuple[str, str, str, int], Entry] = {}
        self.regions = Regions()
        self.arrays = LaunchArrays()
        self._reporter = Reporter(self.regions, self.arrays, simulation.model)
        settings = ffi.new("KcclSimSettings *")
        settings.world_size = world_size
        settings.model = MODELS[simulation.model]
        settings.schedule = SCHEDULES[simulation.schedule]
        limits = LIMITS[simulation.model]
        settings.most_shared = limits.shared_bytes
        settings.most_static_shared = limits.static_shared_bytes
        for name in (
            *("seed", "warp_size", "is_weak", "checks", "ends_when_stuck"),
            *("trace_events", "most_blocks", "max_steps"),
        ):
            setattr(settings, name, getattr(simulation, name))
        settings.hang_ns = int(simulation.hang_s * 1e9)
        settings.knows_memory = 1
        self._handle = lib.kccl_sim_create(settings)
        self._lock = threading.Lock()
        self._failure: ProtocolError | None = None
        self._stats: dict[str, int] = {}
        # The engine knows memory by its address only. So this object keeps memory that kernels may
        # access: windows until remove_window(), other memory as long as the machine lives.
        self.windows: dict[int, Any] = {}
        self.made: weakref.WeakSet[Window] = weakref.WeakSet()
        self.has_left: set[int] = set()
        self._states: list[Any] = []
        self._memory: list[Any] = []

    @property
    def handle(self) -> Any:
        """Returns the engine's KcclSimMachine.

        Raises:
            BackendError: The machine has been destroyed.
        """
        if self._handle is None:
            raise BackendError(
                "the simulated machine has ended: use the communicator within run_threads() only"
            )
        return self._handle

    # ---- Memory ------------------------------------------------------------------------------

    def add_window(
        self, rank: int, address: int, num_bytes: int, memory: Any, name: Namer, whole: str = ""
    ) -> None:
        """Tells the machine about memory that kernels of several ranks access.

        Args:
            rank: The machine's rank that owns the memory.
            address, num_bytes: Its range of addresses.
            memory: An object that keeps the memory alive.
            name: Names its bytes in reports.
            whole: Names all its bytes together.
        """
        lib.kccl_sim_add_window(self.handle, rank, address, num_bytes)
        self.windows[address] = memory
        self.regions.add(address, num_bytes, name, whole)

    def remove_window(self, address: int) -> None:
        """Takes back add_window(). Later accesses of kernels to the memory are findings."""
        if self._handle is not None:
            lib.kccl_sim_remove_window(self._handle, address)
        self.regions.remove(address)
        del self.windows[address]

    def forget(self, rank: int, address: int, num_bytes: int, state: Any) -> None:
        """Forgets the calls of a communicator with this window and KcclState, for reset().

        None of its calls may be in flight.
        """
        lib.kccl_sim_remove_window(self.handle, address)
        lib.kccl_sim_add_window(self.handle, rank, address, num_bytes)
        lib.kccl_sim_forget_calls(self.handle, int(ffi.cast("uintptr_t", state)))

    def add_state(self, rank: int, state: Any, name: Namer, members: Sequence[int] = ()) -> None:
        """Adds a communicator's KcclState of a rank. destroy() sets its status to closed.

        Args:
            rank, name: See add_window().
            state: The KcclState.
            members: The communicator's ranks, as the machine counts them.
        """
        self._states.append(state)
        address = int(ffi.cast("uintptr_t", state))
        self._reporter.members[address] = members
        self.add_memory(rank, address, ffi.sizeof("KcclState"), state, name, "the state of rank")

    def add_memory(
        self, rank: int, address: int, num_bytes: int, memory: Any, name: Namer, whole: str
    ) -> None:
        """Tells the machine about memory that kernels of one rank access as long as it lives.

        Args:
            rank, address, num_bytes, name: See add_window().
            memory: An object that keeps the memory alive, as the machine does.
            whole: A name that the rank's number follows, as in "the state of rank".
        """
        self._memory.append(memory)
        lib.kccl_sim_add_memory(self.handle, rank, address, num_bytes)
        self.regions.add(address, num_bytes, name, f"{whole} {rank}")

    # ---- Launches ----------------------------------------------------------------------------

    def kernel(self, name: str, dtype: str, op: str, world_size: int = 0) -> Entry:
        """Returns one of KCCL's own kernels. Each is compiled at most once."""
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
        """Runs a KcclSimLaunch to its end. Returns False if the machine has a finding."""
        for rank, array in self.arrays.take_freed():
            lib.kccl_sim_forget_array(self.handle, rank, array)
        return bool(lib.kccl_sim_launch(self.handle, launch) == 0)

    def interrupt(self) -> None:
        """Ends all launches within a second, whatever their kernels do. They return an error."""
        if self._handle is not None:
            lib.kccl_sim_interrupt(self._handle)

    def leave(self, rank: int) -> None:
        """Tells the machine that a rank makes no more launches."""
        lib.kccl_sim_leave(self.handle, rank)
        self.has_left.add(rank)

    def wait_outside(self, rank: int) -> None:
        """Tells the machine that a rank waits for other ranks outside of a launch.

        The machine then runs without waiting for this rank's next launch.
        """
        if self._handle is not None:
            lib.kccl_sim_set_outside(self._handle, rank, True)

    def return_inside(self, rank: int) -> None:
        """Tells the machine that a rank waits no longer. The machine waits for its next launch."""
        if self._handle is not None:
            lib.kccl_sim_set_outside(self._handle, rank, False)

    def meet(self, rank: int, others: set[int]) -> None:
        """Ends the wait of `others`, because `rank` has come. Orders what all of them have done."""
        if not others:
            return
        # In this order one of the ranks always counts as running its program, so the machine does
        # not run between these calls.
        for other in others:
            self.return_inside(other)
        for each in (rank, *others):
            self.wait_outside(each)
            self.return_inside(each)

    # ---- Findings ----------------------------------------------------------------------------

    def failure(self) -> ProtocolError | None:
        """Returns the first finding as a new exception for each caller; None if there is no
        finding.
        """
        with self._lock:
            if self._failure is None and self._handle is not None:
                if lib.kccl_sim_num_findings(self._handle) == 0:
                    return None
                finding = lib.kccl_sim_finding(self._handle, 0)
                self._failure = self._reporter.error(finding, self.events())
            known = self._failure
        return None if known is None else ProtocolError(str(known), **vars(known))

    def findings(self) -> list[ProtocolError]:
        """Returns all findings of the last run."""
        count = lib.kccl_sim_num_findings(self.handle)
        events = self.events() if count else []
        return [
            self._reporter.error(lib.kccl_sim_finding(self.handle, index), events)
            for index in range(count)
        ]

    def events(self) -> "Events":
        """Returns the last steps of the run, oldest first."""
        capacity = self.simulation.trace_events
        array = ffi.new("KcclSimEvent[]", max(capacity, 1))
        return Events(array, lib.kccl_sim_events(self.handle, array, capacity))

    def waits(self) -> str:
        """Returns who waited for what when waits last began to time out; "" if none did."""
        if self._handle is None:
            return ""
        array = ffi.new("KcclSimWait[]", lib.kKcclSimMostWaits)
        count = lib.kccl_sim_waits(self._handle, array, lib.kKcclSimMostWaits)
        return self._reporter.waits([array[index] for index in range(count)])

    def uneven_calls(self, least: int = 1) -> str:
        """Returns how many calls each rank has made on channels where ranks have made different
        numbers; "" if there are fewer than `least` such channels.
        """
        if self._handle is None:
            return ""
        array = ffi.new("KcclSimCount[]", lib.kKcclSimMostWaits)
        count = lib.kccl_sim_counts(self._handle, array, lib.kKcclSimMostWaits)
        counts = [array[index] for index in range(count)]
        has_all = sum(each.rank == 0 for each in counts) >= least
        return self._reporter.counts(counts) if has_all else ""

    def check_calls(self) -> None:
        """Checks that all ranks have made equally many calls. Called when all have ended without an
        error.

        Raises:
            ProtocolError: Some ranks have made more calls than others, and no wait has noticed.
        """
        told = self.uneven_calls()
        if told and not lib.kccl_sim_has_failed(self.handle):
            seed = self.simulation.seed
            raise ProtocolError(
                f"calls differ: {told}. All ranks must make the same calls on a channel; seed "
                f"{seed}, which replays it",
                kind="calls_differ",
                seed=seed,
                rank=-1,
            )

    def stats(self) -> dict[str, int]:
        """Returns the fields of KcclSimStats for the last run. Works after destroy(), too."""
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

    def destroy(self) -> None:
        """Destroys the machine, and marks its communicators closed. No rank may be in a launch."""
        if self._handle is None:
            return
        self.stats()
        for state in self._states:
            state.status = lib.kKcclClosed
        for window in self.made:
            window.why_not_in_kernels = (
                "whose simulation has ended, must be of this one: call comm.window() in each run"
            )
        handle, self._handle = self._handle, None
        lib.kccl_sim_destroy(handle)


@contextmanager
def simulated_machine(
    world_size: int, *, trace: str | os.PathLike[str] | None = None, **settings: Any
) -> Iterator[Machine]:
    """Returns a context with a machine. At its end, writes the last steps to a file and ends the
    machine.

    Args:
        world_size: Number of ranks.
        trace: Path of the file, see trace_file.py; None for no file.
        settings: Fields of Simulation.

    Raises:
        InvalidArgument: A setting is wrong, or the file cannot be written.
    """
    simulation = Simulation(**settings)
    path = None if trace is None else Path(trace)
    if path is not None:
        # If the file cannot be written, fail now and not after a long run.
        trace_file.write(path, [])
    machine = Machine(world_size, simulation)
    try:
        yield machine
    finally:
        try:
            if path is not None:
                machine.write_trace(path)
        finally:
            # Destroys the machine only if all ranks have ended. After a second Ctrl-C some may
            # still run.
            if len(machine.has_left) == world_size:
                machine.destroy()


class Events(list[Any]):
    """KcclSimEvents, sorted by step. The list owns their memory."""

    def __init__(self, array: Any, count: int) -> None:
        # Sorts them, because the engine adds a finding's accesses when it finds it, behind events
        # of later steps.
        super().__init__(sorted((array[index] for index in range(count)), key=_step))
        self._array = array


def _step(event: Any) -> int:
    return int(event.step)
