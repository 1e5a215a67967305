"""The cost model: its constants come from records of H200 GPUs, and hold on others."""

import json
import re
from dataclasses import replace

import pytest
from source_tree import ROOT

from kccl import topology
from kccl.backends import shapes
from kccl.base import abi
from kccl.plan.tuning import tuning_for
from kccl.tools import cli
from kccl.topology import cost
from kccl.topology.fit import fit

MACHINES = topology.recorded()
FITTED = {
    "nvidia-h200_1_make_gpu": "h200-2",
    "nvidia-h200_2_make_gpu": "h200-2",
    "nvidia-h200_4_make_gpu": "h200-4",
}
OTHERS = {"nvidia-h100_2": "h100-2"}
# These calls were predicted before a record had them.
BLIND = {"nvidia-h200_2": "h200-2"}
# One constant is from the first of these.
MESSAGES = {"nvidia-h200_2_messages": "h200-2"}
# A file -> the one commit whose documents count. The others are of older code.
COMMITS = {"nvidia-h200_2": "355f1f3bd877"}


def measured(records):
    """(machine, call, microseconds) of the library's calls in the records."""
    for file, machine in records.items():
        (path,) = (ROOT / "bench/records").glob(f"{file}.json*")
        for line in path.read_text().splitlines():
            document = json.loads(line)
            if document["commit"] != COMMITS.get(file, document["commit"]):
                continue
            for row in document["rows"]:
                known = row["library"] == "kccl" and row["algorithm"] in cost.ALGORITHMS
                if known and row["mode"] != "eager":
                    call = topology.Call(
                        **{"algorithm": row["algorithm"], "nbytes": row["bytes"]},
                        **{name: row[name] for name in ("world_size", "mode", "complete", "order")},
                        blocks=row["blocks"] or 1,
                    )
                    yield MACHINES[machine], call, row["time_us"]


def errors(records):
    return sorted(
        abs(topology.predict(machine, call) / us - 1) for machine, call, us in measured(records)
    )


def test_the_constants_are_those_that_the_records_give():
    rows = [
        (cost.terms(cost.figures_of(machine, call.world_size), call), us)
        for machine, call, us in measured(FITTED)
    ]
    again = fit(rows, cost.FIXED)
    assert set(again) == set(cost.CONSTANTS)
    for name, constant in cost.CONSTANTS.items():
        assert again[name] == pytest.approx(constant, abs=2e-4), name


@pytest.mark.parametrize(
    ("name", "records"),
    [("H200", FITTED), ("H100", OTHERS), ("H200", BLIND), ("H200", MESSAGES)],
)
def test_the_errors_are_those_of_the_readme(name, records):
    found = errors(records)
    missed = sum(error > cost.ERROR for error in found)
    # A tenth; of fewer than ten rows one.
    assert missed <= max(1, 0.1 * len(found))
    within = 1 - missed / len(found)
    row = f"| {len(found)} | {within:.0%} | {found[len(found) // 2]:.0%} | {found[-1]:.0%} |"
    lines = (ROOT / "topology/README.md").read_text().splitlines()
    assert [line for line in lines if re.match(rf"\| {name}\b.*", line) and line.endswith(row)], row


@pytest.mark.parametrize(("machine", "ranks"), [("h200-2", 2), ("h200-4", 4)])
def test_what_is_ranked_first_is_near_the_measured_choice(machine, ranks):
    """The tuned kernel is predicted to take at most a tenth more than the first one."""
    lines = tuning_for("cuda").of(ranks)
    names = [name for name in cost.ALGORITHMS if name.startswith("all_reduce")]
    for nbytes in (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20):
        tuned = next(
            line.algorithm
            for line in lines
            if line.collective == "all_reduce" and nbytes <= (line.up_to_bytes or nbytes)
        )
        calls = [topology.Call(algorithm=name, nbytes=nbytes, world_size=ranks) for name in names]
        found = topology.ranked(MACHINES[machine], calls)
        times = {call.algorithm: us for us, call in found}
        assert times[tuned] <= 1.1 * found[0][0], (nbytes, found)


@pytest.mark.parametrize("machine", ["mi300x-8", "h200-8", "gb200-tray", "pcie-2"])
def test_predictions_grow_with_bytes_and_never_beat_the_wire(machine):
    ranks = min(8, len(topology.Graph(MACHINES[machine]).gpus))
    figures = cost.figures_of(MACHINES[machine], ranks)
    for name in cost.ALGORITHMS:
        times = []
        for nbytes in (0, 8, 1 << 13, 1 << 20):
            mode = "in_kernel" if name.startswith("grid") else "graph"
            call = topology.Call(algorithm=name, nbytes=nbytes, world_size=ranks, mode=mode)
            if name != "grid_sync":
                times.append(topology.predict(MACHINES[machine], call))
        assert times == sorted(times)
        assert all(us > figures.one_way_us for us in times)


