"""The reference against what laneformer.md and the models' papers promise. tests/parity compares it
with other people's implementations.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import kccl
from kccl.engine.executors.reference import Cache, Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.base import Stored
from kccl.engine.formats.float32 import FLOAT32
from kccl.engine.model.rope import Rope
from kccl.engine.model.sample import SamplingParams

TINY = ("tiny-laneformer", "tiny-llama", "tiny-qwen3")
# Where a message's FP32 sum is in the middle of two BF16 numbers, the order of a sum decides.
CLOSE = {"float32": 1e-5, "bfloat16": 5e-3}
IDS = np.random.default_rng(7).integers(256, size=24).tolist()


class AsNumbers:
    """A checkpoint whose tensors are arrays."""

    def read(self, name):
        return Stored(FLOAT32, FLOAT32.from_values(self.tensor(name)))


class Changed(AsNumbers):
    """A checkpoint with some tensors passed through functions."""

    def __init__(self, checkpoint, **changes):
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._changes = {name.replace("__", "."): change for name, change in changes.items()}

    def tensor(self, name):
        tensor = self._checkpoint.tensor(name)
        return self._changes[name](tensor.copy()) if name in self._changes else tensor


class Merged(AsNumbers):
    """A checkpoint whose lanes are one lane, with the same numbers."""

    def __init__(self, checkpoint):
        self.config = replace(checkpoint.config, num_lanes=1)
        self._checkpoint = checkpoint

    def tensor(self, name):
        tensor = self._checkpoint.tensor(name)
        if tensor.ndim < 3:
            return tensor
        axis = 1 if name.endswith(("wo", "w2")) else 0
        return np.concatenate(list(tensor), axis=axis)[None]


def in_plain_loops(checkpoint, ids):
    """The logits of an ordinary model behind its last token, a number at a time and in float64."""
    c = checkpoint.config
    weights = Merged(checkpoint)

    def read(name):
        tensor = weights.tensor(name).astype(np.float64)
        return tensor[0] if tensor.ndim == 3 else tensor

    def norm(x, weight):
        return x / np.sqrt(np.mean(x**2) + c.norm_eps) * weight

    def turn(head, position):
        out = head.copy()
        for i in range(c.head_dim // 2):
            angle = position * c.rope.theta ** (-2 * i / c.head_dim)
            a, b = (2 * i, 2 * i + 1) if c.rope.is_interleaved else (i, i + c.head_dim // 2)
            out[a] = head[a] * np.cos(angle) - head[b] * np.sin(angle)
            out[b] = head[a] * np.sin(angle) + head[b] * np.cos(angle)
        return out

    def heads(name, n, position, head_norm):
        split = (read(name) @ n).reshape(-1, c.head_dim)
        if head_norm is not None:
            split = [norm(head, head_norm) for head in split]
        return [turn(head, position) for head in split]

    xs = [read("embedding")[token] for token in ids]
    for layer in range(c.num_layers):
        at = f"layers.{layer}."
        q_norm, k_norm = (read(at + n) if c.has_qk_norm else None for n in ("q_norm", "k_norm"))
        ns = [norm(x, read(at + "attention_norm")) for x in xs]
        ks = [heads(at + "wk", n, position, k_norm) for position, n in enumerate(ns)]
        vs = [(read(at + "wv") @ n).reshape(-1, c.head_dim) for n in ns]
        for position, n in enumerate(ns):
            mixed = []
            for h, q in enumerate(heads(at + "wq", n, position, q_norm)):
                kv = h * c.num_kv_heads // c.num_heads
                e = np.exp([q @ ks[j][kv] / np.sqrt(c.head_dim) for j in range(position + 1)])
                mixed.append(sum(e[j] / e.sum() * vs[j][kv] for j in range(position + 1)))
            x = xs[position] + read(at + "wo") @ np.concatenate(mixed)
            n = norm(x, read(at + "ffn_norm"))
            gate = read(at + "w1") @ n
            inner = gate / (1 + np.exp(-gate)) * (read(at + "w3") @ n)
            xs[position] = x + read(at + "w2") @ inner
    return read("embedding" if c.is_tied else "head") @ norm(xs[-1], read("norm"))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tiny-llama", {}),
        ("tiny-llama", {"rope": Rope(theta=100.0, is_interleaved=True), "is_tied": False}),
        ("tiny-qwen3", {}),
    ],
)
def test_logits_by_hand(model, changes):
    checkpoint = random_checkpoint(model, **changes)
    wanted = in_plain_loops(checkpoint, IDS[:9])
    found = Reference(checkpoint).logits(IDS[:9])[-1]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", TINY)
def test_decoding_and_chunks_give_what_one_run_gives(model):
    reference = Reference(random_checkpoint(model))
    cache, parts = Cache(), []
    for chunk in (IDS[:5], IDS[5:6], IDS[6:7], IDS[7:20], IDS[20:]):
        parts.append(reference.logits(chunk, cache))
    assert cache.length == len(IDS)
    close = CLOSE[reference.config.message_dtype]
    np.testing.assert_allclose(np.concatenate(parts), reference.logits(IDS), rtol=0, atol=close)


def test_a_run_that_stops_early_leaves_the_cache_as_it_was():
    reference = Reference(random_checkpoint("tiny-llama"))
    cache = Cache()
    reference.logits(IDS[:4], cache)
    reference.run_until([9, 9, 9], 8, cache)
    assert cache.length == 4
    again = reference.logits(IDS[4:], cache)
    np.testing.assert_allclose(again, reference.logits(IDS)[4:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", TINY)
def test_no_position_sees_a_later_one(model):
    reference = Reference(random_checkpoint(model))
    changed = [*IDS[:-3], *(255 - token for token in IDS[-3:])]
    is_equal = (reference.logits(IDS) == reference.logits(changed)).all(axis=1)
    assert is_equal.tolist() == [True] * (len(IDS) - 3) + [False] * 3


def test_a_window_ends_after_its_keys():
    """One layer, so that nothing older gets through by way of other positions."""
    one_layer = {"num_layers": 1, "window_layers": 1, "delay": 1, "window": 8}
    reference = Reference(random_checkpoint("tiny-laneformer", **one_layer))
    changed = [255 - IDS[0], *IDS[1:]]
    differs = (reference.logits(IDS) != reference.logits(changed)).any(axis=1)
    assert differs.tolist() == [True] * 8 + [False] * (len(IDS) - 8)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_ordinary_models_do_not_depend_on_their_lanes(model):
    """Each lane has its own query heads, the KV heads that they read, and its own columns of the
    feed-forward block: one lane that has them all gives the same logits.
    """
    checkpoint = random_checkpoint(model)
    assert checkpoint.config.num_lanes > 1
    lanes, one = Reference(checkpoint), Reference(Merged(checkpoint))
    np.testing.assert_allclose(lanes.logits(IDS), one.logits(IDS), rtol=0, atol=1e-5)


def first_changes(config_changes, tensor, lane):
    """Where the residual of each lane first differs when a lane's weights do, as op names."""
    checkpoint = random_checkpoint("tiny-laneformer", **config_changes)

    def double(weights):
        weights[lane] *= 2
        return weights

    before = Reference(checkpoint).trace(IDS[:4])
    after = Reference(Changed(checkpoint, **{tensor: double})).trace(IDS[:4])
    residuals = [name for name in before if name.endswith(("out", "down"))]
    return [
        next((name for name in residuals if (before[name][lane] != after[name][lane]).any()), None)
        for lane in range(4)
    ]


