"""Describes accesses outside of a kernel's memory, and what ends a kernel at once."""

from typing import Any

from ..base.abi import ffi, members
from ..plan.limits import LIMITS
from .launch_arrays import LaunchArrays
from .regions import Regions

_EDGES = {value: name for name, value in members("KcclSimEdge", "kKcclSimEdge").items()}


def edge_of(kind: str, finding: Any, regions: Regions, arrays: LaunchArrays, model: str) -> str:
    """Returns in words where outside of the kernel's memory a KcclSimFinding's access lies, or what
    ended the kernel; "" for other kinds of findings.

    Args:
        kind: The finding's kind, as in report.py.
        finding: The finding.
        regions: Names of windows.
        arrays: Names of arrays.
        model: The machine's model.
    """
    text = "" if finding.text == ffi.NULL else ffi.string(finding.text).decode(errors="replace")
    if kind == "out_of_bounds":
        return _missed(finding, regions, arrays)
    if kind == "assertion":
        if text == "__trap()":
            return "the kernel calls __trap()"
        return f"assert({text}) does not hold" if text else "the kernel calls abort()"
    if kind == "trap":
        if text == "SIGFPE":
            return "divides an integer by zero, whose result is undefined on a GPU"
        return "executes a trap, or an instruction that this CPU does not have"
    if kind == "too_much_shared":
        return _too_much(finding, model)
    return ""


def _missed(finding: Any, regions: Regions, arrays: LaunchArrays) -> str:
    num_bytes, address = finding.num_bytes, finding.address
    size = _bytes(num_bytes) if num_bytes else "memory"
    edge = _EDGES[finding.edge]
    if edge == "none":
        return (
            f"{size} at {address:#x}, where the kernel has no memory: no array, window or shared "
            "memory that it was given is near"
        )
    if edge == "stack":
        return (
            f"{size} among the local variables of another thread, or of a function that has "
            "returned: on a GPU nobody else can access them"
        )
    begin, end = finding.edge_address, finding.edge_address + finding.edge_bytes
    whole = _whole(edge, finding, regions, arrays)
    where = f"{size} at offset {address - begin} of {whole}"
    if edge == "closed":
        return f"{where}, which has been closed"
    if edge == "freed":
        return f"{where}, which an earlier launch got and which has been freed since"
    if finding.is_foreign:
        return f"{where}, {_FOREIGN[edge]}"
    if address < begin:
        return f"{where}: {_bytes(begin - address)} before its beginning"
    return f"{where}: {_bytes(address + max(num_bytes, 1) - end)} behind its end"


def shared_name(finding: Any) -> str:
    """Returns the name of a finding's address in block-shared memory; "" if it lies elsewhere."""
    edge = _EDGES[finding.edge]
    if edge not in ("shared", "dynamic"):
        return ""
    offset, num_bytes = finding.address - finding.edge_address, finding.edge_bytes
    where = f"the shared memory of rank {finding.edge_rank} block {finding.edge_block}"
    if edge == "dynamic":
        return f"byte {offset} of the dynamic part of {where}"
    return f"byte {offset} of a variable of {num_bytes} bytes in {where}"


def unstarted(finding: Any) -> str:
    """Returns the note that some blocks have no room while others wait; "" if all have begun."""
    if finding.num_unstarted == 0:
        return ""
    return (
        f". A GPU runs {finding.num_resident} of these blocks at once, and {finding.num_unstarted} "
        "more when some have ended. Blocks that wait for each other must all run at once"
    )


def why_invalid(finding: Any) -> str:
    """Returns why no GPU can make an access; "" for an access to null."""
    if finding.text != ffi.NULL:
        return f": it is {ffi.string(finding.text).decode()}"
    if finding.alignment == 0:
        return ""
    return f": its address, {finding.address:#x}, is no multiple of {finding.alignment}"


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"


_FOREIGN = {
    "array": "an array of another rank: only windows can be accessed by all ranks",
    "shared": "which only the threads of that block can access",
    "dynamic": "which only the threads of that block can access",
    "window": "which this kernel must not access",
    "arguments": "which belong to another launch",
}


def _whole(edge: str, finding: Any, regions: Regions, arrays: LaunchArrays) -> str:
    """Returns the name and the size of the memory at whose edge a finding is."""
    num_bytes = finding.edge_bytes
    if edge in ("array", "freed"):
        whose = f" on rank {finding.edge_rank}" if finding.is_foreign and edge == "array" else ""
        return f"{arrays.name(finding.edge_name)}{whose}, {num_bytes} bytes"
    if edge == "arguments":
        return f"the arguments of the launch, {num_bytes} bytes"
    if edge in ("shared", "dynamic"):
        block = f"rank {finding.edge_rank} block {finding.edge_block}"
        if edge == "shared":
            return f"a variable of {num_bytes} bytes in the shared memory of {block}"
        return f"the dynamic shared memory of {block}, for which shared_bytes={num_bytes} was given"
    name = regions.whole(finding.edge_address) or f"a window of rank {finding.edge_rank}"
    return f"{name}, {num_bytes} bytes"


def _too_much(finding: Any, model: str) -> str:
    limits = LIMITS[model]
    variables, most = finding.num_bytes, finding.edge_bytes
    if most == limits.static_shared_bytes and variables > most:
        more = "; platform::dynamic_shared() can have more" if limits.shared_bytes > most else ""
        return (
            f"declares variables of {variables} bytes in block-shared memory, must have at most "
            f"{most} on {limits.gpu}{more}"
        )
    return (
        f"declares variables of {variables} bytes in block-shared memory besides the "
        f"{finding.address} bytes that shared_bytes gives, must have at most {most} bytes together "
        f"on {limits.gpu}"
    )