def test_what_cannot_be_predicted_says_why():
    call = topology.Call(algorithm="all_reduce_one_shot_ll16", nbytes=8, world_size=3)
    with pytest.raises(ValueError, match="3 ranks, must be 1 to 2"):
        topology.predict(MACHINES["pcie-2"], call)
    sync = topology.Call(algorithm="grid_sync", nbytes=0, world_size=1, mode="in_kernel")
    with pytest.raises(ValueError, match="compute units is not known"):
        topology.predict(MACHINES["pcie-2"], sync)
    other = topology.Call(algorithm="all_reduce_ring", nbytes=8, world_size=2)
    with pytest.raises(ValueError, match="all_reduce_ring"):
        topology.predict(MACHINES["pcie-2"], other)


def test_only_what_is_like_the_records_has_their_error():
    """The limits are those of the records."""
    found = {}
    for _, call, _ in measured(FITTED | OTHERS | BLIND | MESSAGES):
        order = "relaxed" if call.mode == "graph" else call.order
        key = (call.algorithm, call.mode, call.complete, order)
        found.setdefault(key, []).append((call.world_size, call.nbytes))
    limits = {
        key: tuple(f(each[i] for each in sizes) for i in (0, 1) for f in (min, max))
        for key, sizes in found.items()
    }
    assert limits == cost.RECORDED
    # A grid's time depends on the latency within each GPU, too.
    exchange = topology.Call(
        algorithm="grid_exchange", nbytes=2048, world_size=2, mode="in_kernel", blocks=132
    )
    h200 = MACHINES["h200-2"]
    devices = [
        replace(each, latency_us=each.latency_us and replace(each.latency_us, source="l2"))
        for each in h200.devices
    ]
    told = replace(h200, devices=tuple(devices))
    assert cost.error_of(cost.figures_of(h200, 2), exchange) == cost.ERROR
    assert cost.error_of(cost.figures_of(told, 2), exchange) == cost.UNMEASURED_ERROR
    gather = topology.Call(algorithm="gather_direct_ll16", nbytes=8, world_size=2)
    reduce = topology.Call(algorithm="all_reduce_one_shot_ll16", nbytes=8192, world_size=4)
    for machine, call, error in (
        ("h200-4", gather, cost.ERROR),
        ("h100-2", gather, cost.ERROR),
        ("h200-8", gather, cost.UNMEASURED_ERROR),
        ("mi300x-8", gather, cost.UNMEASURED_ERROR),
        # More bytes or ranks than any record has.
        ("h200-2", replace(gather, nbytes=65537), cost.UNMEASURED_ERROR),
        ("h200-4", replace(gather, algorithm="gather_push_simple"), cost.UNMEASURED_ERROR),
        ("h200-4", replace(gather, world_size=4), cost.ERROR),
        ("h200-4", reduce, cost.ERROR),
        ("h200-4", replace(reduce, nbytes=1 << 20), cost.UNMEASURED_ERROR),
        ("h200-4", replace(reduce, mode="in_kernel"), cost.ERROR),
        ("h200-4", replace(reduce, mode="in_kernel", order="acq_rel"), cost.UNMEASURED_ERROR),
        ("h200-4", replace(gather, algorithm="scan_direct_ll16"), cost.ERROR),
        ("h200-4", replace(gather, algorithm="scan_push_simple"), cost.UNMEASURED_ERROR),
        ("h200-4", replace(gather, is_loaded=True), cost.UNMEASURED_ERROR),
    ):
        assert cost.error_of(cost.figures_of(MACHINES[machine], call.world_size), call) == error


def test_a_full_stream_slows_what_polls():
    """As the probes have measured it: within a GPU by a factor, between GPUs by a longer poll."""
    sync = topology.Call(algorithm="grid_sync", nbytes=0, world_size=1, mode="in_kernel")
    reduce = topology.Call(algorithm="all_reduce_one_shot_ll16", nbytes=8, world_size=2)
    predict = topology.predict
    for machine, factor, us in (("h200-2", 0.91582 / 0.32992, 0.590), ("h100-2", 4.19, 0.926)):
        idle, loaded = (
            [predict(MACHINES[machine], replace(call, is_loaded=more)) for call in (sync, reduce)]
            for more in (False, True)
        )
        assert loaded[0] / idle[0] == pytest.approx(factor, rel=0.01)
        assert loaded[1] - idle[1] == pytest.approx(us, abs=0.001)
    # A poll is longer once a hop, whatever else the call does.
    for name, hops in (("all_reduce_two_shot_push_simple", 2), ("broadcast_direct_ll16", 1)):
        call = replace(reduce, algorithm=name, mode="in_kernel", order="acq_rel")
        more = predict(MACHINES["h200-2"], replace(call, is_loaded=True))
        more -= predict(MACHINES["h200-2"], call)
        assert more == pytest.approx(hops * (0.73994 - 0.14957))
    with pytest.raises(ValueError, match="poll beside a full stream is not known"):
        predict(MACHINES["mi300x-8"], replace(reduce, is_loaded=True))


