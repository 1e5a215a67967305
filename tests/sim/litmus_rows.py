"""The rows of test_litmus.py whose steps are text: what PTX and AMD's memory model say of them.

litmus.py says how a row is written.
"""

from dataclasses import dataclass

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
PACKETS = "MODEL.md: what orders"
PF = "fence packets"
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
    # ---- A fence of packets orders packets of system scope, and nothing else
    Row("packets", f"p=1; {PF}; q=1 | q; {PF}; p", "1 1 1 1 0 _ _ _", FORBIDDEN, PACKETS),
    Row("packets, no first", f"p=1; q=1 | q; {PF}; p", "1 1 1 1 0 _ _ _", ALLOWED, PACKETS),
    Row("packets, no second", f"p=1; {PF}; q=1 | q; p", "1 1 1 1 0 _ _ _", ALLOWED, PACKETS),
    Row(
        "packets+fence",
        f"p=1; {PF}; q=1 | q; fence@system; p",
        "1 1 1 1 0 _ _ _",
        FORBIDDEN,
        PACKETS,
    ),
    Row(
        "fence+packets",
        f"p=1; fence@system; q=1 | q; {PF}; p",
        "1 1 1 1 0 _ _ _",
        FORBIDDEN,
        PACKETS,
    ),
    Row("packets, a flag", f"p=1; {PF}; y=1 | y; {PF}; p", "1 0 _ _ _", ALLOWED, PACKETS),
    Row("packets, a word", f"x=1; {PF}; p=1 | p; {PF}; x", "1 1 1 1 0", ALLOWED, PACKETS),
    Row(
        "packets of two",
        f"p=1; sync | sync; {PF}; q=1 | await q; {PF}; p",
        "0 _ _ _",
        FORBIDDEN,
        PACKETS,
        NEAR_FAR,
    ),
    Row(
        "packets of two, no fence",
        f"p=1; sync | sync; q=1 | await q; {PF}; p",
        "0 _ _ _",
        ALLOWED,
        PACKETS,
        NEAR_FAR,
    ),
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
    Row("packets plain", f"x:=1; {PF}; p=1 | await p; {PF}; x:", "data_race", ALLOWED, PACKETS),
    Row(
        "packets, then a fence",
        f"x:=1; {PF}; p=1 | await p; fence; x:",
        "data_race",
        ALLOWED,
        PACKETS,
    ),
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
