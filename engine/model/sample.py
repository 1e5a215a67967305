"""How the next token is chosen: the parameters, and the oracle in NumPy.

A token is a pure function of logits, parameters, position and history. The noise of token `id` at a
position depends on (seed, position, id) alone, so it does not matter which rank, block or vector
lane draws it. Everything after the logits is computed in float64: executors whose logits have the
same bits choose the same tokens, but for ties within the last bit of a sum, exp or log.
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kccl import Error, InvalidArgument

from ..base.scalars import as_float, as_integer, plain

Array = NDArray[Any]
T = TypeVar("T")

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

    Numbers may be Python's or NumPy's.

    Attributes:
        temperature: Divides the logits, by 1e-6 or more. 0: the largest logit wins, of equal ones
            the lowest id, and top_k, top_p and min_p have no effect.
        top_k: Keeps the logits that are not below the k-th largest; 0: all.
        top_p: Keeps the most likely tokens until their probabilities sum to this; 1: all.
        min_p: Keeps tokens at least this likely in relation to the most likely one; 0: all.
        repetition_penalty: Divides the positive logits of ids in the prompt or the answer, and
            multiplies the negative ones; from 1e-6 to 1e6.
        seed: Of the noise, 64 bits. None: Engine draws one for each request, the same on all ranks.
        max_tokens: Most tokens to generate.
        stop_ids: Tokens that end the answer; kept as a tuple.
        stop: A string that ends the answer, or several; kept as a tuple. UTF-8 must be able to
            encode them.
        logprobs: Whether each token comes with its log-probability.

    Raises:
        InvalidArgument: A parameter is wrong; the text names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        temperature = self._number("temperature")
        is_right = temperature == 0 or _LEAST_DIVISOR <= temperature < math.inf
        self._check("temperature", is_right, f"0, or {_LEAST_DIVISOR:g} or more")
        self._integer("top_k", 0, 2**32 - 1)
        self._check("top_p", 0 < self._number("top_p") <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= self._number("min_p") <= 1, "from 0 to 1")
        is_right = _LEAST_DIVISOR <= self._number("repetition_penalty") <= _MOST_PENALTY
        self._check("repetition_penalty", is_right, f"from {_LEAST_DIVISOR:g} to {_MOST_PENALTY:g}")
        if self.seed is not None:
            self._integer("seed", 0, 2**64 - 1)
        self._integer("max_tokens", 1, 2**32 - 1)
        ids = _listed(self.stop_ids, as_integer)
        is_right = ids is not None and all(0 <= i < 2**31 for i in ids)
        self._check("stop_ids", is_right, f"a list of integers from 0 to {2**31 - 1}")
        self._set("stop_ids", ids)
        texts = _listed([self.stop] if isinstance(self.stop, str) else self.stop, _text)
        wanted = "a string that is not empty and valid UTF-8, or a list of such"
        self._check("stop", texts is not None, wanted)
        self._set("stop", texts)
        logprobs = plain(self.logprobs)
        self._check("logprobs", isinstance(logprobs, bool), "True or False")
        self._set("logprobs", logprobs)

    @property
    def noise_seed(self) -> int:
        """The seed; 0 if it is None. Engine never leaves it so where noise is drawn."""
        return 0 if self.seed is None else self.seed

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise InvalidArgument(f"{name} is {_shown(getattr(self, name))}, must be {wanted}")

    def _number(self, name: str) -> float:
        """The field as a float, which replaces what was given; NaN if it is no number."""
        number = as_float(getattr(self, name))
        if not math.isnan(number):
            self._set(name, number)
        return number

    def _integer(self, name: str, least: int, most: int) -> None:
        number = as_integer(getattr(self, name))
        is_right = number is not None and least <= number <= most
        self._check(name, is_right, f"an integer from {least} to {most}")
        self._set(name, number)


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
        scores = scores[kept] + gumbel(params.noise_seed, position, kept)
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


def _listed(values: Any, convert: Callable[[Any], T | None]) -> tuple[T, ...] | None:
    """The values, converted; None if they are no list, or one cannot be converted."""
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        return None
    found = []
    for value in values:
        converted = convert(value)
        if converted is None:
            return None
        found.append(converted)
    return tuple(found)


def _text(value: Any) -> str | None:
    """A string that an answer's text may hold: it is not empty, and UTF-8 can encode it."""
    if not isinstance(value, str):
        return None
    try:
        return str(value) if value.encode() else None
    except UnicodeEncodeError:
        return None


def _shown(value: Any) -> str:
    """A value for a message of one line."""
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python does not print integers of thousands of digits.
        return "an integer of too many digits"
