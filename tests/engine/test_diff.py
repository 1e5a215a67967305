import math
import threading

import numpy as np
import pytest

import kccl
from kccl.engine import diff
from kccl.engine.diff import Diff, Incremental, make_executor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.ops import KINDS, Mlp

IDS = [5, 250, 17, 17]


class Wrong(Reference):
    """The reference with a fault: in one weight each second column has the wrong sign."""

    name = "layers.1.w3"

    def _weight(self, name):
        weight = super()._weight(name)
        return weight * np.resize([1, -1], weight.shape[-1]) if name == self.name else weight


def faulty(model="tiny-llama", **parts):
    checkpoint = random_checkpoint(model)
    return Diff(checkpoint, Wrong(checkpoint), IDS, **parts)


def test_all_ops_before_a_fault_are_equal():
    differences = list(faulty().all())
    wrong = [each.op.name for each in differences if each.error > 0]
    first = [each.op.name for each in differences].index("layers.1.gate_up")
    assert wrong == [each.op.name for each in differences[first:]]
    assert all(each.relative > 1e-3 for each in differences[first:])


def test_the_limits_find_a_fault():
    differences = list(faulty().all())
    first = next(each for each in differences if not each.is_within(None))
    assert first.op.name == "layers.1.gate_up"
    assert {each.op.kind for each in differences} == {
        name for name, kind in KINDS.items() if kind.mlp is not Mlp.EXPERTS
    }


@pytest.mark.parametrize("name", ["embedding", "layers.0.wq", "layers.1.w3", "layers.2.w2", "norm"])
def test_bisect_finds_the_op_with_few_runs(name, monkeypatch):
    monkeypatch.setattr(Wrong, "name", name)
    # Not tied, so that the embedding is one op's.
    checkpoint = random_checkpoint("tiny-llama", is_tied=False)
    looked_at = []
    found = Diff(checkpoint, Wrong(checkpoint), IDS).bisect(1e-3, looked_at.append)
    assert name in found.op.weights
    assert len(looked_at) <= math.ceil(math.log2(18 + 1))


def test_bisect_finds_nothing_where_nothing_is_wrong():
    checkpoint = random_checkpoint("tiny-laneformer")
    assert Diff(checkpoint, Incremental(checkpoint), IDS).bisect(2e-2) is None


@pytest.mark.parametrize("model", ["tiny-laneformer", "tiny-qwen3", "tiny-gpt-oss"])
def test_decoding_agrees_with_prefill(model):
    checkpoint = random_checkpoint(model)
    relative = [each.relative for each in Diff(checkpoint, Incremental(checkpoint), IDS).all()]
    assert max(relative) < diff.TOLERANCES[checkpoint.config.message_dtype]
    # Sums in another order.
    assert max(relative) > 0


def test_a_layer_limit_leaves_out_what_follows():
    ops = faulty(layers=1).ops
    assert [op.name.rpartition(".")[2] for op in ops] == ["qkv", "attend", "out", "gate_up", "down"]
    assert all(each.error == 0 for each in faulty(layers=1).all())
    for layers in (0, 4):
        with pytest.raises(kccl.InvalidArgument, match=f"layers is {layers}"):
            faulty(layers=layers)


