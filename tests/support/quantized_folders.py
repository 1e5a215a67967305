"""Writes small folders with quantised weights, laid out as compressed-tensors, transformers, AWQ
and GPTQ do it, and says which numbers they mean. Nothing here uses the engine.
"""

import json
import math
import struct

import ml_dtypes
import numpy as np
from tiny_models import LLAMA, ordinary_shapes

# Two lanes: "o_proj" has 64 columns in each, "down_proj" 128.
MODEL = LLAMA | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "vocab_size": 48,
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.uint8): "F8_E4M3",
    np.dtype("S1"): "U8",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}


def write_tensors(path, tensors):
    """Writes a safetensors file. Arrays of uint8 become tensors in F8_E4M3, those of S1 in U8."""
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    told = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(each).tobytes() for each in tensors.values())
    path.write_bytes(struct.pack("<Q", len(told)) + told + data)


def scales(noise, shape, columns, dtype=np.float32, spread=1.0):
    """Random scales with which weights of the size `spread` keep activations near 1."""
    size = noise.uniform(0.5, 1.5, shape) / (spread * math.sqrt(columns))
    return size.astype(dtype)


def over(scale, shape, rows, columns):
    """Repeats scales over blocks of so many rows and columns."""
    wide = np.repeat(np.repeat(scale.astype(np.float32), rows, axis=0), columns, axis=1)
    return wide[: shape[0], : shape[1]]


def e4m3(codes):
    """The numbers of bytes."""
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa / 512, (8 + mantissa) / 8 * 2.0 ** (exponent - 7))
    return np.where(codes & 128, -size, size).astype(np.float32)


