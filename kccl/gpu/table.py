"""The interface of a vendor's driver: the shape of the tables that cuda.py and hip.py fill.

All other modules of kccl use neutral names: a function is an attribute of Names, and what vendors
do in different ways is a method of Table. Launches in C (csrc/host/gpu.cpp) take the functions by
their addresses.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ..base.errors import BackendError
from ..jit.rtc import RuntimeCompiler


class DriverError(BackendError):
    """Raised when a function of the driver has failed.

    Attributes:
        code: The error code that the function returned.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Names:
    """The driver's names of its functions, with the arguments and results that each must have.

    A function returns its error code and then its results. Handles are integers or objects that
    int() takes.
    """

    driver_version: str  # () -> int

    # Devices. A context is what Table.open_device() returned.
    num_devices: str  # () -> int
    current_ordinal: str  # () -> int, when this thread has a current device
    can_access: str  # (ordinal, ordinal of the memory) -> int
    enable_access: str  # (context of the memory's device, 0), for accesses by the current device
    synchronize_device: str  # ()

    # Streams and copies
    create_stream: str  # (flags) -> stream
    synchronize_stream: str  # (stream)
    query_stream: str  # (stream), see not_ready
    destroy_stream: str  # (stream)
    copy_on_device: str  # (to, from, bytes, stream)
    copy_to_device: str  # (to, buffer, bytes, stream)
    copy_to_host: str  # (buffer, from, bytes, stream)
    fill: str  # (address, byte, bytes, stream)
    create_event: str  # (0) -> event
    record_event: str  # (event, stream)
    synchronize_event: str  # (event)
    elapsed_ms: str  # (begin, end) -> float
    query_event: str  # (event), see not_ready
    destroy_event: str  # (event)

    # Kernels
    resident_blocks: str  # (function, threads, shared bytes) -> int, of one multiprocessor
    # (function, grid x, y, z, block x, y, z, shared bytes, stream, addresses of arguments, 0)
    launch: str
    launch_cooperative: str  # the arguments of `launch` without the last one; "": is not used

    # Graphs
    begin_capture: str  # (stream, Table.capture_mode)
    end_capture: str  # (stream) -> graph
    launch_graph: str  # (what can be launched, stream)
    create_graph: str  # (0) -> graph
    add_kernel_node: str  # (graph, None, 0, what Table.kernel_node() returned) -> node
    instantiate_graph: str  # (graph, 0) -> what can be launched
    destroy_graph: str  # (graph)
    destroy_instance: str  # (what can be launched)

    # Memory
    free: str  # (address)
    allocate_on_host: str  # (bytes, flags) -> address
    free_on_host: str  # (address)
    close_handle: str  # (address that Table.open_handle() returned)

    # Memory with a mapping of its own
    create_memory: str  # (bytes, what Table.memory_kind() returned, 0) -> memory
    release_memory: str  # (memory)
    reserve_addresses: str  # (bytes, alignment, 0, 0) -> address
    free_addresses: str  # (address, bytes)
    map_memory: str  # (address, bytes, 0, memory, 0)
    unmap_memory: str  # (address, bytes)


