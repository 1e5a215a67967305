"""The facts about a kernel (KernelSpec), and the facts about a call on which the choice depends
(Request).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ..base import dtypes
from ..base.dtypes import Dtype

# The largest launch of a call on a GPU. No GPU has blocks of more threads.
MOST_BLOCKS, MOST_THREADS = 128, 1024
SHARE_UNIT_BYTES = 16  # the unit of KcclCall.share, see payload.cuh

PARTS = "_parts"
"""The end of the names of kernels whose calls have parts of different lengths."""

GPUS = ("sim", "cuda", "hip")
EVERYWHERE = ("host", *GPUS)


class Counts(Enum):
    """The unit of KcclCall.count in a call of a kernel. On the host kccl_host_bind() turns elements
    into bytes (csrc/host/api.inc).
    """

    ELEMENTS = "elements of the message"
    CHUNK_ELEMENTS = "elements of one rank's chunk of the message"
    BYTES = "bytes of the message"
    CHUNK_BYTES = "bytes of one rank's chunk of the message"
    EVENTS = "signals or syncs, which move no data"


@dataclass(frozen=True)
class Request:
    """A call to be run, as far as the choice of an algorithm depends on it.

    Attributes:
        collective: Name of the collective, as in "all_reduce".
        nbytes: Message size as nccl-tests counts it: the larger of a rank's two arrays.
        world_size: Number of ranks.
        backend: "host", "sim", "cuda" or "hip".
        dtype: Element type; None for barrier.
        can_attach: True if every rank's process may read every other's memory.
    """

    collective: str
    nbytes: int
    world_size: int
    backend: str
    dtype: Dtype | None = None
    can_attach: bool = True


Condition = Callable[[Request], str | None]
"""Returns why a kernel cannot run a request, or None when it can."""


def needs_peers(request: Request) -> str | None:
    """A Condition for algorithms that divide the work among ranks: refuses a single rank."""
    return "one rank has no peer to share the work with" if request.world_size == 1 else None


def needs_floats(request: Request) -> str | None:
    """A Condition for protocols in which NaN marks a word that has not arrived: refuses types
    without NaN.
    """
    if request.dtype is None or request.dtype.has_nan:
        return None
    return f"{request.dtype.name} has no bit pattern to spare for words that have not arrived"


def needs_attach(request: Request) -> str | None:
    """A Condition for kernels that read other ranks' memory: refuses ranks that may not read it."""
    if request.can_attach:
        return None
    return "the ranks' processes may not read each other's memory (process_vm_readv)"


@dataclass(frozen=True)
class KernelSpec:
    """The facts about one kernel of the library. They are written in specs.py and nowhere else.

    Attributes:
        collective: The collective that it runs, as in "all_reduce". A kernel without alternatives,
            as "put" or "grid_sync", has its own name here.
        algorithm: Its algorithm, as in "two_shot"; "" for a kernel without alternatives.
        protocol: Its protocol, as in "ll16"; "" where the algorithm's name says it.
        moves: One line for people: which data goes where.
        counts: The unit of KcclCall.count.
        takes: What KcclCall.peer says: "root"; "exclusive", which is 1 or 0; or "" for nothing that
            the ranks of a collective must agree on.
        bytes_per_thread: On GPUs, payload bytes that one thread moves at a time. 0: the kernel runs
            in one block, whose size `one_block` gives.
        one_block: On GPUs, the size of that block: one warp where only words move, or the largest
            block where the length of the data is not known when the call is planned.
        targets: Backends that may choose the kernel.
        needs: Conditions on a request.
        unrolls_for_two: True if the host has a second instance, with loops over ranks unrolled for
            two ranks. This pays where instructions cost more than waiting.
        takes_type: Tells whether the kernel takes an element type. Only kernels without
            alternatives that compute have it.
        takes_rows: True if a call has rows of KcclCall.width elements, and a block takes whole
            rows.
        waits: False if the kernel waits for no other rank, so that it ends by itself.
    """

    collective: str
    algorithm: str = ""
    protocol: str = ""
    moves: str = ""
    counts: Counts = Counts.EVENTS
    takes: Literal["", "root", "exclusive"] = ""
    bytes_per_thread: int = 0
    one_block: Literal["warp", "full"] = "warp"
    targets: tuple[str, ...] = EVERYWHERE
    needs: tuple[Condition, ...] = ()
    unrolls_for_two: bool = False
    takes_type: Callable[[Dtype], bool] | None = None
    takes_rows: bool = False
    waits: bool = True

    @property
    def name(self) -> str:
        """Returns the name of the kernel, its file, its benchmark rows and its lines of tuning
        tables.
        """
        return "_".join(filter(None, (self.collective, self.algorithm, self.protocol)))

    @property
    def constant(self) -> str:
        """Returns the kernel's member of KcclKernel in abi.inc."""
        return "kKccl" + "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def is_collective(self) -> bool:
        """Tells whether plans choose the kernel for a collective, or it makes calls with parts of
        different lengths.

        It is False for all_reduce_rms_norm, although all ranks make its calls together.
        """
        return bool(self.algorithm) or self.name.endswith(PARTS)

    @property
    def only_moves(self) -> bool:
        """Tells whether the kernel only moves data, so that it takes any type."""
        return self.counts in (Counts.BYTES, Counts.CHUNK_BYTES)

    def why_not(self, request: Request) -> str | None:
        """Returns why the kernel cannot run a request; None if it can."""
        if request.backend not in self.targets:
            return f"for {' and '.join(self.targets)} only"
        return next(filter(None, (condition(request) for condition in self.needs)), None)

    def peer_bytes(self, count: int, dtype: str) -> int:
        """Returns the bytes that a call sends to one peer. The threads of the rank divide them.

        Args:
            count: KcclCall.count.
            dtype: Name of the element type; unused by kernels that count bytes.
        """
        match self.counts:
            case Counts.ELEMENTS | Counts.CHUNK_ELEMENTS:
                return count * dtypes.of(dtype).itemsize
            case Counts.BYTES | Counts.CHUNK_BYTES:
                return count
        return 0

    def share(self, count: int, dtype: str, blocks: int) -> int:
        """Returns the KcclCall.share for a call of `blocks` blocks; other arguments as in
        peer_bytes().
        """
        units = -(-self.peer_bytes(count, dtype) // SHARE_UNIT_BYTES)
        return -(-units // blocks) if blocks > 1 else 0

    def message_bytes(self, count: int, dtype: str, world_size: int) -> int:
        """Returns the bytes of a call's message; arguments as in peer_bytes()."""
        is_chunk = self.counts in (Counts.CHUNK_ELEMENTS, Counts.CHUNK_BYTES)
        return self.peer_bytes(count, dtype) * (world_size if is_chunk else 1)
