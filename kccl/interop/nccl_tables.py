"""Writes the planner's tables as constants for libkccl_nccl.so (csrc/nccl/plan.h)."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends.shapes import BLOCKS_PER_CHANNEL, SIZES, THREADS_PER_BLOCK
from ..base import dtypes
from ..base.dtypes import Dtype
from ..gpu.cuda import CUDA
from ..plan.choice import choose
from ..plan.spec import MOST_THREADS, SHARE_UNIT_BYTES, KernelSpec, Request
from ..plan.specs import BY_NAME
from ..plan.tuning import tuning_for

WORLD_SIZES = (2, 4, 8)
"""Numbers of ranks that are served."""

REACHES = Path(__file__).with_name("nccl_reaches.json")
"""Up to which sizes KCCL is faster than NCCL: written by bench/tune/nccl.py."""

_SUMS = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
_MOVED = (dtypes.uint8,)
_TYPES = {
    "all_reduce": _SUMS,
    "reduce_scatter": _SUMS,
    "all_gather": _MOVED,
    "broadcast": _MOVED,
}
# Calls by packets and bare words. The others need staging, hundreds of MiB with several
# communicators.
_PROTOCOLS = ("ll16", "sentinel")


@dataclass(frozen=True)
class Line:
    """See Line in csrc/nccl/plan.h."""

    collective: str
    world_size: int
    dtype: Dtype
    up_to_bytes: int
    kernel: KernelSpec
    blocks: int
    threads: int


def lines(world_sizes: Sequence[int]) -> list[Line]:
    """Returns the lines of the tables, by ascending size for each kind of call."""
    found = []
    for world_size in world_sizes:
        for collective, types in _TYPES.items():
            for dtype in types:
                found += _lines_of(collective, world_size, dtype)
    return found


def _lines_of(collective: str, world_size: int, dtype: Dtype) -> list[Line]:
    tuning = tuning_for("cuda")
    reach = _reach(collective, world_size)
    ends = {line.up_to_bytes for line in tuning.of(world_size) if line.collective == collective}
    found: list[Line] = []
    for end in sorted({min(each, reach) for each in ends if each is not None} | {reach}):
        plan = choose(Request(collective, end, world_size, "cuda", dtype), tuning)
        kernel = BY_NAME[plan.name]
        if kernel.protocol not in _PROTOCOLS:
            break
        found.append(Line(collective, world_size, dtype, end, kernel, plan.blocks, plan.threads))
    return found


def _reach(collective: str, world_size: int) -> int:
    """Returns up to which size KCCL makes calls. As in a Tuning: of this number of ranks, or else
    of the next larger one, or else of the largest.
    """
    reaches: dict[int, int] = {
        line["world_size"]: line["up_to_bytes"]
        for line in json.loads(REACHES.read_text("utf-8"))["reaches"]
        if line["collective"] == collective
    }
    larger = [size for size in reaches if size >= world_size]
    return reaches[min(larger) if larger else max(reaches)]


def kernels(of: Sequence[Line]) -> list[KernelSpec]:
    """Returns the kernels of lines, each once."""
    return list({line.kernel.name: line.kernel for line in of}.values())


def plan(of: Sequence[Line]) -> str:
    """Returns the content of plan.inc."""
    specs = kernels(of)
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    rows = [f'    {{"{spec.name}", {spec.constant}, {spec.bytes_per_thread}}},' for spec in specs]
    table = [
        f"    {{Collective::k{_camel(line.collective)}, {line.world_size}, {line.dtype.constant}, "
        f"{line.up_to_bytes}, {numbers[line.kernel.name]}, {line.blocks}, {line.threads}}},"
        for line in of
    ]
    facts = [
        f"constexpr uint32_t kBlocksPerChannel = {BLOCKS_PER_CHANNEL};",
        f"constexpr uint32_t kThreadsPerBlock = {THREADS_PER_BLOCK};",
        f"constexpr uint32_t kMostThreads = {MOST_THREADS};",
        f"constexpr uint32_t kWarpSize = {CUDA.warp_size};",
        f"constexpr uint64_t kShareUnitBytes = {SHARE_UNIT_BYTES};",
    ]
    lists = ["constexpr Kernel kKernels[] = {", *rows, "};"]
    lists += ["constexpr Line kLines[] = {", *table, "};"]
    text = "".join(f"{line}\n" for line in (*facts, *lists))
    return f"{text}constexpr uint32_t kTablesHash = {zlib.crc32((text + sizes()).encode())}u;\n"


def sizes() -> str:
    """Returns the content of sizes.inc: the sizes of a communicator without staging, and from which
    compute capability on a GPU launches programmatic dependents.
    """
    values: dict[str, Any] = {**SIZES, "epoch_bits": 32, "message_bytes": 0}
    return (
        "constexpr KcclSizes kSizes = {\n"
        "    .num_channels = 0,\n"
        f"    .blocks_per_channel = {values['blocks_per_channel']},\n"
        f"    .epoch_bits = {values['epoch_bits']},\n"
        f"    .message_bytes = {values['message_bytes']},\n"
        f"    .packet_bytes = {values['packet_bytes']},\n"
        "    .staging_bytes = kKcclLeastStagingBytes,\n"
        "    .exchange_bytes = kKcclLineBytes,\n"
        "};\n"
        f"constexpr int kDependentsMajor = {CUDA.dependents_capability[0]};\n"
    )


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