def fp8(noise, shape, *, block=None, per_row=False, name="weight_scale", dtype=np.float32):
    """FP8 with one scale, one a row, or one a block. Each byte but the two NaNs occurs."""
    codes = noise.integers(0, 254, shape).astype(np.uint8)
    codes += codes >= 127
    rows, columns = block or (1 if per_row else shape[0], shape[1])
    grid = -(-shape[0] // rows), -(-shape[1] // columns)
    scale = scales(noise, grid, shape[1], dtype, 130)
    weights = e4m3(codes) * over(scale, shape, rows, columns)
    stored = scale if block or per_row else scale.reshape(())
    return {"weight": codes, name: stored}, weights


def int8(noise, shape, dtype=ml_dtypes.bfloat16):
    """Integers of 8 bits with a scale a row."""
    integers = noise.integers(-128, 128, shape).astype(np.int8)
    scale = scales(noise, (shape[0], 1), shape[1], dtype, 70)
    weights = integers.astype(np.float32) * scale.astype(np.float32)
    return {"weight": integers, "weight_scale": scale}, weights


def in_words(integers, bits=4, order=None):
    """Packs unsigned integers along the last axis, the first in the lowest bits of a word."""
    count = 32 // bits
    parts = integers.reshape(*integers.shape[:-1], -1, count).astype(np.uint32)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for i in range(count):
        words |= parts[..., i if order is None else order[i]] << np.uint32(bits * i)
    return words.view(np.int32)


def int8_zeros(noise, shape, group=64):
    """Integers of 8 bits with a scale and a zero point a group."""
    integers = noise.integers(-128, 128, shape).astype(np.int8)
    scale = scales(noise, (shape[0], shape[1] // group), shape[1], np.float32, 70)
    zeros = noise.integers(-128, 128, scale.shape).astype(np.int8)
    wide = integers.astype(np.float32) - over(zeros, shape, 1, group)
    tensors = {"weight": integers, "weight_scale": scale, "weight_zero_point": zeros}
    return tensors, wide * over(scale, shape, 1, group)


def packed(noise, shape, *, bits=4, group=None, has_zeros=False, dtype=ml_dtypes.bfloat16):
    """compressed-tensors' packed integers, with a scale a row or a group."""
    rows, columns = shape
    group = group or columns
    half = 1 << bits - 1
    integers = noise.integers(0, 2 * half, shape)
    scale = scales(noise, (rows, columns // group), columns, dtype, half / 2)
    zeros = np.full(scale.shape, half)
    tensors = {
        "weight_packed": in_words(integers, bits),
        "weight_scale": scale,
        "weight_shape": np.array(shape, np.int64),
    }
    if has_zeros:
        zeros = noise.integers(0, 2 * half, scale.shape)
        in_word = 32 // bits
        whole = np.zeros((-(-rows // in_word) * in_word, columns // group), int)
        whole[:rows] = zeros
        tensors["weight_zero_point"] = np.ascontiguousarray(in_words(whole.T, bits).T)
    return tensors, (integers - over(zeros, shape, 1, group)).astype(np.float32) * over(
        scale, shape, 1, group
    )


def awq(noise, shape, *, group=None):
    rows, columns = shape
    group = group or columns
    integers = noise.integers(0, 16, (columns, rows))
    zeros = noise.integers(0, 16, (columns // group, rows))
    scale = scales(noise, zeros.shape, columns, np.float16, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": in_words(integers, order=order),
        "qzeros": in_words(zeros, order=order),
        "scales": scale,
    }
    wide = (integers - over(zeros, (columns, rows), group, 1)).astype(np.float32)
    return tensors, (wide * over(scale, (columns, rows), group, 1)).T


def gptq(noise, shape, *, group=None, less=1, bits=4):
    """less: what stored zero points are less than those that are meant. GPTQModel subtracts it from
    all zero points of a word at once, so one of 0 borrows from the next.
    """
    rows, columns = shape
    group = group or columns
    integers = noise.integers(0, 1 << bits, (columns, rows))
    zeros = noise.integers(0, 1 << bits, (columns // group, rows))
    scale = scales(noise, zeros.shape, columns, np.float16, 1 << bits - 2)
    ones = np.uint32((0x11111111 if bits == 4 else 0x01010101) * less)
    tensors = {
        "qweight": np.ascontiguousarray(in_words(integers.T, bits).T),
        "qzeros": (in_words(zeros, bits).view(np.uint32) - ones).view(np.int32),
        "scales": scale,
        "g_idx": (np.arange(columns) // group).astype(np.int32),
    }
    wide = (integers - over(zeros, (columns, rows), group, 1)).astype(np.float32)
    return tensors, (wide * over(scale, (columns, rows), group, 1)).T


def mxfp4(noise, shape, *, scale_dtype="S1"):
    """4-bit floats with a power of two for 32 columns. Each number occurs."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = noise.integers(0, 16, shape).astype(np.uint8)
    powers = noise.integers(120, 124, (shape[0], shape[1] // 32)).astype(np.uint8)
    numbers = np.where(codes & 8, -1, 1) * sizes[codes & 7]
    meant = numbers * np.repeat(2.0 ** (powers.astype(np.float32) - 127), 32, axis=1)
    tensors = {
        "weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).view("S1"),
        "weight_scale": powers.view(scale_dtype),
    }
    return tensors, meant.astype(np.float32)


def nvfp4(noise, shape, *, names=("weight_packed", "weight_global_scale"), is_divided=True):
    """4-bit floats with an e4m3 scale for 16 columns, and one number for all of these."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = noise.integers(0, 16, shape).astype(np.uint8)
    of_16 = noise.integers(1, 127, (shape[0], shape[1] // 16)).astype(np.uint8)
    # A power of two, so that its inverse is exact.
    factor = np.float32(2.0 ** -(9 + round(math.log2(shape[1]) / 2)))
    numbers = np.where(codes & 8, -1, 1) * sizes[codes & 7]
    meant = numbers * np.repeat(e4m3(of_16) * factor, 16, axis=1)
    tensors = {
        names[0]: (codes[:, 0::2] | codes[:, 1::2] << 4).view("S1"),
        "weight_scale": of_16,
        names[1]: np.array([1 / factor], np.float32) if is_divided else np.array(factor),
        "input_scale": np.array(0.25, np.float32),
    }
    return tensors, meant.astype(np.float32)


def modelopt4(noise, shape):
    return nvfp4(noise, shape, names=("weight", "weight_scale_2"), is_divided=False)


def with_input_scale(made):
    """A scale of activations, which is ignored."""
    tensors, meant = made
    return tensors | {"input_scale": np.array(0.5, np.float32)}, meant


def compressed(form, weights, *, dynamic=False, **more):
    """The configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights}
    if dynamic:
        group["input_activations"] = {"num_bits": 8, "type": weights["type"], "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **more,
    }


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
NVFLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}


def _blocks(noise, shape):
    return fp8(noise, shape, block=(128, 128), name="weight_scale_inv", dtype=ml_dtypes.bfloat16)


# Name -> (quantization_config, what makes a matrix, the name of its form).
LAYOUTS = {
    "fp8 blocks": (_FP8 | {"weight_block_size": [128, 128]}, _blocks, "e4m3"),
    "fp8 tensor": (_FP8, fp8, "e4m3"),
    "fp8 compressed tensor": (
        compressed("float-quantized", FLOAT | {"strategy": "tensor"}, dynamic=True),
        fp8,
        "e4m3",
    ),
    "fp8 compressed rows": (
        compressed("float-quantized", FLOAT | {"strategy": "channel"}, dynamic=True),
        lambda noise, shape: fp8(noise, shape, per_row=True, dtype=ml_dtypes.bfloat16),
        "e4m3",
    ),
    "fp8 powers of two": (
        _FP8 | {"weight_block_size": [128, 128]},
        lambda noise, shape: fp8(
            *(noise, shape),
            **{"block": (128, 128), "name": "weight_scale_inv"},
            dtype=ml_dtypes.float8_e8m0fnu,
        ),
        "e4m3",
    ),
    "mxfp4": (compressed("mxfp4-pack-quantized", FLOAT4), mxfp4, "mxfp4"),
    "mxfp4 e8m0": (
        compressed("mxfp4-pack-quantized", FLOAT4, dynamic=True),
        lambda noise, shape: mxfp4(noise, shape, scale_dtype=ml_dtypes.float8_e8m0fnu),
        "mxfp4",
    ),
    "fp8 static": (
        _FP8 | {"activation_scheme": "static"},
        lambda *a: with_input_scale(fp8(*a)),
        "e4m3",
    ),
    "fp8 fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda noise, shape: fp8(noise, shape, per_row=True),
        "e4m3",
    ),
    "fp8 modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        lambda *a: with_input_scale(fp8(*a)),
        "e4m3",
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", NVFLOAT4), nvfp4, "nvfp4"),
    "nvfp4 modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*vision*"]},
        modelopt4,
        "nvfp4",
    ),
    "int8 zeros": (
        compressed(
            "int-quantized", INT8 | {"strategy": "group", "group_size": 64, "symmetric": False}
        ),
        int8_zeros,
        "int8_zeros",
    ),
    "int8 packed zeros": (
        compressed(
            "pack-quantized", INT8 | {"strategy": "group", "group_size": 128, "symmetric": False}
        ),
        lambda noise, shape: packed(noise, shape, bits=8, group=128, has_zeros=True),
        "int8_zeros",
    ),
    "gptq 8 bits": (
        _GPTQ | {"bits": 8, "group_size": 128},
        lambda *a: gptq(*a, group=128, bits=8),
        "int8_zeros",
    ),
    "int8 rows": (compressed("int-quantized", INT8, dynamic=True), int8, "int8"),
    "int8 packed": (
        compressed("pack-quantized", INT8),
        lambda noise, shape: packed(noise, shape, bits=8, dtype=np.float16),
        "int8",
    ),
    "int4 rows": (
        compressed("pack-quantized", INT4 | {"strategy": "channel"}),
        packed,
        "int4",
    ),
    "awq 128": (_AWQ | {"group_size": 128}, lambda *a: awq(*a, group=128), "int4_zeros"),
    "awq 32": (_AWQ | {"group_size": 32}, lambda *a: awq(*a, group=32), "int4_zeros"),
    "gptq 64": (_GPTQ | {"group_size": 64}, lambda *a: gptq(*a, group=64), "int4_zeros"),
    "gptq rows": (_GPTQ | {"group_size": -1}, gptq, "int4_zeros"),
    "gptq v2": (
        _GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"},
        lambda *a: gptq(*a, group=32, less=0),
        "int4_zeros",
    ),
}
for _group in (32, 64, 128):
    for _has_zeros in (False, True):
        LAYOUTS[f"int4 {_group}{' zeros' * _has_zeros}"] = (
            compressed(
                "pack-quantized", INT4 | {"group_size": _group, "symmetric": not _has_zeros}
            ),
            # Scales of 24 bits show that none is rounded.
            lambda noise, shape, group=_group, has_zeros=_has_zeros: packed(
                noise, shape, group=group, has_zeros=has_zeros, dtype=np.float32
            ),
            "int4_zeros" if _has_zeros else "int4",
        )


def tensors_of(name, config=MODEL, *, without=(), seed=0):
    """Returns a model's tensors, and the numbers that its quantised matrices mean.

    Args:
        name: One of LAYOUTS.
        without: Modules that stay in BF16.
    """
    noise = np.random.default_rng(seed)
    _, make, _ = LAYOUTS[name]
    tensors, meant = {}, {}
    for full, shape in ordinary_shapes(config).items():
        layer = full.removesuffix(".weight")
        if layer.rpartition(".")[2] in LINEAR and layer not in without:
            parts, meant[layer] = make(noise, shape)
            tensors |= {f"{layer}.{part}": array for part, array in parts.items()}
        else:
            size = 1.0 if len(shape) == 1 else noise.standard_normal(shape) / math.sqrt(shape[-1])
            tensors[full] = np.broadcast_to(size, shape).astype(ml_dtypes.bfloat16)
    return tensors, meant


def write_folder(folder, name, tensors, config=MODEL, **more):
    """Writes config.json and the weights. more: fields of the quantization_config that differ."""
    folder.mkdir(exist_ok=True)
    quantization = LAYOUTS[name][0] | more
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    write_tensors(folder / "model.safetensors", tensors)
    return folder