class Table(ABC):
    """One vendor's driver.

    Attributes:
        backend: The name of the backend on these GPUs.
        vendor: The vendor of the GPUs, for error messages.
        names: The names of functions.
        errors: The binding's enumeration of error codes.
        out_of_memory: The error code of an allocation.
        not_ready: The error code of query_stream for a stream that has work left, and of
            query_event for an event that has not happened.
        is_accessible: The error code of enable_access for memory that is accessible already.
        stream_flags: The flags of a stream that does not wait for the default stream.
        capture_mode: The mode of a capture that forbids this thread's calls only.
        legacy_stream: The default stream of each device. It and the blocking streams wait for each
            other.
        host_flags: The flags of host memory that all devices map at the host's address.
        multiprocessors, shared_bytes, maps_memory, exports_memory: Names for attribute(), of these
            facts: the number of multiprocessors, the most shared memory of a block, whether there
            is memory with a mapping of its own, whether a file descriptor can export that memory.
        warp_size: Threads of a warp.
        bus_parts: Attributes of a device that make up its PCI address: domain, bus and device.
        dlpack_type: DLPack's number for this vendor's GPUs.
        queue: Field of KcclGpuQueue -> the function whose address it holds.
        dependents_queue: Field of KcclGpuQueue for programmatic dependents -> its function.
        dependents_version: The version of the driver whose functions these are.
        visible_devices: The environment variable that hides devices.
        handles: What the driver's handles for other processes are called, for messages.
        paths: The paths between GPUs that suffice, for messages.
        needs: What the backend needs on a machine, for messages.
        compiler: Compiles for these GPUs at run time.
    """

    backend: str
    vendor: str
    names: Names
    errors: str
    out_of_memory: int
    not_ready: int
    is_accessible: int
    stream_flags: int
    capture_mode: str
    legacy_stream: int
    host_flags: int
    multiprocessors: str
    shared_bytes: str
    maps_memory: str
    exports_memory: str
    warp_size: int
    bus_parts: tuple[str, str, str]
    dlpack_type: int
    queue: ClassVar[Mapping[str, str]]
    dependents_queue: ClassVar[Mapping[str, str]]
    dependents_version: int
    visible_devices: str
    handles: str
    paths: str
    needs: str
    compiler: RuntimeCompiler

    @property
    @abstractmethod
    def cure(self) -> str:
        """Returns what the user can do if the GPUs, the driver or its binding are missing."""

    # ---- Functions by the driver's own names -------------------------------------------------

    @abstractmethod
    def load(self) -> Any:
        """Returns the driver's binding, initialized: functions and constants are its attributes.

        Raises:
            BackendError: The binding or the driver is missing.
        """

    @cached_property
    def binding(self) -> Any:
        """Returns the result of load(), once it has succeeded."""
        return self.load()

    def call(self, name: str, *args: Any, note: str = "") -> Any:
        """Calls a function of the driver.

        Args:
            name: The name of the function.
            *args: Its arguments, in the order of the binding.
            note: A text for the error message: the argument that matters.

        Returns:
            None, its result, or a tuple of its results.

        Raises:
            BackendError: The function failed, or there is no driver.
        """
        code, *results = self._made(name, args)
        if int(code) != 0:
            raise DriverError(self.error_text(name, int(code), note), int(code))
        return results[0] if len(results) == 1 else tuple(results) or None

    def attempt(self, name: str, *args: Any) -> int:
        """Calls a function of the driver that has no results; returns its error code."""
        return int(self._made(name, args)[0])

    def _made(self, name: str, args: Sequence[Any]) -> Any:
        """Returns what the binding's function returned."""
        function = getattr(self.binding, name)
        try:
            return function(*args)
        except RuntimeError as error:
            # Bindings look a function up at its first call, and raise this if the driver lacks it.
            raise BackendError(f"{name} cannot be called: {error}") from error

    def error_text(self, name: str, code: int, note: str = "") -> str:
        """Returns the error message for function `name` and its error code."""
        known = {int(each): each.name for each in getattr(self.binding, self.errors)}
        return f"{name} failed: {known.get(code, 'unknown error')} ({code}){note and ' ' + note}"

    def constant(self, name: str) -> Any:
        """Returns a constant, a member of an enumeration ("Enumeration.MEMBER") or a type by its
        name.
        """
        owner, _, member = name.partition(".")
        found = getattr(self.binding, owner)
        return getattr(found, member) if member else found

    @abstractmethod
    def function_address(self, name: str, version: int = 0) -> int:
        """Returns the address of a function, for callers in C.

        Args:
            name: The name of the function.
            version: The version of the driver's interface that callers know; 0 for the driver's
                own.
        """

    # ---- Devices -----------------------------------------------------------------------------

    @abstractmethod
    def attribute(self, ordinal: int, name: str) -> int:
        """Returns an attribute of a device by the driver's name."""

    @abstractmethod
    def device_name(self, ordinal: int) -> str:
        """Returns the product's name.

        Raises:
            DriverError: There is no such device.
        """

    @abstractmethod
    def device_uuid(self, ordinal: int) -> str:
        """Returns an identifier of a device that is the same in every process."""

    @abstractmethod
    def device_arch(self, ordinal: int) -> str:
        """Returns the architecture to compile for, as in "sm_90a".

        Raises:
            BackendError: The device is too old.
        """

    @abstractmethod
    def arch_for(self, arch: str) -> str:
        """Returns the name of `arch` that has all features of its GPUs, as "sm_90a" for "sm_90". If
        there is no other name, returns `arch`.
        """

    @abstractmethod
    def open_device(self, ordinal: int) -> int:
        """Returns the context of a device, which lives as long as the process."""

    @abstractmethod
    def push(self, context: int) -> None:
        """Makes a device current in this thread, until pop()."""

    @abstractmethod
    def pop(self) -> None:
        """Makes the device current that was current before the last push()."""

    @abstractmethod
    def has_current(self) -> bool:
        """Tells whether the program has made a device current in this thread."""

    @abstractmethod
    def device_of(self, address: int) -> int:
        """Returns the number of the device whose memory holds an address.

        Raises:
            DriverError: The address is in no device's memory.
        """

    # ---- Kernels -----------------------------------------------------------------------------

    @abstractmethod
    def load_code(
        self, code: bytes, names: Sequence[str]
    ) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """Loads compiled code on the current device, where it stays until the process ends.

        It may wait for the kernels that run on that device, and for no others. The functions are
        loaded in full, so a launch loads nothing more.

        Returns:
            The function of each name, and (offset, bytes) of each of its parameters.
        """

    @abstractmethod
    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        """Lets launches of a function have `num_bytes` of dynamic shared memory.

        Raises:
            DriverError: A block cannot have so much on the device.
        """

    @abstractmethod
    def function_attribute(self, function: int, name: str) -> int:
        """Returns an attribute of a function by the driver's name, as in "NUM_REGS"."""

    def max_threads(self, function: int) -> int:
        """Returns the most threads that a block may have, by the registers the function uses."""
        return self.function_attribute(function, "MAX_THREADS_PER_BLOCK")

    @abstractmethod
    def kernel_node(self, function: int, *, grid: int, block: int, arguments: int) -> Any:
        """Returns the parameters of a graph's kernel node. `arguments` is the address of an array
        of the arguments' addresses.
        """

    @abstractmethod
    def launches_dependents(self, ordinal: int) -> bool:
        """Tells whether a captured kernel may be the programmatic dependent of the one before
        it.
        """

    @abstractmethod
    def relax_captures(self) -> Any:
        """Lets this thread make calls that captures forbid. Returns the value for
        restore_captures().
        """

    @abstractmethod
    def restore_captures(self, before: Any) -> None:
        """Ends what relax_captures() began."""

    # ---- Memory of the current device --------------------------------------------------------

    @abstractmethod
    def allocate(self, num_bytes: int, note: str) -> int:
        """Allocates memory that peers may write while kernels poll it; `note` as in call()."""

    @abstractmethod
    def export_handle(self, address: int) -> bytes:
        """Returns the IPC handle of allocated memory."""

    @abstractmethod
    def open_handle(self, handle: bytes, note: str) -> int:
        """Maps the memory that another process exported; `note` as in call()."""

    @abstractmethod
    def memory_kind(self, ordinal: int) -> Any:
        """Returns the properties of exportable memory of a device with a mapping of its own."""

    @abstractmethod
    def memory_unit(self, kind: Any) -> int:
        """Returns the unit in bytes of which sizes of such memory must be multiples."""

    @abstractmethod
    def allow_access(
        self, address: int, num_bytes: int, ordinals: Sequence[int], note: str
    ) -> None:
        """Lets devices read and write mapped memory; `note` as in call()."""

    @abstractmethod
    def export_memory(self, memory: Any) -> int:
        """Returns a file descriptor of the memory. The caller must close it."""

    @abstractmethod
    def import_memory(self, fd: int, note: str) -> Any:
        """Returns the memory that was exported as a file descriptor. The caller still must close
        the descriptor. `note` is as in call().
        """
