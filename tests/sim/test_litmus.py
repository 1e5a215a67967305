"""The simulator's memory shows what PTX and AMD's memory model allow, and nothing that they forbid.

    python tests/sim/test_litmus.py

prints the table. csrc/sim/MODEL.md explains it; litmus.py says how a test is written.
"""

from dataclasses import dataclass

import litmus
import numpy as np
import pytest
from litmus import MOST_RUNS, SEEDS, Answer, machine

ALLOWED = "allowed"  # and a run must show it
FORBIDDEN = "forbidden"
# Allowed by the memory model, but never seen: MODEL.md lists it as not modelled.
NOT_MODELLED = "not modelled"

FAR = ("device", "system")
ALL = ("block", "device", "system")
BOTH = ("sm_90", "gfx942")
SM_90, GFX942 = BOTH

# Sections of the PTX ISA's chapter "Memory Consistency Model", and of LLVM's AMDGPUUsage.
CAUSALITY = "PTX Axioms: Causality; AMDGPU Memory Model"
PATTERNS = "PTX Release and Acquire Patterns; AMDGPU Memory Model"
FENCE_SC = "PTX Axioms: Fence-SC; C++20 [atomics.order]"
COHERENCE = "PTX Axioms: Coherence, SC-per-location"
SCOPE = "PTX Morally Strong Operations; AMDGPU Memory Scopes"
OBSERVATION = "PTX Observation (through read-modify-writes); C++20 [intro.races], release sequences"
VECTORS = "PTX Vector Data-types; AMDGPU Memory Model GFX942"
BARRIERS = "PTX Memory Synchronization; AMDGPU Memory Model GFX942"
# Threads 0 and 1 in one block of rank 0, thread 2 in rank 1.
NEAR_NEAR_FAR = "000 001 100"
NEAR_FAR = (NEAR_NEAR_FAR,)
# So many stores that the simulator forgets what the word held before them.
MANY_V = "; ".join(f"v={value}" for value in range(1, 10))
MANY_V_REL = MANY_V.replace(";", ".rel;") + ".rel"


@dataclass(frozen=True)
class Row:
    """A test: name, steps, outcome, what the models say of the outcome, and where they say it."""

    name: str
    steps: str
    outcome: str
    book: str
    reference: str
    places: tuple[str, ...] = FAR
    models: tuple[str, ...] = BOTH


