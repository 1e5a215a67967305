"""The machine of a program of sim_programs.py, the outcome of a run, and the names of kernels."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from sim_makes import makes

from kccl import module
from kccl.backends.settings import Settings
from kccl.base import abi
from kccl.jit import cache, names
from kccl.plan.specs import KERNELS as KERNEL_SPECS
from kccl.sim.library import load
from kccl.sim.machine import Simulation

KERNELS = Path(__file__).parents[1] / "kernels"
# How the kernels below make the calls of each collective.
MAKES = makes()
LL16 = "all_reduce_one_shot_ll16"
SENTINEL = "all_reduce_one_shot_sentinel"
TWO_SHOT_SENTINEL = "all_reduce_two_shot_sentinel"
PULL = "all_reduce_one_shot_pull_simple"
PUSH = "all_reduce_two_shot_push_simple"
SCATTER = "reduce_scatter_direct_ll16"
SCATTER_PULL = "reduce_scatter_pull_simple"
SCATTER_PUSH = "reduce_scatter_push_simple"
GATHER = "all_gather_direct_ll16"
GATHER_PULL = "all_gather_pull_simple"
GATHER_PUSH = "all_gather_push_simple"
BROADCAST = "broadcast_direct_ll16"
BROADCAST_PUSH = "broadcast_push_simple"
BARRIER = "barrier_direct"
# A copy by other threads than those of the library's calls: see kernels/copies.cuh.
COPY = "copy"
# An exchange of one rank's blocks: see kernels/failures.cuh.
LOCAL_EXCHANGE = "grid_exchange of one rank"
NUMBERS = {**abi.KERNELS, COPY: len(abi.KERNELS), LOCAL_EXCHANGE: len(abi.KERNELS) + 1}
UNTOUCHED = 0xB5  # what memory holds that a call has not written
# A staging slot has the least size that the layout allows.
STAGING_BYTES = 1024
# The kernels of GPUs that talk to other ranks or blocks: kernels/sequence.cuh can call them.
ALL_KINDS = tuple(
    spec.name for spec in KERNEL_SPECS if "sim" in spec.targets and spec.takes_type is None
)
# What programs of exchanges call: with all kinds as well a kernel takes half a minute to compile.
EXCHANGE_KINDS = (LL16, "grid_exchange")
# Forms of grid_exchange in kernels/sequence.cuh: what a block reaches and reduces, and the order.
NUM_EXCHANGES = 6


@dataclass(frozen=True)
class Machine:
    """What a program runs on: fields of Simulation, and of Settings.

    Attributes:
        csrc: Root of the device source; a planted bug has a copy of its own.
    """

    warp_size: int = 32
    model: str = "sm_90"
    epoch_bits: int = 32
    packet_bytes: int = 256
    exchange_bytes: int = 2048
    staging_bytes: int = STAGING_BYTES
    blocks_per_channel: int = 1
    num_channels: int = 1
    message_bytes: int = 0
    schedule: str = "mixed"
    is_weak: bool = True
    checks: bool = True
    ends_when_stuck: bool = True
    trace_events: int = 0
    most_blocks: int = 0
    csrc: Path = cache.CSRC

    def simulation(self):
        own = ("warp_size", "model", "schedule", "is_weak", "checks", "ends_when_stuck")
        fields = {name: getattr(self, name) for name in (*own, "trace_events", "most_blocks")}
        # The longest program takes a hundredth of these steps.
        return Simulation(max_steps=10**9, **fields)

    def settings(self):
        return Settings(
            num_channels=self.num_channels,
            packet_bytes=self.packet_bytes,
            staging_bytes=self.staging_bytes,
            blocks_per_channel=self.blocks_per_channel,
            message_bytes=self.message_bytes,
            exchange_bytes=self.exchange_bytes,
            epoch_bits=self.epoch_bits,
        )


@dataclass(frozen=True)
class Outcome:
    """What a run ended with.

    Attributes:
        kind: "" when all is right; else the first finding's kind, "failed_call" or "wrong_data".
        message: What was wrong, in words.
        stats: Fields of KcclSimStats.
        statuses: Each rank's KcclStatus.
    """

    kind: str
    message: str
    stats: dict = field(repr=False)
    statuses: tuple = ()


@lru_cache(maxsize=256)
def compiled(file, kernel, warp_size, csrc, before=""):
    """A kernel of a file in tests/kernels, compiled with this device source, behind some text."""
    source = before + (KERNELS / file).read_text()
    path = cache.compile_sim(
        source, [kernel], warp_size=warp_size, name=file, include_dirs=[KERNELS], csrc=csrc
    )
    entries = load(path, 1).entries
    return module.Module("sim", warp_size, [kernel], lambda: entries).kernel(kernel)


def sequence(machine, coop, kinds, exchanges, dtype, op):
    """The kernel of kernels/sequence.cuh, or of kernels/grids.cuh, for a list of calls.

    Args:
        coop: As Script.begin() takes it.
        kinds: Names of the kernels that the list may call.
        exchanges: Which forms of grid_exchange the list has: they take seconds to compile.
        dtype, op: The type and operator of the reductions.
    """
    # Programs of all kinds are to need few kernels.
    if exchanges and kinds in (ALL_KINDS, EXCHANGE_KINDS):
        exchanges = range(NUM_EXCHANGES)
    bits = sum(1 << NUMBERS[kind] for kind in kinds)
    forms = sum(1 << form for form in exchanges)
    expression = names.expression(LL16, dtype, op, machine.csrc)
    element_and_op = ", ".join(expression.partition("<")[2].split(", ")[:2])
    if coop in ("Grid", "OpenGrid"):
        keeps = str(coop == "OpenGrid").lower()
        name = f"kccl::kernels::grid_sequence<{keeps}, {bits}ull, {element_and_op}>"
        return compiled("grids.cuh", name, machine.warp_size, machine.csrc, MAKES)
    name = f"kccl::kernels::sequence<kccl::{coop}, {bits}ull, {forms}u, {element_and_op}>"
    return compiled("sequence.cuh", name, machine.warp_size, machine.csrc, MAKES)
