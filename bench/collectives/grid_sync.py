"""grid_sync: no block of a kernel continues before all its blocks have arrived. In kernels only."""

from __future__ import annotations

from ..harness.collective import Collective, OnGpus, call_in_kernels, checks_itself
from ..harness.forms import ORDERS, of_barriers

COLLECTIVE = Collective(
    name="grid_sync",
    order="acq_rel",
    has_data=False,
    has_op=False,
    has_root=False,
    has_out=False,
    waits_for_all=True,
    busbw_factor=lambda world_size: None,
    check=checks_itself,
    prepare=call_in_kernels,
    direct=call_in_kernels,
    mpi=call_in_kernels,
    forms=tuple(
        of_barriers("grid_sync", f"GridSync<{ORDERS[order]}>", order, is_within=True)
        for order in ORDERS
    ),
    on_gpus=OnGpus(order=2, sizes=(), sizes_inside=()),
)