OUTCOMES = (
    # ---- Message passing
    Row("MP", "x=1; y=1 | y; x", "1 0", ALLOWED, CAUSALITY, ALL),
    Row("MP+rel+acq", "x=1; y=1.rel | y.acq; x", "1 0", FORBIDDEN, CAUSALITY, ALL),
    Row("MP+rel", "x=1; y=1.rel | y; x", "1 0", ALLOWED, PATTERNS, ALL),
    Row("MP+acq", "x=1; y=1 | y.acq; x", "1 0", ALLOWED, PATTERNS, ALL),
    Row("MP+fence+fence", "x=1; fence; y=1 | y; fence; x", "1 0", FORBIDDEN, PATTERNS, ALL),
    Row("MP+fence+acq", "x=1; fence; y=1 | y.acq; x", "1 0", FORBIDDEN, PATTERNS),
    Row("MP+rel+fence", "x=1; y=1.rel | y; fence; x", "1 0", FORBIDDEN, PATTERNS),
    Row("MP+fence late", "x=1; y=1; fence | y; fence; x", "1 0", ALLOWED, PATTERNS),
    Row("MP+acq elsewhere", "x=1; y=1.rel | y; z.acq; x", "1 _ 0", ALLOWED, PATTERNS),
    Row("MP+rel; rlx", "x=1; y=1.rel; y=2 | y.acq; x", "2 0", FORBIDDEN, PATTERNS),
    Row("MP+rel; rlx z", "x=1; y=1.rel; z=1 | z.acq; x", "1 0", ALLOWED, PATTERNS),
    Row("MP+rel+rlx; acq", "x=1; y=1.rel | y; y.acq; x", "1 _ 0", FORBIDDEN, PATTERNS),
    Row("MP packet", "x=1; p=1 | p; x", "1 1 1 1 0", ALLOWED, CAUSALITY),
    # ---- Store buffering, load buffering
    Row("SB", "x=1; y | y=1; x", "0 0", ALLOWED, FENCE_SC, ALL),
    Row("SB+rel+acq", "x=1.rel; y.acq | y=1.rel; x.acq", "0 0", ALLOWED, FENCE_SC, ALL),
    Row("SB+fence", "x=1; fence; y | y=1; fence; x", "0 0", ALLOWED, FENCE_SC, ALL),
    Row("SB+sc", "x=1; fence.sc; y | y=1; fence.sc; x", "0 0", FORBIDDEN, FENCE_SC, ALL),
    Row(
        "SB+sc narrow",
        "x=1; fence.sc@block; y | y=1; fence.sc@block; x",
        "0 0",
        ALLOWED,
        SCOPE,
    ),
    Row("SB+sc+narrow", "x=1; fence.sc; y | y=1; fence.sc@block; x", "0 0", ALLOWED, SCOPE),
    Row("LB", "x; y=1 | y; x=1", "1 1", NOT_MODELLED, "PTX Axioms: No-Thin-Air", ALL),
    # ---- Independent reads of independent writes
    Row("IRIW", "x=1 | y=1 | x; y | y; x", "1 0 1 0", ALLOWED, CAUSALITY),
    Row(
        "IRIW+acq",
        "x=1.rel | y=1.rel | x.acq; y.acq | y.acq; x.acq",
        "1 0 1 0",
        ALLOWED,
        CAUSALITY,
    ),
    Row("IRIW+fence", "x=1 | y=1 | x; fence; y | y; fence; x", "1 0 1 0", ALLOWED, FENCE_SC),
    Row(
        "IRIW+sc",
        "x=1 | y=1 | x; fence.sc; y | y; fence.sc; x",
        "1 0 1 0",
        FORBIDDEN,
        FENCE_SC,
        ("system",),
    ),
    # ---- One word
    Row("CoRR", "x=1 | x; x", "1 0", FORBIDDEN, COHERENCE, ALL),
    Row("CoRR2", "x=1 | x=2 | x; x | x; x", "1 2 2 1", FORBIDDEN, COHERENCE),
    Row("CoWW", "x=1; x=2 | x; x", "2 1", FORBIDDEN, COHERENCE, ALL),
    Row("CoRW1", "x; x=1", "1", FORBIDDEN, COHERENCE),
    Row("CoRW2", "x; x=2 | x=1", "1 x=1", FORBIDDEN, COHERENCE),
    Row("CoWR", "x=1; x | x=2", "0", FORBIDDEN, COHERENCE),
    Row("CoWR2", "x=1; x | x=2", "2 x=1", FORBIDDEN, COHERENCE),
    Row("CoRR+rel+acq", "x=1 | x; y=1.rel; x | y.acq; x", "1 1 1 0", FORBIDDEN, COHERENCE),
    Row("CoRR+rlx", "x=1 | x; y=1; x | y; x", "1 1 1 0", ALLOWED, COHERENCE),
    Row("CAS", "claim x | claim x", "1 1", FORBIDDEN, "PTX Axioms: Atomicity"),
    Row("add", "add x | add x", "x=1", FORBIDDEN, "PTX Axioms: Atomicity"),
    # ---- A release sequence: an update carries on the releases of what it updates
    Row("MP+add rel", "x=1; add y.rel | y.acq; x", "1 0", FORBIDDEN, OBSERVATION),
    Row("MP+add", "x=1; add y | y.acq; x", "1 0", ALLOWED, OBSERVATION),
    Row("MP+add+fence", "x=1; add y.rel | y; fence; x", "1 0", FORBIDDEN, OBSERVATION),
    Row("MP+adds", "x=1; add y.rel | add y | y.acq; x", "2 0", FORBIDDEN, OBSERVATION),
    Row("MP+adds rlx", "x=1; add y | add y.rel | y.acq; x", "2 0", ALLOWED, OBSERVATION),
    Row("MP+own add", "x=1; add y.rel | add y; y.acq; x", "2 0", FORBIDDEN, OBSERVATION),
    Row("MP+own add rlx", "x=1; add y.rel | add y; y; x", "2 0", ALLOWED, OBSERVATION),
    Row("MP+rel+add", "x=1; y=1.rel | add y | y.acq; x", "2 0", FORBIDDEN, OBSERVATION),
    Row("MP+adds+fence", "x=1; add y.rel | add y | y; fence; x", "2 0", FORBIDDEN, OBSERVATION),
    # ---- Cumulativity
    Row("WRC", "x=1 | x; y=1 | y; x", "1 1 0", ALLOWED, CAUSALITY),
    Row("WRC+rel+acq", "x=1 | x; y=1.rel | y.acq; x", "1 1 0", FORBIDDEN, CAUSALITY),
    Row(
        "WRC scopes",
        "x=1 | x; y=1.rel | y.acq; x",
        "1 1 0",
        FORBIDDEN,
        SCOPE,
        ("000 001 100", "000 010 100", "000 100 010"),
    ),
    Row("ISA2", "x=1; y=1.rel | y; z=1.rel | z.acq; x", "1 1 0", ALLOWED, CAUSALITY),
    Row("ISA2+acq", "x=1; y=1.rel | y.acq; z=1.rel | z.acq; x", "1 1 0", FORBIDDEN, CAUSALITY),
    Row("ISA2+fence", "x=1; y=1.rel | y; fence; z=1 | z.acq; x", "1 1 0", FORBIDDEN, CAUSALITY),
    Row(
        "ISA2 scopes",
        "x=1; y=1.rel@block | y.acq@block; z=1.rel | z.acq; x",
        "1 1 0",
        FORBIDDEN,
        SCOPE,
        NEAR_FAR,
    ),
    # ---- Scopes too narrow
    Row("MP rel narrow", "x=1; y=1.rel@block | y.acq; x", "1 0", ALLOWED, SCOPE),
    Row("MP acq narrow", "x=1; y=1.rel | y.acq@block; x", "1 0", ALLOWED, SCOPE),
    Row("MP fence narrow", "x=1; fence@block; y=1 | y; fence; x", "1 0", ALLOWED, SCOPE),
    Row("MP fence narrow 2", "x=1; fence; y=1 | y; fence@block; x", "1 0", ALLOWED, SCOPE),
    Row("MP wide, narrow", "x=1; fence; fence@block; y=1 | y.acq; x", "1 0", FORBIDDEN, SCOPE),
    # ---- Packets
    Row("packet tears", "p=1 | p", "1 1 0 0", ALLOWED, VECTORS, ALL),
    Row("packet tears 2", "p=1 | p", "0 0 1 1", ALLOWED, VECTORS, ALL),
    Row("half tears", "p=1 | p", "1 0 _ _", FORBIDDEN, VECTORS, ALL),
    Row("half tears 2", "p=1 | p", "0 1 _ _", FORBIDDEN, VECTORS, ALL),
    Row("v4.u32 tears", "p=1/4 | p/4", "1 0 _ _", ALLOWED, VECTORS, ALL),
    # ---- Two words in one unit of 8 bytes
    Row("neighbour old", f"w=1; {MANY_V} | v; w", "9 0", ALLOWED, CAUSALITY),
    Row("neighbour new", f"w=1; x=1.rel | x.acq; {MANY_V}; w", "1 0", FORBIDDEN, CAUSALITY),
    # ---- Block barriers
    Row("barrier", "x=1; sync | sync; x", "0", FORBIDDEN, BARRIERS, ("block",)),
    Row("barrier bare", "x=1; bare | bare; x", "0", ALLOWED, BARRIERS, ("block",), (GFX942,)),
    Row("barrier bare", "x=1; bare | bare; x", "0", FORBIDDEN, BARRIERS, ("block",), (SM_90,)),
    Row(
        "barrier+rel", "x=1; sync | sync; y=1.rel | y.acq; x", "1 0", FORBIDDEN, BARRIERS, NEAR_FAR
    ),
    # ---- Two writers: what the memory model allows here is a finding instead (below)
    Row("2+2W", "x=1; y=2 | y=1; x=2", "x=1 y=1", NOT_MODELLED, COHERENCE),
    Row("S", "x=2; y=1 | y; x=1", "1 x=2", NOT_MODELLED, COHERENCE),
    Row("R", "x=1; y=1 | y=2; x", "0 y=2", ALLOWED, FENCE_SC),
    Row("R+sc", "x=1; fence.sc; y=1 | y=2; fence.sc; x", "0 y=2", FORBIDDEN, FENCE_SC),
)

