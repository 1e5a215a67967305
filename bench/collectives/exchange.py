"""exchange: every block publishes a slice and collects all slices. Inside kernels only.

Rows with world size 1 measure an exchange among the blocks of one GPU, even if several ranks run it
at the same time. The other rows measure an exchange among the blocks of all ranks. "bytes" is what
the blocks of one GPU publish together.
"""

from __future__ import annotations

from ..harness.collective import Collective, call_in_kernels, checks_itself

COLLECTIVE = Collective(
    name="exchange",
    order="acq_rel",
    has_data=True,
    has_op=False,
    has_root=False,
    has_out=False,
    waits_for_all=True,
    busbw_factor=lambda world_size: None,
    check=checks_itself,
    prepare=call_in_kernels,
    direct=call_in_kernels,
    mpi=call_in_kernels,
    dtype="int64",
    # Twice what all GPUs publish must fit into a block's shared memory.
    end=8 << 10,
)