def test_packets_of_a_message_end_where_the_slots_of_its_pipes_do():
    source = (ROOT / "csrc/include/kccl/pipes.cuh").read_text()
    head = int(re.search(r"kHead = (\d+);", source)[1])
    payload = shapes.SIZES["packet_bytes"] - head * shapes._PACKET_BYTES
    assert abi.MOST_PIPES * payload == cost.MOST_PACKETS


def test_fit_finds_constants_and_refuses_what_it_cannot_tell_apart():
    rows = [({"a": x, "b": 1.0, "c": 2.0}, 3 * x + 5 + 2.0) for x in (1.0, 2.0, 4.0)]
    assert fit(rows, {"c": 1.0}) == pytest.approx({"a": 3.0, "b": 5.0, "c": 1.0})
    with pytest.raises(ValueError, match="do not tell"):
        fit(rows, {})
    down = [({"a": x, "b": 1.0}, 10 - x) for x in (1.0, 2.0, 3.0)]
    assert fit(down, {})["a"] == 0.0


def test_plan_predicts_for_a_machine(capsys):
    def kccl(*arguments):
        return cli.main(["plan", *arguments]), *capsys.readouterr()

    code, shown, _ = kccl("all_reduce", "--machine", "mi300x-8", "--bytes", "8K")
    assert code == 0
    assert shown.startswith("all_reduce of 8,192 bytes over 8 ranks on mi300x-8: a prediction")
    assert len(re.findall(r"all_reduce_\w+: [\d.]+ us \([\d.]+ to [\d.]+\)", shown)) == 4
    # Only the estimate that counts here is named.
    assert shown.count("Estimated: ") == 1 and "Estimated: 0.7-1.0 us" in shown
    assert "KCCL takes all_reduce_one_shot_ll16: " in shown
    code, shown, _ = kccl("all_reduce", "--machine", "h200-4", "--bytes", "8K", "--dtype", "int32")
    assert "not all_reduce_one_shot_sentinel: int32 has no bit pattern to spare" in shown
    assert len(re.findall(r"all_reduce_\w+: [\d.]+ us", shown)) == 2
    # What is estimated of it are ranges of the probe.
    assert "Estimated" not in shown
    for collective in ("all_to_all", "gather", "reduce", "scan", "scatter"):
        code, shown, _ = kccl(collective, "--machine", "h200-4", "--bytes", "8K")
        # Not reduce_scatter's times beside reduce's. reduce has two algorithms by packets.
        expected = 3 if collective == "reduce" else 2
        assert code == 0
        assert len(re.findall(rf"  {collective}_\w+: [\d.]+ us", shown)) == expected
        # Records of the kernels for long messages have two GPUs, not four, or none.
        assert "50% are assumed" in shown and "25%" in shown
    code, shown, _ = kccl("gather", "--machine", "h200-4", "-n", "2", "--bytes", "8K")
    assert "Where no record has so many bytes and ranks, 50% are assumed." in shown
    code, shown, _ = kccl("send_recv", "--machine", "h200-4", "--bytes", "8K")
    assert "the others are predicted within 24 %" in shown.replace("\n    ", " ")
    assert "send_recv of 8,192 bytes to the farthest of 2 GPUs on h200-4" in shown
    code, shown, _ = kccl("barrier", "--machine", "h200-4", "-n", "2")
    assert "barrier over 2 ranks" in shown and "Estimated" not in shown
    for arguments, told in (
        (("all_reduce", "--machine", "h200-4", "-n", "5"), "5 ranks, must be 1 to 4"),
        (("send_recv",), "add --machine"),
        (("send_recv", "--machine", "h200-4", "-n", "1"), "must be 2 or more"),
        (("barrier", "--machine", "h200"), "must be one of"),
        (("barrier", "--machine", "intel-xeon-2-cores"), "has no GPUs"),
    ):
        code, _, complaint = kccl(*arguments)
        assert code == 2 and told in complaint, complaint