RACES = "PTX Conflict and Data-races"
# Outcome: the finding's kind, or "none".
VERDICTS = (
    Row("MP plain", "x:=1; y=1 | await y; x:", "data_race", ALLOWED, RACES, ALL),
    Row("MP plain+rel", "x:=1; y=1.rel | await y; x:", "data_race", ALLOWED, RACES),
    Row("MP plain+acq", "x:=1; y=1 | await y.acq; x:", "data_race", ALLOWED, RACES),
    Row("MP plain+rel+acq", "x:=1; y=1.rel | await y.acq; x:", "none", ALLOWED, RACES, ALL),
    Row("MP plain+fence", "x:=1; fence; y=1 | await y; fence; x:", "none", ALLOWED, RACES),
    Row("overwritten", "x:; y=1 | await y; x:=1", "data_race", ALLOWED, RACES),
    Row("overwritten+rel", "x:; y=1.rel | await y.acq; x:=1", "none", ALLOWED, RACES),
    Row("first value, overwritten", "x; y=1 | await y; x:=1", "data_race", ALLOWED, RACES, ALL),
    Row("first value, rel", "x; y=1.rel | await y.acq; x:=1", "none", ALLOWED, RACES, ALL),
    Row("plain, atomic", "x=1 | x:", "data_race", ALLOWED, RACES),
    Row("fence narrow", "x:=1; fence@block; y=1 | await y; fence; x:", "data_race", ALLOWED, SCOPE),
    Row("rel narrow", "x:=1; y=1.rel@block | await y.acq", "narrow_scope", ALLOWED, SCOPE),
    Row("acq narrow", "x:=1; y=1.rel | await y.acq@block", "narrow_scope", ALLOWED, SCOPE),
    Row("barrier plain", "x:=1; sync | sync; x:", "none", ALLOWED, BARRIERS, ("block",)),
    Row(
        "bare plain", "x:=1; bare | bare; x:", "data_race", ALLOWED, BARRIERS, ("block",), (GFX942,)
    ),
    Row("bare plain", "x:=1; bare | bare; x:", "none", ALLOWED, BARRIERS, ("block",), (SM_90,)),
    Row(
        "barrier plain+rel",
        "x:=1; sync | sync; y=1.rel | await y.acq; x:",
        "none",
        ALLOWED,
        BARRIERS,
        NEAR_FAR,
    ),
    Row("W+W", "x=1 | x=2", "two_writers", ALLOWED, "PTX Coherence Order"),
    Row("2+2W", "x=1; y=2 | y=1; x=2", "two_writers", ALLOWED, "PTX Coherence Order"),
    Row("S", "x=2; y=1 | await y; x=1", "two_writers", ALLOWED, "PTX Coherence Order"),
    Row("S+rel", "x=2; y=1.rel | await y; x=1", "two_writers", ALLOWED, "PTX Coherence Order"),
    Row("S+rel+acq", "x=2; y=1.rel | await y.acq; x=1", "none", ALLOWED, "PTX Coherence Order"),
    Row("reuse", "p=1; p=1 | await p; y=1", "reused_slot", ALLOWED, "MODEL.md: caused"),
    Row("reuse+credit", "p=1; await y; p=1 | await p; y=1", "none", ALLOWED, "MODEL.md: caused"),
    Row("W+W equal", "x=1 | x=1; y=1.rel | await y.acq; x=2", "two_writers", ALLOWED, COHERENCE),
    Row("relay", "x=1 | await x; y=1 | await y; x=2", "none", ALLOWED, "MODEL.md: caused"),
    Row("relay unseen", "x=1 | y=1 | await y; x=2", "two_writers", ALLOWED, "MODEL.md: caused"),
    # Two words in one unit of 8 bytes: accesses to one order nothing on the other
    Row("neighbours", f"w=1; w=2 | {MANY_V}", "none", ALLOWED, COHERENCE),
    Row("neighbours plain", "w:=1; w:=2 | v=1; v=2", "none", ALLOWED, RACES),
    Row("neighbours scope", "w:=1; w:=2 | v@device; v@device", "none", ALLOWED, SCOPE),
    Row(
        "neighbour evicts",
        f"x:=1; w=1.rel; y=1 | await y; {MANY_V}; z=1 | await z; await w.acq; x:",
        "none",
        ALLOWED,
        PATTERNS,
    ),
    Row(
        "neighbour releases",
        f"w=1; y=1 | await y; x:=1; {MANY_V_REL}; z=1 | await z; await w.acq; x:",
        "data_race",
        ALLOWED,
        PATTERNS,
    ),
    Row("nobody stores", "await x | x", "deadlock", ALLOWED, "MODEL.md: verdicts"),
)


