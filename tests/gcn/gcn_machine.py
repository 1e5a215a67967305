"""The machine that runs assembly of gfx942: interpreter/ as a library, and what a MI300X is like.

Nothing here has run on an AMD GPU. The machine is what AMD and LLVM write about the instructions
and the memory model, and times that others have measured: see LATENCIES.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kccl.jit import compilers

SOURCES = Path(__file__).parent / "interpreter"
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]


@dataclass(frozen=True)
class Figure:
    """A time, in picoseconds, or a number of cycles, and where it comes from."""

    value: int
    source: str


MEASURED_A = "MI300A, Schieffer et al., arXiv 2508.11298: a load of local memory"
ASSUMED = "assumed"
# By the names of GcnSettings' fields.
LATENCIES = {
    "cycle": Figure(476, "2.1 GHz, the peak clock in AMD's data sheet of the MI300X"),
    "level1": Figure(60_000, f"{ASSUMED}: about 125 cycles"),
    "level2": Figure(120_000, f"{ASSUMED}: about 250 cycles"),
    "local": Figure(
        346_000, f"{MEASURED_A}, 346 ns; one that finds it in the Infinity Cache is faster"
    ),
    "remote": Figure(690_000, "the same paper: a load of another APU's memory, 690 ns"),
    "shared": Figure(61_000, f"{ASSUMED}: 128 cycles, as the LDS of GCN"),
    "link_32_bytes": Figure(
        667, "48 GB/s a direction and peer, AMD's xGMI blog post; 32 B are the least that moves"
    ),
    "channel_access": Figure(
        480, "17.2 TB/s of Infinity Cache, AMD's CDNA3 white paper, by 128 channels: 64 B a cycle"
    ),
    "channel_atomic": Figure(1_900, f"{ASSUMED}: 4 cycles in the channel"),
    "write_back": Figure(1_000_000, f"{ASSUMED}: 2,048 lines a channel of an L2, one a cycle"),
    "vector_cycles": Figure(7, "a dependent v_dot2c, danila-permogorskii/batch1-cdna"),
    "scalar_cycles": Figure(5, f"{ASSUMED}: one more than the four of issue"),
    "branch_cycles": Figure(16, f"{ASSUMED}: taken, from the instruction cache"),
    "slow_cycles": Figure(16, f"{ASSUMED}: a quarter of the rate"),
    "matrix_cycles": Figure(32, f"{ASSUMED}: 8 passes of 4 cycles"),
    "memory_cycles": Figure(8, f"{ASSUMED}: 64 lanes by 8"),
    "barrier_cycles": Figure(20, ASSUMED),
}
# Longer than any program of the tests takes.
LIMIT = 3_000_000_000


class _Settings(ctypes.Structure):
    _fields_ = [
        (
            name,
            {"uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32}[
                kind
            ],
        )
        for kind, name in re.findall(
            r"^\s+(u?int\d+_t) (\w+);", (SOURCES / "settings.inc").read_text(), re.MULTILINE
        )
    ]


@cache
def library() -> ctypes.CDLL:
    """Builds the interpreter, if this version of it has not been built, and loads it."""
    cxx = compilers.find_cxx()
    assert cxx is not None, compilers.CURE
    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    key = hashlib.sha256(repr((cxx, FLAGS, texts)).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"kccl-gcn-{os.getuid()}-{key}.so"
    if not target.exists():
        _build(cxx, target)
    lib = ctypes.CDLL(str(target))
    word, text, handle = ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p
    for name, result, arguments in (
        ("gcn_error", text, []),
        ("gcn_parse", handle, [text]),
        ("gcn_forget", None, [handle]),
        ("gcn_machine", handle, [ctypes.POINTER(_Settings)]),
        ("gcn_destroy", None, [handle]),
        ("gcn_add_region", None, [handle, word, word, ctypes.c_int]),
        (
            "gcn_enqueue",
            ctypes.c_int,
            [handle, handle, text, ctypes.c_int, *[ctypes.c_uint32] * 3, text, word],
        ),
        ("gcn_run", ctypes.c_int, [handle]),
        ("gcn_launch_time", ctypes.c_int64, [handle, ctypes.c_int]),
        ("gcn_executed", word, [handle, text]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _build(cxx: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)

        def compiled(source: Path) -> Path:
            to = folder / f"{source.stem}.o"
            subprocess.run([*cxx, *FLAGS, "-c", str(source), "-o", str(to)], check=True)
            return to

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
        linked = folder / "gcn.so"
        subprocess.run([*cxx, "-shared", *map(str, objects), "-o", str(linked)], check=True)
        # Another process may have done the same meanwhile.
        linked.replace(target)


class Unknown(Exception):
    """The interpreter does not know what the assembly uses."""


class Program:
    """Assembly that clang wrote, taken apart."""

    def __init__(self, assembly: str) -> None:
        """Raises Unknown, with the line, for an instruction that the interpreter does not know."""
        self.assembly = assembly
        self.handle = library().gcn_parse(assembly.encode())
        if not self.handle:
            raise Unknown(library().gcn_error().decode())

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            library().gcn_forget(self.handle)

    def symbol(self, start: str) -> str:
        """The one kernel whose mangled name begins so."""
        found = [
            name
            for name in re.findall(r"\.amdhsa_kernel (\S+)", self.assembly)
            if name.startswith(start)
        ]
        assert len(found) == 1, f"{start}: {found}"
        return found[0]


@dataclass(frozen=True)
class Launch:
    """A kernel on one rank.

    Attributes:
        arguments: As they lie in memory, without those that the compiler hides.
    """

    rank: int
    program: Program
    symbol: str
    arguments: bytes
    grid: int = 1
    block: int = 64
    shared_bytes: int = 0


@dataclass(frozen=True)
class Report:
    """What a run did.

    Attributes:
        finding: What is wrong; None if nothing is.
        times_ns: The time of each launch, in virtual time.
        executed: How many instructions ran, by the beginnings of names that were asked for.
    """

    finding: str | None
    times_ns: tuple[float, ...]
    executed: dict[str, int]


def run(
    launches: Sequence[Launch],
    regions: Sequence[tuple[int, int, int]],
    *,
    world_size: int,
    seed: int = 0,
    counted: Sequence[str] = (),
    **changed: int,
) -> Report:
    """Runs launches from the start, those of a rank one after the other.

    Args:
        launches: In the order of each rank.
        regions: Memory as (address, bytes, rank).
        world_size: Number of GPUs, each with caches of its own.
        seed: 0: each access takes as long as LATENCIES says. Others: longer or shorter, in parts.
        counted: Beginnings of names of instructions to count.
        changed: Fields of GcnSettings that differ.
    """
    values: dict[str, Any] = {name: figure.value for name, figure in LATENCIES.items()}
    values |= {"seed": seed, "world_size": world_size, "limit": LIMIT, **changed}
    assert set(values) == {name for name, *_ in _Settings._fields_}
    lib = library()
    machine = lib.gcn_machine(ctypes.byref(_Settings(**values)))
    try:
        for address, nbytes, rank in regions:
            lib.gcn_add_region(machine, address, nbytes, rank)
        for each in launches:
            done = lib.gcn_enqueue(
                machine,
                each.program.handle,
                each.symbol.encode(),
                each.rank,
                each.grid,
                each.block,
                each.shared_bytes,
                each.arguments,
                len(each.arguments),
            )
            assert done, lib.gcn_error().decode()
        finding = None if lib.gcn_run(machine) else lib.gcn_error().decode()
        times = tuple(lib.gcn_launch_time(machine, i) / 1000 for i in range(len(launches)))
        return Report(
            finding, times, {name: lib.gcn_executed(machine, name.encode()) for name in counted}
        )
    finally:
        lib.gcn_destroy(machine)
