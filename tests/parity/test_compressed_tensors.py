"""Folders that compressed-tensors writes, by its own schemes, against what it reads from them."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kccl.engine import Engine
from kccl.engine.files.quantize import KINDS, write_quantized

compressed_tensors = pytest.importorskip("compressed_tensors")

from compressed_tensors import quantization  # noqa: E402
from compressed_tensors.compressors import ModelCompressor  # noqa: E402
from compressed_tensors.quantization import utils  # noqa: E402

pytestmark = pytest.mark.long

IDS = np.random.default_rng(1).integers(64, size=24).tolist()
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=64,
    max_position_embeddings=128,
)
# Each scheme's format on the host, and the tolerance. compressed-tensors multiplies the scales of
# NVFP4 in BF16, of which the engine has FP32.
SCHEMES = {
    "FP8": ("e4m3_128", 1e-4),
    "FP8_BLOCK": ("e4m3_128", 1e-4),
    "FP8_DYNAMIC": ("e4m3_128", 1e-4),
    "MXFP4A16": ("mxfp4", 1e-4),
    "NVFP4": ("nvfp4_128", 0.03),
    "NVFP4A16": ("nvfp4_128", 0.03),
    "W4A16": ("int4_128", 1e-4),
    "W4A16_ASYM": ("int4_zeros_128", 1e-4),
    "W8A16": ("int8_128", 1e-4),
    "W8A8": ("int8_128", 1e-4),
}


def in_blocks(weight, args):
    """A matrix with what shares a scale along the last axis."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight
    if args.strategy == "block":
        rows, columns = args.block_structure
        grid = weight.reshape(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
        return grid.transpose(1, 2).flatten(2)
    return weight.reshape(len(weight), -1, args.group_size)


def put(module, name, value):
    if hasattr(module, name):
        parameter = getattr(module, name)
        parameter.data = value.reshape(parameter.shape).to(parameter.dtype)


def quantise(model, scheme):
    """Gives each linear layer but the head the scales of its weights."""
    groups = {"group_0": quantization.preset_name_to_scheme(scheme, ["Linear"])}
    config = quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        args, weight = module.quantization_scheme.weights, module.weight.data
        blocks = in_blocks(weight, args)
        of_all = None
        if hasattr(module, "weight_global_scale"):
            of_all = utils.generate_gparam(weight.min(), weight.max())
            put(module, "weight_global_scale", of_all)
        least, most = blocks.amin(-1), blocks.amax(-1)
        scale, zero = utils.calculate_qparams(least, most, args, global_scale=of_all)
        put(module, "weight_scale", scale)
        put(module, "weight_zero_point", zero)
        for name in ("input_scale", "input_global_scale"):
            if hasattr(module, name):
                put(module, name, torch.full_like(getattr(module, name).data, 0.25))
        module.quantization_status = quantization.QuantizationStatus.FROZEN


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_scheme(tmp_path, scheme, assert_close):
    form, tolerance = SCHEMES[scheme]
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        if "layers" not in name:
            # The host has these in BF16.
            parameter.data = parameter.data.bfloat16().float()
    quantise(model, scheme)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    compressor.decompress_model(model)
    theirs = LlamaForCausalLM(CONFIG)
    read = model.state_dict()
    theirs.load_state_dict({name: read[name].float() for name in theirs.state_dict()})
    with torch.no_grad():
        wanted = theirs(torch.tensor([IDS])).logits[0].numpy()
    with Engine(tmp_path, tokenizer=False) as engine:
        found = engine.logits(IDS)
        formats = {engine.formats[op].name for op in ("qkv", "out", "gate_up", "down")}
        notices = " ".join(engine.notices)
    assert formats == {form}
    assert ("activations stay" in notices) == (not scheme.endswith(("A16", "ASYM")))
    assert_close(found, wanted, tolerance)


@pytest.mark.parametrize("weights", sorted(KINDS))
def test_transformers_reads_what_quantize_writes(tmp_path, weights, assert_close):
    torch.manual_seed(2)
    model = LlamaForCausalLM(CONFIG).bfloat16()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    model.save_pretrained(tmp_path / "m")
    write_quantized(tmp_path / "m", tmp_path / "out", weights)
    # The first call dequantises the weights. MXFP4 always becomes BF16, which holds it exactly.
    dtype = torch.bfloat16 if weights == "mxfp4" else torch.float32
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    with torch.no_grad():
        read(torch.tensor([IDS]))
        state = read.state_dict()
        theirs = LlamaForCausalLM(CONFIG)
        theirs.load_state_dict({name: state[name].float() for name in theirs.state_dict()})
        wanted = theirs(torch.tensor([IDS])).logits[0].numpy()
    with Engine(tmp_path / "out", tokenizer=False) as engine:
        assert_close(engine.logits(IDS), wanted, 1e-4)