@dataclass(frozen=True)
class KernelRow:
    """A test that is a kernel of litmus.cuh: its finding, and gfx942's where that differs."""

    kernel: str
    finding: str
    reference: str
    num_warps: int = 2
    on_gfx942: str = ""


PROXIES = "PTX Proxies, Asynchronous Operations"
KERNELS = (
    KernelRow("lanes<kccl::Together::kSync>", "none", "PTX bar.warp.sync", 1),
    KernelRow("lanes<kccl::Together::kVote>", "data_race", "CUDA guide, warp vote functions", 1),
    KernelRow("lanes<kccl::Together::kShuffle>", "data_race", "CUDA guide, warp shuffles", 1),
    KernelRow("credit<true>", "none", "MODEL.md: caused", 1),
    KernelRow("credit<false>", "reused_slot", "MODEL.md: caused", 1),
    KernelRow("copies<kccl::Copying::kRight>", "none", PROXIES),
    KernelRow("copies<kccl::Copying::kReadsEarly>", "data_race", PROXIES),
    KernelRow("copies<kccl::Copying::kWaitsForOther>", "data_race", PROXIES, on_gfx942="none"),
    KernelRow("copies<kccl::Copying::kNoFirstFence>", "data_race", PROXIES, on_gfx942="none"),
    KernelRow("copies<kccl::Copying::kNoFence>", "data_race", PROXIES, on_gfx942="none"),
    KernelRow("copies<kccl::Copying::kWriterFences>", "none", PROXIES),
    KernelRow("copies<kccl::Copying::kIssuerFences>", "none", PROXIES),
    KernelRow("copies<kccl::Copying::kWritesSource>", "data_race", PROXIES, on_gfx942="none"),
    KernelRow("copies<kccl::Copying::kCopiesOver>", "data_race", PROXIES),
    KernelRow("copies<kccl::Copying::kCopiesOverFree>", "none", PROXIES),
    KernelRow("copies<kccl::Copying::kNotDrained>", "undrained", PROXIES, on_gfx942="none"),
    KernelRow("ring<false>", "none", PROXIES),
    KernelRow("ring<true>", "data_race", PROXIES),
)


