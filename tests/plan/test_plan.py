"""The planner: tuning tables, the choice among algorithms, and the facts of a KernelSpec.

All of it is pure: there is no communicator and no device here.
"""

import json
from itertools import product

import pytest

import kccl
from kccl import topology
from kccl.plan import spec as spec_types
from kccl.plan import specs, tuning
from kccl.plan.choice import choose
from kccl.plan.spec import Counts, KernelSpec, Request
from kccl.plan.specs import KERNELS, SPECS
from kccl.plan.tuning import Threshold, Tuning, read_tuning, tuning_for

BACKENDS = spec_types.EVERYWHERE
WORLD_SIZES = range(1, 9)
COLLECTIVES = sorted({spec.collective for spec in SPECS})
DTYPES = (kccl.float32, kccl.int32)
ENDLESS = 1 << 50
LL16, SENTINEL = "all_reduce_one_shot_ll16", "all_reduce_one_shot_sentinel"
PULL, CMA = "all_reduce_one_shot_pull_simple", "all_reduce_two_shot_cma_simple"


def request(nbytes=8, world_size=2, backend="host", dtype=kccl.float32, **more):
    return Request("all_reduce", nbytes, world_size, backend, dtype, **more)


def table(*lines):
    """A tuning of any world size, of lines (up_to_bytes, algorithm)."""
    return Tuning("here/table.json", {2: tuple(Threshold("all_reduce", *line) for line in lines)})


# ---- The installed tables ----------------------------------------------------------------------


def test_every_backend_has_a_table():
    tables = tuning._TABLES.glob("*.json")
    assert {path.stem for path in tables} == {*BACKENDS} - {"sim", *tuning._BORROWED}
    for backend, lender in tuning._BORROWED.items():
        assert tuning_for(backend).thresholds == tuning_for(lender).thresholds
        assert tuning_for(backend).origin.endswith(f"nothing is measured on {backend}")
    # The simulator measures nothing. It takes the first kernel of each collective.
    assert {line.collective for line in tuning_for("sim").of(1)} == set(COLLECTIVES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_name_what_their_backend_can_run(backend):
    """At every world size that a table is used for."""
    for world_size in WORLD_SIZES:
        for line in tuning_for(backend).of(world_size):
            spec = specs.BY_NAME[line.algorithm]
            assert spec in SPECS and spec.collective == line.collective, line
            asked = Request(line.collective, 8, world_size, backend, kccl.float32)
            assert spec.why_not(asked) is None, (line, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_have_a_line_for_every_call(backend):
    """So no call gets an algorithm that nobody measured."""
    sizes = (0, 8, 4096, 1 << 20, 1 << 24, ENDLESS)
    for asked in product(COLLECTIVES, sizes, WORLD_SIZES, [backend], DTYPES):
        plan = choose(Request(*asked), tuning_for(backend))
        lender = tuning._BORROWED.get(backend, backend)
        table = "specs.py" if backend == "sim" else f"{lender}.json"
        assert f" by {table}" in plan.reason, plan.explain()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_line_of_a_table_is_used(backend):
    """A line behind one that always wins would never be read."""
    installed = tuning_for(backend)
    for world_size, lines in installed.thresholds.items():
        for line in lines:
            nbytes = ENDLESS if line.up_to_bytes is None else line.up_to_bytes
            sizes = "any size" if line.up_to_bytes is None else f"up to {line.up_to_bytes} bytes"
            plans = [
                choose(Request(line.collective, nbytes, world_size, backend, dtype), installed)
                for dtype in DTYPES
            ]
            found = {(plan.name, plan.blocks, plan.threads): plan.reason for plan in plans}
            assert f"for {sizes} by" in found[line.algorithm, line.blocks, line.threads], line


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"sim"}))
def test_tables_belong_to_recorded_machines(backend):
    """The plan names them."""
    known = topology.recorded()
    for world_size in WORLD_SIZES:
        machine = tuning_for(backend).machine_of(world_size)
        assert machine in known
        plan = choose(Request("barrier", 0, world_size, backend), tuning_for(backend))
        assert f".json for {machine}, measured on" in plan.reason


