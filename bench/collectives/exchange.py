"""exchange: every block publishes a slice and collects the slices of all. In kernels only.

Rows of world size 1 are of the blocks of one GPU, also where several ranks run at the same time;
the others are of the blocks of all ranks. "bytes" is what a GPU's blocks publish.
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
    # Twice what all GPUs publish has to fit a block's shared memory.
    end=8 << 10,
)
