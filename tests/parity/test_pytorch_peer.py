"""The benchmark's decoder in PyTorch against the NumPy reference, on the CPU."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._dynamo.testing

import kccl
from kccl.bench.decode.peer import Room
from kccl.bench.decode.pytorch import experts, layers, matrices
from kccl.bench.decode.pytorch.decoder import EAGER, Decoder, Weights
from kccl.bench.decode.pytorch.device import Cpu
from kccl.bench.decode.pytorch.peer import TorchPeer
from kccl.bench.decode.pytorch.ranks import Alone, Ranks
from kccl.engine.executors.opening import read_for
from kccl.engine.executors.reference import Cache, Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.base import Stored
from kccl.engine.formats.e4m3 import E4M3
from kccl.engine.formats.int4 import INT4
from kccl.engine.formats.int8 import INT8
from kccl.engine.formats.mxfp4 import MXFP4
from kccl.engine.model.rope import Rope
from kccl.engine.model.rope_scaling import DynamicScaling

pytestmark = pytest.mark.long

# A window that ends within a page, and one that ends before the last pages.
CONTEXT = 6 * layers.PAGE
LONG = {"context": CONTEXT, "window": 300}
IDS = np.random.default_rng(2).integers(256, size=CONTEXT).tolist()
# The check of `kccl bench decode` for engines in BF16: a 32nd of the largest logit.
SURE_IN_BF16 = 2.0**-5


@pytest.fixture(autouse=True)
def one_thread():
    """These tensors are so small that PyTorch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Together(Ranks):
    """Ranks that are threads."""

    name = version = ""

    def __init__(self, rank, parts, barrier):
        self.rank, self.world_size = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def gather(self, x):
        self._parts[self.rank] = x.clone()
        self._barrier.wait(30)
        found = torch.stack(self._parts)
        self._barrier.wait(30)
        return found

    def sum(self, x):
        # In place, as NCCL's and KCCL's.
        return x.copy_(self.gather(x).sum(0))

    def of_rank_0(self, value):
        raise NotImplementedError

    def close(self):
        pass


def logits_by_reference(checkpoint, prompt, answer):
    reference, cache = Reference(checkpoint), Cache()
    reference.logits(prompt[:-1], cache)
    return reference.logits([prompt[-1], *answer], cache)


def decode(checkpoint, ranks, prompt, answer, dtype):
    """The tokens after a prompt and after each of the answer, which is given; and the logits."""
    weights = Weights(checkpoint, ranks.rank, ranks.world_size, "cpu", dtype)
    decoder = Decoder(weights, CONTEXT, ranks)
    logits = []

    def best(mine):
        logits.append(mine.flatten().float().numpy())
        return layers.best(mine)

    tokens = [decoder.extend(prompt, 0).item()]
    pieces = replace(EAGER, best=best)
    for index, token in enumerate(answer):
        position = torch.tensor([len(prompt) + index])
        span = decoder.span(int(position), int(position) + 1)
        tokens.append(decoder.step(torch.tensor([token]), position, span, pieces).item())
    return tokens, np.stack(logits)


@pytest.mark.parametrize("length", [5, 700])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tiny-laneformer", LONG),
        ("tiny-laneformer", {**LONG, "early_comm": True, "message_dtype": "float32"}),
        ("tiny-laneformer", {**LONG, "lm_head": "vocab_parallel", "mlp_comm": False}),
        ("tiny-llama", {"context": CONTEXT, "is_tied": False}),
        ("tiny-qwen3", {"context": CONTEXT}),
        ("tiny-llama", {"context": CONTEXT, "biases": ("qkv", "out", "gate_up", "down")}),
        ("tiny-qwen2", {**LONG, "window_layers": (1,)}),
        ("tiny-qwen3-moe", {"context": CONTEXT}),
        ("tiny-gpt-oss", {**LONG, "window_layers": (1, 3)}),
    ],
    ids=[
        *("laneformer", "early_comm", "vocab_parallel", "llama", "qwen3", "biases"),
        *("biases and a window", "qwen3-moe", "gpt-oss"),
    ],
)
def test_logits(model, changes, length, assert_close):
    checkpoint = random_checkpoint(model, **changes)
    prompt, answer = IDS[:length], IDS[length : length + 8]
    wanted = logits_by_reference(checkpoint, prompt, answer)
    tokens, logits = decode(checkpoint, Alone(), prompt, answer, torch.float32)
    # A message in BF16 may be rounded the other way.
    is_rounded = checkpoint.config.message_dtype == "bfloat16"
    assert_close(logits, wanted[1:], 3e-2 if is_rounded else 1e-4)
    assert tokens[0] == wanted[0].argmax()


