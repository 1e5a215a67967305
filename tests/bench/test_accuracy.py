"""How far ops are from the reference, as rows and as a README's table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kccl.bench.decode import accuracy
from kccl.engine import diff
from kccl.engine.model.ops import KINDS, Limit, Mlp


def test_rows_have_the_worst_op_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["tiny-laneformer", "tiny-qwen3", "--tokens", "4", "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["command"].startswith("python -m kccl.bench.decode.accuracy tiny-laneformer")
    rows = made["rows"]
    kinds = [name for name, kind in KINDS.items() if kind.mlp is not Mlp.EXPERTS]
    assert [row["op_kind"] for row in rows] == kinds * 2
    assert all(row["rmse"] <= row["rmse_limit"] for row in rows)
    assert any(row["rmse"] > 0 for row in rows)
    lines = accuracy.markdown([made, made]).splitlines()
    assert lines[3].startswith("| tiny-laneformer | 1 | 4 | qkv | 6 | ")
    assert len(lines) == 2 + len(rows) + 2


def test_an_op_beyond_its_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(diff.LIMITS, "down", Limit(0.0, 1.0))
    assert accuracy.main(["tiny-llama", "--tokens", "4"]) == 1


def test_a_model_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["no/such/folder"]) == 2
    assert "'no/such/folder' is neither" in capsys.readouterr().err
