"""A rank's KcclState on a GPU, as the host sees it.

The KcclState lies in device memory, where kernels read it in every call. The host has a copy, and
writes both. It writes the device's on a stream without kernels, so that a timeout can be changed
while a kernel runs. It reads its own copy, after it has checked the mailbox, in which the device
reports a failure.
"""

import os
from typing import Any

from ..base.abi import ffi, lib
from . import driver
from .memory import Memory, shared_stream


class DeviceState:
    """The fields of KcclState that the host uses. An assignment writes to the device at once.

    Attributes:
        address: The address of the device's KcclState.
        host: The host's copy, a KcclState.
        mailbox: The KcclMailbox, which device and host share.
        queue: The KcclGpuQueue by which calls are launched.
    """

    def __init__(self, device: driver.Device, context: Any, *, has_dependents: bool) -> None:
        """Makes a state of zeros.

        Args:
            device: The device that has the memory.
            context: KcclHostContext of this rank.
            has_dependents: True if calls may be launched as programmatic dependents.
        """
        self._device = device
        self._writes = shared_stream(device, "writes")
        self._pid = os.getpid()
        fills = shared_stream(device, "fills")
        self._memory = Memory(device, ffi.sizeof("KcclState"), fills)
        self._mail = Memory(device, ffi.sizeof("KcclMailbox"), fills, on_host=True)
        self.address = self._memory.address
        self.mailbox = ffi.cast("KcclMailbox *", self._mail.address)
        self.host = ffi.new("KcclState *")
        self.host.idle_context = int(ffi.cast("uintptr_t", context))
        self.queue = _new_queue(device, has_dependents=has_dependents)
        self.queue.state = self.address
        self.queue.mailbox = self.mailbox
        self._write_all()

    @property
    def status(self) -> int:
        """Returns the host's own KcclStatus if it is not ok, else what the device has reported."""
        return int(lib.kccl_gpu_hear(self.queue, self.host))

    @status.setter
    def status(self, value: int) -> None:
        self._set("status", value)

    @property
    def record(self) -> Any:
        """Returns the host's copy of the KcclRecord that tells why the status is not ok."""
        return self.host.record

    @property
    def contacted(self) -> bool:
        """Returns False always, because only the device knows whether a call has completed."""
        return False

    @property
    def limit_ns(self) -> int:
        """Returns the timeout of one wait, in nanoseconds."""
        return int(self.host.limit_ns)

    @limit_ns.setter
    def limit_ns(self, value: int) -> None:
        self._set("limit_ns", value)

    @property
    def first_limit_ns(self) -> int:
        """Returns the timeout of one wait, in nanoseconds, until the first call has completed."""
        return int(self.host.first_limit_ns)

    @first_limit_ns.setter
    def first_limit_ns(self, value: int) -> None:
        self._set("first_limit_ns", value)

    def fail(self, record: Any) -> None:
        """Fails this rank with a KcclRecord, unless it has failed already."""
        if self.status != lib.kKcclOk:
            return
        self.host.record = record[0]
        self._copy("record")
        self.status = record.status

    def clear(self) -> None:
        """Forgets everything except the timeouts. Called while no kernel runs."""
        fresh = ffi.new("KcclState *")
        for kept in ("limit_ns", "first_limit_ns", "idle_context"):
            setattr(fresh, kept, getattr(self.host, kept))
        ffi.memmove(self.host, fresh, ffi.sizeof("KcclState"))
        # mailbox.gone (the peers that have ended) keeps its value: a process that has ended does
        # not come back.
        self.mailbox.status = self.mailbox.interrupted = 0
        self._write_all()

    def write(self, address: int, data: bytes) -> None:
        """Writes to device memory, this rank's or a peer's, on the stream for writes."""
        # A forked child of the process has no context of the driver, and must not write.
        if os.getpid() == self._pid:
            with self._device.current():
                driver.write(address, data, self._writes)

    def _set(self, name: str, value: int) -> None:
        setattr(self.host, name, value)
        self._copy(name)

    def _copy(self, name: str) -> None:
        field = ffi.addressof(self.host, name)
        offset = ffi.offsetof("KcclState", name)
        num_bytes = ffi.sizeof(ffi.typeof(field).item)
        self.write(self.address + offset, bytes(ffi.buffer(field, num_bytes)))

    def _write_all(self) -> None:
        device = ffi.new("KcclState *", self.host[0])
        device.idle_context = self._mail.address
        self.write(self.address, bytes(ffi.buffer(device)))


def _new_queue(device: driver.Device, *, has_dependents: bool) -> Any:
    """Returns a KcclGpuQueue with the addresses of the driver's functions."""
    gpu = driver.table()
    queue = ffi.new("KcclGpuQueue *")
    queue.context = device.context
    for field, name in gpu.queue.items():
        setattr(queue, field, gpu.function_address(name))
    if has_dependents and gpu.launches_dependents(device.ordinal):
        for field, name in gpu.dependents_queue.items():
            setattr(queue, field, gpu.function_address(name, gpu.dependents_version))
    return queue
