"""A rank's scratches: the windows that calls write into, and the KcclDeviceComms that name them.

A communicator has one scratch for its own calls. Each DeviceComm for users' kernels has another, so
kernels with different ones may run at the same time.
"""

import mmap
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

from ..base.abi import ffi, lib
from ..ranks.agreement import agree_on_arguments
from ..ranks.team import Connected
from ..ranks.windows import Window
from .device_comm import DeviceComm
from .settings import Settings


def make_comm(
    settings: Settings,
    *,
    rank: int,
    addresses: tuple[int, ...],
    scratch: tuple[int, ...],
    state: Any,
    channels: Any,
    polls_per_check: int,
    grid_counters: int | None = None,
) -> Any:
    """Returns a KcclDeviceComm; csrc/include/kccl/device_comm.h fills it.

    Args:
        settings: The communicator's Settings, which Settings.layout() has checked.
        rank: The rank whose struct this is.
        addresses, scratch: The addresses of every rank's window and scratch, in rank order.
        state: The rank's KcclState.
        channels: Address of the rank's KcclChannelStates, one for each scratch channel.
        polls_per_check: Polls between two reads of the clock.
        grid_counters: Counters of grid_sync, as topology.grid_counters() says. None: as many as the
            target has.
    """
    comm = ffi.new("KcclDeviceComm *")
    sizes = ffi.new("KcclSizes *", asdict(settings))
    state, channels = (int(ffi.cast("uintptr_t", each)) for each in (state, channels))
    own = rank, len(addresses), sizes, addresses, scratch, state, channels
    lib.kccl_host_make_comm(comm, *own, mmap.PAGESIZE, polls_per_check)
    if grid_counters is not None:
        assert 1 <= grid_counters <= lib.kKcclGridCounters
        comm.grid_counters = grid_counters
    return comm


def sizes_for_kernels(channels: int, max_bytes: int, exchange_bytes: int) -> Settings:
    """Returns the sizes for a DeviceComm; csrc/include/kccl/device_comm.h computes them."""
    sizes = ffi.new("KcclSizes *")
    lib.kccl_host_sizes_for_kernels(sizes, channels, max_bytes, exchange_bytes)
    return Settings(**{each.name: getattr(sizes, each.name) for each in fields(Settings)})


class Channels(Protocol):
    """The KcclChannelStates of one scratch, one for each scratch channel. They are zero at first.

    Attributes:
        address: The address of the first state.
    """

    @property
    def address(self) -> int: ...

    def clear(self) -> None:
        """Writes zeros over all states."""


class Memory(Protocol):
    """Allocates a rank's windows and channels: in host memory, for the simulator, or on a GPU."""

    def window(
        self, nbytes: int, what: str, timeout: float, layout: Mapping[str, int] | None = None
    ) -> Window:
        """Allocates a window, zero at first. Collective.

        Args:
            nbytes: Size.
            what: Its use, for error messages.
            timeout: Seconds to wait for the other ranks.
            layout: The fields of KcclLayout, for a scratch; None for a user's window.
        """

    def channels(self, count: int) -> Channels:
        """Allocates the states of `count` scratch channels."""

    def arm(self, window: Window, begin: int) -> None:
        """Writes 0xff over this rank's part of a window, from `begin` to the end."""


@dataclass(frozen=True)
class _Scratch:
    window: Window
    channels: Channels
    sentinel: int  # offset of the sentinel slots, whose bytes are 0xff before the first call


class Scratches:
    """All scratches of one rank.

    Attributes:
        comm: The KcclDeviceComm of the communicator's own calls.
    """

    def __init__(
        self,
        mesh: Connected,
        settings: Settings,
        memory: Memory,
        *,
        state: Any,
        polls_per_check: int,
        timeout: float,
        grid_counters: int | None = None,
    ) -> None:
        """Makes the scratch of the communicator's own calls. Collective.

        The caller must exchange with all ranks once more before any rank makes a call, because this
        rank prepares its slots after the last exchange here.

        Args:
            mesh: The ranks.
            settings: Sizes of that scratch.
            memory: The memory in which that scratch lies.
            state: The rank's KcclState, or its address, as kernels see it.
            polls_per_check: Polls between two reads of the clock.
            timeout: Seconds to wait for the other ranks.
            grid_counters: As in make_comm().
        """
        self._mesh = mesh
        self._settings = settings
        self._memory = memory
        self._state = state
        self._polls_per_check = polls_per_check
        self._grid_counters = grid_counters
        self._scratches: list[_Scratch] = []
        own = self._make(settings, "start-up", timeout)
        # This window begins with what the communicator has only once: abort words, failure records
        # and signals.
        self._window: Window | None = own.window
        self._states: list[Channels] = []
        self.comm = self._comm_of(settings, own)

    def comm_for_kernels(
        self, channels: int, max_bytes: int, exchange_bytes: int, timeout: float
    ) -> DeviceComm:
        """Returns a DeviceComm with a scratch of its own. Collective; see
        Backend.comm_for_kernels().
        """
        settings = replace(
            sizes_for_kernels(channels, max_bytes, exchange_bytes),
            epoch_bits=self._settings.epoch_bits,
        )
        # Peers may write into the scratch once this method has returned, so it waits until all
        # ranks are ready.
        with self._mesh.together("device_comm", timeout) as undo:
            same = {"channels": channels, "max_bytes": max_bytes, "exchange_bytes": exchange_bytes}
            agree_on_arguments(self._mesh, same, "device_comm", timeout)
            scratch = self._make(settings, "device_comm", timeout)
            undo.callback(self._scratches.remove, scratch)
            comm = self._comm_of(settings, scratch)
            data = bytes(ffi.buffer(comm))
            # The DeviceComm gets a weak reference to this object, so that it does not keep the
            # communicator alive.
            owner = weakref.ref(self)

            def is_open() -> bool:
                scratches = owner()
                return scratches is not None and not scratches.are_dropped

            return DeviceComm(comm.rank, comm.world_size, channels, max_bytes, data, is_open)

    def windows(self) -> list[Window]:
        """Returns the window of each scratch."""
        return [scratch.window for scratch in self._scratches]

    @property
    def are_dropped(self) -> bool:
        """Tells whether drop() was called."""
        return self._window is None

    def drop(self) -> None:
        """Drops the windows. Later calls do not use them, because they find an error in the status.

        The channels' states stay, because calls read them before the status.
        """
        self._states += [scratch.channels for scratch in self._scratches]
        self._scratches.clear()
        self._window = None

    def clear(self) -> None:
        """Resets all scratches to what they were before the first call. Called while all ranks are
        between calls.
        """
        for scratch in self._scratches:
            scratch.window.clear()
            self._memory.arm(scratch.window, scratch.sentinel)
            scratch.channels.clear()

    def _make(self, settings: Settings, what: str, timeout: float) -> _Scratch:
        layout = settings.layout(self._mesh.world_size)
        window = self._memory.window(layout["scratch_bytes"], what, timeout, layout)
        channels = self._memory.channels(settings.scratch_channels)
        scratch = _Scratch(window, channels, layout["sentinel"])
        self._memory.arm(window, scratch.sentinel)
        self._scratches.append(scratch)
        return scratch

    def _comm_of(self, settings: Settings, scratch: _Scratch) -> Any:
        assert self._window is not None
        return make_comm(
            settings,
            rank=self._mesh.rank,
            addresses=self._window.addresses,
            scratch=scratch.window.addresses,
            state=self._state,
            channels=scratch.channels.address,
            polls_per_check=self._polls_per_check,
            grid_counters=self._grid_counters,
        )
