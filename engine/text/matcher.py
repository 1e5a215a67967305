"""Computes by a grammar which ids may come next in an answer, token by token.

llguidance does the work. All ranks compute the same masks, because they have the same tokens.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kccl import InvalidArgument

from ..base.extras import library
from ..model.grammar import Grammar, is_panic, reason_in
from .tokenizer import Tokenizer

# How many grammars stay compiled.
_MOST_KEPT = 16


class Matcher:
    """The position of an answer in a grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """Wraps llguidance's matcher, at whatever position that is.

        Args:
            matcher: llguidance's matcher. Only this object may use it from now on.
            vocab_size: The number of the model's ids.

        Raises:
            InvalidArgument: The grammar is too complex, or names tokens that the model lacks.
        """
        self._matcher, self._vocab_size = matcher, vocab_size
        self._words = np.zeros((vocab_size + 31) // 32, np.uint32)
        self._check()

    def copy(self) -> "Matcher":
        """Returns a new Matcher at the same position in the grammar."""
        return Matcher(_done(self._matcher.deep_copy), self._vocab_size)

    def push(self, number: int) -> None:
        """Advances by the answer's next token.

        Raises:
            InvalidArgument: The grammar is too complex at this position.
        """
        _done(self._matcher.consume_token, number)
        self._check()

    def mask(self) -> NDArray[np.uint32] | None:
        """Returns the mask of the ids that may come next, as Executor.post_mask() takes it. Returns
        None if none may. The array is overwritten by the next call.

        Raises:
            InvalidArgument: The grammar is too complex at this position.
        """
        words = self._words
        _done(self._matcher.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)
        self._check()
        return words if words.any() else None

    def first_mask(self) -> NDArray[np.uint32]:
        """Returns the mask of the answer's first token, as mask() does. This may take long.

        Raises:
            InvalidArgument: The grammar is too complex, or allows none of the model's tokens.
        """
        mask = self.mask()
        if mask is None:
            raise InvalidArgument(
                "grammar allows none of the model's tokens: an answer cannot begin"
            )
        return mask

    @property
    def has_ended(self) -> bool:
        """Tells whether the answer is complete, and only an end id can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _unfollowed(self._matcher.get_error())


class Matchers:
    """Makes Matchers for one model's grammars.

    It keeps the last _MOST_KEPT grammars compiled. Programs often use the same grammar again, and
    other requests wait while one is compiled.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """Stores the arguments. Compiles nothing yet.

        Args:
            tokenizer: Returns the model's tokenizer, or raises kccl.Error if there is none.
            vocab_size: The number of the model's ids.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: Any = None
        self._first = lru_cache(_MOST_KEPT)(self._begin)

    def __call__(self, grammar: Grammar) -> Matcher:
        """Returns a matcher at the grammar's beginning. The first call may take a second.

        Raises:
            InvalidArgument: The grammar is too complex, or names tokens that the model lacks.
            kccl.Error: llguidance is not installed, or there is no tokenizer.
        """
        return self._first(grammar).copy()

    def _begin(self, grammar: Grammar) -> Matcher:
        llguidance = library("llguidance", "serve")
        if self._compiled is None:
            found = _Vocabulary(self._tokenizer(), self._vocab_size)
            eos = found.eos_ids or None
            self._compiled = llguidance.LLTokenizer(found, n_vocab=self._vocab_size, eos_token=eos)
        # log_level=0: llguidance prints nothing. Errors become exceptions.
        begun = _done(llguidance.LLMatcher, self._compiled, grammar.compiled(), log_level=0)
        return Matcher(begun, self._vocab_size)


def _done(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Calls a function of llguidance. If its Rust code panics, only the request must fail.

    Raises:
        InvalidArgument: llguidance panicked.
    """
    try:
        return call(*args, **more)
    except BaseException as error:
        if is_panic(error):
            raise _unfollowed(f"llguidance has failed: {error}") from None
        raise


def _unfollowed(reason: str) -> InvalidArgument:
    return InvalidArgument(f"grammar cannot be followed: {reason_in(reason)}")


class _Vocabulary:
    """A model's vocabulary in the form in which llguidance's LLTokenizer takes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_ids = [number for number in tokenizer.eos_ids if number < vocab_size]
        self.eos_token_id = self.eos_ids[0] if self.eos_ids else None
        # llguidance must never match these ids as text.
        special = {*tokenizer.special_ids, *self.eos_ids}
        self.special_token_ids = sorted(number for number in special if number < vocab_size)
        self.tokens = [
            tokenizer.name_of(number).encode() if number in special else tokenizer.bytes_of(number)
            for number in range(vocab_size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns the ids of a text."""
        given = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(given, add_bos=False)
