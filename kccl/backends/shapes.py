"""Chooses how many blocks and threads a call on a GPU has."""

from collections.abc import Mapping
from typing import Any

from ..base import arguments
from ..base.abi import FEW_PIPES, MOST_PIPES, PIPE_SLICE_BYTES, message_bytes
from ..base.errors import InvalidArgument
from ..plan.spec import MOST_BLOCKS, MOST_THREADS, KernelSpec

# Each channel of the scratch has room for this many blocks, and for each block slots of these
# sizes.
BLOCKS_PER_CHANNEL = MOST_BLOCKS
SIZES = {
    "blocks_per_channel": BLOCKS_PER_CHANNEL,
    "packet_bytes": 8192,
    "staging_bytes": 131072,
    # The pipes of send and recv: 32 on channel 0 and 8 on each other one, 256 KiB each. With
    # 128 KiB each, messages of 64 MB took 1.3 times as long between two H100.
    "message_bytes": 16 << 20,
}
# Threads of a block, as long as a call needs fewer blocks than it may have. Longer calls have more.
# Blocks are small, because the warps of one block share an SM.
THREADS_PER_BLOCK = 128
_PACKET_BYTES = 8  # payload of a packet
_GROUP_COLUMNS = 32  # a row's threads work in groups of this many: kGroupColumns of norm.cuh
_LONGEST_ROW_BYTES = 16384  # what 512 threads of a block hold of a row, 32 bytes in each thread


def check_shape(blocks: Any, threads: Any, warp_size: int) -> None:
    """Checks the shape that a caller gave for a call.

    Args:
        blocks, threads: What the caller gave.
        warp_size: Threads of a warp.

    Raises:
        InvalidArgument: No call can have this shape.
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
    width: int = 0,
) -> tuple[int, int]:
    """Returns the number of blocks of a call, and the threads of each block.

    Each packet of the message has a thread, up to the most threads of a launch.

    Args:
        spec: The kernel's spec.
        count, dtype: See KernelSpec.peer_bytes().
        most: Threads that a block of this kernel may have.
        blocks: Most blocks; 0 for as many as a channel has.
        threads: The threads of a block, until the call uses all its blocks; 0 for 128.
        warp_size: Threads of a warp.
        width: Elements of a row, where blocks take whole rows.
    """
    most = min(most, MOST_THREADS) // warp_size * warp_size
    if spec.takes_rows:
        each = row_threads(spec, width, dtype, warp_size)
        return min(count // width, blocks or BLOCKS_PER_CHANNEL), min(each, threads or most, most)
    if spec.bytes_per_thread == 0:
        return 1, most if spec.one_block == "full" else warp_size
    packets = max(-(-spec.peer_bytes(count, dtype) // spec.bytes_per_thread), 1)
    most_blocks = blocks or BLOCKS_PER_CHANNEL
    num_blocks = min(-(-packets // min(threads or THREADS_PER_BLOCK, most)), most_blocks)
    each = -(-packets // (num_blocks * warp_size)) * warp_size
    return num_blocks, min(each, most)


def row_threads(spec: KernelSpec, width: int, dtype: str, warp_size: int) -> int:
    """Returns the threads that hold a row of `width` elements: groups of 32, in whole warps."""
    groups = -(-spec.peer_bytes(width, dtype) // (_GROUP_COLUMNS * spec.bytes_per_thread))
    return -(-groups * _GROUP_COLUMNS // warp_size) * warp_size


def longest_row(packet_bytes: int, world_size: int) -> int:
    """Returns the bytes of the longest row that all_reduce_rms_norm takes; see its file."""
    return min(packet_bytes * (2 if world_size == 2 else 1), _LONGEST_ROW_BYTES)


def messages_shape(
    fields: Mapping[str, Any], most: int, most_blocks: int, *, warp_size: int
) -> tuple[int, int]:
    """Returns the number of blocks of a call of send_recv, and the threads of each block. Every
    message has equally many blocks.

    Args:
        fields: The fields of a KcclCall with at least one message.
        most: Threads that a block of this kernel may have.
        most_blocks: Blocks that the call may have, unless there are more messages.
        warp_size: Threads of a warp.
    """
    heads = (*fields["sends"], *fields["receives"])
    messages = [
        message_bytes(head) for bit, head in enumerate(heads) if fields["messages"] >> bit & 1
    ]
    pipes = FEW_PIPES if fields["channel"] else MOST_PIPES
    slices = min(max(-(-max(messages) // PIPE_SLICE_BYTES), 1), pipes)
    each = min(slices, max(most_blocks // len(messages), 1))
    # Each packet of a slice has a thread, up to the most threads of a block.
    packets = max(-(-max(messages) // (slices * _PACKET_BYTES)), 1) + 2
    threads = -(-packets // warp_size) * warp_size
    return each * len(messages), min(threads, most // warp_size * warp_size)
