"""Bugs planted in the assembly: each turns a program red that is green without it."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_machine import Launch, Program
from gcn_mutations import STUCK, Edit, replaced
from gcn_programs import Outcome, collective
from gcn_world import World, compiled, kernel_assembly
from long import hunted

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]
SEEDS = range(16)
# A run in which a wait never ends takes as long as this, in picoseconds.
SHORT = 2_000_000_000
LL16 = "all_reduce_one_shot_ll16"
SENTINEL = "all_reduce_one_shot_sentinel"
PUSH = "all_reduce_two_shot_push_simple"


def _flag_before_its_data(body: str) -> str:
    """The store of a flag changes places with the write-back before it."""
    pattern = (
        r"^(\tbuffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt\(0\)\n)(\tglobal_store_dword [^\n]* sc0 sc1\n)"
    )
    return replaced(pattern, r"\2\1")(body)


@dataclass(frozen=True)
class Mutation:
    """An edit of a kernel's assembly.

    Attributes:
        kernel: Which kernel.
        edit: Changes its body.
        finds: What the outcome says, as a pattern.
    """

    kernel: str
    edit: Edit
    finds: str


WRONG = r"has a wrong result"
SYSTEM_LOAD = r"^(\tglobal_load_dwordx2 [^\n]*?) sc0 sc1$"
SYSTEM_STORE = r"^(\tglobal_store_dwordx2 [^\n]*?) sc0 sc1$"
MUTATIONS = {
    # Scopes
    "packets are stored without a scope": Mutation(LL16, replaced(SYSTEM_STORE, r"\1"), STUCK),
    "packets are stored with agent scope": Mutation(LL16, replaced(SYSTEM_STORE, r"\1 sc1"), STUCK),
    "packets are loaded without a scope": Mutation(LL16, replaced(SYSTEM_LOAD, r"\1"), STUCK),
    "packets are loaded with agent scope": Mutation(
        LL16, replaced(SYSTEM_LOAD, r"\1 sc1"), "loads with agent scope what rank"
    ),
    "sentinel words are stored without a scope": Mutation(
        SENTINEL, replaced(SYSTEM_STORE, r"\1"), STUCK
    ),
    "sentinel words are loaded with agent scope": Mutation(
        SENTINEL, replaced(SYSTEM_LOAD, r"\1 sc1"), "loads with agent scope what rank"
    ),
    "flags are stored without a scope": Mutation(
        PUSH, replaced(r"^(\tglobal_store_dword [^\n]*?) sc0 sc1$", r"\1"), STUCK
    ),
    # Waits
    "no wait for packets": Mutation(
        LL16,
        replaced(r"^\ts_waitcnt vmcnt\(\d+\)$", "\ts_nop 0"),
        r"reads v\d+, which no s_waitcnt waited for",
    ),
    "a wait for all loads but one too many": Mutation(
        LL16,
        replaced(r"^\ts_waitcnt vmcnt\(0\)$", "\ts_waitcnt vmcnt(1)"),
        r"reads v\d+, which no s_waitcnt waited for",
    ),
    "no wait for arguments": Mutation(
        LL16,
        replaced(r"^\ts_waitcnt lgkmcnt\(0\)$", "\ts_nop 0"),
        r"reads s\d+, which no s_waitcnt waited for",
    ),
    "no wait for the write-back": Mutation(
        PUSH, replaced(r"^(\tbuffer_wbl2 sc0 sc1\n)\ts_waitcnt vmcnt\(0\)$", r"\1\ts_nop 0"), WRONG
    ),
    # Caches
    "no write-back before a flag": Mutation(
        PUSH, replaced(r"^\tbuffer_wbl2 sc0 sc1$", "\ts_nop 0"), WRONG
    ),
    "a write-back for the own GPU only": Mutation(
        PUSH, replaced(r"^\tbuffer_wbl2 sc0 sc1$", "\tbuffer_wbl2 sc1"), WRONG
    ),
    "caches are not emptied behind a flag": Mutation(
        PUSH, replaced(r"^\tbuffer_inv sc0 sc1$", "\ts_nop 0"), WRONG
    ),
    # Order
    "a flag goes before its data": Mutation(PUSH, _flag_before_its_data, WRONG),
    "no barriers of the block": Mutation(PUSH, replaced(r"^\ts_barrier$", "\ts_nop 0"), WRONG),
    "a packet's halves have changed places": Mutation(
        LL16,
        replaced(r"^(\tglobal_store_dwordx2 [^\n]*?) offset:8 sc0 sc1$", r"\1 offset:24 sc0 sc1"),
        rf"{STUCK}|{WRONG}|nobody's",
    ),
    # Lanes
    "lanes that sat out a branch do not come back": Mutation(
        LL16, replaced(r"^\ts_or_b64 exec, exec, s\[\d+:\d+\]$", "\ts_nop 0"), rf"{STUCK}|{WRONG}"
    ),
}


# Long messages use a slot more than once in a kernel, so what was read there before may be seen
# again.
COUNTS = {LL16: 1000, SENTINEL: 1000, PUSH: 12000}


def _outcome(kernel: str, seed: int, program: Program | None = None) -> Outcome:
    count = COUNTS[kernel]
    return collective(kernel, 2, count=count, calls=2, seed=seed, program=program, limit=SHORT)


def _edited(assembly: str, symbol: str, edit: Edit) -> str:
    """The assembly with another body of the kernel whose mangled name begins so."""
    begin = assembly.index(f"\n{symbol}")
    end = assembly.index(".Lfunc_end", begin)
    body = assembly[begin:end]
    changed = edit(body)
    assert changed != body
    return assembly[:begin] + changed + assembly[end:]


def _mutated(mutation: Mutation) -> Program:
    assembly = kernel_assembly(mutation.kernel, "float32", "sum", 2)
    symbol = f"_ZN4kccl7kernels{len(mutation.kernel)}{mutation.kernel}"
    return Program(_edited(assembly, symbol, mutation.edit))


@pytest.mark.parametrize("kernel", [LL16, SENTINEL, PUSH])
def test_without_a_bug_every_seed_is_green(kernel):
    for seed in SEEDS:
        outcome = _outcome(kernel, seed)
        assert outcome.wrong is None, f"seed {seed}: {outcome.wrong}"


@pytest.mark.parametrize("name", hunted(MUTATIONS))
def test_a_planted_bug_is_found(name):
    mutation = MUTATIONS[name]
    program = _mutated(mutation)
    for seed in SEEDS:
        outcome = _outcome(mutation.kernel, seed, program)
        if outcome.wrong is not None:
            assert re.search(mutation.finds, outcome.wrong), outcome.wrong
            return
    pytest.fail(f"no seed below {SEEDS.stop} finds it")


# Rank 0 stores packets at `data` and then at `flags`, both in rank 1's memory. Rank 1 waits for the
# flags and reads the data.
RELAY = """#include <kccl/kccl.cuh>
KCCL_KERNEL void relay(KCCL_KERNEL_PARAM(KcclDeviceComm) parameter, uint64_t data, uint64_t flags,
                       uint64_t seen) {
    using namespace kccl;
    const DeviceComm& comm = platform::first_parameter(parameter);
    const uint32_t i = platform::thread_in_block();
    auto* const from = reinterpret_cast<mem::Packet*>(data) + i;
    auto* const flag = reinterpret_cast<mem::Packet*>(flags) + i;
    if (comm.rank == 0) {
        mem::store_packet(from, {{i + 1, i + 1}});
        mem::fence_packets();
        mem::store_packet(flag, {{1, 1}});
        return;
    }
    while (true) {
        const mem::Packet packet = mem::load_packet(flag);
        if (!platform::warp_any(packet.half[0] == 0 || packet.half[1] == 0)) break;
    }
    mem::fence_packets();
    const mem::Packet packet = mem::load_packet(from);
    mem::store_plain(reinterpret_cast<uint64_t*>(seen) + i, packet.half[0] + packet.half[1]);
}
"""


def _relays(assembly: str, seed: int) -> bool:
    """Whether rank 1 has seen the data that rank 0 stored before the flags."""
    world, program, block = World(2), Program(assembly), 64
    data, flags = (world.array(1, np.zeros(2 * block, np.uint64)) for _ in range(2))
    seen = world.array(1, np.zeros(block, np.uint64))
    addresses = np.array([each.ctypes.data for each in (data, flags, seen)], np.uint64)
    launches = [
        Launch(
            rank,
            program,
            program.symbol("_Z5relay"),
            world.comm_bytes(rank) + addresses.tobytes(),
            block=block,
        )
        for rank in range(2)
    ]
    report = world.run(launches, seed=seed)
    assert report.finding is None, report.finding
    return bool((seen == 2 * np.arange(1, block + 1)).all())


def test_a_fence_of_packets_waits_until_they_are_there():
    """In a sentinel call the polls behind the re-arming wait for it, too: they end in the order of
    their issue. So the wait of the fence is taken away where nothing else waits.
    """
    assembly = compiled(RELAY)
    # A seed of six finds it.
    seeds = range(4 * SEEDS.stop)
    assert all(_relays(assembly, seed) for seed in seeds)
    no_wait = replaced(
        r"^\ts_waitcnt vmcnt\(0\)\n(\tglobal_store_dwordx2 [^\n]* sc0 sc1)$", "\ts_nop 0\n\\1"
    )
    without = _edited(assembly, "_Z5relay", no_wait)
    assert not all(_relays(without, seed) for seed in seeds)
