"""Makes the exception for the status of a communicator, and its text.

csrc/include/kccl/record.hpp says the same in C++ programs without Python.
"""

import os
from typing import Any

from . import abi
from .abi import kernel_name, lib
from .errors import BackendError, Error, InvalidArgument, PeerLost, Timeout, WaitFailed

AFTER_RESET = "all ranks may go on after comm.reset()"
"""The end of an error's text if no rank is lost."""
WITH_SHRINK = "the survivors may go on with comm.shrink()"
"""The end of an error's text if a rank is lost."""
_OF_TEAM = "; these are steps of their calls, and a root is numbered within a team"
_WITH_ENGINE = "open a new Engine"


def unfinished_reset(rank: int) -> Timeout:
    """Returns the exception for a call made after a reset() that failed and before one that
    succeeds.
    """
    return Timeout(
        f"reset() has begun on rank {rank} and is not complete: call it again before other calls",
        rank=rank,
        collective="reset",
    )


def error_of(
    status: int,
    record: Any,
    rank: int,
    caveat: str = "",
    *,
    simulated: str | None = None,
    has_teams: bool = False,
) -> Error:
    """Returns the exception for a communicator's status.

    Args:
        status: A KcclStatus other than ok.
        record: The KcclRecord that was written with the status.
        rank: The rank that raises.
        caveat: A note for the survivors of a lost peer, added to the text; "" for none.
        simulated: On the simulator, who waited for what, added to the text of a timeout. None if
            waits take real time.
        has_teams: True if calls are lists of steps made with teams, so that a record tells of one
            step.
    """
    caveat = f"; {caveat}" if caveat else ""
    if status == lib.kKcclForked:
        return Error(
            f"this process is a fork of rank {rank}'s process; only that process may use the "
            "communicator (start ranks with `kccl run`, mpirun or kccl.run_threads)"
        )
    if status == lib.kKcclClosed:
        return Error(f"the communicator is closed on rank {rank}")
    if record.status == lib.kKcclOk:
        return Error(
            f"the communicator cannot be used on rank {rank} until the reset() that has begun "
            "succeeds; call comm.reset() again, or comm.shrink()"
        )
    if record.status == lib.kKcclAborted:
        return PeerLost(
            f"rank {record.rank} gave up outside of a call: an exception ended its program, or it "
            f"called shrink(); {WITH_SHRINK}{caveat}",
            rank=record.rank,
            peer=record.peer,
        )
    if record.status == lib.kKcclCallsDiffer:
        own, peers = record.call, record.waited_ns
        parts = (lib.kKcclAllToAllParts, lib.kKcclReduceScatterParts)
        if own == peers and own >> 24 in parts:
            return InvalidArgument(
                f"{kernel_name(own >> 24)}: rank {record.rank} expects {record.seen} bytes of rank "
                f"{record.peer}, which sends it {record.wanted}: the counts on both ranks must "
                f"agree; {AFTER_RESET}"
            )
        is_posted = _is_posted(own >> 24)
        if is_posted and own == peers and record.seen == record.wanted:
            return InvalidArgument(
                f"the ranks disagree about a call on channel {record.channel} before this one: "
                f"rank {record.rank} and rank {record.peer} now make {_call(own, record.seen)}, "
                f"but have made different calls before it; KCCL_CHECK=1 names these; {AFTER_RESET}"
            )
        # The note on teams is left out for a message, which is no step, and a posted call, which
        # has no team.
        of_team = has_teams and own >> 24 != lib.kKcclRecv and not is_posted
        return InvalidArgument(
            f"the ranks disagree about this call: rank {record.rank}: {_call(own, record.seen)}; "
            f"rank {record.peer}: {_call(peers, record.wanted)}{_OF_TEAM * of_team}; "
            f"{AFTER_RESET}"
        )
    is_ring = record.kernel == lib.kKcclNumKernels
    is_step = record.kernel == lib.kKcclEngineStep
    name = "a ring of copies" if is_ring else "decoding"
    if record.kernel >= lib.kKcclNodesKernel:
        number = record.kernel - lib.kKcclNodesKernel
        name = f"{[*abi.NODES_CALLS][number]} between nodes"
    elif not is_ring and not is_step:
        name = _kernel_name(record.kernel)
    if record.status == lib.kKcclGridTooLarge:
        return InvalidArgument(
            f"{name}: the kernel on rank {record.rank} has {record.seen} blocks, must have at most "
            f"{record.wanted}; {AFTER_RESET}"
        )
    if record.status == lib.kKcclOpenedTwice:
        return InvalidArgument(
            f"{name}: the kernel on rank {record.rank} has opened a second one while one of this "
            f"communicator was open; {AFTER_RESET}"
        )
    if record.status == lib.kKcclMessageTooLong:
        is_exchange = record.kernel == lib.kKcclGridExchange
        limit = "exchange_bytes" if is_exchange else "max_bytes"
        return InvalidArgument(
            f"{name}: a call in the kernel on rank {record.rank} has {record.seen} bytes, must "
            f"have at most {record.wanted}, the {limit} of its device_comm(); {AFTER_RESET}"
        )
    if record.status == lib.kKcclCapacityPassed:
        return InvalidArgument(
            f"{name}: rank {record.rank} has {record.seen} rows for expert {record.channel}, must "
            f"have at most {record.wanted}, the capacity of its Experts; {AFTER_RESET}"
        )
    if record.status == lib.kKcclBadArgument:
        where = "Channel" if is_ring else name
        return InvalidArgument(
            f"{where}: {_bad_argument(record)}, in a call in the kernel on rank {record.rank}; "
            f"{AFTER_RESET}"
        )
    if record.status == lib.kKcclUnreadable:
        error = record.seen & 0xFFFF
        return BackendError(
            f"{name} on channel {record.channel}: rank {record.rank} could not read the memory of "
            f"peer {record.peer}: {os.strerror(error)} (errno {error}); {AFTER_RESET}"
        )
    waited_s = record.waited_ns * 1e-9
    peer = f"peer {record.peer}" if record.peer >= 0 else "any peer"
    awaited = peer
    where = f"channel {record.channel}"
    seen = f"epoch seen {record.seen}, wanted {record.wanted}"
    if record.kernel >= lib.kKcclNodesKernel or _is_posted(record.kernel):
        seen = f"call {record.wanted} on this channel"
    if record.kernel == lib.kKcclGridSync:
        where, awaited = f"rank {record.rank}", f"block {record.channel}"
    elif record.kernel == lib.kKcclGridExchange:
        where, awaited = f"rank {record.rank}", f"block {record.channel} of rank {record.peer}"
    elif record.kernel == lib.kKcclWait:
        where = f"signal_id {record.channel}"
        seen = f"{record.seen} signals seen, {record.wanted} wanted"
    elif record.kernel in (lib.kKcclSend, lib.kKcclRecv):
        where = f"tag {record.channel}" if record.channel >= 0 else "any tag"
    elif is_step:
        where, awaited = f"rank {record.rank}", f"block {record.channel} of rank {record.peer}"
        seen = f"step seen {record.seen}, wanted {record.wanted}"
        if record.channel == lib.kKcclEngineMask:
            awaited = "the ids that a grammar allows, which its process computes"
            seen = f"those of position {record.seen} seen, of {record.wanted} wanted"
    elif is_ring:
        where, awaited = f"rank {record.rank}", "a warp of the same block"
        seen = f"copy {record.seen} seen, {record.wanted} wanted"
    kind: type[WaitFailed] = PeerLost
    cure = WITH_SHRINK + caveat
    if record.status == lib.kKcclTimeout:
        kind, cure, cause = Timeout, AFTER_RESET, f"{awaited} did not arrive"
    elif record.status == lib.kKcclPeerLost:
        cause = f"the process of {peer} has ended"
    elif record.status == lib.kKcclPeerLeft:
        cause = f"{peer} has closed or dropped the communicator"
    else:
        kind, cure, awaited = WaitFailed, AFTER_RESET, "its peers"
        cause = f"rank {record.rank} was interrupted"
    if record.kernel in (lib.kKcclSend, lib.kKcclRecv):
        seen = f"{record.seen} other messages of {awaited} have come"
    if is_step:
        cure = _WITH_ENGINE
    waited = f"rank {record.rank} waited for {awaited}: {seen}, after {waited_s:.3g} s"
    if simulated is not None:
        waited += " of simulated time"
    source = "" if record.rank == rank else f" (rank {rank} heard it from rank {record.rank})"
    tells = kind is Timeout or record.status == lib.kKcclPeerLeft
    table = f"\n{simulated}" if simulated and tells else ""
    return kind(
        f"{name} on {where}: {cause}; {waited}{source}; {cure}{table}",
        rank=record.rank,
        peer=record.peer if record.peer >= 0 else None,
        collective=name,
        channel=record.channel,
        epoch_seen=record.seen,
        epoch_wanted=record.wanted,
        waited_s=waited_s,
    )


