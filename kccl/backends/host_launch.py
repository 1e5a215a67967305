"""Runs a user's kernel on the host: each block is an OS thread."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from ..base.abi import MAX_BLOCKS
from ..base.errors import BackendError, InvalidArgument

# Most bytes of dynamic shared memory of a block: kDynamicSharedBytes of
# csrc/include/kccl/platform.cuh.
_MOST_SHARED_BYTES = 232448


def run(
    entry: Any,
    data: bytes,
    *,
    grid: int,
    shared_bytes: int,
    context: Any,
    abort: Callable[[], None],
) -> None:
    """Runs all blocks of a launch at once, and returns when they have ended.

    Args:
        entry: The kernel's sim.library.Entry.
        data: Its arguments, as Kernel.pack() lays them out.
        grid: Number of blocks.
        shared_bytes: Dynamic shared memory of each block.
        context: The rank's KcclHostContext.
        abort: Function that ends the rank's waits. Called after Ctrl-C.

    Raises:
        InvalidArgument: The host cannot run this many blocks, or has less shared memory.
        BackendError: A block's thread did not start. The rank's waits have ended, as after Ctrl-C.
    """
    for name, value, most in (
        ("grid", grid, MAX_BLOCKS),
        ("shared_bytes", shared_bytes, _MOST_SHARED_BYTES),
    ):
        if value > most:
            raise InvalidArgument(f"{name} is {value}, must be at most {most} on the host")
    words = (ctypes.c_uint64 * (-(-len(data) // 8) or 1))()
    ctypes.memmove(words, data, len(data))
    ended = [threading.Event() for _ in range(grid)]
    running: list[threading.Event] = []
    is_called_off = False
    lock = threading.Lock()

    def run_block(block: int) -> None:
        with lock:
            if is_called_off:
                return
            running.append(ended[block])
        try:
            entry.run_block(entry.address, ctypes.addressof(words), block, grid)
        finally:
            ended[block].set()

    # The blocks' threads do not hold the GIL, so their waits must not call into Python.
    holds_gil, context.holds_gil = context.holds_gil, 0
    try:
        for block in range(grid):
            thread = threading.Thread(target=run_block, args=(block,), name=f"kccl block {block}")
            try:
                thread.start()
            except RuntimeError as error:
                raise BackendError(
                    f"the thread of block {block} of {grid} did not start: {error}; launch fewer "
                    "blocks, or raise the limit of threads (ulimit -u, the container's pids)"
                ) from error
        for event in ended:
            event.wait()
    except BaseException:
        # After Ctrl-C, which only the main thread receives, or when a thread did not start: ends
        # all waits, because running blocks may wait for blocks that will never run.
        abort()
        # From here on no thread begins its block any more.
        with lock:
            is_called_off = True
        for event in running:
            event.wait()
        raise
    finally:
        context.holds_gil = holds_gil
