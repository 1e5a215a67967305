"""Which recorded machine is the nearest, and in what another one differs."""

import pytest

from kccl import topology

MACHINES = topology.recorded()


@pytest.mark.parametrize(
    ("here", "others", "wanted"),
    [
        ("h200-8", ("h200-2", "h200-4", "mi300x-8"), "h200-4"),
        ("h100-2", ("h200-2", "h200-4", "pcie-2"), "h200-2"),
        ("mi300x-8", ("h200-8", "pcie-2"), "h200-8"),
        # NVIDIA's GPUs, by their links.
        ("gb200-tray", ("pcie-2", "h200-2"), "h200-2"),
        (
            "intel-xeon-2-cores",
            ("h200-2", "intel-xeon-gold-6242-32-cores"),
            "intel-xeon-gold-6242-32-cores",
        ),
        ("h200-2", tuple(MACHINES), "h200-2"),
    ],
)
def test_the_nearest_machine(here, others, wanted):
    assert topology.nearest(MACHINES[here], {name: MACHINES[name] for name in others}) == wanted


def test_differences_are_in_words():
    told = topology.differences(MACHINES["mi300x-8"], MACHINES["h200-4"])
    assert told[0] == "maker AMD instead of NVIDIA" and told[-1] == "GPUs 8 instead of 4"
    assert topology.differences(MACHINES["h200-4"], MACHINES["h200-4"]) == []
    told = topology.differences(MACHINES["intel-xeon-2-cores"], MACHINES["h200-2"])
    assert "GPUs 0 instead of 2" in told
    with pytest.raises(ValueError, match="no machine is known"):
        topology.nearest(MACHINES["h200-2"], {})