def _bad_argument(record: Any) -> str:
    """Returns in words which argument a call in a kernel refused, its value and its limit."""
    argument, kernel = record.call, record.kernel
    value, limit = record.waited_ns, record.wanted << 32 | record.seen
    name = _name(abi.ARGUMENTS, argument) if argument in abi.ARGUMENTS.values() else "an argument"
    if argument in (lib.kKcclArgumentOut, lib.kKcclArgumentIn):
        return f"{name} is {value:#x}, must be an address in a window"
    value -= (value >> 63) << 64
    if argument == lib.kKcclArgumentWorldSize:
        return f"WORLD_SIZE is {value}, must be {limit}, the number of ranks, or 0"
    if argument > lib.kKcclArgumentSignalId and argument != lib.kKcclArgumentExpert:
        is_least = argument == lib.kKcclArgumentStride and 0 <= value < limit
        words = f"must be at {'least' if is_least else 'most'} {limit}"
    else:
        least = -1 if kernel == lib.kKcclWait and argument == lib.kKcclArgumentPeer else 0
        words = f"must be below {limit}"
        if value < least:
            words = f"must be at least {least} and below {limit}"
    meaning = {
        lib.kKcclArgumentChannel: ", the channels of its device_comm()",
        lib.kKcclArgumentBlock: ", the blocks of a call",
        lib.kKcclArgumentRoot: ", the number of ranks",
        lib.kKcclArgumentPeer: ", the number of ranks",
        lib.kKcclArgumentNumBytes: ", what the window has from there on",
        lib.kKcclArgumentOffset: ", the window's bytes",
        lib.kKcclArgumentSlices: ", the slices of the exchange",
        lib.kKcclArgumentExpert: ", the number of experts",
        lib.kKcclArgumentTopK: ", the most experts of a row",
    }
    if argument == lib.kKcclArgumentSlices:
        name = "slices.first + slices.num"
    return f"{name} is {value}, {words}{meaning.get(argument, '')}"


