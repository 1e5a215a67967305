"""What `kccl bench decode` makes of timelines and of kernels that leave something out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hand_made_timeline import OP_NS, STAGE_BYTES, TOKEN_STEP_NS, made_stamps

from kccl.bench import compare
from kccl.bench.decode import perfetto, picture, report, variants
from kccl.bench.decode.timeline import Part, landed_in_windows, summary_of
from kccl.engine.model.timeline import Timeline, timelines
from kccl.engine.model.variant import USUAL, Variant, parse
from kccl.tools import cli as command

pytestmark = pytest.mark.takes(16)


@pytest.fixture
def pair() -> list[Timeline]:
    """Two ranks of two blocks each, and three kept tokens."""
    return timelines([made_stamps(rank=rank) for rank in range(2)])


def test_a_summary_says_where_the_time_goes(pair: list[Timeline]) -> None:
    found = summary_of(pair[0])
    assert found.token_us == pytest.approx(TOKEN_STEP_NS * 1e-3)
    for kind in ("qkv", "out", "gate_up", "down", "head"):
        times = {name: part.mean for name, part in found.parts[kind].items()}
        wanted = {"wait": 0.4, "multiply": 0.3, "meet": 0.2, "finish": 0.1}
        assert times == pytest.approx(wanted, abs=1e-3)
    # One of two blocks has it.
    assert found.parts["attend"]["multiply"].mean == pytest.approx(0.15, abs=1e-3)
    assert found.parts["attend"]["multiply"].slowest == pytest.approx(0.3, abs=1e-3)
    # It waits between its second and third stamp, and finishes before and after.
    assert set(found.parts["end"]) == {"wait", "finish"}
    assert found.parts["end"]["wait"].mean == pytest.approx(0.3, abs=1e-3)
    assert found.parts["end"]["finish"].mean == pytest.approx(0.7, abs=1e-3)
    assert isinstance(found.parts["end"]["wait"], Part)


def test_a_summary_says_what_the_memory_does(pair: list[Timeline]) -> None:
    """In a token step nine stages land, in five of ten windows; each is in flight for 200 ns, and
    full for 700.
    """
    found = summary_of(pair[0])
    assert found.bytes_per_s == pytest.approx(9 * STAGE_BYTES / TOKEN_STEP_NS * 1e9)
    assert found.idle_share == pytest.approx(0.5)
    assert found.quiet_share == pytest.approx(1 - 5 * 200 / TOKEN_STEP_NS, abs=1e-3)
    assert found.in_flight == pytest.approx(9 * 200 / (2 * TOKEN_STEP_NS), abs=1e-3)
    assert found.ring_level == pytest.approx(9 * 700 / (2 * TOKEN_STEP_NS), abs=1e-3)
    assert found.ring_stages == 4
    landed = landed_in_windows(pair[0]).reshape(3, 10)
    assert (landed == landed[0]).all()
    assert sorted(landed[0].tolist()) == [0] * 5 + [STAGE_BYTES] + [2 * STAGE_BYTES] * 4


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = json.loads(path.read_text())
    return data["otherData"], data["traceEvents"]


def test_a_file_has_a_track_for_each_block(pair: list[Timeline], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert perfetto.write(path, pair, {"model": "made"}) == 3
    facts, events = read(path)
    assert facts == {"model": "made", "tokens": 3}
    named = [each["args"]["name"] for each in events if each["ph"] == "M"]
    blocks = ["block 0, residual 0", "block 1, residual 1"]
    assert named == ["rank 0", *blocks, "rank 1", *blocks]
    slices = [each for each in events if each["ph"] == "X"]
    tracks = {(each["pid"], each["tid"]) for each in slices}
    assert tracks == {(0, 0), (0, 1), (1, 0), (1, 1)}
    mine = [each for each in slices if (each["pid"], each["tid"]) == (0, 1)]
    # Six of seven ops and their phases: the block has no part of attention.
    assert len(mine) == 3 * (5 * 5 + 4)
    (down, *_) = [each for each in mine if each["name"] == "0 down"]
    assert (down["ts"], down["dur"]) == pytest.approx((4 * OP_NS * 1e-3, OP_NS * 1e-3), abs=2e-3)
    inner = [each for each in mine if down["ts"] <= each["ts"] < down["ts"] + down["dur"] - 1e-3]
    assert [each["name"] for each in inner] == ["0 down", "wait", "multiply", "meet", "finish"]


def test_counters_show_the_ring_and_the_memory(pair: list[Timeline], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    perfetto.write(path, pair, {})
    _, events = read(path)
    counters = [each for each in events if each["ph"] == "C" and each["pid"] == 1]
    landed = [each["args"]["GB/s"] for each in counters if each["name"] == "weights that land"]
    assert sum(landed) == pytest.approx(3 * 9 * STAGE_BYTES / 1000, rel=1e-2)
    rings = [each["args"] for each in counters if each["name"].startswith("ring ")]
    assert {each["full"] for each in rings} == {0, 1}
    assert {each["name"] for each in counters} == {
        *("weights that land", "stages, mean", "ring 0", "ring 1"),
    }


def test_a_file_has_as_many_tokens_as_fit(
    pair: list[Timeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    perfetto.write(path, pair, {})
    whole = path.stat().st_size
    monkeypatch.setattr(perfetto, "MOST_BYTES", whole * 3 // 4)
    assert perfetto.write(path, pair, {}) == 2
    assert path.stat().st_size < whole * 3 // 4
    monkeypatch.setattr(perfetto, "MOST_BYTES", 10)
    assert perfetto.write(path, pair, {}) == 1


def test_a_picture_is_drawn(pair: list[Timeline], tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    picture.draw(path, pair, "made by hand", 4e9)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


# ---- kernels that leave something out ------------------------------------------------------------


class Timed:
    """An engine whose kernels take a known time a token."""

    def __init__(self) -> None:
        self.step_us = {"none": 100.0, "weights": 30.0, "attention": 90.0}
        self.used: list[str] = []

    @contextmanager
    def using(self, variant: Variant) -> Iterator[None]:
        self.used.append(variant.name)
        yield

    def timed(self, prompt: list[int], num: int) -> tuple[list[int], list[float]]:
        step_s = self.step_us[self.used[-1]] * 1e-6
        return [0] * num, [index * step_s for index in range(num + 1)]


def test_variants_are_timed_in_turn() -> None:
    engine = Timed()
    chosen = variants.variants_of(["none,weights", "attention"])
    assert chosen == [parse("weights"), parse("attention")]
    found = variants.time_variants(engine, [1], 4, chosen, 2)  # type: ignore[arg-type]
    assert engine.used == ["none", "weights", "attention", "attention", "weights", "none"]
    assert [row["ablated"] for row in found] == ["weights", "attention"]
    assert [row["us_per_token"] for row in found] == pytest.approx([30, 90])
    assert [row["whole_us"] for row in found] == pytest.approx([100, 100])
    assert [row["tok_s"] for row in found] == [None, None]
    assert variants.variants_of(["none"]) == []
    assert USUAL.name == "none"


def test_ablated_rows_are_no_speeds() -> None:
    """Neither in records' checks nor in READMEs."""
    whole = dict.fromkeys(report.COLUMNS) | {"library": "kccl", "position": 128, "model": "m"}
    whole |= {"us_per_token": 100.0, "tok_s": 1e4, "tokens_match": True, "world_size": 1}
    fast = whole | {"us_per_token": 10.0, "tok_s": None, "tokens_match": None}
    fast |= {"ablated": "weights", "whole_us": 100.0}
    machine = {"cpu_model": "some CPU", "allowed_cpus": 2}
    made = {"machine": machine, "commit": "abc", "rows": [whole, fast]}
    assert report.ours_and_best(made["rows"]) == [(whole, None)]
    assert "| 100 |" in report.markdown([made]).splitlines()[2]
    assert compare.compare([made], [made]).compared == 1


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_in_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, table = tmp_path / "t.json", tmp_path / "rows.csv"
    asked = ["--random-weights", "tiny-tiles", "--backend", "sim", "--positions", "3"]
    asked += ["--new-tokens", "1", "--repeats", "1", "--ablate", "none,weights"]
    asked += ["--trace", str(trace), "--traced-tokens", "1", "--json", "--csv", str(table)]
    assert command.main(["bench", "decode", *asked]) == 0
    captured = capsys.readouterr()
    made = json.loads(captured.out.splitlines()[-1])
    whole, ablated = made["rows"]
    assert (whole["ablated"], whole["tokens_match"], whole["ttft_ms"]) == (None, True, None)
    names = ("ablated", "tokens_match", "tok_s")
    assert [ablated[name] for name in names] == ["weights", None, None]
    assert min(ablated["us_per_token"], ablated["whole_us"]) > 0
    assert made["machine"]["timelines"][0]["token_us"] > 0
    facts, events = read(trace)
    assert (facts["position"], facts["tokens"]) == (3, 1)
    assert {each["name"] for each in events} >= {"0 qkv", "1 down", "head", "end", "wait"}
    assert trace.with_suffix(".png").exists()
    assert len(table.read_text().splitlines()) == 3
    for text in ("left out or changed", "rank 0, us a token", "no time here measures a machine"):
        assert text in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ablate", "everything"), "'everything' cannot be left out or changed"),
        (("--ablate", "weights"), "--ablate needs --backend cuda, hip or sim"),
        (("--trace", "t.json"), "--trace needs --backend cuda, hip or sim"),
        (("--backend", "sim", "--ablate", "exchanges"), "has races"),
        (("--backend", "sim", "--trace", "/nowhere/t.json"), "cannot be written: No such file"),
        (("--backend", "sim", "--trace", "t.json", "--traced-tokens", "0"), "--traced-tokens is 0"),
        (
            ("--backend", "sim", "--trace", "t.json", "--positions", "60"),
            "--positions has 60, must be from 1 to 58",
        ),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["bench", "decode", "--random-weights", "tiny-tiles", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_is_refused_in_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    # There is no other rank to compare complaints with.
    monkeypatch.setattr("kccl.tools.complaints.Complaints.meet", lambda *_: None)
    asked = ("--random-weights", "tiny-tiles", "--backend", "cuda", "--trace", "t.json")
    assert command.main(["bench", "decode", *asked]) == 2
    assert "--trace needs ranks that are threads" in capsys.readouterr().err
