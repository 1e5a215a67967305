"""How ranks agree on their groups: by the topology or flat, and all in one way."""

import json

import pytest

import kccl
from kccl import topology
from kccl.ranks.team import agree_on_groups

TWO_SOCKETS = topology.recorded()["intel-xeon-gold-6242-32-cores"]


class Mesh:
    """Rank 0 of 10, which a launcher has bound to two sockets in turns."""

    rank, world_size = 0, 10

    def __init__(self, layouts):
        self._layouts = layouts

    def allgather(self, payload, what, timeout):
        own = json.loads(payload)
        if isinstance(own, dict):
            cpus = [[rank % 2 * 16 + rank // 2] for rank in range(self.world_size)]
            told = zip(cpus, self._layouts, strict=True)
            return [json.dumps(own | {"cpus": c, "layout": name}).encode() for c, name in told]
        return [payload] * self.world_size


@pytest.fixture(autouse=True)
def two_sockets(monkeypatch):
    monkeypatch.setattr(topology, "discover", lambda: TWO_SOCKETS)


def test_groups_are_sockets_or_consecutive_ranks():
    near = agree_on_groups(Mesh(["topology"] * 10), "topology", 1.0)
    assert near == (tuple(range(0, 10, 2)), tuple(range(1, 10, 2)))
    flat = agree_on_groups(Mesh(["flat"] * 10), "flat", 1.0)
    assert flat == (tuple(range(5)), tuple(range(5, 10)))


def test_unlike_layouts_are_refused():
    layouts = ["topology"] * 9 + ["flat"]
    told = "KCCL_LAYOUT is 'topology' on rank 0 and 'flat' on rank 9, must be the same"
    with pytest.raises(kccl.InvalidArgument, match=told):
        agree_on_groups(Mesh(layouts), "topology", 1.0)


def test_an_unknown_layout_is_refused(monkeypatch):
    from kccl.base import env

    assert env.read({"KCCL_LAYOUT": "flat"}).layout == "flat"
    with pytest.raises(kccl.InvalidArgument, match="KCCL_LAYOUT='near' must be one of topology"):
        env.read({"KCCL_LAYOUT": "near"})
