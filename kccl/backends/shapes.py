"""How many blocks and threads a call on a GPU has."""

from typing import Any

from ..base import arguments
from ..base.errors import InvalidArgument
from ..plan.spec import MOST_BLOCKS, MOST_THREADS, KernelSpec

# The scratch has room for so many blocks in each channel.
BLOCKS_PER_CHANNEL = MOST_BLOCKS
# Threads of a block until the call uses all its blocks. Small blocks, because the warps of one
# block share an SM.
_THREADS_PER_BLOCK = 128


def check_shape(blocks: Any, threads: Any, warp_size: int) -> None:
    """Checks what a caller gave as a call's shape.

    Args:
        blocks, threads: As given.
        warp_size: Threads of a warp.

    Raises:
        InvalidArgument: No call can have it.
    """
    arguments.between("blocks", blocks, 1, BLOCKS_PER_CHANNEL)
    arguments.between("threads", threads, warp_size, MOST_THREADS)
    if threads % warp_size:
        raise InvalidArgument(f"threads is {threads}, must be a multiple of {warp_size}")


def launch_shape(
    spec: KernelSpec,
    count: int,
    dtype: str,
    most: int,
    blocks: int = 0,
    threads: int = 0,
    *,
    warp_size: int,
) -> tuple[int, int]:
    """Blocks of a call, and threads of each: a thread for each packet, as far as threads go.

    Args:
        spec: Of the kernel.
        count, dtype: See KernelSpec.peer_bytes().
        most: Threads that a block of this kernel may have.
        blocks: Most blocks; 0 for as many as a channel has.
        threads: Of a block, until the call uses all its blocks; 0 for 128.
        warp_size: Threads of a warp.
    """
    most = min(most, MOST_THREADS) // warp_size * warp_size
    if spec.bytes_per_thread == 0:
        return 1, most if spec.one_block == "full" else warp_size
    packets = max(-(-spec.peer_bytes(count, dtype) // spec.bytes_per_thread), 1)
    most_blocks = blocks or BLOCKS_PER_CHANNEL
    num_blocks = min(-(-packets // min(threads or _THREADS_PER_BLOCK, most)), most_blocks)
    each = -(-packets // (num_blocks * warp_size)) * warp_size
    return num_blocks, min(each, most)
