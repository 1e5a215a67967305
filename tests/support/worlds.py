"""Many schedules of one small program: how tests and the soak explore the simulator.

Unlike run_threads() it has no threads, no sockets and no Python between launches. A World has the
ranks' windows and states. It runs a program, which is a list of launches for each rank, under one
seed after another.

    world = World(4, Simulation(ends_when_stuck=True))
    program = [[world.call(rank, "all_reduce_one_shot_ll16", input=x[rank], output=y[rank])]
               for rank in range(4)]
    for seed in range(1000):
        report = world.run(program, seed)
        assert not report.findings, report.findings[0]

Internal: what tests and the soak need, without the checks of arguments that users get.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kccl import module
from kccl.backends.calls import fill_call
from kccl.backends.device_comm import DeviceComm
from kccl.backends.scratch import make_comm
from kccl.backends.settings import Settings
from kccl.backends.sim import num_threads
from kccl.base import arrays
from kccl.base.abi import ffi, lib
from kccl.base.errors import InvalidArgument, ProtocolError
from kccl.jit import cache
from kccl.plan.specs import BY_NAME
from kccl.sim.launch_arrays import launch_of
from kccl.sim.machine import Machine, Simulation
from kccl.sim.regions import bytes_namer, state_namer, window_namer

if TYPE_CHECKING:
    import numpy as np

# The least that the layout allows, because windows are cleared before each run.
_SETTINGS = Settings(num_channels=1, packet_bytes=8192, staging_bytes=1024)
_LIMIT_NS = 10**9


@dataclass(frozen=True)
class Launch:
    """A kernel on one rank, made by World.call() or World.launch().

    Attributes:
        rank: The rank.
        what: Its KcclSimLaunch.
        keep: Holds the memory of its arguments.
    """

    rank: int
    what: Any
    keep: Any


Program = Sequence[Sequence[Launch]]


@dataclass(frozen=True)
class Report:
    """What one run did.

    Attributes:
        findings: What is wrong; empty when nothing is.
        stats: Fields of KcclSimStats.
        statuses: Each rank's KcclStatus.
    """

    findings: tuple[ProtocolError, ...]
    stats: dict[str, int]
    statuses: tuple[int, ...]


class World:
    """The ranks of a machine.

    Attributes:
        world_size: Their number.
        simulation: The machine's settings; the seed is that of each run.
    """

    def __init__(
        self,
        world_size: int,
        simulation: Simulation = Simulation(ends_when_stuck=True),  # noqa: B008  # frozen
        settings: Settings = _SETTINGS,
        *,
        csrc: Path = cache.CSRC,
    ) -> None:
        """Makes the machine and the windows.

        Args:
            world_size: Number of ranks.
            simulation: Settings of the machine.
            settings: Sizes of windows, and the width of epochs.
            csrc: Root of the device source; a changed copy shows what the simulator finds in it.
        """
        import numpy as np

        self.world_size = world_size
        self.simulation = simulation
        self._machine = Machine(world_size, simulation, csrc=csrc)
        layout = settings.layout(world_size)
        self._sentinel = layout["sentinel"]
        self._windows = np.zeros((world_size, layout["scratch_bytes"]), np.uint8)
        self._more_windows: list[np.ndarray[Any, Any]] = []
        self._states = ffi.new("KcclState[]", world_size)
        self._channels = ffi.new("KcclChannelState[]", world_size * settings.scratch_channels)
        self._context = ffi.new("KcclHostContext *")
        addresses = tuple(window.ctypes.data for window in self._windows)
        self._comms = []
        for rank in range(world_size):
            self._comms.append(
                make_comm(
                    settings,
                    rank=rank,
                    addresses=addresses,
                    scratch=addresses,
                    state=self._states + rank,
                    channels=self._channels + rank * settings.scratch_channels,
                    polls_per_check=1,
                )
            )
            name = window_namer(layout, world_size, rank)
            self._machine.add_window(
                rank, addresses[rank], layout["scratch_bytes"], self._windows, name
            )
            self._machine.regions.add(
                int(ffi.cast("uintptr_t", self._states + rank)),
                ffi.sizeof("KcclState"),
                state_namer(rank),
            )

    def close(self) -> None:
        """Ends the machine. Idempotent."""
        self._machine.destroy()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Programs ----------------------------------------------------------------------------

    def window(self, nbytes: int) -> "np.ndarray[Any, Any]":
        """Memory of each rank that every rank may use: uint8 [world_size, nbytes], zero before each
        run.
        """
        import numpy as np

        # Each rank's memory begins on a line.
        stride = -(-nbytes // 128) * 128
        windows = np.zeros((self.world_size, stride), np.uint8)
        for rank, window in enumerate(windows):
            name = bytes_namer(f"window {len(self._more_windows)} of rank {rank}")
            self._machine.add_window(rank, window.ctypes.data, stride, windows, name)
        self._more_windows.append(windows)
        return windows[:, :nbytes]

    def call(
        self,
        rank: int,
        kernel: str,
        *,
        input: Any = None,
        output: Any = None,
        count: int | None = None,
        dtype: str = "float32",
        op: str = "sum",
        peer: int = 0,
        channel: int = 0,
        block: int = 0,
        grid: int = 1,
        unrolls: bool = False,
        stream: int = 0,
        is_dependent: bool = False,
        dependent: int = lib.kKcclNoDependent,
        **parts: Any,
    ) -> Launch:
        """A launch of one of the library's kernels.

        Args:
            rank: Who makes the call.
            kernel: Its name.
            input, output: Arrays, addresses, or None.
            count: As KcclCall's; None: the input's elements, or bytes where a kernel counts bytes.
            dtype, op: For kernels that reduce.
            peer, channel: As KcclCall's.
            block: Threads; 0: as run_threads() takes.
            grid: Blocks.
            unrolls: Take the instance for this number of ranks, as on GPUs; else that for any.
            stream, is_dependent: As KcclSimLaunch's.
            dependent: As KcclCall's.
            parts: sends, receives and repeats, and the fields of messages, as KcclCall's.
        """
        addresses = [_address(array) for array in (input, output)]
        if count is None:
            count = 0 if input is None else input.size if "reduce" in kernel else input.nbytes
        call = ffi.new("KcclCall *")
        fill_call(
            call,
            self._comms[rank],
            kernel,
            dtype,
            op,
            input=addresses[0],
            output=addresses[1],
            count=count,
            peer=peer,
            channel=channel,
            share=BY_NAME[kernel].share(count, dtype, grid),
            dependent=dependent,
            **parts,
        )
        entry = self._machine.kernel(kernel, dtype, op, self.world_size if unrolls else 0)
        block = block or num_threads(kernel, count, dtype)
        what, keep = launch_of(rank, entry, bytes(ffi.buffer(call)), grid=grid, block=block)
        what.stream, what.is_dependent = stream, is_dependent
        return Launch(rank, what, (keep, input, output))

    def device_comm(self, rank: int) -> DeviceComm:
        """The DeviceComm that users' kernels take."""
        comm = self._comms[rank]
        return DeviceComm(
            rank,
            self.world_size,
            comm.num_channels,
            comm.layout.packet_bytes,
            bytes(ffi.buffer(comm)),
            is_open=lambda: True,
        )

    def launch(
        self,
        rank: int,
        kernel: module.Kernel,
        *args: Any,
        grid: int = 1,
        block: int = 64,
        shared_bytes: int = 0,
        stream: int = 0,
        is_dependent: bool = False,
    ) -> Launch:
        """A launch of a user's kernel; arguments as in module.Kernel and KcclSimLaunch."""
        if kernel.module.warp_size != self.simulation.warp_size:
            raise InvalidArgument(f"{kernel} is for warps of {kernel.module.warp_size}")
        grid, block = module.check_grid(grid, block, self.simulation.warp_size)
        data, keep_args = kernel.pack(args)
        what, keep = launch_of(
            rank, kernel.entry, data, grid=grid, block=block, shared_bytes=shared_bytes
        )
        what.stream, what.is_dependent = stream, is_dependent
        return Launch(rank, what, (keep, keep_args))

    # ---- Runs --------------------------------------------------------------------------------

    def run(self, program: Program, seed: int = 0) -> Report:
        """Runs a program from the start, with windows and states as before the first call.

        The program's arrays belong to the caller, who fills them again if the program writes them.

        Args:
            program: For each rank its launches, in order.
            seed: Decides the schedule, and what memory does.
        """
        self._clear()
        machine = self._machine.handle
        lib.kccl_sim_restart(machine, seed)
        for launches in program:
            for launch in launches:
                if lib.kccl_sim_enqueue(machine, launch.what) != 0:
                    raise InvalidArgument(f"rank {launch.rank} cannot launch such a block or grid")
        found = lib.kccl_sim_run(machine)
        findings = tuple(self._machine.findings()) if found else ()
        statuses = tuple(self._states[rank].status for rank in range(self.world_size))
        return Report(findings, self._machine.stats(), statuses)

    def explore(
        self, program: Program, *, deviations: int | None = None, limit: int
    ) -> Iterator[Report]:
        """Runs a program under all schedules, one after the other.

        Each decision of the machine has a default. A schedule deviates where it decides otherwise.
        Most bugs need very few deviations (delay bounding: Emmi, Qadeer, Rakamaric, POPL 2011).

        Args:
            program: As in run(); tiny.
            deviations: The most deviations of a schedule; None for any number.
            limit: The most runs.
        """
        assert self.simulation.schedule == "exhaustive"
        machine = self._machine.handle
        # Schedules to run: the decisions up to a deviation, and how many deviations may follow.
        pending = [(b"", deviations)]
        for _ in range(limit):
            if not pending:
                return
            tape, left = pending.pop()
            lib.kccl_sim_set_tape(machine, tape, len(tape))
            report = self.run(program)
            if left != 0:
                count = report.stats["choices"]
                choices, bounds = (ffi.new("uint8_t[]", max(count, 1)) for _ in range(2))
                lib.kccl_sim_choices(machine, choices, bounds, count)
                taken = bytes(choices[0:count])
                pending += (
                    (taken[:at] + bytes([choice]), None if left is None else left - 1)
                    for at in reversed(range(len(tape), count))
                    for choice in range(1, bounds[at])
                )
            yield report

    def write_trace(self, path: Path) -> None:
        """Writes the last steps of the last run, for Perfetto."""
        self._machine.write_trace(path)

    def _clear(self) -> None:
        self._windows[:, : self._sentinel] = 0
        self._windows[:, self._sentinel :] = 0xFF
        for windows in self._more_windows:
            windows[:] = 0
        for memory in (self._states, self._channels):
            ffi.memmove(memory, bytes(ffi.sizeof(memory)), ffi.sizeof(memory))
        context = int(ffi.cast("uintptr_t", self._context))
        for rank in range(self.world_size):
            state = self._states[rank]
            state.limit_ns = state.first_limit_ns = _LIMIT_NS
            state.idle_context = context


def _address(array: Any) -> int:
    if array is None:
        return 0
    return array if isinstance(array, int) else arrays.pointer(array, "array").address
