"""Reads from config.json how quantised weights are stored.

The field `quantization_config` names a method. The engine reads transformers' FP8 checkpoints,
fbgemm, compressed-tensors, NVIDIA's ModelOpt, AWQ, GPTQ and gpt-oss's MXFP4. It refuses settings
that it does not support if they would change the logits. One exception is the rounding of
activations: the engine does not round them, and a notice says so.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ..base.fields import Fields, read_json, shown
from ..formats.nvfp4 import SCALED
from .patterns import LINEAR, check_number, is_kept, is_match, names_of
from .schemes import (
    FIELD,
    SMALLEST_GROUP,
    Layout,
    Quantization,
    Scheme,
    block,
    group_size,
    only,
    refuse,
)

# The head's module. AWQ, GPTQ and transformers' FP8 quantise it only if the file says so.
_HEAD = "lm_head"


def read_quantization(path: Path) -> Quantization | None:
    """Reads config.json. Returns None if no weights are quantised.

    Raises:
        kccl.Error: The file has a setting that the engine does not support. The text names it.
    """
    whole = Fields(path, read_json(path))
    if FIELD not in whole:
        return _of_old_modelopt(path.with_name(_MODELOPT_FILE))
    fields = whole.inner(FIELD)
    method = fields.text("quant_method")
    if method not in _METHODS:
        raise fields.wrong("quant_method", f"one of {', '.join(_METHODS)}")
    if method == "mxfp4" and whole.value("model_type") != "gpt_oss":
        raise fields.wrong("quant_method", "another one: gpt-oss alone has it")
    return _METHODS[method](fields)


# ---- Methods ------------------------------------------------------------------------------------


def _fp8(fields: Fields) -> Quantization:
    """Reads the method of DeepSeek's files, which transformers, Qwen3-FP8 and AutoFP8 use, too."""
    if fields.text("activation_scheme", default="dynamic") not in ("dynamic", "static"):
        raise fields.wrong("activation_scheme", "'dynamic' or 'static'")
    if fields.text("fmt", default="e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.wrong("fmt", "'e4m3'")
    refuse(fields, ("kv_cache_scheme",))
    rows = columns = 0
    if "weight_block_size" in fields:
        rows, columns = block(fields, "weight_block_size")
    scheme = Scheme(Layout.E4M3, ("weight_scale_inv", "weight_scale"), rows, columns)
    lists = ("modules_to_not_convert", "ignored_layers")
    kept = [each for name in lists for each in names_of(fields, name)]
    # If a file has no such list, transformers does not quantise the head.
    has_head = any(name in fields for name in lists)
    return _of_method(fields, scheme, kept, has_head=has_head, rounds_activations=8)


def _fbgemm(fields: Fields) -> Quantization:
    """Reads fbgemm's method: FP8 with a scale per row."""
    scheme = Scheme(Layout.E4M3, ("weight_scale",), 1, 0)
    kept = names_of(fields, "modules_to_not_convert")
    return _of_method(fields, scheme, kept, has_head=False, rounds_activations=8)


def _awq(fields: Fields) -> Quantization:
    only(fields, "bits", 4, "w_bit")
    for name in ("version", "format"):
        if fields.text(name, default="gemm").lower() != "gemm":
            raise fields.wrong(name, "'gemm': the others order the bits otherwise")
    if not fields.boolean("zero_point", default=True):
        raise fields.wrong("zero_point", "true")
    columns = group_size(fields, "group_size", "q_group_size")
    scheme = Scheme(Layout.AWQ, ("scales",), 1, columns, has_zeros=True)
    kept = names_of(fields, "modules_to_not_convert")
    has_head = fields.boolean(_HEAD, default=False)
    return _of_method(fields, scheme, kept, has_head=has_head, rounds_activations=0)


def _gptq(fields: Fields) -> Quantization:
    if (bits := fields.integer("bits")) not in (4, 8):
        raise fields.wrong("bits", "4 or 8")
    named = ("checkpoint_format", "format")
    layout = fields.text(*named, default="gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise fields.wrong(named, "'gptq' or 'gptq_v2'")
    if fields.text("pack_dtype", default="int32") != "int32":
        raise fields.wrong("pack_dtype", "'int32'")
    refuse(fields, ("dynamic", "is_marlin_format", "modules_in_block_to_quantize"))
    columns = group_size(fields, "group_size")
    # The layout "gptq" stores each zero point minus 1; "gptq_v2" stores it as it is.
    offset = 1 if layout == "gptq" else 0
    form = Layout.GPTQ if bits == 4 else Layout.GPTQ8
    scheme = Scheme(form, ("scales",), 1, columns, has_zeros=True, zero_offset=offset)
    has_head = fields.boolean(_HEAD, default=False)
    return _of_method(fields, scheme, (), has_head=has_head, rounds_activations=0)


def _mxfp4(fields: Fields) -> Quantization:
    """Reads gpt-oss's method. Only its experts are quantised, and fused_experts.py finds their
    tensors. So there are no schemes.
    """
    names_of(fields, "modules_to_not_convert")
    if fields.boolean("dequantize", default=False):
        raise fields.wrong("dequantize", "false: the engine does not follow it")
    return Quantization(fields.path, [], lambda module: True, rounds_activations=0)


def _of_method(
    fields: Fields,
    scheme: Scheme,
    kept: Sequence[str],
    *,
    has_head: bool,
    rounds_activations: int,
) -> Quantization:
    """Returns a Quantization with one scheme for all linear layers. Those in `kept` are not
    quantised. Nor is the head, unless `has_head`.
    """

    def is_ignored(module: str) -> bool:
        return (module == _HEAD and not has_head) or is_kept(kept, module)

    return Quantization(
        fields.path,
        [(LINEAR, scheme)],
        is_ignored,
        rounds_activations=rounds_activations,
        is_head_open=scheme.layout is Layout.E4M3,
    )


def _compressed_tensors(fields: Fields) -> Quantization:
    refuse(fields, ("kv_cache_scheme", "transform_config"))
    if "sparsity_config" in fields:
        sparsity = fields.inner("sparsity_config")
        if sparsity.text("format", default="dense") != "dense":
            raise sparsity.wrong("format", "'dense'")
    usual = fields.text("format")
    if usual not in (*_FORMATS, _MIXED):
        raise fields.wrong("format", f"one of {', '.join((*_FORMATS, _MIXED))}")
    groups = fields.inner("config_groups")
    schemes: dict[str, Scheme] = {}
    rounds = 0
    for name in groups.names():
        group = groups.inner(name)
        refuse(group, ("output_activations",))
        rounds = max(rounds, _rounds_activations(group))
        scheme = _scheme(group, usual)
        for target in names_of(group, "targets"):
            if schemes.setdefault(target, scheme) != scheme:
                raise group.wrong("targets", f"without {shown(target)}, which another group has")
    if not schemes:
        raise fields.wrong("config_groups", "groups with targets")
    check_number(fields, "config_groups", [*schemes])
    ignored = names_of(fields, "ignore")

    def is_ignored(module: str) -> bool:
        return any(is_match(each, module) for each in ignored)

    return Quantization(fields.path, [*schemes.items()], is_ignored, rounds_activations=rounds)


def _rounds_activations(group: Fields) -> int:
    """Returns to how many bits activations are rounded. Returns 0 if they are not. Both dynamic
    scales and scales in the file are accepted, because the engine does not round activations.
    """
    if "input_activations" not in group:
        return 0
    activations = group.inner("input_activations")
    if activations.value("dynamic") not in (None, False, True, "local"):
        raise activations.wrong("dynamic", "true, false or 'local'")
    return activations.integer("num_bits", default=8)


def _scheme(group: Fields, usual: str) -> Scheme:
    form = group.text("format", default=usual)
    weights = group.inner("weights")
    bits = weights.integer("num_bits")
    kind = weights.text("type", default="int")
    if form not in _FORMATS:
        raise group.wrong("format", f"one of {', '.join(_FORMATS)}")
    layout = _FORMATS[form].get((kind, bits))
    if layout is None:
        told = " or ".join(f"{bits} of type {kind!r}" for kind, bits in _FORMATS[form])
        raise weights.wrong("num_bits", f"{told} where the format is {form}")
    is_symmetric = weights.boolean("symmetric", default=True)
    if not is_symmetric and kind != "int":
        raise weights.wrong("symmetric", "true but for integers")
    if weights.value("dynamic") not in (None, False):
        raise weights.wrong("dynamic", "false")
    if weights.value("actorder") not in (None, False, "weight", "static", "group"):
        raise weights.wrong("actorder", "null, 'weight' or 'group'")
    if layout is Layout.NVFP4:
        if weights.integer("group_size", default=SCALED) != SCALED:
            raise weights.wrong("group_size", f"{SCALED} where the format is {form}")
        return Scheme(layout, ("weight_scale",), 0, 0)
    rows, columns = _grid(weights)
    if layout is Layout.MXFP4 and (rows, columns) != (1, SMALLEST_GROUP):
        raise weights.wrong("group_size", f"{SMALLEST_GROUP} where the format is {form}")
    return Scheme(layout, ("weight_scale",), rows, columns, has_zeros=not is_symmetric)


def _grid(weights: Fields) -> tuple[int, int]:
    """Returns how many rows and how many columns share a scale. 0 means all of them."""
    strategy = weights.value("strategy")
    if strategy is None:
        size = weights.integer("group_size", default=0)
        strategy = "tensor" if size == 0 else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group":
        return 1, group_size(weights, "group_size")
    if strategy == "block":
        return block(weights, "block_structure")
    raise weights.wrong("strategy", "'tensor', 'channel', 'group' or 'block'")


def _modelopt(fields: Fields) -> Quantization:
    """Reads the method of NVIDIA's ModelOpt, as newer versions write it into config.json."""
    refuse(fields, ("kv_cache_scheme",))
    return _of_modelopt(fields, names_of(fields, "ignore"))


def _of_old_modelopt(path: Path) -> Quantization | None:
    """Reads hf_quant_config.json, which older versions of ModelOpt write. Returns None if there is
    none.
    """
    if not path.exists():
        return None
    fields = Fields(path, read_json(path)).inner("quantization")
    refuse(fields, ("kv_cache_quant_algo",))
    return _of_modelopt(fields, names_of(fields, "exclude_modules"))


def _of_modelopt(fields: Fields, kept: Sequence[str]) -> Quantization:
    """Returns the Quantization of a ModelOpt file. `kept` names the modules that are not quantised;
    "*" in a name matches any text.
    """
    algorithm = fields.text("quant_algo")
    if algorithm not in _MODELOPT:
        raise fields.wrong("quant_algo", f"one of {', '.join(_MODELOPT)}")
    if algorithm == "NVFP4" and fields.integer("group_size", default=SCALED) != SCALED:
        raise fields.wrong("group_size", f"{SCALED} where quant_algo is NVFP4")
    scheme, rounds = _MODELOPT[algorithm]

    def is_ignored(module: str) -> bool:
        return is_kept(kept, module) or any(fnmatchcase(module, each) for each in kept)

    return Quantization(
        fields.path,
        [(LINEAR, scheme)],
        is_ignored,
        rounds_activations=rounds,
        is_head_open=True,
    )


_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT = {
    "FP8": (Scheme(Layout.E4M3, ("weight_scale",), 0, 0), 8),
    "FP8_PER_CHANNEL_PER_TOKEN": (Scheme(Layout.E4M3, ("weight_scale",), 1, 0), 8),
    "NVFP4": (Scheme(Layout.MODELOPT4, ("weight_scale",), 0, 0), 4),
}
_MIXED = "mixed-precision"
_FORMATS: dict[str, dict[tuple[str, int], Layout]] = {
    "float-quantized": {("float", 8): Layout.E4M3},
    "naive-quantized": {("float", 8): Layout.E4M3, ("int", 8): Layout.INT8},
    "int-quantized": {("int", 8): Layout.INT8},
    "pack-quantized": {("int", 4): Layout.PACKED4, ("int", 8): Layout.PACKED8},
    "mxfp4-pack-quantized": {("float", 4): Layout.MXFP4},
    "nvfp4-pack-quantized": {("float", 4): Layout.NVFP4},
}
_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
