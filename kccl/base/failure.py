"""Makes the exception for the status of a communicator, and its text.

csrc/include/kccl/record.hpp says the same in C++ programs without Python.
"""

import os
from typing import Any

from . import abi
from .abi import kernel_name, lib
from .errors import BackendError, Error, InvalidArgument, PeerLost, Timeout, WaitFailed

_AFTER_RESET = "all ranks may go on after comm.reset()"
_WITH_SHRINK = "the survivors may go on with comm.shrink()"
_WITH_ENGINE = "open a new Engine"


def unfinished_reset(rank: int) -> Timeout:
    """The exception for a call made after a reset() that failed and before one that succeeds."""
    return Timeout(
        f"reset() has begun on rank {rank} and is not complete: call it again before other calls",
        rank=rank,
        collective="reset",
    )


def error_of(
    status: int, record: Any, rank: int, caveat: str = "", *, simulated: str | None = None
) -> Error:
    """The exception for a communicator's status.

    Args:
        status: A KcclStatus other than ok.
        record: The KcclRecord that was written with the status.
        rank: The rank that raises.
        caveat: A note for the survivors of a lost peer, added to the text; "" for none.
        simulated: On the simulator who waited for what, added to the text of a time-out. None where
            seconds are real ones.
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
            f"called shrink(); {_WITH_SHRINK}{caveat}",
            rank=record.rank,
            peer=record.peer,
        )
    if record.status == lib.kKcclCallsDiffer:
        own, peers = record.calls & 0xFFFF, record.calls >> 16
        return InvalidArgument(
            f"the ranks disagree about this call: rank {record.rank}: {_call(own, record.seen)}; "
            f"rank {record.peer}: {_call(peers, record.wanted)}; {_AFTER_RESET}"
        )
    is_ring = record.kernel == lib.kKcclNumKernels
    is_step = record.kernel == lib.kKcclEngineStep
    name = "a ring of copies" if is_ring else "decoding"
    if not is_ring and not is_step:
        name = kernel_name(record.kernel)
    if record.status == lib.kKcclGridTooLarge:
        return InvalidArgument(
            f"{name}: the kernel on rank {record.rank} has {record.seen} blocks, must have at most "
            f"{record.wanted}; {_AFTER_RESET}"
        )
    if record.status == lib.kKcclOpenedTwice:
        return InvalidArgument(
            f"{name}: the kernel on rank {record.rank} has opened a second one while one of this "
            f"communicator was open; {_AFTER_RESET}"
        )
    if record.status == lib.kKcclMessageTooLong:
        is_exchange = record.kernel == lib.kKcclGridExchange
        limit = "exchange_bytes" if is_exchange else "max_bytes"
        return InvalidArgument(
            f"{name}: a call in the kernel on rank {record.rank} has {record.seen} bytes, must "
            f"have at most {record.wanted}, the {limit} of its device_comm(); {_AFTER_RESET}"
        )
    if record.status == lib.kKcclBadArgument:
        where = "Channel" if is_ring else name
        return InvalidArgument(
            f"{where}: {_bad_argument(record)}, in a call in the kernel on rank {record.rank}; "
            f"{_AFTER_RESET}"
        )
    if record.status == lib.kKcclUnreadable:
        error = record.seen & 0xFFFF
        return BackendError(
            f"{name} on channel {record.channel}: rank {record.rank} could not read the memory of "
            f"peer {record.peer}: {os.strerror(error)} (errno {error}); {_AFTER_RESET}"
        )
    waited_s = record.waited_ns * 1e-9
    peer = f"peer {record.peer}" if record.peer >= 0 else "any peer"
    awaited = peer
    where = f"channel {record.channel}"
    seen = f"epoch seen {record.seen}, wanted {record.wanted}"
    if record.kernel == lib.kKcclGridSync:
        where, awaited = f"rank {record.rank}", f"block {record.channel}"
    elif record.kernel == lib.kKcclGridExchange:
        where, awaited = f"rank {record.rank}", f"block {record.channel} of rank {record.peer}"
    elif record.kernel == lib.kKcclWait:
        where = f"signal_id {record.channel}"
        seen = f"{record.seen} signals seen, {record.wanted} wanted"
    elif is_step:
        where, awaited = f"rank {record.rank}", f"block {record.channel} of rank {record.peer}"
        seen = f"step seen {record.seen}, wanted {record.wanted}"
    elif is_ring:
        where, awaited = f"rank {record.rank}", "a warp of the same block"
        seen = f"copy {record.seen} seen, {record.wanted} wanted"
    kind: type[WaitFailed] = PeerLost
    cure = _WITH_SHRINK + caveat
    if record.status == lib.kKcclTimeout:
        kind, cure, cause = Timeout, _AFTER_RESET, f"{awaited} did not arrive"
    elif record.status == lib.kKcclPeerLost:
        cause = f"the process of {peer} has ended"
    elif record.status == lib.kKcclPeerLeft:
        cause = f"{peer} has closed or dropped the communicator"
    else:
        kind, cure, awaited = WaitFailed, _AFTER_RESET, "its peers"
        cause = f"rank {record.rank} was interrupted"
    if is_step:
        cure = _WITH_ENGINE
    waited = f"rank {record.rank} waited for {awaited}: {seen}, after {waited_s:.3g} s"
    if simulated is not None:
        waited += " of simulated time"
    source = "" if record.rank == rank else f" (rank {rank} heard it from rank {record.rank})"
    table = f"\n{simulated}" if simulated and kind is Timeout else ""
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
    """The argument that a call in a kernel refuses: its value and its limit."""
    argument, kernel = record.calls, record.kernel
    value, limit = record.waited_ns, record.wanted << 32 | record.seen
    name = _name(abi.ARGUMENTS, argument) if argument in abi.ARGUMENTS.values() else "an argument"
    if argument in (lib.kKcclArgumentOut, lib.kKcclArgumentIn):
        return f"{name} is {value:#x}, must be an address in a window"
    value -= (value >> 63) << 64
    if argument == lib.kKcclArgumentWorldSize:
        return f"WORLD_SIZE is {value}, must be {limit}, the number of ranks, or 0"
    if argument > lib.kKcclArgumentSignalId:
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
    }
    if argument == lib.kKcclArgumentSlices:
        name = "slices.first + slices.num"
    return f"{name} is {value}, {words}{meaning.get(argument, '')}"


def _call(call: int, nbytes: int) -> str:
    """A call in words; `call` is one half of KcclRecord.calls."""
    kernel, dtype, op = call >> 8, call >> 4 & 15, call & 15
    if kernel >= lib.kKcclNumKernels:
        return "another call"
    name = kernel_name(kernel)
    root = f", root {op}" if "broadcast" in name else ""
    words = f"{name}{root}, {nbytes} bytes"
    if "reduce" in words:
        words += f", {_name(abi.DTYPES, dtype)}, {_name(abi.OPS, op)}"
    return words


def _name(numbers: dict[str, int], number: int) -> str:
    return next(name for name, each in numbers.items() if each == number)
