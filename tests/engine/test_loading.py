"""What loading a model takes: memory, and what is told meanwhile."""

import errno
import mmap

import pytest
from loading import memory_of_opening
from long import long_after
from tiny_models import LANEFORMER, LLAMA, write_folder, write_gguf

import kccl
from kccl.engine import Engine, open_checkpoint
from kccl.engine.executors import packing
from kccl.engine.files.random_weights import random_checkpoint

# 140 MB of BF16 in many layers, so that one layer's tensors are a small part.
LARGE = {"hidden": 512, "ffn": 2048, "heads": 16, "kv_heads": 8, "head_dim": 32, "layers": 16}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder and a GGUF file."""
    folder = tmp_path_factory.mktemp("large")
    config = LLAMA | {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 8000,
    }
    write_folder(folder / "folder", config)
    write_gguf(folder / "m.gguf", **LARGE, vocab=8000)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("ranks", long_after(1, [1, 8]))
@pytest.mark.parametrize("name", ["folder", "m.gguf"])
def test_loading_takes_little_more_than_the_packed_weights(files, name, ranks):
    """The least of two runs: ranks that are threads hold more or fewer buffers at the same time."""
    # Each of 8 ranks has buffers, and a heap that keeps some of what they took.
    most = 1.1 if ranks == 1 else 1.15
    assert 0.9 < min(memory_of_opening(files / name, ranks) for _ in range(2)) < most


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("model", ["tiny-laneformer", "tiny-llama"])
def test_progress_ends_at_the_whole(model, ranks):
    """Also of a tied table, which is there twice."""
    told = []
    checkpoint = random_checkpoint(model)
    with Engine(
        checkpoint, ranks=ranks, blocks=1, progress=lambda *numbers: told.append(numbers)
    ) as engine:
        assert {total for _, total in told} == {engine.nbytes}
    assert max(done for done, _ in told) == engine.nbytes
    assert sum(done == engine.nbytes for done, _ in told) <= ranks


def test_lanes_are_those_of_the_whole_tensor(tmp_path):
    write_folder(tmp_path / "laneformer", LANEFORMER)
    write_folder(tmp_path / "llama", LLAMA)
    write_gguf(tmp_path / "m.gguf")
    for name in ("laneformer", "llama", "m.gguf"):
        with open_checkpoint(tmp_path / name) as checkpoint:
            for tensor in ("wq", "wk", "wv", "wo", "w1", "w3", "w2"):
                whole = checkpoint.tensor(f"layers.1.{tensor}")
                lanes = range(1, checkpoint.config.num_lanes)
                some = checkpoint.tensor(f"layers.1.{tensor}", lanes)
                assert some.shape == (len(lanes), *whole.shape[1:])
                assert (some == whole[1:]).all()
            for tensor, lanes in (
                ("embedding", range(1)),
                ("layers.0.wq", range(1, 9)),
                ("layers.0.wo", range(0, 2, 2)),
            ):
                with pytest.raises(kccl.InvalidArgument, match=f"{tensor} has no lanes range"):
                    checkpoint.tensor(tensor, lanes)


def test_only_a_ranks_lanes_are_read(tmp_path, monkeypatch):
    write_folder(tmp_path / "llama", LLAMA)
    with open_checkpoint(tmp_path / "llama") as checkpoint:
        source, read = checkpoint._source, []
        original = source.read

        def noted(name, start, stop):
            read.append((name, stop - start))
            return original(name, start, stop)

        monkeypatch.setattr(source, "read", noted)
        checkpoint.tensor("layers.0.wq", range(1, 2))
    assert read == [("model.layers.0.self_attn.q_proj.weight", 8)]


class Memory:
    """Stands in for mmap.mmap."""

    fails = errno.EINVAL

    def __init__(self, *_, **__):
        if self.fails == errno.ENOMEM:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def madvise(self, _):
        raise OSError(self.fails, "told")


def test_memory_of_weights(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", Memory)
    # A kernel without huge pages.
    assert isinstance(packing._fresh_memory(4096, 0), Memory)
    monkeypatch.setattr(Memory, "fails", errno.ENOMEM)
    with pytest.raises(
        kccl.BackendError,
        match=r"^rank 3 cannot allocate 4096 bytes of weights: Cannot allocate memory$",
    ):
        packing._fresh_memory(4096, 3)


def test_an_opened_checkpoint_brings_its_tokenizer(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    with (
        open_checkpoint(tmp_path / "m.gguf") as checkpoint,
        Engine(checkpoint, blocks=1) as engine,
        Engine(tmp_path / "m.gguf", blocks=1) as other,
    ):
        given = engine.generate("hello", max_tokens=20)
        assert given.text == other.generate("hello", max_tokens=20).text
        # The stop ids are the tokenizer's, and stop strings count.
        assert engine._params(None, {}).stop_ids == (1,)
        cut = engine.generate("hello", max_tokens=20, stop=(given.text[2:4],))
        assert (cut.text, cut.end) == (given.text[: given.text.index(given.text[2:4])], "stop")


def test_a_model_without_tokenizer_takes_ids(tmp_path):
    write_folder(tmp_path / "llama", LLAMA)
    with Engine(tmp_path / "llama", blocks=1) as engine:
        assert len(engine.generate([1, 2], max_tokens=3).ids) == 3
        with pytest.raises(kccl.Error, match="llama has no tokenizer: give ids instead of text"):
            engine.generate("hello")
