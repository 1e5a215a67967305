"""Blocks of GGUF that a device converts to formats/nested.py: the words that the host makes."""

import gguf
import numpy as np
import pytest
from tiny_models import gguf_shapes, write_gguf

import kccl
from kccl.engine import open_checkpoint
from kccl.engine.executors.opening import read_for
from kccl.engine.formats.base import Stored
from kccl.engine.formats.table import IN_FILES, forms_of
from kccl.engine.model.program import Program
from kccl.engine.monokernel import made, weights
from kccl.engine.monokernel.launching import nest_source
from kccl.engine.monokernel.layout import pieces
from kccl.engine.monokernel.source import KERNELS

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
SHAPE = {"hidden": 256, "ffn": 256, "heads": 2, "kv_heads": 2, "head_dim": 32, "vocab": 304}
SHAPE |= {"layers": 1}
# Half a block of w2 is a lane's.
IN_FILE = {"attn_v": "Q6_K", "attn_output": "Q5_0", "ffn_up": "Q5_K", "token_embd": "Q6_K"}


def written(path, family):
    """A file of random blocks, most of them in Q4_K."""
    tensors, random = {}, np.random.default_rng(0)
    for name, size in gguf_shapes(SHAPE, family).items():
        in_files = next((IN_FILE[part] for part in IN_FILE if part in name), "Q4_K")
        if len(size) > 1:
            words = blocks_of(IN_FILES[in_files], random, size[0], size[1])
            tensors[name] = words, gguf.GGMLQuantizationType[in_files]
    write_gguf(path, family=family, tensors=tensors, **SHAPE)
    return path


def blocks_of(stored_in, random, rows, columns):
    """Random words, but factors are finite."""
    words = random.integers(256, size=(rows, stored_in.words_of(columns)), dtype=np.uint8)
    blocks = words.reshape(-1, stored_in.words)
    for at in getattr(stored_in, "halves_at", (0, 2) if stored_in.name.endswith("_1") else (0,)):
        halves = random.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return words


class Nesters:
    """Converts parts in the simulator."""

    def __init__(self, pairs):
        found = [nest_source(*pair) for pair in pairs]
        self._names = {pair: name for pair, (_, name) in zip(pairs, found, strict=True)}
        text, names = "".join(text for text, _ in found), [name for _, name in found]
        self._module = kccl.compile(text, names, target="sim", include_dirs=[KERNELS])

    def nest(self, comm, to, form, part):
        kernel = self._module.kernel(self._names[part.format, form])
        addresses = to.ctypes.data, part.blocks.ctypes.data
        kernel(comm, *addresses, len(part.blocks), *part[2:], grid=2, block=64)


def test_a_device_converts_blocks_as_the_host_does():
    pairs = [(IN_FILES[name], form) for name in FORMATS for form in forms_of(IN_FILES[name])]
    nesters, random = Nesters(pairs), np.random.default_rng(0)

    def main(comm):
        for stored_in, form in pairs:
            blocks = blocks_of(stored_in, random, 3, 512)
            wanted = form.from_stored(Stored(stored_in, blocks)).words
            found = comm.empty(wanted.shape, "uint8")
            part = made.NestedPart(stored_in, blocks, 512, 0, 3, 3, 0, 0)
            nesters.nest(comm, found, form, part)
            assert (found == wanted).all(), (stored_in.name, form.name)

    assert len(pairs) == 18
    kccl.run_threads(main, 1, backend="sim", seed=0)


@pytest.mark.parametrize(("family", "rank", "world_size"), [("llama", 0, 1), ("qwen2", 1, 2)])
def test_products_are_those_of_the_host(tmp_path, monkeypatch, family, rank, world_size):
    monkeypatch.setattr(made, "BLOCKS_BYTES", 5000)
    checkpoint = read_for(open_checkpoint(written(tmp_path / "m.gguf", family)), "cuda", None)
    program = Program(checkpoint.config, checkpoint.formats)
    some = [*pieces(program, rank, world_size)]
    read, nested = (
        [call() for call, _ in weights.matrices(checkpoint, program, some, makes=makes)]
        + [weights.embedding(checkpoint, program, makes=makes)]
        for makes in (False, True)
    )
    kinds = [each.product.kind for each in some]
    pairs = zip(kinds, nested, strict=False)
    by_host = [kind for kind, each in pairs if isinstance(each, np.ndarray)]
    # A rank's columns of w2 end within a block.
    assert by_host == (["down"] if world_size > 1 else [])
    products = [each for each in nested if isinstance(each, made.NestedProduct)]
    nesters = Nesters([*{(part.format, each.format) for each in products for part in each.parts}])

    def main(comm):
        for matrix, product in zip(read, nested, strict=True):
            if isinstance(product, np.ndarray):
                continue
            assert product.nbytes == matrix.nbytes and len(product.parts) > 1
            found = comm.empty(matrix.shape, "uint8")
            for part in product.parts:
                assert part.blocks.nbytes <= 5000
                nesters.nest(comm, found, product.format, part)
            assert (found == matrix).all()

    kccl.run_threads(main, 1, backend="sim", seed=0)


@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "token_embd.weight"])
def test_numbers_that_are_not_finite_are_left_to_the_host(tmp_path, name):
    """The host tells which tensor has them."""
    path = written(tmp_path / "m.gguf", "llama")
    tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    with path.open("r+b") as file:
        # The factor of the last block.
        file.seek(tensor.data_offset + tensor.n_bytes - (2 if "token" in name else 144))
        file.write(np.float16(np.inf).tobytes())
    checkpoint = read_for(open_checkpoint(path), "cuda", None)
    program = Program(checkpoint.config, checkpoint.formats)
    with pytest.raises(kccl.Error, match=f"{name} has a weight that is NaN or infinite"):
        calls = weights.matrices(checkpoint, program, pieces(program, 0, 1), makes=True)
        for call, _ in calls:
            call()
