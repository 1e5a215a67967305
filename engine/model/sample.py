"""Chooses the next token: the parameters, and the NumPy reference that executors must agree with.

A token is a pure function of logits, parameters, position and history. The noise of token `id` at a
position depends on (seed, position, id) alone, so any rank, block or vector lane may compute it.
Everything after the logits is computed in float64. So executors whose logits have the same bits
choose the same tokens, except if two scores differ by no more than the last bits of a sum, exp or
log.
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kccl import Error, InvalidArgument

from ..base.scalars import as_float, as_integer, plain
from .grammar import Grammar

Array = NDArray[Any]
T = TypeVar("T")

_PHILOX_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Limits of the parameters. Beyond them a logit could overflow to infinity in float64. A difference
# of two infinities is NaN, and with a NaN the choice would be arbitrary.
_LEAST_DIVISOR, _MOST_PENALTY = 1e-6, 1e6

FILTERS = ("top_k", "top_p", "min_p")
"""Parameters that have no effect if temperature is 0."""
MOST_ALTERNATIVES = 20
"""The largest top_logprobs."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    They apply in this order: grammar, logit_bias, repetition_penalty, presence_penalty and
    frequency_penalty, temperature, top_k, top_p, min_p.

    Numbers may be Python's or NumPy's.

    Attributes:
        temperature: Divides the logits, by 1e-6 or more. 0: the largest logit wins, of equal ones
            the lowest id, and top_k, top_p and min_p have no effect.
        top_k: Keeps the logits that are not below the k-th largest. 0 keeps all.
        top_p: Keeps the most likely tokens until their probabilities sum to this. 1 keeps all.
        min_p: Keeps tokens at least this likely in relation to the most likely one. 0 keeps all.
        repetition_penalty: Divides the positive logits of ids in the prompt or the answer, and
            multiplies the negative ones; from 1e-6 to 1e6.
        presence_penalty: A number that is subtracted from the logits of ids in the answer; from
            -1e6 to 1e6.
        frequency_penalty: A number that is subtracted from the logits of ids in the answer, once
            for each time that the answer has the id; from -1e6 to 1e6.
        logit_bias: Added to logits: a mapping of ids to numbers from -1e6 to 1e6. Kept as a tuple
            of (id, number), the lowest id first.
        seed: The seed of the noise, 64 bits. None: Engine draws one for each request, the same on
            all ranks.
        max_tokens: Most tokens to generate.
        stop_ids: Tokens that end the answer; kept as a tuple.
        stop: A string that ends the answer, or several; kept as a tuple. UTF-8 must be able to
            encode them. They may contain names of control tokens, as in "<|im_end|>".
        logprobs: Whether each token comes with its log-probability.
        top_logprobs: How many of the likeliest tokens come with each token, at most 20; logprobs
            must be True.
        grammar: What the answer must look like. None allows anything. Only tokens that it permits
            can be chosen. Where the answer is complete, it also permits the tokenizer's end ids. If
            nothing can follow, the answer ends. The answer is incomplete if max_tokens, a stop
            string or a stop id ends it earlier.

    Raises:
        InvalidArgument: A parameter is wrong; the text names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    seed: int | None = None
    max_tokens: int = 256
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        temperature = self._number("temperature")
        is_right = temperature == 0 or _LEAST_DIVISOR <= temperature < math.inf
        self._check("temperature", is_right, f"0, or {_LEAST_DIVISOR:g} or more")
        self._integer("top_k", 0, 2**32 - 1)
        self._check("top_p", 0 < self._number("top_p") <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= self._number("min_p") <= 1, "from 0 to 1")
        is_right = _LEAST_DIVISOR <= self._number("repetition_penalty") <= _MOST_PENALTY
        self._check("repetition_penalty", is_right, f"from {_LEAST_DIVISOR:g} to {_MOST_PENALTY:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            is_right = -_MOST_PENALTY <= self._number(name) <= _MOST_PENALTY
            self._check(name, is_right, f"from -{_MOST_PENALTY:g} to {_MOST_PENALTY:g}")
        biases = _biases(self.logit_bias)
        wanted = f"ids and a number from -{_MOST_PENALTY:g} to {_MOST_PENALTY:g} for each"
        self._check("logit_bias", biases is not None, wanted)
        self._set("logit_bias", biases)
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
        self._integer("top_logprobs", 0, MOST_ALTERNATIVES)
        self._check("top_logprobs", not self.top_logprobs or logprobs, "0 if logprobs is False")
        is_right = self.grammar is None or isinstance(self.grammar, Grammar)
        self._check("grammar", is_right, "a Grammar, as in Grammar.json(schema), or None")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Returns logit_bias in the form in which it is kept."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def noise_seed(self) -> int:
        """Returns the seed. Returns 0 if it is None. Engine sets a seed wherever noise is drawn."""
        return 0 if self.seed is None else self.seed

    def to_json(self) -> dict[str, Any]:
        """Returns what JSON represents without a change, for from_json() on another rank."""
        return {name: _with_lists(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """Returns the parameters whose to_json() is given."""
        grammar = given["grammar"]
        return cls(**{**given, "grammar": None if grammar is None else Grammar(**grammar)})

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise InvalidArgument(f"{name} is {_shown(getattr(self, name))}, must be {wanted}")

    def _number(self, name: str) -> float:
        """Converts a field to float, stores it and returns it. Returns NaN if it is no number."""
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
    logits: Array,
    params: SamplingParams,
    position: int,
    history: Sequence[int],
    num_prompt: int | None = None,
    mask: Array | None = None,
) -> tuple[int, float]:
    """Chooses a token.

    Args:
        logits: float32 [vocab_size].
        position: The place in the sequence that the token will have, from 0.
        history: All ids before that position, of prompt and answer.
        num_prompt: How many ids of `history` are the prompt's. None means all.
        mask: uint32 [(vocab_size + 31) // 32]: which ids may be chosen, as Executor.post_mask()
            takes it. None allows all.

    Returns:
        The id, and its log-probability by the unchanged logits: without grammar, penalties,
        temperature and filters.

    Raises:
        Error: A logit is NaN, none is finite, or all ids that the mask allows have the logit minus
            infinity.
    """
    raw = np.asarray(logits).astype(np.float64)
    peak = raw.max()
    if not math.isfinite(peak):
        raise Error(f"logits for position {position}: the largest is {peak}, must be finite")
    scores = raw.copy()
    if mask is not None:
        scores[~allowed(mask, raw.size)] = -math.inf
        if scores.max() == -math.inf:
            raise Error(f"logits for position {position}: none of an id that may be chosen")
    for token, bias in params.biases:
        scores[token] += bias
    seen = np.unique(np.asarray(history, dtype=np.int64))
    past, penalty = scores[seen], params.repetition_penalty
    scores[seen] = np.where(past > 0, past / penalty, past * penalty)
    answered = history[len(history) if num_prompt is None else num_prompt :]
    used, counts = np.unique(np.asarray(answered, dtype=np.int64), return_counts=True)
    scores[used] -= params.frequency_penalty * counts + params.presence_penalty
    if params.temperature > 0:
        scores /= params.temperature
        kept = kept_ids(scores, params)
        scores = scores[kept] + gumbel(params.noise_seed, position, kept)
        token = int(kept[scores.argmax()])
    else:
        token = int(scores.argmax())
    return token, float(logprobs_of(raw)[token])


def allowed(mask: Array, vocab_size: int) -> Array:
    """Returns the ids that a mask of sample() allows: bool [vocab_size]."""
    words = np.ascontiguousarray(mask, dtype="<u4")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
    return bits.astype(bool)


def logprobs_of(logits: Array) -> Array:
    """Returns the log-probabilities of logits [..., vocab_size], float64."""
    raw = np.asarray(logits).astype(np.float64)
    shifted = raw - raw.max(-1, keepdims=True)
    logprobs: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logprobs


def alternatives(logits: Array, most: int) -> list[tuple[int, float]]:
    """Returns the likeliest ids and their log-probabilities, at most `most`. The likeliest comes
    first; of equal ones, the lowest id.

    Args:
        logits: float32 [vocab_size].
        most: The most ids to return.
    """
    order = np.argsort(-np.asarray(logits), kind="stable")[:most]
    logprobs = logprobs_of(logits)
    return [(int(token), float(logprobs[token])) for token in order]


def kept_ids(scores: Array, params: SamplingParams) -> Array:
    """Returns the ids that top_k, top_p and min_p keep, in ascending order.

    Args:
        scores: float64 [vocab_size], after penalty and temperature.
    """
    # Sorts by score, the largest first. A stable sort keeps equal scores in the order of their ids.
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
    """Returns Gumbel noise, float64, for each id. If it is added to the scores, the id of the
    largest sum is a random sample from the softmax of the scores.

    The key of Philox4x32-10 is the seed (low half, high half), and its counter is (id // 4,
    position, 0, 0). Word id % 4 of its output is w. Then u = (w + 1/2) / 2**32, and the noise is
    -log(-log1p(-u)). The largest noise, which decides the choice, comes from the smallest u, and
    these are exact.
    """
    ids = np.asarray(ids, dtype=np.uint64)
    words = philox((seed & _WORD, seed >> 32), (ids // 4, position, 0, 0))
    word = np.choose((ids % 4).astype(np.intp), words)
    return -np.log(-np.log1p(-(word + 0.5) / 2.0**32))


def philox(key: tuple[int, int], counter: tuple[Any, Any, Any, Any]) -> tuple[Array, ...]:
    """Computes Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words, as uint64, for each
    counter.
    """
    a, b, c, d = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    low, shift = np.uint64(_WORD), np.uint64(32)
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        p, q = a * np.uint64(_MULTIPLIERS[0]), c * np.uint64(_MULTIPLIERS[1])
        a, c = (q >> shift) ^ b ^ np.uint64(k0), (p >> shift) ^ d ^ np.uint64(k1)
        b, d = q & low, p & low
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def _with_lists(value: Any) -> Any:
    """Converts tuples, and those in them, to lists."""
    if isinstance(value, tuple):
        return [_with_lists(each) for each in value]
    return value


def _listed(values: Any, convert: Callable[[Any], T | None]) -> tuple[T, ...] | None:
    """Converts each value. Returns None if `values` is a string or cannot be iterated, or if
    convert() returns None for a value.
    """
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        return None
    found = []
    for value in values:
        converted = convert(value)
        if converted is None:
            return None
        found.append(converted)
    return tuple(found)


def _biases(given: Any) -> tuple[tuple[int, float], ...] | None:
    """Converts logit_bias to (id, number) pairs, sorted by id. Returns None if a pair is wrong."""
    pairs = given.items() if isinstance(given, Mapping) else given
    if isinstance(pairs, str | bytes | bytearray) or not isinstance(pairs, Iterable):
        return None
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            return None
        token, bias = as_integer(pair[0]), as_float(pair[1])
        if token is None or not 0 <= token < 2**31 or not -_MOST_PENALTY <= bias <= _MOST_PENALTY:
            return None
        found[token] = bias
    return tuple(sorted(found.items()))


def _text(value: Any) -> str | None:
    """Returns a stop string. Returns None if it is no string, is empty, or is not valid UTF-8."""
    if not isinstance(value, str):
        return None
    try:
        return str(value) if value.encode() else None
    except UnicodeEncodeError:
        return None


def _shown(value: Any) -> str:
    """Returns a value as text for a message of one line."""
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python does not print integers of thousands of digits.
        return "an integer of too many digits"
