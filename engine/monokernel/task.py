"""Fills and reads the structs of abi.inc that the host and the monokernel give each other."""

from typing import Any

from ..base.core import ffi, lib
from ..model.program import Op, Program
from ..model.sample import SamplingParams

TOKEN_BYTES: int = ffi.sizeof("KcclDecodeToken")
MAILBOX_BYTES: int = ffi.sizeof("KcclDecodeMailbox")
NO_LOGITS = len(ffi.new("KcclDecodeTask *").logits) * (0,)


def new_task(copied: Any = None) -> Any:
    """A KcclDecodeTask with zeros in its fields, or a copy of one."""
    return ffi.new("KcclDecodeTask *") if copied is None else ffi.new("KcclDecodeTask *", copied[0])


def mailbox_at(address: int) -> Any:
    """The KcclDecodeMailbox at an address."""
    return ffi.cast("KcclDecodeMailbox *", address)


def tokens_at(address: int, num: int) -> Any:
    """So many KcclDecodeTokens at an address."""
    return ffi.cast(f"KcclDecodeToken(*)[{num}]", address)[0]


def id_and_end(token: Any) -> tuple[int, int]:
    """The id of a KcclDecodeToken, and its KcclEngineEnd."""
    end, token_id = divmod(token.id_and_end, 1 << lib.kKcclDecodeEndAt)
    return token_id, end


def layers(program: Program) -> bytes:
    """The rules of all layers, as the kernel reads them: KcclDecodeLayer [layers]."""

    def rule(op: Op) -> dict[str, Any]:
        return {
            "own_scale": op.own_scale,
            "receives": -1 if op.receives is None else op.receives,
            "is_blocking": op.is_blocking,
            "sends": op.sends,
        }

    ops = program.by_name
    rules = [
        {
            "attention": rule(ops[f"layers.{i}.out"]),
            "mlp": rule(ops[f"layers.{i}.down"]),
            "window": ops[f"layers.{i}.attend"].window,
        }
        for i in range(program.config.num_layers)
    ]
    return bytes(ffi.buffer(ffi.new("KcclDecodeLayer[]", rules)))


def sampling_of(params: SamplingParams) -> dict[str, Any]:
    """How tokens are chosen: the fields of a KcclEngineSampling."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.noise_seed,
        "top_k": params.top_k,
        "wants_logprobs": params.logprobs,
    }
