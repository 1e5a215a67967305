"""How the next token is chosen: the parameters, and the oracle in NumPy.

A token is a pure function of logits, parameters, position and history. The noise of token `id` at a
position depends on (seed, position, id) alone, so it does not matter which rank, block or vector
lane draws it. Everything after the logits is computed in float64: executors whose logits have the
same bits choose the same tokens, but for ties within the last bit of a sum, exp or log.
"""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kccl import Error, InvalidArgument

Array = NDArray[Any]

_PHILOX_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Beyond these a logit that a parameter divides or multiplies could overflow: float64 would give
# infinities, whose differences are NaN, and a NaN chooses any token.
_LEAST_DIVISOR, _MOST_PENALTY = 1e-6, 1e6


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    The filters apply in this order: repetition_penalty, temperature, top_k, top_p, min_p.

    Attributes:
        temperature: Divides the logits, by 1e-6 or more. 0: the largest logit wins, of equal ones
            the lowest id, and top_k, top_p and min_p have no effect.
        top_k: Keeps the logits that are not below the k-th largest; 0: all.
        top_p: Keeps the most likely tokens until their probabilities sum to this; 1: all.
        min_p: Keeps tokens at least this likely in relation to the most likely one; 0: all.
        repetition_penalty: Divides the positive logits of ids in the prompt or the answer, and
            multiplies the negative ones; from 1e-6 to 1e6.
        seed: Of the noise, 64 bits.
        max_tokens: Most tokens to generate.
        stop_ids: Tokens that end the answer.
        stop: Strings that end the answer, of characters that UTF-8 can encode.
        logprobs: Whether each token comes with its log-probability.

    Raises:
        InvalidArgument: A parameter is wrong; the text names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        temperature = _number(self.temperature)
        is_right = temperature == 0 or _LEAST_DIVISOR <= temperature < math.inf
        self._check("temperature", is_right, f"0, or {_LEAST_DIVISOR:g} or more")
        self._check_int("top_k", 0, 2**32 - 1)
        self._check("top_p", 0 < _number(self.top_p) <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= _number(self.min_p) <= 1, "from 0 to 1")
        is_right = _LEAST_DIVISOR <= _number(self.repetition_penalty) <= _MOST_PENALTY
        self._check("repetition_penalty", is_right, f"from {_LEAST_DIVISOR:g} to {_MOST_PENALTY:g}")
        self._check_int("seed", 0, 2**64 - 1)
        self._check_int("max_tokens", 1, 2**32 - 1)
        ids = isinstance(self.stop_ids, tuple) and all(
            _is_int(i) and 0 <= i < 2**31 for i in self.stop_ids
        )
        self._check("stop_ids", ids, f"a tuple of integers from 0 to {2**31 - 1}")
        texts = isinstance(self.stop, tuple) and all(map(_is_text, self.stop))
        self._check("stop", texts, "a tuple of strings that are not empty, and valid UTF-8")
        self._check("logprobs", isinstance(self.logprobs, bool), "True or False")

    def _check(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise InvalidArgument(f"{name} is {_shown(getattr(self, name))}, must be {wanted}")

    def _check_int(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        is_right = _is_int(value) and least <= value <= most
        self._check(name, is_right, f"an integer from {least} to {most}")


def sample(
    logits: Array, params: SamplingParams, position: int, history: Sequence[int]
) -> tuple[int, float]:
    """Chooses a token.

    Args:
        logits: float32 [vocab_size].
        position: The place in the sequence that the token will have, from 0.
        history: All ids before it, the prompt's too.

    Returns:
        The id, and the log-probability that the model itself gives it: of the logits as they come,
        without penalty, temperature and filters.

    Raises:
        Error: A logit is NaN, or none is finite.
    """
    raw = np.asarray(logits).astype(np.float64)
    peak = raw.max()
    if not math.isfinite(peak):
        raise Error(f"logits for position {position}: the largest is {peak}, must be finite")
    scores = raw.copy()
    seen = np.unique(np.asarray(history, dtype=np.int64))
    past, penalty = scores[seen], params.repetition_penalty
    scores[seen] = np.where(past > 0, past / penalty, past * penalty)
    if params.temperature > 0:
        scores /= params.temperature
        kept = kept_ids(scores, params)
        scores = scores[kept] + gumbel(params.seed, position, kept)
        token = int(kept[scores.argmax()])
    else:
        token = int(scores.argmax())
    return token, float(raw[token] - peak - np.log(np.exp(raw - peak).sum()))


def kept_ids(scores: Array, params: SamplingParams) -> Array:
    """The ids that top_k, top_p and min_p keep, in ascending order.

    Args:
        scores: float64 [vocab_size], after penalty and temperature.
    """
    # The largest first; equal ones by their ids.
    order = np.argsort(-scores, kind="stable")
    if 0 < params.top_k < order.size:
        order = order[scores[order] >= scores[order[params.top_k - 1]]]
    weights = np.exp(scores[order] - scores[order[0]])
    if params.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        order = order[before < params.top_p * weights.sum()]
    order = order[weights[: order.size] >= params.min_p]
    return np.sort(order)


def gumbel(seed: int, position: int, ids: Array) -> Array:
    """Gumbel noise, float64: with it the largest score is a sample of the softmax.

    The word w of token `id` is word id % 4 of Philox4x32-10 with the key (seed's low half, high
    half) and the counter (id // 4, position, 0, 0); u = (w + 1/2) / 2**32, and the noise is
    -log(-log1p(-u)). Small u, which are exact, give the large values that win.
    """
    ids = np.asarray(ids, dtype=np.uint64)
    words = philox((seed & _WORD, seed >> 32), (ids // 4, position, 0, 0))
    word = np.choose((ids % 4).astype(np.intp), words)
    return -np.log(-np.log1p(-(word + 0.5) / 2.0**32))


def philox(key: tuple[int, int], counter: tuple[Any, Any, Any, Any]) -> tuple[Array, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words, as uint64, for each counter."""
    a, b, c, d = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    low, shift = np.uint64(_WORD), np.uint64(32)
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        p, q = a * np.uint64(_MULTIPLIERS[0]), c * np.uint64(_MULTIPLIERS[1])
        a, c = (q >> shift) ^ b ^ np.uint64(k0), (p >> shift) ^ d ^ np.uint64(k1)
        b, d = q & low, p & low
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    """Whether a text may hold this string: it is not empty, and UTF-8 can encode it."""
    if not isinstance(value, str):
        return False
    try:
        return bool(value.encode())
    except UnicodeEncodeError:
        return False


def _number(value: Any) -> float:
    """NaN, which fits no range, if `value` is not a number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if is_number else math.nan
    except OverflowError:
        return math.nan


def _shown(value: Any) -> str:
    """A value for a message of one line."""
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python does not print integers of thousands of digits.
        return "an integer of too many digits"
