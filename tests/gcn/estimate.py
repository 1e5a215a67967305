"""Estimates what calls cost inside of a kernel on MI300X, from code and published latencies.

    python tests/gcn/estimate.py            # prints the estimates, and every assumption behind them
    python tests/gcn/estimate.py --record   # writes them to bench/records as well

Nothing is measured: no AMD GPU is at hand. The machine of gcn_machine.py runs the code that clang
writes for gfx942, instruction by instruction, each access with the latency of the table. A row is
the time of one call more in a kernel of dependent calls.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/gcn")]

import numpy as np  # noqa: E402
from gcn_machine import LATENCIES, Launch, Program  # noqa: E402
from gcn_world import CHAIN, Sizes, World, compiled  # noqa: E402

RECORD = ROOT / "bench/records/gfx942_estimates.jsonl"
WORLD_SIZE = 8
_CHAIN = "KcclDeviceComm, float*, uint32_t, uint32_t"
KERNELS = {
    "all_reduce_one_shot_ll16": f"chain_ll16<{WORLD_SIZE}>({_CHAIN})",
    "all_reduce_one_shot_sentinel": f"chain_sentinel<{WORLD_SIZE}>({_CHAIN})",
    "grid_sync relaxed": "barriers<kccl::mem::Order::kRelaxed>(KcclDeviceComm, uint32_t)",
    "grid_sync acq_rel": "barriers<kccl::mem::Order::kAcqRel>(KcclDeviceComm, uint32_t)",
}
# Calls of two launches; the difference has neither the opening nor the end.
FEW, MANY = 2, 6


@dataclass(frozen=True)
class Estimate:
    """One row.

    Attributes:
        call: A key of KERNELS.
        nbytes: The bytes of a rank's message, float32; 0 for a barrier.
        blocks, threads: The grid's blocks, and the threads of a block.
        time_us: The time of one call.
    """

    call: str
    world_size: int
    nbytes: int
    blocks: int
    threads: int
    time_us: float


@cache
def _program(call: str) -> Program:
    source = f'#include "{CHAIN}"\ntemplate KCCL_KERNEL void kccl::gcn::{KERNELS[call]};\n'
    return Program(compiled(source))


def _symbol(call: str) -> str:
    name = KERNELS[call].partition("<")[0]
    return _program(call).symbol(f"_ZN4kccl3gcn{len(name)}{name}")


def _per_call(times_ns: tuple[float, ...], ranks: int) -> float:
    return (max(times_ns[ranks:]) - max(times_ns[:ranks])) / (MANY - FEW) / 1000


def all_reduce(call: str, nbytes: int, blocks: int, threads: int) -> Estimate:
    """An all_reduce of WORLD_SIZE ranks, of which each block reduces its slice."""
    world = World(WORLD_SIZE, Sizes(num_channels=blocks, blocks_per_channel=1))
    size = nbytes // 4
    values = np.arange(size, dtype=np.float32)
    arrays = [world.array(rank, values + rank) for rank in range(WORLD_SIZE)]
    launches = []
    for calls in (FEW, MANY):
        for rank, array in enumerate(arrays):
            numbers = np.array([size // blocks, calls], np.uint32).tobytes()
            address = np.array([array.ctypes.data], np.uint64).tobytes()
            arguments = world.comm_bytes(rank) + address + numbers
            launches.append(Launch(rank, _program(call), _symbol(call), arguments, blocks, threads))
    report = world.run(launches)
    assert report.finding is None, report.finding
    # After the first call all ranks have the same, and each further one multiplies it.
    total = WORLD_SIZE * values + sum(range(WORLD_SIZE))
    total *= np.float32(WORLD_SIZE) ** (FEW + MANY - 1)
    assert all((array == total).all() for array in arrays)
    return Estimate(
        call, WORLD_SIZE, nbytes, blocks, threads, _per_call(report.times_ns, WORLD_SIZE)
    )


def grid_sync(call: str, blocks: int, threads: int, grid_counters: int | None = None) -> Estimate:
    """A barrier of the blocks of one GPU, one on each compute unit."""
    world = World(1, grid_counters=grid_counters)
    launches = []
    for calls in (FEW, MANY):
        arguments = world.comm_bytes(0) + np.array([calls], np.uint32).tobytes()
        launches.append(Launch(0, _program(call), _symbol(call), arguments, blocks, threads))
    report = world.run(launches)
    assert report.finding is None, report.finding
    return Estimate(call, 1, 0, blocks, threads, _per_call(report.times_ns, 1))


def estimates() -> list[Estimate]:
    """All rows."""
    rows = [
        all_reduce(call, 8192, blocks, threads)
        for call in ("all_reduce_one_shot_ll16", "all_reduce_one_shot_sentinel")
        for blocks, threads in ((8, 64), (8, 128), (16, 128))
    ]
    rows += [
        grid_sync(call, 256, threads)
        for call in ("grid_sync relaxed", "grid_sync acq_rel")
        for threads in (64, 512)
    ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    options = parser.parse_args()
    rows = estimates()
    print("Estimated, not measured: code for gfx942 in an interpreter, with these assumptions.\n")
    for name, figure in LATENCIES.items():
        value = (
            f"{figure.value} cycles" if name.endswith("_cycles") else f"{figure.value / 1000:g} ns"
        )
        print(f"  {name:16} {value:>10}   {figure.source}")
    print(
        "\n  Besides: instructions come from the cache; all blocks begin at the same time; caches\n"
        "  evict nothing; links and channels serve requests in their order; an access\n"
        "  takes place half of its latency after its issue.\n"
    )
    print(f"  {'call':30} {'ranks':>5} {'bytes':>6} {'blocks':>6} {'threads':>7} {'us a call':>9}")
    for row in rows:
        print(
            f"  {row.call:30} {row.world_size:5} {row.nbytes:6} {row.blocks:6} {row.threads:7} "
            f"{row.time_us:9.2f}"
        )
    if options.record:
        document = {
            "machine": {"model": "gfx942 interpreted", "gpu": None},
            "command": "python tests/gcn/estimate.py --record",
            "assumptions": {
                name: {"value": figure.value, "source": figure.source}
                for name, figure in LATENCIES.items()
            },
            "rows": [vars(row) | {"library": "kccl", "estimated": True} for row in rows],
        }
        RECORD.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
