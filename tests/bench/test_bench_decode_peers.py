"""Other engines in `kccl bench decode`: missing, wrong or right ones, and the files they read."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_bench import ReferenceAsPeer, bench, document_of

import kccl
from kccl.bench.decode import files, tokens
from kccl.bench.decode.opened import OpenedPeers
from kccl.bench.decode.peers import PEERS
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.ops import IN_LAYER
from kccl.engine.model.rope import Llama3Scaling, Rope
from kccl.engine.model.rope_scaling import DynamicScaling

ALL_BIASES = tuple(kind.name for kind in IN_LAYER if kind.biases)


class WrongPeer(ReferenceAsPeer):
    library = "wrong"

    def step(self, token: int) -> int:
        return (super().step(token) + 1) % 256


# ---- rows ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_peers")
@pytest.mark.parametrize(
    ("model", "cause"),
    [("tiny-llama", "ModuleNotFoundError"), ("tiny-laneformer", "of the family laneformer")],
)
def test_missing_peers_are_told(
    model: str, cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if model == "tiny-laneformer":
        # What the peers' constructors do first with a model.
        for name in PEERS["host"]:
            monkeypatch.setitem(
                PEERS["host"], name, lambda room: files.check_ordinary(room.checkpoint.config)
            )
    assert bench("--random-weights", model, "--baselines") == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("transformers", "llama.cpp"):
        (line,) = [each for each in lines if each.startswith(f"# no {name} rows: ")]
        assert cause in line


def test_a_peer_is_measured_if_its_tokens_are_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PEERS, "host", {"reference": ReferenceAsPeer, "wrong": WrongPeer})
    arguments = ("--random-weights", "tiny-llama", "--positions", "16", "30", "--baselines")
    assert bench(*arguments, "--json") == 0
    captured = capsys.readouterr()
    out = captured.err + captured.out
    made = document_of(out)
    assert made["machine"]["peers"] == {"reference": "1", "wrong": "1"}
    assert [row["library"] for row in made["rows"]] == ["kccl", "reference"] * 2
    for theirs in made["rows"][1::2]:
        assert theirs["tokens_match"]
        assert theirs["tok_s"] > 0
        assert theirs["world_size"] == 1
        assert theirs["bandwidth_share"] is None
    assert "# no wrong rows: " in out


class Job:
    """What OpenedPeers asks of an engine of two ranks on GPUs. The other rank fails, or agrees."""

    backend, rank, world_size, context = "cuda", 0, 2, 64

    def __init__(self, of_other: str | None) -> None:
        self._of_other = of_other

    def of_processes(self, value: Any) -> list[Any]:
        return [value, self._of_other]

    def of_rank_0(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize("of_other", [None, "out of memory"])
def test_ranks_measure_a_peer_only_if_all_have_opened_it(
    of_other: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(PEERS, "GPUs", {"reference": ReferenceAsPeer})
    checkpoint = random_checkpoint("tiny-llama")
    prompt, answer = list(range(16)), list(range(20, 36))
    known = tokens.NumpyOracle(checkpoint).expected(prompt, answer)
    engine: Any = Job(of_other)
    with ExitStack() as ends:
        peers = OpenedPeers(engine, checkpoint, ends, lambda what: None)
        peers.open(prompt, answer, known)
        if of_other is None:
            assert [peer.library for peer in peers.right] == ["reference"]
            assert peers.notes[0].startswith("reference: 0 of ")
        else:
            assert peers.right == []
            assert peers.notes == ["no reference rows: out of memory"]


def test_ranks_that_are_threads_have_no_peers_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "GPUs", {"reference": ReferenceAsPeer})
    engine: Any = Job(None)
    with ExitStack() as ends:
        peers = OpenedPeers(engine, random_checkpoint("tiny-llama"), ends, lambda what: None)
        peers.open([1], [2], None)
    assert peers.right == []
    assert "its ranks must be processes" in peers.notes[0]


LLAMA_31 = Llama3Scaling(8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tiny-llama", {}),
        ("tiny-llama", {"rope": Rope(is_interleaved=True), "is_tied": False}),
        ("tiny-llama", {"rope": Rope(theta=1e4, scaling=LLAMA_31)}),
        ("tiny-qwen3", {}),
        ("tiny-qwen2", {}),
        ("tiny-mistral", {"window": 0, "window_layers": 0}),
        ("tiny-llama", {"biases": ALL_BIASES}),
        ("tiny-llama", {"biases": ALL_BIASES, "rope": Rope(is_interleaved=True)}),
    ],
    ids=[
        *("llama", "interleaved", "llama-3.1", "qwen3", "qwen2", "mistral", "biases"),
        "interleaved biases",
    ],
)
def test_written_files_are_the_same_model(
    kind: str, model: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    ids = list(range(3, 43))
    checkpoint = random_checkpoint(model, **changes)
    wanted = Reference(checkpoint).logits(ids)
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        files.write_gguf(checkpoint, path)
    else:
        path = tmp_path
        files.write_folder(checkpoint, path)
    with open_checkpoint(path) as written:
        assert np.abs(Reference(written).logits(ids) - wanted).max() < 1e-4


WINDOWS = [("tiny-mistral", {}), ("tiny-qwen3", {"window": 5, "window_layers": (0, 2)})]


@pytest.mark.parametrize(("model", "changes"), WINDOWS, ids=["all layers", "some layers"])
def test_only_a_folder_says_which_layers_have_a_window(
    model: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = random_checkpoint(model, **changes)
    files.write_folder(checkpoint, tmp_path)
    with open_checkpoint(tmp_path) as written:
        for name in ("window", "window_layers"):
            assert getattr(written.config, name) == getattr(checkpoint.config, name)
    with pytest.raises(kccl.Error, match="cannot have a sliding window"):
        files.write_gguf(checkpoint, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("model", "changes", "told"),
    [
        ("tiny-llama", {"biases": ("qkv",)}, "no biases of qkv alone"),
        ("tiny-qwen3-moe", {}, "mixtures of experts are not written to files"),
        ("tiny-mistral", {"biases": ("qkv", "out")}, "no biases of qkv, out alone"),
        ("tiny-qwen2", {"biases": ()}, "no model without biases"),
        ("tiny-mistral", {"window_layers": 2}, "no windows in these layers"),
        ("tiny-llama", {"window": 4, "window_layers": 3}, "no windows in these layers"),
    ],
)
def test_what_a_folder_cannot_express_is_refused(
    model: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(kccl.Error, match=told):
        files.write_folder(random_checkpoint(model, **changes), tmp_path)


@pytest.mark.parametrize(
    "rope", [Rope(attention_factor=1.2), Rope(scaling=DynamicScaling(2.0, 16))], ids=str
)
@pytest.mark.parametrize("write", [files.write_folder, files.write_gguf])
def test_rope_that_would_be_lost_is_not_written(write: Any, rope: Rope, tmp_path: Path) -> None:
    with pytest.raises(kccl.Error, match="RoPE of this kind is not written to files"):
        write(random_checkpoint("tiny-llama", rope=rope), tmp_path)
