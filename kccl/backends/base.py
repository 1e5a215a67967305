"""The interface of a backend: what a communicator needs of the machine it runs on.

host.py, sim.py and gpu.py implement the interface. None of them inherits from another. What some
of them share is in files of its own, as in on_gpu.py, scratch.py and host_memory.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..base.arrays import ArrayView
from ..base.errors import Error
from ..base.strided import Copied
from ..plan.grouping import Grouping
from ..ranks.mesh import Mesh
from ..ranks.windows import Window
from .device_comm import DeviceComm
from .settings import Settings


class Backend(ABC):
    """One rank's memory and calls.

    Attributes:
        name: "host", "sim", "cuda" or "hip".
        state: The rank's KcclState, or an object with its fields.
        context: The rank's KcclHostContext.
        can_attach: True if every rank's process may read every other's memory.
        has_streams: True if calls are enqueued on a stream and return before they have run.
        has_virtual_time: True if timeouts of waits in calls count simulated time.
        caveat: What the survivors must know if a peer is lost; "" for nothing.
        longest_row: Bytes of the longest row that the kernel all_reduce_rms_norm takes; 0 if the
            backend has no such kernel.
        grouping: The groups of the ranks, if they are more than one team can have or are on several
            nodes; else None. With groups, GroupedBackend.chain() makes the calls.
    """

    grouping: Grouping | None = None
    longest_row: int = 0
    name: str
    state: Any
    context: Any
    can_attach: bool
    has_streams: bool
    has_virtual_time: bool
    caveat: str

    # ---- Memory ------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int, timeout: float) -> Window:
        """Returns a window for the caller. Collective."""

    @abstractmethod
    def comm_for_kernels(
        self, channels: int, max_bytes: int, exchange_bytes: int, timeout: float
    ) -> DeviceComm:
        """Returns the DeviceComm by which a user's kernel reaches its peers. Collective.

        Args:
            channels: How many coops make calls.
            max_bytes: Most bytes in the message of one coop.
            exchange_bytes: Most bytes of all slices in publish() and collect() together.
            timeout: Seconds to wait for the other ranks.
        """

    @abstractmethod
    def temporary(self, nbytes: int, channel: int) -> int:
        """Returns the address of memory that the kernels of a channel's calls pass data through.

        All calls of a channel use the same memory. drop_memory() frees it, unless has_streams is
        true: then it stays as long as the backend, because graphs may still use it.
        """

    @abstractmethod
    def answers(self, nbytes: int) -> tuple[int, Any]:
        """Allocates memory of zeros that kernels write and this process reads. Returns its address
        and its owner. Only for backends on which messages are calls of send_recv.
        """

    @abstractmethod
    def view(self, array: Any, name: str, *, writable: bool) -> ArrayView:
        """Returns the view of a caller's array, which must be in memory that this backend's calls
        use.

        Args:
            array: The array.
            name: What the caller calls it, for error messages.
            writable: Whether it will be written.

        Raises:
            InvalidArgument: A call cannot use the array.
        """

    @abstractmethod
    def array(self, window: Window, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns this rank's part of a window, from its beginning, as an array."""

    @abstractmethod
    def like(self, array: Any, view: ArrayView, shape: tuple[int, ...]) -> Any:
        """Returns a new array for a call's result: of the library and type of `array`, whose view
        is given.

        Raises:
            InvalidArgument: The backend cannot make arrays of this library.
        """

    @abstractmethod
    def copied(self, given: Mapping[str, Any], name: str, *, is_written: bool) -> Copied | None:
        """Returns a C-contiguous copy of an array, which a call uses in its place.

        Args:
            given: The call's arguments, as its caller gave them.
            name: The one of which view() said NotContiguous.
            is_written: True if the call writes it, so that the copy will be copied back.

        Returns:
            The copy; None if the array's library makes no copies here.

        Raises:
            InvalidArgument: The call writes the array, and elements of it share memory. Or it
                overlaps another array of the call.
        """

    # ---- Streams -----------------------------------------------------------------------------

    @abstractmethod
    def stream(self, given: Any, view: ArrayView | None, others: Sequence[ArrayView] = ()) -> int:
        """Returns the stream for one call, and makes it wait for what libraries still compute in
        the call's arrays, unless the caller must do that.

        Args:
            given: The stream that the caller gave; None for the current stream of the array's
                library.
            view: The view of the call's first array; None if the call has no array.
            others: The views of its other inputs.

        Raises:
            InvalidArgument: `given` is no stream of this backend.
        """

    @abstractmethod
    def set_stream(self, handle: Any, stream: int) -> None:
        """Sets the stream of the next run of `handle`, which call() returned."""

    @abstractmethod
    def is_captured(self, stream: int) -> bool:
        """Tells whether a stream, which stream() returned, is being captured into a graph. Only
        for backends on which messages are calls of send_recv.
        """

    @abstractmethod
    def stream_of_prepared(self, given: Any, view: ArrayView | None) -> int | Callable[[], int]:
        """Returns the stream of a prepared call: a number, or a function that returns it before
        each run.

        Called only if has_streams is true, like as_graph() and intervals_us().
        """

    @abstractmethod
    def as_graph(self, handle: Any) -> Any:
        """Makes a graph of a call, which call() returned, so that further runs cost the host less.

        Returns:
            An object to keep as long as the call. None if the call is several kernels, which get no
            graph.
        """

    @abstractmethod
    def intervals_us(self, stream: int, parts: Sequence[Callable[[], None]]) -> list[float]:
        """Calls each of `parts`, and returns the microseconds that the stream takes for what each
        one enqueues. Waits until the last one's work has ended.
        """

    # ---- Calls -------------------------------------------------------------------------------

    @abstractmethod
    def call(
        self,
        kernel: str,
        shape: tuple[int, int] = (0, 0),
        *,
        dtype: str = "float32",
        op: str = "sum",
        **fields: int,
    ) -> Any:
        """Returns a KcclHostOp for one of the library's kernels.

        The caller keeps it alive as long as its address is in use.

        Args:
            kernel: Its name.
            shape: The most blocks, and the threads of a block, which check_shape() has passed. For
                a 0 the backend chooses. If the message needs more threads than these blocks have,
                each block gets more.
            dtype, op: Names of the element type and the operator.
            fields: KcclCall's other fields.
        """

    @abstractmethod
    def check_shape(self, blocks: Any, threads: Any) -> None:
        """Checks the shape that a caller gave for a call; see call().

        Raises:
            InvalidArgument: Calls of this backend cannot have this shape.
        """

    @abstractmethod
    def shape_of(self, handle: Any) -> tuple[int, int]:
        """Returns the blocks of a call, which call() returned, and the threads of each. Only if
        has_streams is true.
        """

    @abstractmethod
    def launch(
        self,
        kernel: Any,
        data: bytes,
        *,
        grid: int,
        block: int,
        shared_bytes: int,
        stream: int,
        arrays: Sequence[tuple[int, int, int, Any]] = (),
    ) -> None:
        """Runs a user's kernel to its end, or enqueues it if has_streams is true.

        Args:
            kernel: A module.Kernel that is compiled for this backend.
            data: Its arguments, as Kernel.pack() lays them out.
            grid, block: Number of blocks, and threads of each.
            shared_bytes: Dynamic shared memory of each block.
            stream: What stream() returned.
            arrays: (position among the arguments, address, bytes, the array) of each array.

        Raises:
            InvalidArgument: The kernel cannot run in this shape, or on this device.
        """

    # ---- Failure, recovery, end --------------------------------------------------------------

    @abstractmethod
    def failure(self) -> Error | None:
        """Returns an error of the backend itself, as a refused launch; None if there is none."""

    @abstractmethod
    def simulated_waits(self) -> str | None:
        """Returns who waits for what, for the text of a time-out; None if waits take real time."""

    @abstractmethod
    def abort(self) -> None:
        """Makes this rank's calls fail, and peers' waits for this rank, those of now and later
        ones. Any thread may call it.
        """

    @abstractmethod
    def leave(self) -> None:
        """Tells the peers that this rank makes no more calls. Called once, at the end.

        Raises:
            Timeout: The device's kernels did not end in time. Only if has_streams is true.
        """

    @abstractmethod
    def drop_memory(self) -> None:
        """Frees at once the memory that can be freed before the backend is garbage-collected.

        Called after leave(), with the status closed, while no call of this rank is running.
        """

    @abstractmethod
    def load(self, kernel: Any) -> None:
        """Loads a module.Kernel on this rank's device, before its arguments are packed.

        Raises:
            InvalidArgument: The kernel was compiled for another GPU.
            BackendError: The driver refused the kernel.
        """

    @abstractmethod
    def wait_for_calls(self, what: str) -> None:
        """Waits until no call of this rank is running.

        In reset() the status is an error, so running calls end soon. Until they end, a kernel may
        still write to its peers.

        Args:
            what: The call that waits, as in "reset()".

        Raises:
            Timeout: The device's kernels did not end in time. Only if has_streams is true.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forgets all calls, signals and failures of this rank. Called while all ranks are between
        calls.
        """


class Opener(Protocol):
    """Makes the backends of one rank, for its communicator and for those that are split off.

    Attributes:
        name: The name of the backends.
        most_ranks: Most ranks of a communicator.
        spans_nodes: True if ranks may be on several nodes.
    """

    @property
    def name(self) -> str: ...

    @property
    def most_ranks(self) -> int: ...

    @property
    def spans_nodes(self) -> bool: ...

    def settings(self, epoch_bits: int) -> Settings:
        """Returns the sizes that suit these backends."""

    def __call__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> Backend:
        """Returns a backend with the window of the library's own calls. Collective.

        Args:
            mesh: The ranks.
            settings: Sizes; the same on all ranks.
            shares_cores: True if there are more ranks than cores.
            are_threads: True if the ranks are threads of this process.
            timeout: Seconds to wait for the other ranks here.
        """
