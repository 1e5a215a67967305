"""SmolLM2 against llama.cpp, on 2,000 positions of a fixed text.

From the file itself llama.cpp multiplies 4-bit weights with inputs that it rounds to 8 bits, which
the engine does not: it rounds the weights to BF16. So a third run decides who is right: llama.cpp
with the same weights in BF16, where neither rounds inputs to 8 bits.
"""

from itertools import combinations

import numpy as np
import pytest
from smollm2 import find_smollm2

import kccl
from kccl.bench.decode.files import write_gguf
from kccl.bench.decode.peer import Room
from kccl.bench.decode.peers import LlamaCpp
from kccl.engine import Engine, open_checkpoint
from kccl.engine.files.random_weights import random_checkpoint

llama_cpp = pytest.importorskip(
    "llama_cpp",
    reason="llama-cpp-python is not installed: `make test-llama` compiles it for minutes",
)

pytestmark = pytest.mark.long
POSITIONS = 2000
CLEAR = 0.1  # least margin of the first token over the second, in the second run of a pair


def by_llama_cpp(path, ids):
    model = llama_cpp.Llama(str(path), n_ctx=POSITIONS + 48, logits_all=True, verbose=False)
    try:
        model.eval(ids)
        return model.scores[:POSITIONS].copy()
    finally:
        model.close()


def perplexity(logits, ids):
    logits = logits[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(logits)), ids[1:]]
    return float(np.exp((np.log(np.exp(logits).sum(axis=1)) - chosen).mean()))


def equal_share(logits, other):
    """The share of positions with the same first token, where the other's first is clear."""
    second, first = np.partition(other, -2, axis=1)[:, -2:].T
    is_clear = first - second > CLEAR
    assert is_clear.sum() > 0.9 * POSITIONS
    return float((logits.argmax(axis=1) == other.argmax(axis=1))[is_clear].mean())


@pytest.mark.timeout(600)
def test_smollm2(tmp_path, request):
    path = find_smollm2()
    text = (request.config.rootpath / "LICENSE").read_text()
    with open_checkpoint(path) as checkpoint:
        ids = checkpoint.tokenizer().encode(text, add_bos=False)[:POSITIONS]
        assert len(ids) == POSITIONS
        write_gguf(checkpoint, tmp_path / "bf16.gguf")
        with Engine(checkpoint, ranks=1, context=POSITIONS + 1) as engine:
            runs = {"kccl": engine.logits(ids)}
    runs["llama.cpp, BF16"] = by_llama_cpp(tmp_path / "bf16.gguf", ids)
    runs["llama.cpp"] = by_llama_cpp(path, ids)
    perplexities = {name: perplexity(logits, ids) for name, logits in runs.items()}
    shares = {(a, b): equal_share(runs[a], runs[b]) for a, b in combinations(runs, 2)}
    print(perplexities, shares)
    assert shares["kccl", "llama.cpp, BF16"] >= 0.99
    # As near as llama.cpp is to itself.
    assert shares["kccl", "llama.cpp"] >= shares["llama.cpp, BF16", "llama.cpp"] - 0.003 >= 0.98
    for name in ("llama.cpp, BF16", "llama.cpp"):
        assert perplexities["kccl"] == pytest.approx(perplexities[name], rel=0.005)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_llama_cpp_may_pick_the_token(model, monkeypatch):
    """As the peer on GPUs lets it. Here it does so on the CPU."""
    room = Room(random_checkpoint(model), 128, 1)
    prompt, answer = list(range(40, 60)), list(range(60, 80))
    if not llama_cpp.llama_supports_gpu_offload():
        with pytest.raises(kccl.Error, match="built without CUDA"):
            LlamaCpp(room, is_on_gpu=True)
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    found = []
    for is_on_gpu in (False, True):
        peer = LlamaCpp(room, is_on_gpu=is_on_gpu)
        found.append([peer.extend(prompt), *map(peer.step, answer)])
        assert peer.form == ("token picked on the GPU" if is_on_gpu else "")
        peer.close()
    assert found[0] == found[1]
