"""Settings of drafts: guesses of an answer's next tokens, which one pass of the model checks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import kccl

from ..base.core import lib
from ..base.scalars import as_integer

MOST_DRAFTS: int = lib.kKcclEngineMaxDrafts
"""The most drafts that a pass checks."""

MOST_IDS = 1 << 31
"""Ids are below this: they are numbers of 32 bits with a sign."""

Drafter: TypeAlias = Callable[[list[int], int], Sequence[int]]
"""A function that proposes the next ids of a text. Its arguments are all ids so far, of prompt and
answer, and the most ids that it may return, from 1 to MOST_DRAFTS. It may return fewer, or none. A
wrong id costs time, and changes no token."""


@dataclass(frozen=True)
class Pace:
    """How many drafts a pass has, by the share of the last drafts that were accepted, where a
    request leaves that to the engine. host/drafts.h has the rule.

    Attributes:
        first: The drafts of a pass in the first trial, and in a trial behind a pause.
        shares: Numbers of drafts, and the least share of each, in 24ths.
        least: The least share for passes with drafts, in 24ths. Below it they pause.
    """

    first: int
    shares: Mapping[int, int]
    least: int

    @property
    def packed(self) -> int:
        """Returns the pace in the form of KcclEngineDraftPace."""
        never = lib.kKcclEngineWhole + 1
        packed: int = self.first << lib.kKcclEngineFirstAt
        packed |= self.shares.get(7, never) << lib.kKcclEngineSevenAt
        packed |= self.shares.get(3, never) << lib.kKcclEngineThreeAt
        packed |= self.least << lib.kKcclEngineLeastAt
        return packed


HOST_PACE = Pace(first=1, shares={7: 21, 3: 16}, least=12)
"""On the host arithmetic bounds a pass over several positions. A draft costs 0.3 to 0.6 of a token
there (bench/LOG.md), so few drafts pay."""
GPU_PACE = Pace(first=3, shares={3: 2}, least=2)
"""On a GPU a pass with three drafts takes 1.11 to 1.42 times as long as one without drafts in the
same kernel (bench/LOG.md). So it pays from 0.11 to 0.42 accepted drafts a pass on; they pause below
a quarter. Passes without drafts run in the kernel of one position then, against which a pass with
three drafts takes 1.13 to 1.55 times as long in the formats that were timed."""


@dataclass(frozen=True)
class Drafts:
    """How drafts are made.

    A pass runs the last token and some drafts after it, and reads the weights once. Then it
    chooses a token for each draft's place, from the logits, noise and history that this token would
    have without drafts. A draft is accepted if it equals this token. So drafts change neither the
    tokens of an answer nor their log-probabilities nor its end, whatever SamplingParams are.

    Attributes:
        most: The most drafts of a pass. 0 means none.
        adapts: Whether the number of drafts depends on the share of the last drafts that were
            accepted. On the host a pass has 7 drafts from 7/8 on, 3 from 2/3 on, 1 from 1/2 on,
            else none; on a GPU 3 from 1/12 on, else none; at most `most`. Times play no part, so
            equal requests take equal passes. If no draft is ever right, few passes try one: on the
            host 20 of an answer's first 260.
        drafter: The function that makes the drafts. None: drafts are copied from where the same ids
            stood earlier in the text, else from a table (`uses_ngrams`). Only backend "host" calls
            a drafter. Only it makes drafts for a request with a grammar: on a GPU such a request
            has none, whatever `most` is. In a job of several processes only rank 0's is called. A
            thread of the executor calls it between two passes. All ranks wait meanwhile, and so
            does Ctrl-C. It must return within KCCL_TIMEOUT. It cannot close its engine. If it
            raises, the request raises the same error, and other processes' requests raise
            EndedElsewhere. No automatic garbage collection begins while it runs.
        prediction: The ids that the answer is expected to have, from its first one on. Where it is
            not empty, drafts are its ids at their places. So behind a token that it does not have,
            they are right again only if the answer goes on as it does. All backends take it.
        uses_ngrams: Whether drafts come from the engine's table of n-grams (model/ngrams.py), if it
            has one, where the text has nothing to copy. On the host not if `adapts` is True.

    Raises:
        InvalidArgument: `most` is out of range, `adapts` is no bool, `drafter` is no function, a
            prediction is no sequence of ids, or there are a drafter and a prediction.
    """

    most: int = MOST_DRAFTS
    adapts: bool = False
    drafter: Drafter | None = None
    prediction: Sequence[int] = ()
    uses_ngrams: bool = True

    def __post_init__(self) -> None:
        most = as_integer(self.most)
        if most is None or not 0 <= most <= MOST_DRAFTS:
            raise kccl.InvalidArgument(f"drafts is {self.most!r}, must be from 0 to {MOST_DRAFTS}")
        object.__setattr__(self, "most", most)
        if not isinstance(self.adapts, bool):
            raise kccl.InvalidArgument(f"adapts is {self.adapts!r:.60}, must be True or False")
        if not isinstance(self.uses_ngrams, bool):
            raise kccl.InvalidArgument(
                f"uses_ngrams is {self.uses_ngrams!r:.60}, must be True or False"
            )
        if self.drafter is not None and not callable(self.drafter):
            raise kccl.InvalidArgument(
                f"drafter is {self.drafter!r:.60}, must be a function or None"
            )
        object.__setattr__(self, "prediction", self._predicted())
        if self.drafter is not None and self.prediction:
            raise kccl.InvalidArgument("drafts have a drafter and a prediction: leave out one")

    def _predicted(self) -> tuple[int, ...]:
        given = self.prediction
        found = [as_integer(each) for each in given] if isinstance(given, Iterable) else [None]
        ids = tuple(each for each in found if each is not None and 0 <= each < MOST_IDS)
        if len(ids) != len(found):
            raise kccl.InvalidArgument(f"prediction is {given!r:.60}, must be a sequence of ids")
        return ids

    def check_ids(self, vocab_size: int) -> None:
        """Raises InvalidArgument if the prediction has an id that the model does not have."""
        if self.prediction and max(self.prediction) >= vocab_size:
            raise kccl.InvalidArgument(
                f"prediction has id {max(self.prediction)}, must be below {vocab_size}"
            )

    @property
    def of_all_ranks(self) -> tuple[int, bool, bool, bool, list[int]]:
        """Returns what must be equal on all ranks. Of the drafter this is only whether there is
        one, because each rank has a different object.
        """
        has_drafter = self.drafter is not None
        return self.most, self.adapts, has_drafter, self.uses_ngrams, [*self.prediction]


OFF = Drafts(0)
"""Makes no drafts."""


def drafts_of(given: "Drafts | str | int") -> Drafts:
    """Converts an argument `drafts` to Drafts. It is "off", "auto" (which sets Drafts.adapts), the
    most drafts of a pass, or Drafts already.

    Raises:
        InvalidArgument: The argument is none of these.
    """
    if isinstance(given, Drafts):
        return given
    if given == "off":
        return OFF
    if given == "auto":
        return Drafts(adapts=True)
    most = as_integer(given)
    if most is None or not 1 <= most <= MOST_DRAFTS:
        raise kccl.InvalidArgument(
            f"drafts is {given!r}, must be 'off', 'auto' or an integer from 1 to {MOST_DRAFTS}"
        )
    return Drafts(most)