def test_of_several_machines_the_nearest_has_the_table(tmp_path):
    path = tmp_path / "tables.json"
    names = ("h200-2", "mi300x-8", "pcie-2")
    lines = [
        {"collective": "barrier", "up_to_bytes": number, "algorithm": "barrier_direct"}
        for number in range(len(names))
    ]
    tables = [
        {"world_size": 2, "machine": name, "thresholds": [line]}
        for name, line in zip(names, lines, strict=True)
    ]
    path.write_text(json.dumps({"tables": tables}))
    known = topology.recorded()
    for here, wanted in (("h100-2", "h200-2"), ("gb200-tray", "h200-2"), ("pcie-2", "pcie-2")):
        found = read_tuning(path, lambda here=here: known[here])
        assert found.machine_of(2) == wanted
        assert found.of(2)[0].up_to_bytes == names.index(wanted)
    # A table without a machine is the user's own.
    own = {"world_size": 2, "thresholds": [lines[0]]}
    path.write_text(json.dumps({"tables": [*tables, own]}))
    assert read_tuning(path).machine_of(2) == ""
    # Also where there is no choice.
    tables[0]["machine"] = "h201"
    for given in (tables, tables[:1]):
        path.write_text(json.dumps({"tables": given}))
        told = r'tables\[0\].machine is "h201", must be one of .*h200-2'
        with pytest.raises(kccl.InvalidArgument, match=told):
            read_tuning(path)


# ---- Users' tables -----------------------------------------------------------------------------


def test_a_world_size_takes_the_nearest_larger_table():
    of = {size: (Threshold("barrier", size, "barrier_direct"),) for size in (2, 4)}
    found = [Tuning("", of).of(world_size)[0].up_to_bytes for world_size in (1, 2, 3, 4, 8)]
    assert found == [2, 2, 4, 4, 4]


LINE = {"collective": "all_reduce", "up_to_bytes": None, "algorithm": LL16}


def test_a_table_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "mine.json"
    lines = [LINE | {"up_to_bytes": 64, "blocks": 8, "threads": 64}, LINE]
    path.write_text(json.dumps({"tables": [{"world_size": 2, "thresholds": lines}]}))
    found = read_tuning(path)
    assert found.source == str(path) and found.origin == ""
    assert found.thresholds == {
        2: (Threshold("all_reduce", 64, LL16, 8, 64), Threshold("all_reduce", None, LL16))
    }


def one_line(**changes):
    return json.dumps({"tables": [{"world_size": 2, "thresholds": [LINE | changes]}]})


def one_table(**changes):
    return json.dumps({"tables": [{"world_size": 2, "thresholds": [LINE]} | changes]})


# Text of the file -> what the error says after the path.
NO_TABLES = {
    "": "Expecting value: line 1",
    "{": "Expecting property name",
    "[]": r"the document is \[\], must be an object",
    "null": "the document is null, must be an object",
    "[" * 100_000: "recursion",
    "{}": "the document has no 'tables', must have tables",
    '{"tables": []}': r"tables is \[\], must have a table for each world size",
    '{"tables": {}}': r"tables is \{\}, must be a list",
    '{"tables": [[]]}': r"tables\[0\] is \[\], must be an object",
    '{"tables": [{"world_size": 2}]}': r"tables\[0\] has no 'thresholds', must have thresh",
    one_table(world_size="2"): r'tables\[0\].world_size is "2", must be an integer of 1 or more',
    one_table(world_size=0): r"tables\[0\].world_size is 0, must be",
    one_table(world_size=True): r"tables\[0\].world_size is true, must be",
    one_table(thresholds=None): r"tables\[0\].thresholds is null, must be a list",
    one_table(thresholds=["x"]): r'tables\[0\].thresholds\[0\] is "x", must be an object',
    json.dumps({"tables": json.loads(one_table())["tables"] * 2}): (
        r"tables\[1\].world_size is 2, and an earlier table has it"
    ),
    json.dumps(json.loads(one_table()) | {"origin": 1}): "origin is 1, must be a string",
    json.dumps(
        json.loads(one_table()) | {"table": []}
    ): "the document has 'table', must have no others",
    one_line(up_to_kib=1): r"thresholds\[0\] has 'up_to_kib', must have no others than algorithm, ",
    one_line(algorithm="all_reduce_ring"): (
        r'algorithm is "all_reduce_ring", must be one of all_reduce_one_shot'
    ),
    one_line(algorithm="put"): 'algorithm is "put", must be one of',
    one_line(algorithm="barrier_direct"): 'is "barrier_direct", must be one of all_reduce_one_shot',
    one_line(algorithm=[LL16]): "algorithm is .*, must be one of",
    one_line(collective="allreduce"): 'collective is "allreduce", must be one of all_gather, ',
    one_line(
        up_to_bytes=-64
    ): r"tables\[0\].thresholds\[0\].up_to_bytes is -64, must be an integer of",
    one_line(up_to_bytes=64.0): r"up_to_bytes is 64.0, must be an integer of 0 or more",
    one_line(up_to_bytes="64"): r'up_to_bytes is "64", must be',
    one_line(up_to_bytes=float("nan")): "the document has NaN, which JSON does not have",
    one_line(blocks=float("-inf"), threads=64): "the document has -Infinity",
    one_line(blocks="8", threads=64): 'blocks is "8", must be an integer from 0 to 128',
    one_line(blocks=-1, threads=64): "blocks is -1, must be",
}