@pytest.mark.parametrize(
    ("changes", "tensor", "own", "others"),
    [
        ({}, "layers__0__wo", "layers.0.out", "layers.2.out"),
        ({}, "layers__3__w2", "layers.3.down", "layers.5.down"),
        # Messages of the last two layers land nowhere.
        ({}, "layers__4__wo", "layers.4.out", None),
        ({"delay": 1}, "layers__3__w2", "layers.3.down", "layers.4.down"),
        ({"early_comm": True}, "layers__1__w2", "layers.1.down", "layers.1.down"),
        # Attention's messages are not sent: the MLP's of the same layer bring the news.
        ({"attention_comm": False}, "layers__2__wo", "layers.2.out", "layers.4.down"),
        ({"early_messages": False}, "layers__0__w2", "layers.0.down", "layers.4.out"),
    ],
)
def test_a_lanes_output_reaches_itself_at_once_and_the_others_later(changes, tensor, own, others):
    assert first_changes(changes, tensor, lane=2) == [others, others, own, others]


def test_the_residual_of_delayed_lanes_by_hand():
    """The formula of the specification, on outputs that are taken from the trace."""
    checkpoint = random_checkpoint("tiny-laneformer", message_dtype="float32")
    trace = Reference(checkpoint).trace(IDS[:3])

    def outputs(layer):
        wo = checkpoint.tensor(f"layers.{layer}.wo").astype(np.float64)
        return np.einsum("lti,ldi->ltd", trace[f"layers.{layer}.attend"].astype(np.float64), wo)

    early = trace["embed"] + 2 * outputs(0)
    np.testing.assert_allclose(trace["layers.0.out"], early, rtol=0, atol=1e-5)
    past = outputs(1)
    normal = trace["layers.2.down"] + outputs(3) + past.sum(axis=0) - past
    np.testing.assert_allclose(trace["layers.3.out"], normal, rtol=0, atol=1e-5)