@pytest.mark.parametrize("model", ["tiny-laneformer", "tiny-llama"])
@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
def test_weights_of_fewer_bits(model, weights, assert_close):
    checkpoint = random_checkpoint(model, context=CONTEXT).as_weights(weights)
    prompt, answer = IDS[:5], IDS[5:9]
    wanted = logits_by_reference(checkpoint, prompt, answer)
    tokens, logits = decode(checkpoint, Alone(), prompt, answer, torch.float32)
    is_rounded = checkpoint.config.message_dtype == "bfloat16"
    assert_close(logits, wanted[1:], 3e-2 if is_rounded else 1e-4)
    assert tokens[0] == wanted[0].argmax()


def test_what_has_no_product_is_named():
    checkpoint = random_checkpoint("tiny-llama").as_weights("mxfp4")
    with pytest.raises(kccl.Error, match="it does not multiply MXFP4"):
        Weights(checkpoint, 0, 1, "cpu")


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tiny-laneformer", LONG),
        ("tiny-laneformer", {**LONG, "early_comm": True, "num_lanes": 2}),
        ("tiny-laneformer", {**LONG, "lm_head": "vocab_parallel"}),
        ("tiny-qwen3", {"context": CONTEXT}),
        ("tiny-qwen2", {"context": CONTEXT, "biases": ("qkv", "out", "gate_up", "down")}),
    ],
    ids=["laneformer", "a lane a rank", "vocab_parallel", "qwen3", "biases"],
)
def test_two_ranks_are_one_model(model, changes, assert_close):
    checkpoint = random_checkpoint(model, **changes)
    prompt, answer = IDS[:200], IDS[200:205]
    alone, wanted = decode(checkpoint, Alone(), prompt, answer, torch.float32)
    parts, barrier, found = [None] * 2, threading.Barrier(2), {}

    def run(rank):
        ranks = Together(rank, parts, barrier)
        found[rank] = decode(checkpoint, ranks, prompt, answer, torch.float32)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0][0] == found[1][0] == alone
    logits = np.concatenate([found[rank][1] for rank in range(2)], axis=1)
    assert_close(logits, wanted, 1e-4)


def test_lanes_that_do_not_divide_are_refused():
    with pytest.raises(kccl.InvalidArgument, match="world_size is 2, must divide"):
        Weights(random_checkpoint("tiny-llama"), 0, 2, "cpu")


@pytest.mark.parametrize("model", ["tiny-laneformer", "tiny-llama", "tiny-gpt-oss"])
def test_a_peer_decodes_like_the_reference(model):
    checkpoint = random_checkpoint(model, context=CONTEXT)
    peer = TorchPeer(Room(checkpoint, CONTEXT, 1), Alone(), Cpu())
    assert (peer.library, peer.world_size, peer.backend) == ("torch", 1, "cpu")
    prompt, answer = IDS[:140], IDS[140:160]
    # In two parts, as positions of a benchmark follow each other.
    peer.extend(prompt[:100])
    tokens = [peer.extend(prompt[100:]), *(peer.step(token) for token in answer)]
    wanted = logits_by_reference(checkpoint, prompt, answer)
    second, first = np.partition(wanted, -2, axis=-1)[:, -2:].T
    is_sure = first - second > SURE_IN_BF16 * np.abs(wanted).max()
    assert is_sure.mean() > 0.25
    assert (np.array(tokens) == wanted.argmax(-1))[is_sure].all()

    peer.rewind()
    answer, times = peer.timed(tokens[0], 10)
    assert len(answer) + 1 == len(times)
    assert (np.diff(times) > 0).all()
    peer.rewind()
    one_by_one, token = [], tokens[0]
    for _ in range(10):
        token = peer.step(token)
        one_by_one.append(token)
    assert one_by_one == answer
    peer.close()