@pytest.mark.parametrize("text", NO_TABLES, ids=[f"{text[:60]}" for text in NO_TABLES])
def test_what_is_no_table_is_refused_by_name(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    wanted = f"^{path} is not a tuning table: .*{NO_TABLES[text]}"
    with pytest.raises(kccl.InvalidArgument, match=wanted):
        read_tuning(path)


def test_what_is_no_file_or_no_text_is_refused_by_name(tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(kccl.InvalidArgument, match=f"{path} is not a tuning table: .*No such file"):
        read_tuning(path)
    with pytest.raises(kccl.InvalidArgument, match=r"is not a tuning table: .*Is a directory"):
        read_tuning(tmp_path)
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(kccl.InvalidArgument, match=r"is not a tuning table: .*utf-8"):
        read_tuning(path)


# ---- The choice --------------------------------------------------------------------------------


def test_a_bound_belongs_to_its_line():
    measured = table((64, LL16), (4096, PULL), (None, CMA))
    names = [choose(request(nbytes), measured).name for nbytes in (0, 64, 65, 4096, 4097)]
    assert names == [LL16, LL16, PULL, PULL, CMA]


def test_a_line_that_cannot_run_is_passed_over():
    measured = table((64, SENTINEL), (1024, LL16), (None, PULL))
    assert choose(request(8, dtype=kccl.float32), measured).name == SENTINEL
    assert choose(request(8, dtype=kccl.int32), measured).name == LL16


def test_without_a_line_the_last_that_can_run_is_taken():
    plan = choose(request(8, can_attach=False), table((None, CMA)))
    able = [spec for spec in SPECS if spec.collective == "all_reduce" and spec.name != CMA]
    assert plan.name == [spec.name for spec in able if "host" in spec.targets][-1]
    assert "tuning table" in plan.reason and plan.reason.endswith("can run this")


def test_a_forced_algorithm_runs_whatever_the_table_says():
    measured = table((None, LL16))
    plan = choose(request(), measured, forced=PULL, preferred=SENTINEL)
    assert (plan.name, plan.reason) == (PULL, "asked for by name")
    assert (plan.blocks, plan.threads) == (0, 0)
    others = [spec for spec in SPECS if spec.collective == "all_reduce" and spec.name != PULL]
    why = {True: "another was asked for by name", False: "for sim and cuda and hip only"}
    assert dict(plan.rejected) == {spec.name: why["host" in spec.targets] for spec in others}


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ("ring", f"algorithm is 'ring', must .*all_reduce.* {LL16}, "),
        ("barrier_direct", f"algorithm is 'barrier_direct', must .*all_reduce.* {LL16}, "),
        (SENTINEL, f"algorithm '{SENTINEL}' cannot run this: int32 has no bit pattern"),
    ],
)
def test_a_forced_algorithm_must_be_able_to_run(forced, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        choose(request(dtype=kccl.int32), table((None, LL16)), forced=forced)


def test_a_preferred_algorithm_runs_where_it_can():
    measured = table((None, LL16))

    def chosen(preferred, dtype):
        plan = choose(request(dtype=dtype), measured, preferred=preferred)
        return plan.name, plan.reason

    of_the_table = LL16, "chosen for any size by table.json"
    assert chosen(SENTINEL, kccl.float32) == (SENTINEL, "KCCL_ALGORITHM prefers it")
    assert chosen(SENTINEL, kccl.int32) == of_the_table
    assert chosen("barrier_direct", kccl.float32) == of_the_table


def test_a_collective_that_does_not_exist():
    with pytest.raises(kccl.InvalidArgument, match="collective is 'put', must be one of all_g"):
        choose(Request("put", 8, 2, "host"), table((None, LL16)))


def test_explain_says_what_runs_and_why_not_the_others():
    lines = {
        1: (Threshold("broadcast", 4096, "broadcast_direct_ll16", 8, 64),),
    }
    asked = Request("broadcast", 4096, 1, "cuda", kccl.bfloat16)
    assert choose(
        asked, Tuning("here/mine.json", lines, "measured here")
    ).explain().splitlines() == [
        "broadcast of 4096 bytes bfloat16 over 1 ranks on cuda",
        "  broadcast_direct_ll16: chosen for up to 4096 bytes by mine.json, measured here "
        "(packets from the root to every peer), at most 8 blocks of 64 threads",
        "  not broadcast_pull_simple: for host only",
        "  not broadcast_push_simple: one rank has no peer to share the work with",
    ]
    asked = Request("barrier", 0, 2, "host")
    assert choose(asked, tuning_for("host"), forced="barrier_direct").explain().splitlines() == [
        "barrier of 0 bytes over 2 ranks on host",
        "  barrier_direct: asked for by name (one word to every peer)",
    ]


# ---- Kernels -----------------------------------------------------------------------------------

# Condition -> facts that it refuses, and the reason that it gives.
REFUSED = {
    spec_types.needs_peers: ({"world_size": 1}, "one rank has no peer to share the work with"),
    spec_types.needs_floats: (
        {"dtype": kccl.int64},
        "int64 has no bit pattern to spare for words that have not arrived",
    ),
    spec_types.needs_attach: (
        {"can_attach": False},
        "the ranks' processes may not read each other's memory (process_vm_readv)",
    ),
}


def test_every_condition_is_known_here():
    conditions = {value for name, value in vars(spec_types).items() if name.startswith("needs_")}
    assert set(REFUSED) == conditions == {each for spec in KERNELS for each in spec.needs}


@pytest.mark.parametrize(
    "spec", [spec for spec in KERNELS if spec.needs], ids=lambda spec: spec.name
)
def test_why_not_has_a_sentence_for_each_condition(spec):
    (backend, *_) = spec.targets

    def why_not(**facts):
        facts = {"nbytes": 8, "world_size": 2, "backend": backend, "dtype": kccl.float32} | facts
        return spec.why_not(Request(spec.collective, **facts))

    assert why_not() is None
    for condition, (facts, sentence) in REFUSED.items():
        assert why_not(**facts) == (sentence if condition in spec.needs else None)


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_why_not_names_the_targets(spec):
    for backend in BACKENDS:
        told = spec.why_not(Request(spec.collective, 8, 2, backend, kccl.float32))
        wanted = None if backend in spec.targets else f"for {' and '.join(spec.targets)} only"
        assert told == wanted


# For a count of 10 in bfloat16 on 4 ranks: the bytes to a peer, and the bytes of the message.
BYTES = {
    Counts.ELEMENTS: (20, 20),
    Counts.CHUNK_ELEMENTS: (20, 80),
    Counts.BYTES: (10, 10),
    Counts.CHUNK_BYTES: (10, 40),
    Counts.EVENTS: (0, 0),
}


@pytest.mark.parametrize("counts", Counts)
def test_bytes_of_a_call(counts):
    spec = KernelSpec("any", counts=counts)
    to_peer, message = BYTES[counts]
    assert spec.peer_bytes(10, "bfloat16") == to_peer
    assert spec.message_bytes(10, "bfloat16", 4) == message


@pytest.mark.parametrize("counts", Counts)
def test_blocks_share_units_of_16_bytes(counts):
    """The share is rounded up to whole units, and to the same for each block. 0: a single block."""
    spec = KernelSpec("any", counts=counts)
    count = {Counts.ELEMENTS: 19, Counts.CHUNK_ELEMENTS: 19}.get(counts, 75)
    units = 0 if counts is Counts.EVENTS else 5
    assert spec.share(count, "float32", 1) == 0
    for blocks in (2, 5, 8):
        assert spec.share(count, "float32", blocks) == -(-units // blocks)


def test_kernels_that_move_much_have_a_unit_for_their_threads():
    """On GPUs the planner's algorithms run in many blocks, except those that move no data."""
    for spec in SPECS:
        if "cuda" in spec.targets:
            assert (spec.bytes_per_thread > 0) == (spec.counts is not Counts.EVENTS), spec.name