def answers_of(row: Row, place: str, model: str) -> list[Answer]:
    """The answer by seeds; for the row's first model also that by all schedules."""
    is_verdict = row in VERDICTS
    look = litmus.look_for_finding if is_verdict else litmus.look_for
    wanted = () if is_verdict else (row.outcome,)
    limits = {"mixed": SEEDS, "exhaustive": MOST_RUNS if model == row.models[0] else 0}
    # Rows of outcomes run without checks, which would report the races that the outcomes need.
    return [
        look(row.steps, *wanted, place, machine(model, schedule, is_verdict), limit)
        for schedule, limit in limits.items()
        if limit
    ]


def expected(row: Row | KernelRow, model: str) -> str:
    if isinstance(row, KernelRow):
        return row.on_gfx942 if row.on_gfx942 and model == GFX942 else row.finding
    if row in OUTCOMES:
        return "seen" if row.book == ALLOWED else "never"
    return row.outcome


def kernel_answer(row: KernelRow, model: str) -> tuple[Answer, bool]:
    """What every run found; and whether in some run a copy completed before an earlier one."""
    on = machine(model, "mixed", True)
    source = np.empty(5 * 64, np.uint32)
    results = np.empty(1 + 2 * 64, np.uint32)
    what = row.kernel.partition("<")[0]
    program = []
    for rank in range(2 if what == "credit" else 1):
        args = {
            "lanes": (results,),
            "credit": (on.memory.ctypes.data, np.uint32(rank)),
            "copies": (source, results),
            "ring": (on.world.device_comm(0), source, results),
        }[what]
        kernel = litmus.compiled(on.warp_size).kernel(f"kccl::{row.kernel}")
        block = row.num_warps * on.warp_size
        program.append([on.world.launch(rank, kernel, *args, block=block)])
    words = set()
    was_passed = False
    for run in range(SEEDS):
        source[:] = np.arange(source.size)
        results[:] = 0
        report = on.world.run(program, run)
        words.add(report.findings[0].kind if report.findings else "none")
        if report.findings:
            continue
        was_passed = was_passed or bool(report.stats["late_copies"] and results[0])
        if what == "copies" and row.kernel != "copies<kccl::Copying::kWritesSource>":
            threads = np.arange(2 * on.warp_size)
            assert (results[1 : 1 + threads.size] == source[threads % 64]).all()
    return Answer(" or ".join(words), SEEDS, False), was_passed