@pytest.mark.parametrize("shape", [(1, 24, 40), (4, 24, 40)], ids=["joint", "lanes"])
def test_both_products_are_the_same(shape):
    lanes, rows, columns = shape
    x = torch.randn(lanes, 1, columns, generator=torch.Generator().manual_seed(0))
    w = torch.randn(lanes, rows, columns, generator=torch.Generator().manual_seed(1))
    found = layers.by_compiler(x, w)
    assert found.shape == (lanes, 1, rows)
    torch.testing.assert_close(found, layers.by_library(x, w))
    n = torch.randn(lanes, 1, columns, generator=torch.Generator().manual_seed(2))
    gated = [layers.gated(n, w, product) for product in (layers.by_compiler, layers.by_library)]
    torch.testing.assert_close(*gated)


IN_MXFP4 = dict.fromkeys(("w1", "w3", "w2"), "mxfp4")


@pytest.mark.parametrize(
    ("model", "stored"),
    [("tiny-qwen3-moe", None), ("tiny-gpt-oss", None), ("tiny-gpt-oss", IN_MXFP4)],
    ids=["qwen3-moe", "gpt-oss", "MXFP4"],
)
def test_the_step_of_one_token_has_the_same_experts(model, stored):
    """It gathers their matrices, and is compiled once for all layers."""
    checkpoint = random_checkpoint(model, stored=stored)
    w = Weights(checkpoint, 0, 1, "cpu", torch.float32)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts.one_token, fullgraph=True, dynamic=False, backend=counter)
    for seed, layer in enumerate(w.layers):
        shape = (1, 5, w.program.config.hidden)
        n = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        wanted = experts.many_tokens(n, layer["experts"])
        found = [compiled(n[:, i : i + 1], layer["experts"]) for i in range(5)]
        torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "read"])
def test_experts_stay_in_mxfp4(monkeypatch, is_drawn):
    checkpoint = read_for(random_checkpoint("tiny-gpt-oss", stored=IN_MXFP4), "cuda", None)
    names = [f"layers.1.experts.2.{name}" for name in IN_MXFP4]
    wanted = [MXFP4.to_float32(checkpoint.read(name).words) for name in names]
    if not is_drawn:
        monkeypatch.setattr(checkpoint, "drawn", lambda name: None)
    mixture = Weights(checkpoint, 0, 1, "cpu").layers[1]["experts"]
    assert mixture.w13.codes.dtype is mixture.w2.scales.dtype is torch.uint8
    gate_up = np.concatenate([lanes.reshape(-1, lanes.shape[-1]) for lanes in wanted[:2]])
    np.testing.assert_array_equal(mixture.w13.of(2).values(), gate_up)
    np.testing.assert_array_equal(mixture.w2.of(2).values(), np.concatenate([*wanted[2]], 1))


@pytest.mark.parametrize("numbers", [E4M3[1], INT8[1], INT4[1]], ids=lambda given: given.name)
def test_both_products_of_groups_are_the_same(numbers):
    random = np.random.default_rng(3)
    words = numbers.from_values(random.normal(size=(2, 24, 4 * numbers.block)))
    w = matrices.on_device(Stored(numbers, words), torch.device("cpu"), torch.float32)
    np.testing.assert_array_equal(w.values(), numbers.to_float32(words))
    x = torch.from_numpy(random.normal(size=(2, 1, 4 * numbers.block)).astype(np.float32))
    found = torch.compile(layers.by_compiler, fullgraph=True)(x, w)
    torch.testing.assert_close(found, layers.by_library(x, w), rtol=1e-4, atol=1e-4)
    gated = [layers.gated(x, w, product) for product in (layers.by_compiler, layers.by_library)]
    torch.testing.assert_close(*gated, rtol=1e-4, atol=1e-4)


def test_frequencies_that_depend_on_the_length_are_refused():
    model = random_checkpoint("tiny-llama", rope=Rope(scaling=DynamicScaling(2.0, 16)))
    with pytest.raises(kccl.Error, match="whose frequencies depend on the request's length"):
        Decoder(Weights(model, 0, 1, "cpu"), CONTEXT, Alone())
