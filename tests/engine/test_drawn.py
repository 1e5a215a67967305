"""Matrices of random numbers that a device draws: the words that the host reads."""

import numpy as np
import pytest
from mixtures import GPT_OSS, MXFP4_CONFIG, in_blocks, tensors_of
from tiny_models import write_folder

import kccl
from kccl.engine import open_checkpoint
from kccl.engine.executors.opening import read_for
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.program import Program
from kccl.engine.monokernel import weights
from kccl.engine.monokernel.launching import DRAW, PAIR
from kccl.engine.monokernel.layout import pieces
from kccl.engine.monokernel.source import KERNELS

SHAPE = {"num_layers": 1, "hidden": 96, "ffn": 128, "num_lanes": 2, "num_heads": 4}
SHAPE |= {"num_kv_heads": 2, "head_dim": 16, "vocab_size": 64, "context": 32}


def open_model():
    stored = dict.fromkeys(("w1", "w3", "w2"), "mxfp4")
    given = random_checkpoint("tiny-gpt-oss", **SHAPE, window=4, window_layers=(0,), stored=stored)
    return read_for(given, "sim", None, None)


def experts(checkpoint, rank, world_size, both=(False, True)):
    """The products of a rank's experts as the host reads them, and as a device makes them."""
    program = Program(checkpoint.config, checkpoint.formats)
    some = [x for x in pieces(program, rank, world_size) if x.product.kind.startswith("expert")]
    return [
        [read() for read, _ in weights.matrices(checkpoint, program, some, makes=draws)]
        for draws in both
    ]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_a_device_draws_what_the_host_reads(rank, world_size):
    checkpoint = open_model()
    read, drawn = experts(checkpoint, rank, world_size)

    def main(comm):
        module = kccl.compile(DRAW, ["draw"], target="sim", include_dirs=[KERNELS])
        for matrix, product in zip(read, drawn, strict=True):
            assert product.nbytes == matrix.nbytes
            out = comm.empty(matrix.shape, "uint8")
            module.kernel("draw")(comm, out.ctypes.data, *product[1:], grid=2, block=64)
            assert (out == matrix).all()

    assert len(read) == 14 and isinstance(drawn[0], weights.DrawnProduct)
    kccl.run_threads(main, 1, backend="sim")


def test_numbers_have_the_spread_that_was_asked_for():
    checkpoint = open_model()
    for name, spread in (("w1", 96**-0.5), ("w2", (128 * 2) ** -0.5)):
        numbers = checkpoint.tensor(f"layers.0.experts.2.{name}").astype(np.float32)
        assert 0.7 < numbers.std() / spread < 1.5
        assert len(np.unique(np.abs(numbers))) > 8


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_a_device_converts_what_the_host_reads(tmp_path, rank, world_size):
    config = GPT_OSS | {"hidden_size": 128, "intermediate_size": 64, "head_dim": 16}
    blocks, _ = in_blocks(tensors_of(config))
    write_folder(tmp_path, config | {"quantization_config": MXFP4_CONFIG}, blocks)
    checkpoint = read_for(open_checkpoint(tmp_path), "sim", None, None)
    read, paired = experts(checkpoint, rank, world_size)

    def main(comm):
        module = kccl.compile(PAIR, ["pair"], target="sim", include_dirs=[KERNELS])
        for matrix, product in zip(read, paired, strict=True):
            out = comm.empty(matrix.shape, "uint8")
            addresses = (each.ctypes.data for each in (out, product.pairs, product.scales))
            module.kernel("pair")(comm, *addresses, *product[2:], grid=2, block=64)
            assert (out == matrix).all()

    assert len(read) == 20 and isinstance(paired[0], weights.PairedProduct)
    kccl.run_threads(main, 1, backend="sim")


def test_scales_that_are_too_large_are_left_to_the_host(tmp_path):
    """The host tells which tensor has a number that is infinite."""
    blocks, _ = in_blocks(tensors_of(GPT_OSS))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    blocks[name][2, 5, 1] = 254
    write_folder(tmp_path, GPT_OSS | {"quantization_config": MXFP4_CONFIG}, blocks)
    with pytest.raises(
        kccl.Error, match=r"experts\.2\.down_proj.* has a weight that is NaN or infin"
    ):
        experts(read_for(open_checkpoint(tmp_path), "sim", None, None), 0, 1, [True])
