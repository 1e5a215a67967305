"""Reads RoPE from a GGUF file's metadata and tensors, as llama.cpp does."""

import math

import kccl

from ..base.fields import Fields
from ..model.rope import LinearScaling, Rope, Scaling, TableScaling
from ..model.rope_scaling import ChainedScaling, LongRopeScaling, YarnScaling, yarn_attention_factor
from .gguf_parts import GgufParts

_FREQS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TABLES = frozenset({_FREQS, _SHORT, _LONG})
"""The tensors that have a divisor for each pair's frequency."""
_KINDS = ("none", "linear", "yarn", "longrope")
# The least original context for YaRN. Over a range of pairs, the ramp, YaRN blends divided and
# undivided frequencies. With a context of at most 2 pi the ramp would end before pair 0.
_LEAST_YARN = 7
# The ends of keys, after "rope.", that the engine reads or that have no effect.
_READ = {"dimension_count", "freq_base", "scale_linear", "scaling.type", "scaling.factor"}
_READ |= {"scaling.attn_factor", "scaling.original_context_length", "scaling.finetuned"}
# The ends of keys that llama.cpp reads only for other architectures -> the values with which they
# have no effect.
_USUAL: dict[str, tuple[float, ...]] = {
    "scaling.alpha": (0.0,),
    "scaling.yarn_log_multiplier": (0.0,),
    "scaling.yarn_beta_fast": (32.0,),
    "scaling.yarn_beta_slow": (1.0,),
}


def read_rope(file: GgufParts, fields: Fields, family: str, context: int, head_dim: int) -> Rope:
    """Returns the RoPE of a model.

    Args:
        file: The file, which has the tensors.
        fields: The file's metadata.
        family: The architecture.
        context: The model's context length.
        head_dim: The number of elements of a head.

    Raises:
        kccl.Error: The engine does not support this RoPE. The text names the key or the tensor.
        InvalidArgument: The fields of Rope or of its scaling do not fit each other.
    """
    prefix = f"{family}.rope."
    kind = fields.text(f"{prefix}scaling.type", default="linear")
    if kind not in _KINDS:
        raise fields.wrong(f"{prefix}scaling.type", f"one of {', '.join(_KINDS)}")
    factor = 1.0 if kind == "none" else _factor(fields, prefix)
    attention_factor = yarn_attention_factor(factor) if kind == "yarn" else 1.0
    usual = _USUAL | {
        "scaling.yarn_ext_factor": (-1.0, float(kind == "yarn")),
        "scaling.yarn_attn_factor": (1.0, attention_factor),
    }
    for key in sorted(file.metadata):
        name = key.removeprefix(prefix)
        if name == key or name in _READ:
            continue
        if name not in usual:
            raise fields.wrong(key, "absent, because the engine turns all pairs and layers alike")
        if not any(math.isclose(fields.number(key), each, rel_tol=1e-4) for each in usual[name]):
            raise fields.wrong(key, f"{usual[name][-1]:g}: llama.cpp reads no other for {family}")
    original = fields.integer(f"{prefix}scaling.original_context_length", default=0, least=0)
    original = original or context
    parts: list[Scaling] = []
    _check_tables(file, fields, kind)
    if kind == "longrope":
        short, long = (_table(file, fields, name, head_dim) for name in (_SHORT, _LONG))
        parts.append(LongRopeScaling(short, long, original))
    elif _FREQS in file.tensors:
        parts.append(TableScaling(_table(file, fields, _FREQS, head_dim)))
    if kind == "yarn" and factor != 1:
        if original < _LEAST_YARN:
            raise kccl.Error(
                f"{fields.path}: the original context of RoPE scaling 'yarn' is {original}, must "
                f"be at least {_LEAST_YARN}"
            )
        # gpt-oss was trained with a ramp whose ends are not rounded to whole pairs. GGUF has no key
        # that says so.
        parts.append(YarnScaling(factor, original, truncate=family != "gpt-oss"))
    elif factor != 1:
        parts.append(LinearScaling(factor))
    return Rope(
        theta=fields.positive(f"{prefix}freq_base", default=10_000.0),
        # In GGUF files of Llama models the rows of wq and wk are permuted, so that RoPE rotates the
        # pairs (2i, 2i + 1).
        is_interleaved=family == "llama",
        scaling=parts[0] if len(parts) == 1 else ChainedScaling(tuple(parts)) if parts else None,
        attention_factor=attention_factor
        * fields.positive(f"{prefix}scaling.attn_factor", default=1.0),
    )


def _factor(fields: Fields, prefix: str) -> float:
    """Returns the number by which RoPE's frequencies are divided. Reads the old key, scale_linear,
    only if the new one, scaling.factor, is missing. A value of 0 means 1.
    """
    name = f"{prefix}scaling.factor"
    if name not in fields:
        name = f"{prefix}scale_linear"
    factor = fields.number(name, default=0.0)
    if not 0 <= factor < math.inf:
        raise fields.wrong(name, "a number above 0, or 0 for none")
    return factor or 1.0


def _check_tables(file: GgufParts, fields: Fields, kind: str) -> None:
    """Raises kccl.Error if there is a table that llama.cpp would not use for this scaling."""
    wanted = {_SHORT, _LONG} if kind == "longrope" else {_FREQS}
    for name in sorted(ROPE_TABLES & file.tensors.keys() - wanted):
        raise kccl.Error(f"{fields.path}: tensor {name} does not belong to RoPE scaling {kind!r}")


def _table(file: GgufParts, fields: Fields, name: str, head_dim: int) -> tuple[float, ...]:
    """Returns a tensor's factors, one for each pair."""
    if name not in file.tensors:
        raise kccl.Error(f"{fields.path}: tensor {name} is missing")
    shape, wanted = file.tensors[name].shape, (head_dim // 2,)
    if shape != wanted:
        raise kccl.Error(
            f"{fields.path}: tensor {name} has shape {list(shape)}, must have {list(wanted)} by "
            "the model's configuration"
        )
    factors = tuple(float(factor) for factor in file.read(name, 0, shape[0]).to_float32())
    try:
        return TableScaling(factors).factors
    except kccl.InvalidArgument as error:
        raise kccl.Error(f"{fields.path}: tensor {name}: {error}") from error
