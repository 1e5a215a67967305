"""Refuses models that the monokernel cannot run."""

import kccl

from ..base.core import lib
from ..model.config import ModelConfig
from ..model.drafts import Drafts
from ..model.experts import Experts
from ..model.program import Program
from .layout import TILE
from .shape import Tuning

# Each has a thread in the warp that chooses (kernels/choose_experts.cuh).
_MOST_CHOSEN = 32
# The matrix unit of an NVIDIA GPU multiplies four vectors at a time, in at most two turns.
MOST_COLUMNS = 2 * lib.kKcclDecodeVectors
# The most drafts of a token step if the engine decides how many it has: with more columns, a
# product takes the matrix unit twice.
_MOST_ADAPTING = lib.kKcclDecodeVectors - 1


def check(program: Program, world_size: int, tuning: Tuning | None = None) -> None:
    """Refuses a model that the monokernel cannot run, at all or with a tuning.

    Raises:
        InvalidArgument: The monokernel cannot run the model; the text says why.
    """
    c = program.config
    if tuning is not None and tuning.columns != 1:
        _check_columns(program, tuning)
    if c.experts is None:
        for name, value, without in (
            ("has_sinks", c.has_sinks, False),
            ("swiglu_limit", c.swiglu_limit, 0),
        ):
            if value != without:
                raise kccl.InvalidArgument(
                    f"{name} is {value}, must be {without} for the monokernel without experts; "
                    "backend 'host' runs it"
                )
    else:
        _check_experts(c, c.experts)
    lane_heads, lane_kv_heads = c.num_heads // c.num_lanes, c.num_kv_heads // c.num_lanes
    rows = {
        "hidden": c.hidden,
        "head_dim": c.head_dim,
        "ffn / num_lanes": c.ffn // c.num_lanes,
        **_head_rows(program, world_size),
    }
    for name, size in rows.items():
        if size % TILE:
            raise kccl.InvalidArgument(
                f"{name} is {size}, must be a multiple of {TILE} for the monokernel"
            )
    if world_size > c.num_lanes:
        raise kccl.InvalidArgument(
            f"world_size is {world_size}, must be at most the model's {c.num_lanes} lanes for the "
            "monokernel"
        )
    if c.num_lanes % world_size and program.num_residuals > 1:
        raise kccl.InvalidArgument(
            f"world_size is {world_size}, must divide the {c.num_lanes} lanes of a Laneformer for "
            "the monokernel; backend 'host' takes any number"
        )
    if c.vocab_size % world_size and program.num_head_parts == 1:
        raise kccl.InvalidArgument(
            f"world_size is {world_size}, must divide the model's {c.vocab_size} tokens for the "
            "monokernel"
        )
    if c.head_dim > 128:
        raise kccl.InvalidArgument(f"head_dim is {c.head_dim}, must be at most 128")
    if lane_heads // lane_kv_heads > 8:
        raise kccl.InvalidArgument(
            f"num_heads / num_kv_heads is {lane_heads // lane_kv_heads}, must be at most 8 for the "
            "monokernel"
        )


def most_drafts(program: Program, tuning: Tuning, drafts: Drafts) -> int:
    """Returns the most drafts of a token step. A block may have memory for fewer
    (Sizes.most_columns).

    Raises:
        InvalidArgument: Drafts are asked for, and the monokernel cannot run several positions of
            this model in a token step.
    """
    if drafts.most == 0:
        return 0
    what = _without_columns(program, tuning)
    if what and not drafts.adapts:
        raise kccl.InvalidArgument(
            f"drafts is {drafts.most}, must be 'off' or 'auto' for {what}: a token step runs one "
            "position"
        )
    if what:
        return 0
    return min(drafts.most, _MOST_ADAPTING) if drafts.adapts else drafts.most


def check_requests(program: Program, tuning: Tuning, requests: int) -> None:
    """Raises InvalidArgument if several requests are to run at the same time, and the monokernel
    cannot run several positions of this model in a token step.
    """
    if requests > 1 and (what := _without_columns(program, tuning)):
        raise kccl.InvalidArgument(
            f"slots is {requests}, must be 1 for {what}: a token step runs one position"
        )


def _without_columns(program: Program, tuning: Tuning) -> str:
    """Returns why a token step runs one position only: what has no columns. "" if it has."""
    if program.config.experts is not None:
        return "a mixture of experts"
    return "weights in registers, as on AMD's GPUs" if tuning.weights_in_registers else ""


def _check_columns(program: Program, tuning: Tuning) -> None:
    if not 1 <= tuning.columns <= MOST_COLUMNS:
        raise kccl.InvalidArgument(f"columns is {tuning.columns}, must be from 1 to {MOST_COLUMNS}")
    if what := _without_columns(program, tuning):
        raise kccl.InvalidArgument(
            f"columns is {tuning.columns}, must be 1 for {what}: a token step runs one position"
        )


def _check_experts(c: ModelConfig, experts: Experts) -> None:
    if experts.chosen > _MOST_CHOSEN:
        raise kccl.InvalidArgument(
            f"experts.chosen is {experts.chosen}, must be at most {_MOST_CHOSEN} for the monokernel"
        )
    having = [kind for kind in ("expert_gate_up", "expert_down") if kind in c.biases]
    if len(having) == 1:
        # kernels/expert_biases.cuh copies those of both products, or none.
        raise kccl.InvalidArgument(
            f"biases has {having[0]!r} alone, must have both products of experts or neither for "
            "the monokernel; backend 'host' runs it"
        )


def _head_rows(program: Program, world_size: int) -> dict[str, int]:
    """Returns the number of rows of the head that one product has, and its name for errors."""
    vocab_size, parts = program.config.vocab_size, program.num_head_parts
    if parts > 1:
        return {f"vocab_size / {parts} lanes": vocab_size // parts}
    return {f"vocab_size / {world_size} ranks": vocab_size // world_size}
