"""The structs that kernels/task.cuh declares, as ctypes."""

import ctypes

from ..model.program import Op, Program
from ..model.sample import SamplingParams

U32, U64 = ctypes.c_uint32, ctypes.c_uint64


class Sampling(ctypes.Structure):
    """kccl::decode::Sampling."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        ("repetition_penalty", ctypes.c_double),
        ("seed", U64),
        *((name, U32) for name in ("top_k", "wants_logprobs")),
    )


class Task(ctypes.Structure):
    """kccl::decode::Task."""

    _fields_ = (
        *((name, U64) for name in ("weights", "embedding", "norms", "qk_norms", "biases")),
        *((name, U64) for name in ("cosines", "sines", "cache", "layers")),
        ("boards", U64 * 8),
        *((name, U64) for name in ("ids", "stop_ids")),
        ("logits", U64 * 8),
        *((name, U64) for name in ("own_logits", "marks")),
        *((name, U64) for name in ("mailbox", "tokens")),
        *((name, U32) for name in ("num_ids", "num_stop_ids", "start", "max_tokens")),
        *((name, U32) for name in ("round", "exchange", "number", "only_reads")),
        *((name, U32) for name in ("traced", "reserved")),
        ("sampling", Sampling),
        ("trace", U64),
    )


class Module(ctypes.Structure):
    """kccl::decode::Module."""

    _fields_ = (
        ("own_scale", ctypes.c_float),
        ("receives", ctypes.c_int32),
        ("is_blocking", U32),
        ("sends", U32),
    )


class Layer(ctypes.Structure):
    """kccl::decode::Layer."""

    _fields_ = (("attention", Module), ("mlp", Module), ("window", U32), ("reserved", U32 * 3))


class Token(ctypes.Structure):
    """kccl::decode::Token."""

    _fields_ = (
        ("id", U32, 28),
        ("end", U32, 4),
        ("number", U32),
        ("logprob", ctypes.c_float),
        ("number_again", U32),
    )


class Mailbox(ctypes.Structure):
    """kccl::decode::Mailbox."""

    _fields_ = (("cancelled", U32), ("rounds", U32), ("exchanges", U32))


def layers(program: Program) -> bytes:
    """The rules of all layers, as the kernel reads them."""

    def rule(op: Op) -> Module:
        receives = -1 if op.receives is None else op.receives
        return Module(op.own_scale, receives, int(op.is_blocking), int(op.sends))

    ops = program.by_name
    rules = [
        Layer(
            rule(ops[f"layers.{i}.out"]),
            rule(ops[f"layers.{i}.down"]),
            ops[f"layers.{i}.attend"].window,
        )
        for i in range(program.config.num_layers)
    ]
    return b"".join(map(bytes, rules))


def sampling_of(params: SamplingParams) -> Sampling:
    """How the kernel chooses tokens."""
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=params.noise_seed,
        top_k=params.top_k,
        wants_logprobs=params.logprobs,
    )
