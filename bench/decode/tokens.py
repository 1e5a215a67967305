"""Checks tokens: where the NumPy reference is sure, its likeliest token must have been chosen."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kccl.engine.executors.reference import Cache
from kccl.engine.files.checkpoint import Checkpoint

from .routed_reference import RoutedReference
from .routers import Routers

LENGTH = 16
"""The number of tokens of the first check's prompt, and of its answer."""

# The reference is sure of a token if its logit exceeds the second largest by this margin. A BF16
# message that is rounded the other way changes a logit by about a hundredth.
_SURE = {"bfloat16": 1e-2, "float32": 1e-3}
# If keys and values are F16, the margin is this fraction of the largest logit. It is eight times
# the largest error that was seen, on the bundled model.
_SURE_WITH_F16 = 2.0**-7
# For an engine that computes everything in BF16, the margin is this fraction of the largest logit,
# which is eight roundings of BF16.
_SURE_IN_BF16 = 2.0**-5
# The number of positions that the reference runs at once. It is limited by the memory for their
# attention and logits, and by the timeout of the ranks that wait.
_PART = 256
# A check needs at least this fraction of tokens of which the reference is sure.
_LEAST_SHARE = 0.25


def token_hash(tokens: Sequence[int]) -> str:
    """Returns the beginning of the SHA-256 of the ids, each in 4 bytes."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Verdict:
    """How tokens compare with the reference's.

    Attributes:
        compared: The number of tokens of which the reference is sure.
        wrong: The number of these tokens that differ from the reference's.
        of: The number of all tokens.
        routers: The choices of experts in a mixture; None: not compared, or there are none.
    """

    compared: int
    wrong: int
    of: int
    routers: Routers | None = None

    @property
    def is_right(self) -> bool:
        if self.routers is not None and self.routers.wrong:
            return False
        return self.wrong == 0 and self.compared >= self.of * _LEAST_SHARE

    def __str__(self) -> str:
        told = f"{self.wrong} of {self.compared} tokens differ from the reference's"
        return told if self.routers is None else f"{told}; {self.routers}"


@dataclass(frozen=True)
class Expected:
    """The reference's choice for each token of an answer, given all tokens before it.

    Attributes:
        prompt: The ids of the prompt.
        answer: The ids that KCCL chose.
        best: The likeliest id at each position of the answer.
        margins: By how much the logit of each of these ids exceeds the second largest logit.
        largest: The magnitude of the largest logit.
        message_dtype: The dtype to which the model's messages are rounded.
        routers: See Verdict.
    """

    prompt: list[int]
    answer: list[int]
    best: NDArray[Any]
    margins: NDArray[Any]
    largest: float
    message_dtype: str
    routers: Routers | None = None

    def ours(self, *, has_f16_cache: bool = False) -> Verdict:
        """Returns how KCCL's answer compares with the reference. `has_f16_cache` tells whether KCCL
        keeps keys and values in F16; then the reference must be sure by a larger margin.
        """
        margin = _SURE[self.message_dtype]
        if has_f16_cache:
            margin = max(margin, _SURE_WITH_F16 * self.largest)
        return self._compare(self.answer, margin)

    def theirs(self, tokens: Sequence[int]) -> Verdict:
        """Returns how another engine's tokens compare. It must have chosen each one given the
        prompt and KCCL's tokens before it.
        """
        return self._compare(tokens, _SURE_IN_BF16 * self.largest)

    def _compare(self, tokens: Sequence[int], margin: float) -> Verdict:
        is_sure = self.margins > margin
        wrong = is_sure & (np.array(tokens) != self.best)
        return Verdict(int(is_sure.sum()), int(wrong.sum()), len(tokens), self.routers)


class Oracle(ABC):
    """Runs a reference for answers of one model."""

    @abstractmethod
    def expected(
        self,
        prompt: list[int],
        answer: list[int],
        after_part: Callable[[], object] | None = None,
        routers: Routers | None = None,
    ) -> Expected:
        """Runs the reference over the prompt and the answer.

        Args:
            prompt: The ids of the prompt.
            answer: Ids that KCCL chose.
            after_part: Called num_parts() times, spread over the run.
            routers: Chooses the experts of a mixture; None: the reference does.
        """


class NumpyOracle(Oracle):
    """The NumPy reference. Keeps the model's weights in FP32."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._reference = RoutedReference(checkpoint)
        self._config = checkpoint.config

    def expected(
        self,
        prompt: list[int],
        answer: list[int],
        after_part: Callable[[], object] | None = None,
        routers: Routers | None = None,
    ) -> Expected:
        """See Oracle."""
        self._reference.routers = routers
        ids, cache = [*prompt, *answer[:-1]], Cache(len(prompt) + len(answer))
        num = num_parts(prompt, answer, self._config.num_layers)
        kept: list[NDArray[Any]] = []
        firsts = range(0, len(ids), _PART)
        for step, first in enumerate(firsts):
            logits = self._reference.logits(ids[first : first + _PART], cache)
            # Keeps the logits from the prompt's last token on, which choose the answer's tokens.
            kept.append(logits[max(len(prompt) - 1 - first, 0) :])
            tell_parts(after_part, num, step, len(firsts))
        logits = np.concatenate(kept)
        return expected_of(prompt, answer, logits, self._config.message_dtype, routers)


def expected_of(
    prompt: list[int],
    answer: list[int],
    logits: NDArray[Any],
    message_dtype: str,
    routers: Routers | None,
) -> Expected:
    """Returns what a reference's logits, [ids of the answer, vocab_size], expect."""
    second, first_logit = np.partition(logits, -2, axis=-1)[:, -2:].T
    return Expected(
        prompt=prompt,
        answer=answer,
        best=logits.argmax(-1),
        margins=first_logit - second,
        largest=float(np.abs(logits).max()),
        message_dtype=message_dtype,
        routers=routers,
    )


def num_parts(prompt: list[int], answer: list[int], num_layers: int) -> int:
    """Returns how often Oracle.expected() calls `after_part`. All oracles call it as often, because
    only rank 0 has one. Some run part after part of the ids, others layer after layer.
    """
    return max(-(-(len(prompt) + len(answer) - 1) // _PART), num_layers)


def tell_parts(after_part: Callable[[], object] | None, num: int, step: int, steps: int) -> None:
    """Makes those of `num` calls of `after_part` that are due behind a step of a run."""
    if after_part is not None:
        for _ in range(num * step // steps, num * (step + 1) // steps):
            after_part()