def _call(call: int, nbytes: int) -> str:
    """Returns a call in words; `call` is KcclRecord.call, or waited_ns for the peer's call."""
    kernel, dtype, op, peer = call >> 24, call >> 16 & 255, call >> 8 & 255, call & 255
    is_message = kernel in (lib.kKcclSend, lib.kKcclRecv)
    if kernel >= lib.kKcclNumKernels and not _is_posted(kernel):
        return "another call"
    name = _kernel_name(kernel)
    is_scan = name.startswith("scan_")
    what = f", root {peer}" if _has_root(name) else ", exclusive" if is_scan and peer else ""
    if is_message:
        tag = call & lib.kKcclAnyTag
        what = ", any tag" if tag == lib.kKcclAnyTag else f", tag {tag}" if tag else ""
    elif peer and not what:
        what = f", counts with check sum {peer}"
    words = f"{name}{what}, {nbytes} bytes"
    if not is_message and not name.startswith("barrier"):
        words += f", {abi.type_words(dtype)}".removesuffix(", ")
    if is_scan or "reduce" in words:
        words += f", {_name(abi.OPS, op)}"
    return words


def _is_posted(kernel: int) -> bool:
    """Tells whether a record's kernel number stands for a step in which ranks post their parts
    (csrc/include/kccl/postings.cuh).
    """
    return bool(0 <= kernel - lib.kKcclPosted < lib.kKcclNumKernels)


def _kernel_name(kernel: int) -> str:
    """Returns the name of a record's kernel; for a posted step, a name such as
    "broadcast_posted".
    """
    if not _is_posted(kernel):
        return kernel_name(kernel)
    collective = kernel_name(kernel - lib.kKcclPosted).partition("_direct")[0]
    return f"{collective}_posted"


def _has_root(kernel: str) -> bool:
    """Tells whether calls of this kernel have a root, on which the ranks must agree."""
    rooted = kernel.startswith(("broadcast_", "reduce_", "gather_", "scatter_"))
    return rooted and not kernel.startswith("reduce_scatter_")


def _name(numbers: dict[str, int], number: int) -> str:
    return next(name for name, each in numbers.items() if each == number)
