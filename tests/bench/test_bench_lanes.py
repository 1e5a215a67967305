"""`python -m kccl.bench.in_kernel.lanes` without a GPU: which lane a multiprocessor serves, and the
kernels on the simulator.
"""

from pathlib import Path

import pytest

import kccl
from kccl.bench.in_kernel import beside, lanes
from kccl.bench.in_kernel.side import FOLDER, SimRunner

RECORDS = Path(lanes.__file__).parents[1] / "records"
NO_SEAT = 0xFFFFFFFF


def probed():
    return kccl.topology.Machine.from_json((RECORDS / "nvidia-h200_1_probe.json").read_text())


def served(seats):
    return [None if seat == NO_SEAT else int(seat) >> 16 for seat in seats.table]


def test_lanes_in_halves_are_those_of_the_placement():
    machine = probed()
    halves = lanes.halves_of(machine)
    assert len(halves) == 132 and sum(halves) == 66
    for number in (2, 4):
        found = lanes.seats(halves, number, "halves")
        placed = kccl.topology.place_blocks(
            machine, "grid_sync", blocks=132, lanes=number, seats=halves
        )
        assert served(found) == list(placed.lanes)
        flat = lanes.seats(halves, number, "flat")
        assert served(flat) == [unit % number for unit in range(132)]
        assert found.count == flat.count == 132 // number


def test_halves_of_unequal_size_have_equally_many_blocks_a_lane():
    halves = [0] * 10 + [1] * 6
    found = lanes.seats(halves, 4, "halves")
    assert found.count == 3 and found.seated == 12
    for lane in range(4):
        assert {halves[unit] for unit in range(16) if served(found)[unit] == lane} == {lane // 2}
    assert lanes.seats(halves, 4, "flat").seated == 12
    assert lanes.seats(halves, 4, "halves", one=True).seated == 3


def test_a_machine_without_a_probe_is_refused():
    with pytest.raises(ValueError, match="no probe that tells the halves"):
        lanes.halves_of(kccl.topology.recorded()["mi300x-8"])


@pytest.mark.long
@pytest.mark.takes(60)
def test_the_kernels_on_the_simulator(monkeypatch, tmp_path):
    monkeypatch.setattr(lanes, "_BYTES", 64)
    monkeypatch.setattr(beside, "_BYTES", 64)
    monkeypatch.setattr(lanes, "LANES", (1, 2))
    monkeypatch.setattr(lanes, "halves_of", lambda machine: [0, 1, 1, 0])

    def rows():
        def main(comm):
            return lanes.timed(SimRunner(comm), probed(), calls=4, repeats=2)

        return kccl.run_threads(main, 1, backend="sim", seed=2)[0]

    found = rows()
    assert [row["wrong"] for row in found] == [0] * len(found)
    shapes = {(row["lanes"], row["calling_lanes"], row["blocks"]) for row in found}
    assert shapes == {(1, 1, 4), (2, 2, 2), (2, 1, 2)}
    # A sync that does not wait for the last block, and a bit that changes on the way.
    for path in FOLDER.glob("*.cuh"):
        text = path.read_text()
        if path.name == "lanes.cuh":
            for old, new in (
                ("wanted_ += seat_.count;", "wanted_ += seat_.count - 1;"),
                ("unpack(packet))", "unpack(packet) ^ 4u)"),
            ):
                assert text.count(old) == 1
                text = text.replace(old, new)
        (tmp_path / path.name).write_text(text)
    monkeypatch.setattr(lanes, "KERNELS", tmp_path / "lanes.cuh")
    wrong = {(row["collective"], row["wrong"] > 0) for row in rows() if row["layout"] != "library"}
    assert wrong >= {("grid_sync", True), ("exchange", True)}
