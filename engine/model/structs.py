"""Fills the structs of abi.inc that both executors use."""

from typing import Any

from .program import Op
from .sample import SamplingParams


def rule_of(op: Op) -> dict[str, Any]:
    """Returns how an op adds to the residual: the fields of a KcclDecodeModule."""
    return {
        "own_scale": op.own_scale,
        "receives": -1 if op.receives is None else op.receives,
        "is_blocking": op.is_blocking,
        "sends": op.sends,
    }


def sampling_of(params: SamplingParams) -> dict[str, Any]:
    """Returns how tokens are chosen: the fields of a KcclEngineSampling."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.noise_seed,
        "top_k": params.top_k,
        "wants_logprobs": params.logprobs,
    }
