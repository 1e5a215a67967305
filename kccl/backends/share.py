"""Bounds what a call takes of a GPU, so that calls of several streams fit beside each other.

A kernel waits for its peers while it runs. If one stream's kernel fills the GPU of rank 0 and
another's that of rank 1, both wait for ever. So each of KCCL_STREAMS = n streams has a share of the
GPU. Calls are bounded when they are planned, by numbers on which all ranks have agreed:

    blocks    A call has no more blocks than the smallest of the GPUs has multiprocessors, S.
    threads   A block has so few that a multiprocessor runs n such blocks at once.
    early     A call lets the next one onto the GPU before it ends (dependent_launch.cuh) only if
              both are small: a multiprocessor runs 2 n of their blocks at once, or their blocks are
              at most S / 2.

Then the kernels of n streams fit in any order, wherever a GPU puts the blocks. DECISIONS.md has the
proof, under "Calls leave room for those of other streams".

A row of all_reduce_rms_norm has a block with a fixed number of threads. Where n such blocks may not
fit on a multiprocessor, the call has at most S / n blocks. n such calls fit beside each other, and
beside other calls of at most S / n blocks; beside larger ones they may find no room.

Kernels that wait for no other rank end by themselves, so they have no bounds.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import InvalidArgument
from ..plan.spec import MOST_BLOCKS, KernelSpec
from ..ranks.team import Connected
from .shapes import launch_shape, messages_shape, row_threads


@dataclass(frozen=True)
class Share:
    """What a stream of calls may take of a GPU.

    Attributes:
        streams: KCCL_STREAMS: how many streams must fit.
        multiprocessors: Those of the GPU that has fewest.
        longest_row: See Backend.longest_row. A row of these bytes takes a whole multiprocessor.
    """

    streams: int
    multiprocessors: int
    longest_row: int

    def shape(
        self,
        spec: KernelSpec,
        fields: Mapping[str, Any],
        dtype: str,
        most: int,
        given: tuple[int, int],
        *,
        occupancy: Callable[[int], int],
        warp_size: int,
    ) -> tuple[int, int]:
        """Returns the number of blocks of a call, and the threads of each block.

        Args:
            spec: The kernel's spec.
            fields: The fields of the KcclCall.
            dtype: Name of the element type.
            most: Threads that a block of this kernel may have.
            given: The most blocks, and the threads of a block, which the caller gave; 0 for the
                plan's choice. They are bounded as the plan's.
            occupancy: Returns how many blocks of so many threads a multiprocessor runs at once.
            warp_size: Threads of a warp.

        Raises:
            InvalidArgument: A multiprocessor cannot run a block for each stream.
        """
        count, width = fields.get("count", 0), fields.get("width", 0)
        blocks, threads = given
        if not spec.waits:
            return launch_shape(
                spec, count, dtype, most, blocks, threads, warp_size=warp_size, width=width
            )
        most_blocks = min(blocks or MOST_BLOCKS, self.multiprocessors)
        if spec.takes_rows:
            if self._is_wide(spec, width, dtype, warp_size):
                most_blocks = min(most_blocks, max(self.multiprocessors // self.streams, 1))
            return launch_shape(
                spec, count, dtype, most, most_blocks, threads, warp_size=warp_size, width=width
            )
        fitting = self._fitting(spec.name, most, occupancy, warp_size)
        if "messages" in fields:
            return messages_shape(fields, fitting, most_blocks, warp_size=warp_size)
        # The threads are bounded behind the choice of the blocks. So the number of blocks does not
        # depend on the registers that this rank's compiler has given the kernel.
        num_blocks, each = launch_shape(
            spec, count, dtype, most, most_blocks, threads, warp_size=warp_size
        )
        return num_blocks, min(each, fitting)

    def _fitting(
        self, name: str, most: int, occupancy: Callable[[int], int], warp_size: int
    ) -> int:
        """Returns the most threads of a block of which a multiprocessor runs enough at once."""
        for threads in range(most // warp_size * warp_size, 0, -warp_size):
            if occupancy(threads) >= self.streams:
                return threads
        raise InvalidArgument(
            f"KCCL_STREAMS is {self.streams}, must be at most {occupancy(warp_size)} for {name}: a "
            "multiprocessor runs no more of its blocks at once"
        )

    def _is_wide(self, spec: KernelSpec, width: int, dtype: str, warp_size: int) -> bool:
        """Tells whether the blocks of n rows may not fit on a multiprocessor. Counts by the
        kernel's most threads, whose registers fill one, and not by what the compiler gave it: the
        ranks must agree.
        """
        most = self.longest_row // spec.bytes_per_thread
        return row_threads(spec, width, dtype, warp_size) * self.streams > most

    def fit(self, blocks: int, occupancy: int) -> int:
        """Returns the KcclCall.fit of a call.

        Args:
            blocks: Blocks of the call.
            occupancy: How many of them a multiprocessor runs at once.
        """
        is_small = (
            occupancy >= 2 * self.streams
            or (occupancy >= self.streams and 2 * blocks <= self.multiprocessors)
            # A few wide rows, and the next few of the same stream.
            or 2 * self.streams * blocks <= self.multiprocessors
        )
        return occupancy * self.multiprocessors // blocks if is_small else 0


def agree(
    mesh: Connected, streams: int, multiprocessors: int, longest_row: int, timeout: float
) -> Share:
    """Returns the share of a stream, which is the same on all ranks. Collective.

    Args:
        mesh: The ranks that take part.
        streams: This rank's KCCL_STREAMS.
        multiprocessors: Those of this rank's GPU.
        longest_row: See Share.
        timeout: Seconds to wait for the other ranks.

    Raises:
        InvalidArgument: KCCL_STREAMS differs between ranks.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    told = json.dumps([streams, multiprocessors]).encode()
    everyone = [json.loads(reply) for reply in mesh.allgather(told, "start-up", timeout)]
    for peer, (its_streams, _) in enumerate(everyone):
        if its_streams != streams:
            raise InvalidArgument(
                f"KCCL_STREAMS is {streams} on rank {mesh.rank} and {its_streams} on rank {peer}, "
                "must be the same on all ranks"
            )
    return Share(streams, min(each for _, each in everyone), longest_row)
