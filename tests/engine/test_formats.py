"""Formats of weights: each has its twins, and a model may have products in several of them."""

from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from long import long_after
from source_tree import ROOT
from test_monokernel import CONTEXT, SMALL, TOLERANCE, generate, logits_of
from test_prefill import CHUNKED

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.host import HostExecutor
from kccl.engine.executors.packing import format_number
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.base import Stored
from kccl.engine.formats.bfloat16 import BFLOAT16
from kccl.engine.formats.float16 import FLOAT16
from kccl.engine.formats.float32 import FLOAT32
from kccl.engine.formats.nested import Nested
from kccl.engine.formats.table import IN_FILES, MULTIPLIED
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.sequence import formats_of, sequence_of

IDS = [5, 99, 17, 64, 2, 120]
SCORED, NEW = IDS[:3], 2
# Each op whose vector is another op's, and two ops with one vector, differ.
MIXED = {
    "some": {"w2": "float16", "wq": "float16", "wk": "float16", "wv": "float16"},
    "others": {"wo": "float16", "w1": "float16", "w3": "float16", "embedding": "float16"},
}


@cache
def mixed(name: str, which: str):
    window = {"window": 4, "window_layers": 2} if name == "tiny-laneformer" else {}
    layers = 3 if name == "tiny-laneformer" else 2
    changes = {"num_layers": layers, "stored": MIXED[which], **SMALL, **window}
    return random_checkpoint(name, **changes).as_stored()


def test_each_format_has_its_twins():
    for each in MULTIPLIED.values():
        name = each.family or each.name
        assert (ROOT / f"engine/kernels/formats/{name}.cuh").is_file()
        # The host executor multiplies GGUF's own blocks.
        assert (ROOT / f"engine/host/formats/{name}.h").is_file() != isinstance(each, Nested)
        assert (ROOT / f"engine/formats/{name}.py").is_file()
    assert [format_number(each) for each in (BFLOAT16, FLOAT16)] == [0, 1]
    with pytest.raises(kccl.InvalidArgument, match="multiplies no weights in float32"):
        format_number(FLOAT32)


@pytest.mark.parametrize("name", IN_FILES)
def test_a_formats_numbers_agree_with_each_other(name):
    """Its blocks, its bytes, and the shape that a tensor of it has."""
    if name not in ("BF16", "F16", "F32"):
        pytest.importorskip("gguf", reason="the engine's libraries are not installed")
    stored_in = IN_FILES[name]
    columns = 2 * stored_in.block
    words = np.zeros((3, stored_in.words_of(columns)), stored_in.word)
    stored = Stored(stored_in, words)
    assert stored.shape == stored.to_float32().shape == stored.values().shape == (3, columns)
    assert words.nbytes == stored_in.bytes_of(3 * columns)
    assert stored_in.is_finite(words) and stored.to_float32().dtype == np.float32
    # A packed row tile has 16 scales for each block.
    scales = 256 // stored_in.block * stored_in.scale_bytes // 16
    assert stored_in.tile_bytes in (0, stored_in.bytes_of(256) - scales)


def test_words_become_numbers_and_numbers_words():
    for stored_in, dtype in ((BFLOAT16, ml_dtypes.bfloat16), (FLOAT16, np.float16)):
        words = np.arange(1 << 16, dtype=np.uint16)
        values = words.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(stored_in.to_float32(words), values)
        finite = np.isfinite(values)
        np.testing.assert_array_equal(stored_in.from_values(values[finite]), words[finite])
        for each in (np.inf, -np.inf, np.nan):
            assert not stored_in.is_finite(stored_in.from_values(np.array([0, each, 1])))