def test_the_place_of_the_largest_error_is_told():
    class Off:
        def __init__(self, reference):
            self._reference = reference

        def run_until(self, ids, op_index):
            output = self._reference.run_until(ids, op_index).copy()
            output[1, 2, 30] += 0.5
            output[0, 1, 3] += 0.25
            return output

    checkpoint = random_checkpoint("tiny-laneformer")
    reference = Reference(checkpoint)
    found = Diff(checkpoint, Off(reference), IDS).at(reference.program.by_name["layers.2.out"])
    assert found.place == (1, 2, 30)
    assert found.error == pytest.approx(0.5)
    rms = np.sqrt(np.square(reference.trace(IDS)["layers.2.out"]).mean())
    assert found.relative == pytest.approx(0.5 / rms, rel=1e-5)
    size = reference.trace(IDS)["layers.2.out"].size
    assert found.rmse == pytest.approx(np.sqrt((0.5**2 + 0.25**2) / size) / rms, rel=1e-5)
    # The error is about at a right angle to the output.
    assert 1 - found.cosine == pytest.approx(found.rmse**2 / 2, rel=0.3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_an_infinite_error(value):
    class NotFinite:
        def run_until(self, ids, op_index):
            return np.full((1, 4, 64), value, np.float32)

    checkpoint = random_checkpoint("tiny-llama")
    found = next(Diff(checkpoint, NotFinite(), IDS).all())
    assert found.op.name == "embed"
    assert found.relative == found.rmse == math.inf
    assert not found.is_within(None)


def test_a_reference_that_is_not_finite_is_never_met():
    class Broken(Wrong):
        def _weight(self, name):
            return super()._weight(name) * np.float32(np.nan if name == self.name else 1)

    checkpoint = random_checkpoint("tiny-llama")
    compared = Diff(checkpoint, Reference(checkpoint), IDS)
    compared.reference = Broken(checkpoint)
    relative = {each.op.name: each.relative for each in compared.all()}
    assert relative["layers.1.out"] == 0
    assert relative["layers.1.gate_up"] == relative["head"] == math.inf
    assert compared.bisect(1e-3).op.name == "layers.1.gate_up"


def test_a_wrong_shape_is_an_error():
    class Short:
        def run_until(self, ids, op_index):
            return np.zeros((1, 3, 64), np.float32)

    checkpoint = random_checkpoint("tiny-llama")
    with pytest.raises(kccl.Error, match=r"embed: the executor gives \(1, 3, 64\)"):
        next(Diff(checkpoint, Short(), IDS).all())


def test_command_line(capsys):
    assert diff.main(["tiny-qwen3", "--tokens", "4"]) == 0
    told = capsys.readouterr().out
    assert "layers.2.gate_up" in told
    assert "all within the limits" in told
    assert diff.main(["tiny-qwen3", "--tokens", "4", "--tolerance", "0", "--bisect"]) == 1
    assert "first beyond a relative error of 0: layers.0.qkv" in capsys.readouterr().out
    assert diff.main(["tiny-qwen3", "--op", "layers.1.out"]) == 0
    assert "layers.1.down" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-llama", "--op", "layers.9.out"], "op is 'layers.9.out'"),
        (
            ["tiny-llama", "--executor", "nothing"],
            "executor is 'nothing', must be host, cuda, hip, sim, incremental",
        ),
        (["no/such/folder"], "model 'no/such/folder' is neither"),
        (["tiny-llama", "--tokens", "0"], "--tokens is 0, must be at least 1"),
        (["tiny-llama", "--seed", "-1"], "--seed is -1, must be at least 0"),
        (["tiny-llama", "--tolerance", "nan"], "--tolerance is nan, must be at least 0"),
        (["tiny-llama", "--executor", "os:path"], "executor is 'os:path', which cannot be called"),
        (["tiny-llama", "--op", "layers.0.out", "--layers", "1"], "--op and --layers are given"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    assert diff.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_options_that_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        diff.main(["tiny-llama", "--op", "layers.0.out", "--bisect"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_executor_is_closed():
    before = threading.active_count()
    assert diff.main(["tiny-llama", "--tokens", "2", "--op", "embed"]) == 0
    assert threading.active_count() == before
    # A host executor outside of rank threads: its communicator is closed.
    checkpoint = random_checkpoint("tiny-llama")
    with diff._opened_executor("host", checkpoint) as engine:
        pass
    with pytest.raises(kccl.InvalidArgument, match="closed"):
        engine.run_until([1], 0)


def test_an_executor_may_come_from_any_module():
    executor = make_executor(
        "kccl.engine.executors.reference:Reference", random_checkpoint("tiny-llama")
    )
    assert isinstance(executor, Reference)