def test_messages_are_rounded_and_a_lanes_own_output_is_not():
    rounded, exact = (
        Reference(random_checkpoint("tiny-laneformer", message_dtype=dtype)).trace(IDS)
        for dtype in ("bfloat16", "float32")
    )
    # The first messages land in layer 2.
    assert (rounded["layers.1.down"] == exact["layers.1.down"]).all()
    difference = np.abs(rounded["layers.2.out"] - exact["layers.2.out"]).max()
    assert 1e-4 < difference < 1e-2


def test_a_blocking_sum_takes_all_outputs_rounded():
    """The lane's own, too: so lanes that share a residual may compute it each for itself."""
    checkpoint = random_checkpoint("tiny-laneformer", delay=0)
    trace = Reference(checkpoint).trace(IDS)
    wo = checkpoint.tensor("layers.0.wo").astype(np.float32)
    outputs = np.einsum("lti,ldi->ltd", trace["layers.0.attend"], wo)
    rounded = outputs.astype(ml_dtypes.bfloat16).astype(np.float32)
    errors = [
        np.abs(trace["layers.0.out"] - trace["embed"] - each.sum(axis=0))
        for each in (rounded, outputs)
    ]
    # A message that is about midway between two BF16 numbers may round the other way here.
    assert np.median(errors[0]) < 1e-6 < 1e-4 < np.median(errors[1])


def test_a_head_in_parts_reads_each_lanes_own_residual():
    checkpoint = random_checkpoint("tiny-laneformer", lm_head="vocab_parallel")
    reference = Reference(checkpoint)
    trace = reference.trace(IDS[:3])
    head = checkpoint.tensor("head").astype(np.float32)
    for lane in range(4):
        part = slice(64 * lane, 64 * lane + 64)
        wanted = trace["final"][lane] @ head[part].T
        np.testing.assert_allclose(trace["head"][0][:, part], wanted, rtol=0, atol=1e-5)


def test_weights_need_not_be_kept():
    checkpoint = random_checkpoint("tiny-qwen3")
    kept, read_again = Reference(checkpoint), Reference(checkpoint, keep_weights=False)
    assert (kept.logits(IDS) == read_again.logits(IDS)).all()


def test_generate_follows_the_logits_and_stops():
    reference = Reference(random_checkpoint("tiny-llama"))
    ids, logprobs = zip(*reference.generate(IDS[:6], SamplingParams(max_tokens=5)), strict=True)
    assert len(ids) == 5
    logits = reference.logits([*IDS[:6], *ids])[5:-1].astype(np.float64)
    assert logits.argmax(axis=1).tolist() == list(ids)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(logprobs), shares[range(5), ids], rtol=1e-4)
    stopped = reference.generate(IDS[:6], SamplingParams(max_tokens=5, stop_ids=(ids[2],)))
    assert [token for token, _ in stopped] == list(ids[: ids.index(ids[2]) + 1])


def test_generate_ends_with_the_context():
    reference = Reference(random_checkpoint("tiny-llama", context=10))
    assert len(list(reference.generate(IDS[:6], SamplingParams(max_tokens=99)))) == 4
    with pytest.raises(kccl.InvalidArgument, match=r"ids has 10 tokens.*context, 10"):
        next(reference.generate(IDS[:10], SamplingParams()))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one"),
        ([[1]], "at least one"),
        ([1.5], "at least one"),
        ([3, 256], "has 256, must be from 0 to 255"),
        ([-1], "has -1"),
        ([1] * 129, "position 129, must be within the context, 128"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        Reference(random_checkpoint("tiny-llama")).logits(ids)


def test_ops_are_numbered_from_0():
    reference = Reference(random_checkpoint("tiny-llama"))
    for index in (18, -1):
        with pytest.raises(kccl.InvalidArgument, match=f"op_index is {index}"):
            reference.run_until(IDS, index)