def test_a_checkpoint_keeps_a_format_where_it_is_asked_to():
    """By default all matrices are turned into one dtype, as ever."""
    kept = mixed("tiny-llama", "some")
    usual = kept.as_dtype("bfloat16")
    assert set(usual.formats.values()) == {BFLOAT16}
    assert {kind for kind, each in kept.formats.items() if each is FLOAT16} == {"qkv", "down"}
    assert kept.read("layers.0.w2").format is FLOAT16
    assert kept.tensor("layers.0.w2").dtype == np.float16
    assert kept.format_of("layers.0.attention_norm") is FLOAT32
    rounded = usual.tensor("layers.0.w2")
    assert (rounded == kept.tensor("layers.0.w2").astype(ml_dtypes.bfloat16)).all()
    # A product has one format: queries alone keep none.
    some = random_checkpoint("tiny-llama", stored={"wq": "float16"}).as_stored()
    assert set(some.formats.values()) == {BFLOAT16}
    # Tied tables are one tensor.
    tied = mixed("tiny-llama", "others").formats
    assert tied["embed"] is tied["head"] is FLOAT16


def test_the_program_and_the_monokernels_table_have_each_products_format():
    checkpoint = mixed("tiny-llama", "others")
    program = Program(checkpoint.config, checkpoint.formats)
    formats = {op.kind: op.format for op in program.ops}
    wanted = dict.fromkeys(("out", "gate_up", "embed", "head"), FLOAT16)
    assert formats == {"attend": None, "final": None, "qkv": BFLOAT16, "down": BFLOAT16} | wanted
    table = sequence_of(program, CHUNKED)
    assert "FormatList<kccl::decode::Bfloat16, kccl::decode::Float16>" in table
    assert "using OutFormat = kccl::decode::Float16;" in table
    assert formats_of(program).count("#include") == 2


def check(checkpoint, results, tolerance):
    reference = Reference(checkpoint)
    wanted = reference.logits(SCORED)
    tokens = [token for token, _ in reference.generate(IDS, SamplingParams(max_tokens=NEW))]
    first = results[0][0]
    for logits, found in results:
        np.testing.assert_array_equal(logits.view(np.uint32), first.view(np.uint32))
        assert found == tokens
    np.testing.assert_allclose(first, wanted, atol=tolerance)
    # With all weights in BF16 it would be another model.
    rounded = Reference(checkpoint.as_dtype("bfloat16")).logits(SCORED)
    assert np.abs(first - rounded).max() > 2 * np.abs(first - wanted).max()


@pytest.mark.parametrize("which", MIXED)
@pytest.mark.parametrize("name", ["tiny-laneformer", "tiny-llama"])
def test_the_host_runs_a_model_of_two_formats(name, which):
    checkpoint = mixed(name, which)

    def main(comm):
        executor = HostExecutor(checkpoint, comm, blocks=1, context=CONTEXT)
        logits = np.empty((len(SCORED), checkpoint.config.vocab_size), np.float32)
        executor.start_scoring(SCORED, logits, writes_shared=True)
        executor.wait()
        executor.start(IDS, SamplingParams(max_tokens=NEW))
        tokens = [token.id for token in executor.tokens()]
        executor.close()
        return logits, tokens

    results = [*kccl.run_threads(main, 1), *kccl.run_threads(main, 2)]
    check(checkpoint, results, 1e-4)


# It compiles kernels of two formats, which is long on a busy machine.
@pytest.mark.long
@pytest.mark.takes(20)
@pytest.mark.parametrize(
    ("name", "which", "in_registers"),
    long_after(
        1,
        [
            ("tiny-llama", "others", True),
            ("tiny-laneformer", "some", False),
        ],
    ),
)
def test_the_monokernel_runs_a_model_of_two_formats(name, which, in_registers):
    """Decode and prefill, with a ring of weights and with weights in registers."""
    checkpoint = mixed(name, which)
    tuning = replace(CHUNKED, blocks=4, weights_in_registers=in_registers)

    def main(comm):
        executor = DeviceExecutor(checkpoint, comm, tuning=tuning, context=CONTEXT)
        return logits_of(executor, SCORED), generate(executor, NEW)

    results = kccl.run_threads(main, 1, backend="sim")
    if name == "tiny-laneformer" and not in_registers:
        results += kccl.run_threads(main, 2, backend="sim", seed=1)
    check(checkpoint, results, TOLERANCE)
