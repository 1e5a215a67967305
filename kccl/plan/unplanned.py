"""The kernels among which no plan chooses: one-sided calls, messages, computations, and what blocks
do together. specs.py has the others.
"""

from .ops import can_normalise, can_scale
from .spec import GPUS, Counts, KernelSpec

UNPLANNED = (
    KernelSpec("put", moves="an array to a peer's window", counts=Counts.BYTES, one_block="full"),
    KernelSpec("get", moves="an array of a peer's window", counts=Counts.BYTES, one_block="full"),
    KernelSpec("signal", moves="one word to a peer"),
    KernelSpec("wait", moves="nothing: polls this rank's words"),
    KernelSpec("send", moves="an array to a peer's recv", counts=Counts.BYTES, targets=("host",)),
    KernelSpec("recv", moves="the array of a peer's send", counts=Counts.BYTES, targets=("host",)),
    KernelSpec(
        "send_recv",
        moves="messages to peers and from peers: packets, the rest through the receivers' windows",
        counts=Counts.BYTES,
        one_block="full",
        targets=GPUS,
    ),
    KernelSpec(
        "scale",
        moves="nothing: multiplies an array by a number",
        counts=Counts.ELEMENTS,
        bytes_per_thread=16,
        takes_type=can_scale,
        waits=False,
    ),
    KernelSpec(
        "narrow",
        moves="nothing: rounds an array of sums to the caller's type",
        counts=Counts.ELEMENTS,
        bytes_per_thread=16,
        takes_type=lambda dtype: dtype.accumulator != dtype,
        waits=False,
    ),
    KernelSpec(
        "rms_norm",
        moves="nothing: adds the residual to rows and normalises them",
        counts=Counts.ELEMENTS,
        bytes_per_thread=32,
        takes_type=can_normalise,
        takes_rows=True,
        waits=False,
    ),
    KernelSpec(
        "all_reduce_rms_norm",
        moves="packets to every peer; each reduces and normalises all rows",
        counts=Counts.ELEMENTS,
        bytes_per_thread=32,
        targets=GPUS,
        takes_type=can_normalise,
        takes_rows=True,
    ),
    KernelSpec("grid_sync", moves="one word between the blocks of a GPU"),
    KernelSpec("grid_exchange", moves="packets between the blocks of all GPUs"),
)
"""A part of specs.KERNELS."""
