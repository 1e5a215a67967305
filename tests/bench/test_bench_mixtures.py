"""The check of a mixture's tokens in `kccl bench decode`: which choices of experts are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decode_bench import bench
from numpy.typing import NDArray

from kccl.bench.decode import tokens
from kccl.bench.decode.oracles import open_oracle
from kccl.bench.decode.routers import Routers
from kccl.engine import Engine
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.experts import Experts

SHAPE: dict[str, Any] = {"num_layers": 3, "hidden": 128, "head_dim": 16, "vocab_size": 512}
SHAPE |= {"context": 64, "ffn": 128, "num_heads": 8, "num_kv_heads": 4}
GPT_OSS = SHAPE | {"window": 4, "window_layers": (0, 2)}
IN_MXFP4 = {"stored": dict.fromkeys(("w1", "w3", "w2"), "mxfp4")}
LOGITS = np.array([[1.0, 0.5, 0.498, -1.0], [1.0, 0.5, 0.3, -1.0]], np.float32)


def test_an_engines_choice_is_taken_where_logits_count_as_equal() -> None:
    # At both positions the engine takes expert 2 instead of 1.
    engine = LOGITS[None, :, [0, 2, 1, 3]]
    routers = Routers(Experts(num=4, chosen=2), engine)
    ids, weights = routers.choose(0, 0, LOGITS)
    assert ids.tolist() == [[0, 2], [0, 1]]
    powers = np.exp(LOGITS[0, [0, 2]])
    np.testing.assert_allclose(weights[0], powers / powers.sum(), rtol=1e-6)
    assert (routers.num, routers.close, routers.taken, routers.wrong) == (2, 1, 1, 1)
    verdict = tokens.Verdict(compared=4, wrong=0, of=4, routers=routers)
    assert not verdict.is_right
    assert "of 2 choices of experts 1 are taken from KCCL, and 1 are wrong" in str(verdict)


def test_a_wrong_choice_of_experts_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        return bench("--random-weights", "tiny-gpt-oss", "--positions", "20", "--new-tokens", "8")

    assert run() == 0
    assert "of 112 choices of experts 0 are taken from KCCL, and 0 are wrong" in (
        capsys.readouterr().out
    )
    routed = Engine.routed

    def of_another_layer(self: Engine, ids: list[int]) -> NDArray[np.float32]:
        return np.roll(routed(self, ids), 1, axis=0)

    monkeypatch.setattr(Engine, "routed", of_another_layer)
    assert run() == 1


@pytest.mark.parametrize(("num", "steps"), [(5, 2), (3, 3), (7, 1)])
def test_ranks_meet_as_often_whatever_the_steps(num: int, steps: int) -> None:
    calls: list[int] = []
    for step in range(steps):
        tokens.tell_parts(lambda step=step: calls.append(step), num, step, steps)  # type: ignore[misc]
    assert len(calls) == num and set(calls) == set(range(steps))


@pytest.mark.usefixtures("no_peers")
def test_which_oracle_it_is_is_told_once() -> None:
    notes: list[str] = []
    checkpoint = random_checkpoint("tiny-gpt-oss", **SHAPE)
    for _ in range(2):
        assert isinstance(open_oracle(checkpoint, "cuda", notes), tokens.NumpyOracle)
    assert len(notes) == 1 and "checked in NumPy" in notes[0]


@pytest.mark.parametrize(
    ("model", "fields"),
    [("tiny-gpt-oss", GPT_OSS | IN_MXFP4), ("tiny-qwen3-moe", SHAPE)],
    ids=("gpt-oss in MXFP4", "qwen3-moe"),
)
def test_pytorchs_reference_is_numpys(model: str, fields: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    from kccl.bench.decode.pytorch.reference import LayerByLayer

    checkpoint = random_checkpoint(model, **fields)
    ids = np.random.default_rng(0).integers(512, size=20).tolist()
    prompt, answer = ids[:12], ids[12:]
    wanted = tokens.NumpyOracle(checkpoint).expected(prompt, answer)
    oracle = LayerByLayer(checkpoint, "cpu")
    # How much of the model the oracle has read at each call.
    kept: list[int] = []
    found = oracle.expected(prompt, answer, lambda: kept.append(len(oracle._kept)))
    assert len(kept) == tokens.num_parts(prompt, answer, 3) == 3
    assert 0 < kept[0] < kept[1] < kept[2] < len(oracle._kept)
    assert (found.best == wanted.best).all()
    np.testing.assert_allclose(found.margins, wanted.margins, atol=1e-5)
