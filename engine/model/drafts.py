"""Guesses of an answer's next tokens, several of which one pass checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import kccl

from ..base.core import lib
from ..base.scalars import as_integer

MOST_DRAFTS: int = lib.kKcclEngineMaxDrafts
"""Most drafts of a pass."""

Drafter: TypeAlias = Callable[[list[int], int], Sequence[int]]
"""Proposes what follows on a text. It is called with all ids so far, prompt and answer, and with
the most ids that it may return, from 1 to MOST_DRAFTS. It may return fewer, or an empty sequence.
An id that turns out wrong costs time, and changes no token."""


@dataclass(frozen=True)
class Drafts:
    """How drafts are made.

    A pass runs the last token and some drafts behind it, and reads the weights once. A draft
    becomes a token if it equals the token that is chosen for its place, whose logits, noise and
    history are those that it would have without drafts. So an answer has the same tokens, the same
    log-probabilities and the same end, with every field of SamplingParams, a grammar too.

    Attributes:
        most: The most drafts of a pass; 0: none.
        adapts: Whether a pass takes 7 drafts (at most `most`), 3, 1 or none, by the share of the
            last drafts that were accepted: seven in eight, two in three, half, or fewer. Times
            play no part, so equal requests take equal passes. If no draft is ever right, 20 of an
            answer's first 260 passes try one.
        drafter: Makes the drafts; None: they are what followed on the same ids earlier in the text.
            In a job of several processes rank 0's is called. A thread of the executor calls it
            between two passes, and all ranks wait meanwhile: it must return within KCCL_TIMEOUT,
            and Ctrl-C waits for it. It cannot close its engine. If it raises, so does the request;
            other processes' requests then raise EndedElsewhere. No garbage collection begins by
            itself while it runs.

    Raises:
        InvalidArgument: `most` is out of range, `adapts` is no bool, or `drafter` is no function.
    """

    most: int = MOST_DRAFTS
    adapts: bool = False
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        most = as_integer(self.most)
        if most is None or not 0 <= most <= MOST_DRAFTS:
            raise kccl.InvalidArgument(f"drafts is {self.most!r}, must be from 0 to {MOST_DRAFTS}")
        object.__setattr__(self, "most", most)
        if not isinstance(self.adapts, bool):
            raise kccl.InvalidArgument(f"adapts is {self.adapts!r:.60}, must be True or False")
        if self.drafter is not None and not callable(self.drafter):
            raise kccl.InvalidArgument(
                f"drafter is {self.drafter!r:.60}, must be a function or None"
            )

    @property
    def of_all_ranks(self) -> tuple[int, bool, bool]:
        """Returns what must be the same on all ranks, whose drafters are different objects."""
        return self.most, self.adapts, self.drafter is not None


OFF = Drafts(0)
"""No drafts."""


def drafts_of(given: "Drafts | str | int") -> Drafts:
    """Returns how drafts are made: "off", "auto" (Drafts.adapts), the most drafts of a pass, or
    Drafts.

    Raises:
        InvalidArgument: It is none of these.
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
