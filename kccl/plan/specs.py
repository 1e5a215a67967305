"""The kernels of the library, and all facts about each of them.

Nothing here needs a device, a communicator or the compiled core. So setup.py reads this table too,
and makes the host's table of kernels from it (csrc/host/kernel_table.py).
"""

from ..base.errors import InvalidArgument
from .spec import GPUS, Counts, KernelSpec, needs_attach, needs_floats, needs_peers

KERNELS = (
    KernelSpec(
        "all_reduce",
        "one_shot",
        "ll16",
        moves="packets to every peer; each reduces everything",
        counts=Counts.ELEMENTS,
        bytes_per_thread=8,
        unrolls_for_two=True,
    ),
    KernelSpec(
        "all_reduce",
        "one_shot",
        "sentinel",
        moves="bare words to every peer; each reduces everything",
        counts=Counts.ELEMENTS,
        bytes_per_thread=16,
        needs=(needs_floats,),
        unrolls_for_two=True,
    ),
    KernelSpec(
        "all_reduce",
        "two_shot",
        "sentinel",
        moves="bare words of each chunk to its owner, who sends every peer the result",
        counts=Counts.ELEMENTS,
        bytes_per_thread=64,
        targets=GPUS,
        needs=(needs_peers, needs_floats),
    ),
    KernelSpec(
        "all_reduce",
        "one_shot_pull",
        "simple",
        moves="each rank copies its input to its window; each pulls and reduces everything",
        counts=Counts.ELEMENTS,
        targets=("host",),
    ),
    KernelSpec(
        "all_reduce",
        "two_shot_pull",
        "simple",
        moves="each rank copies its input to its window, pulls and reduces its chunk, pulls the "
        "others' results",
        counts=Counts.ELEMENTS,
        targets=("host",),
        needs=(needs_peers,),
    ),
    KernelSpec(
        "all_reduce",
        "two_shot_push",
        "simple",
        moves="each rank sends every peer its chunk, reduces its own, sends every peer the result",
        counts=Counts.ELEMENTS,
        bytes_per_thread=16,
        targets=GPUS,
        needs=(needs_peers,),
    ),
    KernelSpec(
        "all_reduce",
        "two_shot_cma",
        "simple",
        moves="each rank reads its chunk of the others' memory, reduces it, reads the others' "
        "results",
        counts=Counts.ELEMENTS,
        targets=("host",),
        needs=(needs_attach, needs_peers),
    ),
    KernelSpec(
        "reduce_scatter",
        "direct",
        "ll16",
        moves="packets of each chunk to its owner, who reduces it",
        counts=Counts.CHUNK_ELEMENTS,
        bytes_per_thread=8,
        unrolls_for_two=True,
    ),
    KernelSpec(
        "reduce_scatter",
        "pull",
        "simple",
        moves="each rank copies its input to its window; each pulls and reduces its chunk",
        counts=Counts.CHUNK_ELEMENTS,
        targets=("host",),
    ),
    KernelSpec(
        "reduce_scatter",
        "push",
        "simple",
        moves="each rank sends every peer its chunk, reduces its own",
        counts=Counts.CHUNK_ELEMENTS,
        bytes_per_thread=16,
        targets=GPUS,
        needs=(needs_peers,),
    ),
    KernelSpec(
        "all_gather",
        "direct",
        "ll16",
        moves="packets to every peer",
        counts=Counts.CHUNK_BYTES,
        bytes_per_thread=8,
        unrolls_for_two=True,
    ),
    KernelSpec(
        "all_gather",
        "pull",
        "simple",
        moves="each rank copies its input to its window; each pulls the others'",
        counts=Counts.CHUNK_BYTES,
        targets=("host",),
    ),
    KernelSpec(
        "all_gather",
        "push",
        "simple",
        moves="each rank sends every peer its input",
        counts=Counts.CHUNK_BYTES,
        bytes_per_thread=16,
        targets=GPUS,
        needs=(needs_peers,),
    ),
    KernelSpec(
        "broadcast",
        "direct",
        "ll16",
        moves="packets from the root to every peer",
        counts=Counts.BYTES,
        bytes_per_thread=8,
    ),
    KernelSpec(
        "broadcast",
        "pull",
        "simple",
        moves="the root copies its array to its window; every peer pulls it",
        counts=Counts.BYTES,
        targets=("host",),
    ),
    KernelSpec(
        "broadcast",
        "push",
        "simple",
        moves="the root sends each peer a chunk, which it forwards to the others",
        counts=Counts.BYTES,
        bytes_per_thread=16,
        targets=GPUS,
        needs=(needs_peers,),
    ),
    KernelSpec("barrier", "direct", moves="one word to every peer"),
    KernelSpec("put", moves="an array to a peer's window", counts=Counts.BYTES, one_block="full"),
    KernelSpec("get", moves="an array of a peer's window", counts=Counts.BYTES, one_block="full"),
    KernelSpec("signal", moves="one word to a peer"),
    KernelSpec("wait", moves="nothing: polls this rank's words"),
    KernelSpec("grid_sync", moves="one word between the blocks of a GPU"),
    KernelSpec("grid_exchange", moves="packets between the blocks of all GPUs"),
)
"""All kernels. Those of one collective are in the order in which a plan lists them."""

SPECS = tuple(spec for spec in KERNELS if spec.algorithm)
"""The kernels among which a plan chooses."""

BY_NAME = {spec.name: spec for spec in KERNELS}


def algorithms(collective: str) -> list[str]:
    """Names of the algorithms of a collective.

    Raises:
        InvalidArgument: There is no such collective.
    """
    return [spec.name for spec in of_collective(collective)]


def of_collective(collective: str) -> list[KernelSpec]:
    """The kernels among which a plan of a collective chooses.

    Raises:
        InvalidArgument: There is no such collective.
    """
    found = [spec for spec in SPECS if spec.collective == collective]
    if not found:
        known = ", ".join(sorted({spec.collective for spec in SPECS}))
        raise InvalidArgument(f"collective is {collective!r}, must be one of {known}")
    return found
