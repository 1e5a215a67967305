"""exchange: every block publishes a slice and collects all slices. Inside kernels only.

Rows with world size 1 measure an exchange among the blocks of one GPU, even if several ranks run it
at the same time. The other rows measure an exchange among the blocks of all ranks. "bytes" is what
the blocks of one GPU publish together.
"""

from __future__ import annotations

from ..harness.collective import Collective, OnGpus, call_in_kernels, checks_itself
from ..harness.forms import ORDERS, Form


def _form(order: str, *, is_within: bool) -> Form:
    reach = "kKcclReachRank" if is_within else "kKcclReachAllRanks"
    name = f"Exchange<{reach}, {ORDERS[order]}, {{world_size}}>"
    kernel = f"in_kernel::exchange<in_kernel::{name}, {{notes}}>"
    return Form("grid_exchange", kernel, "message", order, is_within=is_within)


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
    # Limits the sizes: a block's shared memory must hold twice the bytes that all GPUs publish.
    end=8 << 10,
    forms=tuple(
        _form(order, is_within=is_within) for is_within in (True, False) for order in ORDERS
    ),
    is_apart_in_kernels=True,
    on_gpus=OnGpus(order=3, sizes_inside=("-b", "2K", "-f", "4")),
)