def cases(rows):
    return [
        pytest.param(row, place, model, id=f"{row.name}-{place}-{model}".replace(" ", "_"))
        for row in rows
        for place in row.places
        for model in row.models
    ]


@pytest.mark.parametrize(("row", "place", "model"), cases([*OUTCOMES, *VERDICTS]))
def test_litmus(row, place, model):
    for answer in answers_of(row, place, model):
        assert answer.word == expected(row, model), answer
        assert answer.is_whole or answer.word not in ("never", "none") or answer.runs == SEEDS


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.kernel.replace("kccl::", ""))
def test_kernel(row, model):
    answer, was_passed = kernel_answer(row, model)
    assert answer.word == expected(row, model), answer
    # On sm_90, where copies are asynchronous, some complete late and out of order.
    is_late = model == SM_90 and row.kernel == "copies<kccl::Copying::kRight>"
    assert was_passed or not is_late


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize(("reader", "kind"), [("000", "none"), ("100", "data_race")])
def test_kernel_boundary(reader, kind, model):
    """A launch is ordered after the one before it on its rank's stream, and after nothing else."""
    on = machine(model, "mixed", True)
    (write,), (read,) = on.program("x:=1", "000") + on.program("x:", reader)
    program = [[write, read]] if reader == "000" else [[write], [read]]
    findings = [each for seed in range(SEEDS) for each in on.world.run(program, seed).findings]
    assert {finding.kind for finding in findings} == ({kind} - {"none"})


def main() -> None:
    """Prints the table: for each model how many runs it took, by seeds and by the exhaustive
    schedule. A star: these were all schedules. A row's numbers are those of its slowest place.
    """
    form = "{:18} {:55} {:9} {:13} {:30} {:20} {}"
    print(form.format("test", "steps", "outcome", "book", *BOTH, "reference"))
    for row in (*OUTCOMES, *VERDICTS):
        cells = dict.fromkeys(BOTH, "")
        for model in row.models:
            answers = [answers_of(row, place, model) for place in row.places]
            by_schedule = [
                max(some, key=lambda each: each.runs) for some in zip(*answers, strict=True)
            ]
            cells[model] = ", ".join(map(str, by_schedule))
        outcome, book = (row.outcome, row.book) if row in OUTCOMES else ("", "finding")
        print(form.format(row.name, row.steps, outcome, book, *cells.values(), row.reference))
    for kernel in KERNELS:
        cells = {model: str(kernel_answer(kernel, model)[0]) for model in BOTH}
        name = kernel.kernel.replace("kccl::", "")
        print(form.format("", name, "", "finding", *cells.values(), kernel.reference))


if __name__ == "__main__":
    main()
