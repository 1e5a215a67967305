"""What a checkpoint's weights are stored in, and read in."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the engine's libraries are not installed")

from tiny_models import LLAMA, random_tensors, shapes_of, write_folder

import kccl
from kccl.engine.files.checkpoint import open_checkpoint


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_dtypes_are_rounded(tmp_path, dtype):
    tensors = write_folder(tmp_path, LLAMA, random_tensors(shapes_of(LLAMA), dtype))
    with open_checkpoint(tmp_path) as checkpoint:
        is_f16 = dtype is np.float16
        assert checkpoint.stored == ("F16" if is_f16 else "F32",)
        assert checkpoint.dtype == ("float16" if is_f16 else "bfloat16")
        for name, kind in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
            read = checkpoint.as_dtype(name)
            wanted = tensors["lm_head.weight"].astype(kind)
            for found in (read.tensor("head"), read.rows("head", 0, len(wanted))):
                assert found.dtype == kind and (found == wanted).all()
            norm = tensors["model.norm.weight"].astype(np.float32)
            assert (read.tensor("norm") == norm).all()
        with pytest.raises(kccl.InvalidArgument, match="dtype is 'float8', must be one of"):
            checkpoint.as_dtype("float8")


def test_one_tensor_of_another_dtype_makes_it_bf16(tmp_path):
    tensors = random_tensors(shapes_of(LLAMA), np.float16)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float32)
    # Norms do not count.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)
    write_folder(tmp_path, LLAMA, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.stored, checkpoint.dtype) == (("F16", "F32"), "bfloat16")


@pytest.mark.parametrize("value", [65520.0, -1e30])
def test_weights_beyond_float16_are_refused_when_read(tmp_path, value):
    tensors = random_tensors(shapes_of(LLAMA), np.float32)
    tensors["lm_head.weight"][-1, -1] = value
    write_folder(tmp_path, LLAMA, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.tensor("head")
        told = "tensor lm_head.weight has a weight beyond 65504, the largest of float16: "
        with pytest.raises(kccl.Error, match=told) as caught:
            checkpoint.as_dtype("float16").tensor("head")
        assert str(caught.value).endswith(f"; it is {value:.5g}")


@pytest.mark.parametrize("value", [3.4e38, -3.4028235e38])
def test_weights_beyond_bfloat16_are_told_with_their_value(tmp_path, value):
    tensors = random_tensors(shapes_of(LLAMA), np.float32)
    norm, head = tensors["model.norm.weight"], tensors["lm_head.weight"]
    # A norm stays in FP32, which holds it. The largest of bfloat16 is one of its numbers.
    norm[0], head[0, 0], head[-1, -1] = value, 3.3895e38, value
    write_folder(tmp_path, LLAMA, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensor("norm")[0] == np.float32(value)
        told = "tensor lm_head.weight has a weight beyond 3.39e.38, the largest of bfloat16"
        with pytest.raises(kccl.Error, match=told) as caught:
            checkpoint.tensor("head")
        assert str(caught.value).endswith(f"; it is {value:.5g}")
