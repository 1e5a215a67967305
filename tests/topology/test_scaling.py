"""Predictions for more GPUs than one kernel joins: chains of steps, and the study."""

import re

import pytest

from kccl import topology
from kccl.tools import cli

MACHINES = topology.recorded()
CLUSTER = topology.fabric_of(MACHINES["h200-2x8"])
RACK = topology.fabric_of(MACHINES["gb200-nvl72"])


def test_fabrics_are_read_from_machines():
    assert (CLUSTER.domain, CLUSTER.near.one_way_us, CLUSTER.far.one_way_us) == (8, 0.729, 3.0)
    assert (RACK.domain, RACK.far) == (72, None)
    racks = topology.fabric_of(MACHINES["gb200-nvl72"], MACHINES["h200-2x8"])
    assert (racks.domain, racks.far.gbps) == (72, 50)
    # GB200's figures are published or specified; those of the cluster are estimates.
    assert not (CLUSTER.near.is_measured or CLUSTER.far.is_measured or RACK.near.is_measured)
    assert topology.fabric_of(MACHINES["h200-4"]).near.is_measured


@pytest.mark.parametrize("nbytes", [0, 8, 8192, 1 << 20])
@pytest.mark.parametrize(("fabric", "most"), [(CLUSTER, 576), (RACK, 72)])
def test_a_chain_joins_all_ranks_with_groups_of_eight_at_most(fabric, most, nbytes):
    collective = "all_reduce" if nbytes else "barrier"
    for ranks in (2, 8, 16, 72, 144, 576):
        if ranks > most or (ranks > fabric.domain and ranks % fabric.domain):
            continue
        if fabric is RACK or ranks <= 8 or ranks % 8 == 0:
            chain = topology.predict_chain(fabric, collective, nbytes, ranks)
            joined, near = 1, 1
            for step in chain.steps:
                assert 2 <= step.ranks <= 8
                # reduce_scatter and all_gather of one group are a pair.
                if not step.kernel.startswith("all_gather"):
                    joined *= step.ranks
                    near *= 1 if step.is_far else step.ranks
            assert (joined, near) == (ranks, min(ranks, fabric.domain))
            assert chain.low_us < chain.us < chain.high_us
            ways = sum(fabric.far.one_way_us if s.is_far else 0.7 for s in chain.steps)
            assert chain.us > ways


def test_one_group_is_predicted_as_by_the_cost_model():
    chain = topology.predict_chain(topology.fabric_of(MACHINES["h200-8"]), "all_reduce", 8192, 8)
    names = [name for name in topology.PREDICTED if name.startswith("all_reduce")]
    calls = [topology.Call(algorithm=name, nbytes=8192, world_size=8) for name in names]
    us, call = topology.ranked(MACHINES["h200-8"], calls)[0]
    assert (chain.us, chain.steps[0].kernel) == (us, call.algorithm)


def test_a_long_message_is_divided_and_a_short_one_is_not():
    short = topology.predict_chain(CLUSTER, "all_reduce", 8, 64)
    long = topology.predict_chain(CLUSTER, "all_reduce", 1 << 20, 64)
    assert [step.kernel[:10] for step in short.steps] == ["all_reduce"] * 2
    kernels = [step.kernel for step in long.steps]
    assert kernels[0].startswith("reduce_scatter") and kernels[-1].startswith("all_gather")


@pytest.mark.parametrize(
    ("fabric", "collective", "ranks", "told"),
    [
        (CLUSTER, "all_reduce", 12, "12 ranks, must be at most 8, the GPUs of a domain, or a mul"),
        (RACK, "all_reduce", 144, "144 ranks, must be 1 to 72"),
        (RACK, "all_reduce", 22, "22 ranks, which groups of one size, at most 8, do not give"),
        (RACK, "scan", 16, "is 'scan', must be one of all_reduce, barrier"),
    ],
)
def test_what_has_no_chain_says_why(fabric, collective, ranks, told):
    with pytest.raises(ValueError, match=told):
        topology.predict_chain(fabric, collective, 8, ranks)


def test_the_study_grows_and_says_that_it_is_a_prediction(capsys, tmp_path):
    found = topology.study("all_reduce", 8192)
    assert len(found) == 3
    for chains in found.values():
        assert (min(chains), max(chains)) == (2, 576)
        times = [chains[count].us for count in sorted(chains)]
        assert times == sorted(times)
    path = tmp_path / "scaling.png"
    assert cli.main(["plan", "scaling", "--bytes", "8K", "--plot", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("all_reduce of 8,192 bytes, us: a prediction")
    assert len(re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", shown)) == 30
    assert "No chain of kernels on GPUs exists yet" in shown
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plan_predicts_for_more_than_eight_gpus(capsys):
    def kccl(*arguments):
        return cli.main(["plan", *arguments]), *capsys.readouterr()

    code, shown, _ = kccl("all_reduce", "--machine", "h200-2x8", "-n", "16", "--bytes", "8K")
    assert code == 0 and "over 16 ranks on h200-2x8: a prediction" in shown
    assert "in groups of 8 within a domain" in shown and "groups of 2 across domains" in shown
    assert "Estimated: a guess: a write that a GPU starts over InfiniBand" in shown
    for arguments, told in (
        (("all_gather", "--machine", "gb200-nvl72", "-n", "72"), "must be one of all_reduce, bar"),
        (("all_reduce", "--machine", "h200-2x8", "-n", "32"), "32 ranks, must be 1 to 16"),
        (("scaling", "-n", "4"), "takes --bytes, --plot: leave out -n"),
        (("scaling", "--backend", "cuda"), "leave out --backend"),
        (("scaling", "--dtype", "int8", "--position", "0"), "leave out --dtype and --position"),
        (("all_reduce", "--plot", "f.png", "--position", "7"), "leave out --position and --plot"),
        (("all_reduce", "--machine", "h200-2", "--backend", "host"), "leave out --backend"),
    ):
        code, _, complaint = kccl(*arguments)
        assert code == 2 and told in complaint, complaint
