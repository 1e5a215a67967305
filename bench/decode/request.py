"""The request for a measurement of decoding, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kccl.engine import Engine
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.model.timeline import Timeline
from kccl.engine.model.variant import Variant

from ..harness.measure import Row
from .tokens import LENGTH

MOST_TOKENS = 64
"""The most new tokens of a run if their number is chosen by time."""
FIRST_TOKEN_PROMPT = 512
"""Tokens of the prompt whose first token is timed, if the context has room for them."""


@dataclass(frozen=True)
class Request:
    """A request for a measurement.

    Attributes:
        checkpoint: The model.
        name: The model's name in rows.
        positions: The positions to measure, in ascending order.
        new_tokens: Tokens of a run; None: as many as take most of a second.
        repeats: Number of runs at each position.
        ranks: The argument of Engine.
        has_baselines: Whether peers are measured, too.
        variants: Kernels that are timed beside the whole one.
        traced_tokens: The number of tokens that are traced, at the first position.
        drafts, weights: The arguments of Engine.
    """

    checkpoint: Checkpoint
    name: str
    positions: Sequence[int]
    new_tokens: int | None
    repeats: int
    ranks: int | None
    has_baselines: bool
    variants: Sequence[Variant] = ()
    traced_tokens: int = 0
    drafts: str | int = "off"
    weights: str | None = None

    def kind_of(self, engine: Engine) -> str:
        """Returns the dtype for rows: that of the layers' weights, which are most of the bytes."""
        return self.weights or engine.dtype

    @property
    def context(self) -> int:
        """The number of tokens for which the KV cache needs room."""
        # One more token follows the last new token. It ends the last timed interval.
        longest = max(self.positions) + max(self.new_tokens or MOST_TOKENS, self.traced_tokens + 1)
        longest += 1
        longest = max(longest, FIRST_TOKEN_PROMPT + 2, 2 * LENGTH)
        return min(longest, self.checkpoint.config.context)


@dataclass
class Result:
    """The result of a measurement.

    Attributes:
        rows: The rows of the positions measured so far; empty on all ranks but 0.
        notes: A sentence for each check, and for each peer without rows.
        versions: The versions of the peers.
        is_right: Whether all of KCCL's tokens were right.
        facts: The facts about the GPUs.
        timelines: The timelines of the ranks, if tokens are traced.
        stream_bytes_per_s: Bytes a second that all ranks together read if they do nothing else,
            median of the runs; None on the simulator.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    is_right: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    timelines: list[Timeline] = field(default_factory=list)
    stream_bytes_per_s: float | None = None
