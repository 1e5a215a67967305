"""Tells the peers of a rank on a GPU that it makes no more calls."""

import os
from contextlib import suppress
from functools import partial
from typing import Any

from ..base import abi
from ..base.abi import ffi, lib
from ..base.errors import BackendError
from ..gpu import driver, release
from ..gpu.state import DeviceState
from .scratch import Scratches


def depart(comm: Any, state: DeviceState, departure: int, record: bytes = b"") -> None:
    """Writes a rank's KcclDeparture, and its record, into every peer's window.

    Args:
        comm: The KcclDeviceComm of the rank's own calls.
        state: The rank's KcclState.
        departure: A number of KcclDeparture.
        record: The bytes of a KcclRecord; b"" to write none.
    """
    layout, rank = comm.layout, comm.rank
    for peer in range(comm.world_size):
        if peer == rank:
            continue
        base = comm.window[peer]
        if record:
            state.write(base + layout.records + rank * abi.LINE_BYTES, record)
        word = departure.to_bytes(ffi.sizeof("uint32_t"), "little")
        state.write(base + layout.abort + rank * len(word), word)


def leave_when_collected(
    backend: object, device: driver.Device, state: DeviceState, scratches: Scratches
) -> None:
    """Makes a backend that is dropped without leave() tell its peers, when it is garbage-collected.

    The finalizer does what leave() does, but in the thread that releases memory, where it may wait
    for the device: at most for the timeout in `state`.
    """
    leave = partial(_leave, device, state, scratches, os.getpid())
    release.later(backend, device, leave)


def _leave(device: driver.Device, state: DeviceState, scratches: Scratches, pid: int) -> None:
    # A rank that has left or given up has told its peers already.
    if os.getpid() != pid or state.status != lib.kKcclOk:
        return
    # Errors of this wait are ignored: the peers are told even if the device's work has failed or
    # does not end in time.
    with suppress(BackendError):
        driver.synchronize_within(device, state.limit_ns / 1e9)
    with device.current():
        if state.status == lib.kKcclOk:
            depart(scratches.comm, state, lib.kKcclLeft)
