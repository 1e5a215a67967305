"""Runs requests of rank 0 at the same time, on executors that have batches."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..model.batches import BatchExecutor, Member
from ..model.executor import Drafted, EndedElsewhere, Place, Token
from ..model.sample import SamplingParams
from .cancellation import Cancellation
from .constrained import Constrained
from .prefixes import common_prefix
from .ranks import Ranks, Request, Wanted
from .runner import Runner, seeded
from .shares import spread

# A request waits for another one's prompt if that saves so many positions: the columns of a pass.
_WORTH = 32


class Batch:
    """The requests that run at the same time on an engine's ranks. The executors' batch begins with
    the first of them, and ends with the last.

    Only rank 0 knows the requests. The other ranks of a job run the columns that it tells them.

    Attributes:
        runner: Runs what runs alone, and has the prefixes that the KV cache keeps.
        seats: As many as there may be requests at a time.
        tell: Called with the order by which the other ranks of a job begin a batch: see follow().
    """

    def __init__(self, runner: Runner, ranks: Ranks[BatchExecutor], number: int) -> None:
        """Begins without requests.

        Args:
            runner, ranks: The runner, and its ranks.
            number: The most requests at a time. The KV cache must have as many slots.
        """
        self.runner = runner
        self.seats = [Seat(self) for _ in range(number)]
        self.tell: Callable[[dict[str, Any]], None] = lambda order: None
        self._ranks = ranks
        # Guards all below, and the runner's prefixes.
        self._changed = threading.Condition()
        self._running: Request[BatchExecutor] | None = None
        self._places: list[Place] = []
        # Slot -> the prompt of a request that has no token yet.
        self._prompts: dict[int, list[int]] = {}

    def reach(self, ids: list[int], params: SamplingParams) -> int:
        """Returns the reach of a request: see Program.reach(). The requests that run at a time must
        have the same, because one table of rotations serves them all.
        """
        length = min(len(ids) + params.max_tokens, self.runner.context)
        return self.runner.program.reach(length, self.runner.context)

    def follow(self, length: int) -> None:
        """Runs a batch on a rank that is not rank 0, until its end. `length` is from the order."""
        with self._ranks.request(Wanted("batch")):
            self.runner.prefixes.forget_all()
            self._start(length)
            for each in self._ranks.mine:
                each.wait()

    def _start(self, length: int) -> None:
        self.runner.rotate(length)
        for each in self._ranks.mine:
            each.drafts = self.runner.drafts
            each.start_batch()

    def join(
        self, ids: list[int], params: SamplingParams, cancellation: Cancellation
    ) -> tuple[Member, Place]:
        """Adds a request, whose reach is that of those that run. Waits while something else runs,
        and while another request computes a prompt that begins alike: it is copied then.

        Raises:
            EndedElsewhere: The request was cancelled while another one's prompt was computed.
            InvalidArgument: The engine is closed.
            kccl.Error: A rank was lost.
        """
        reach = self.reach(ids, params)
        while (joined := self._join(ids, params, reach)) is None:
            # Entered before the lock is taken: who cancels holds the cancellation's lock, and waits
            # for this one. It spans the wait alone, so that who cancels never waits for a start.
            with cancellation.of(self._wake), self._changed:
                self._changed.wait_for(
                    lambda: cancellation.is_asked or not self._is_computed(ids, reach)
                )
            if cancellation.is_asked:
                raise EndedElsewhere
        return joined

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _join(
        self, ids: list[int], params: SamplingParams, reach: int
    ) -> tuple[Member, Place] | None:
        """Adds a request, or returns None if it must wait for another one's prompt."""
        with self._changed:
            if self._is_computed(ids, reach):
                return None
            if self._running is None:
                self.tell({"kind": "batch", "length": reach})
                running = self._ranks.request(Wanted("batch", waits=True))
                running.__enter__()
                self._running = running
            try:
                if not self._places:
                    self._start(reach)
                prefixes, kind = self.runner.prefixes, (True, reach)
                busy = [place.slot for place in self._places]
                place, _ = prefixes.find(ids, kind, busy)
                member = self._ranks.mine[0].join(ids, params, place)
                prefixes.begin(place, kind)
                prefixes.keep(place, ids[: place.num_cached])
                self._places.append(place)
                self._prompts[place.slot] = ids
                return member, place
            except BaseException as error:
                self._end_unused(error)
                raise

    def _is_computed(self, ids: list[int], reach: int) -> bool:
        """Tells whether a request that runs computes more of these ids than the cache has."""
        place, _ = self.runner.prefixes.find(ids, (True, reach))
        least = place.num_cached + _WORTH
        return any(common_prefix(each, ids) >= least for each in self._prompts.values())

    def keep(self, place: Place, ids: list[int]) -> None:
        """Records that a request has its first token, so its slot holds its prompt."""
        with self._changed:
            self.runner.prefixes.keep(place, ids)
            self._prompts.pop(place.slot, None)
            self._changed.notify_all()

    def leave(
        self, member: Member, place: Place, ids: list[int] | None, error: BaseException | None
    ) -> None:
        """Ends a request.

        Args:
            member, place: From join().
            ids: The ids whose keys and values its slot holds; None: those that are known.
            error: The error with which the request ends, if any. Without one, errors of the ranks
                are raised.
        """
        member.leave()
        with self._changed:
            if ids is not None:
                self.runner.prefixes.keep(place, ids)
            self._prompts.pop(place.slot, None)
            self._places.remove(place)
            self._changed.notify_all()
            self._end_unused(error)

    def _end_unused(self, error: BaseException | None) -> None:
        """Ends the executors' batch if no request is left in it."""
        if not self._places and self._running is not None:
            running, self._running = self._running, None
            running.__exit__(None, error, None)


class Seat:
    """Runs requests one after the other, beside those of a batch's other seats. It has those
    methods and attributes of a Runner that jobs use.

    Attributes:
        num_cached, drafted: As a Runner's.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.num_cached = 0
        self.drafted = Drafted()

    def tokens(
        self,
        ids: list[int],
        params: SamplingParams,
        *,
        cancellation: Cancellation | None = None,
        waits: bool = True,
    ) -> Generator[Token, None, None]:
        """See Runner. The request always waits while something else runs."""
        batch, runner = self._batch, self._batch.runner
        cancellation = cancellation or Cancellation()
        params = seeded(params)
        matcher = None if params.grammar is None else runner.matcher(params.grammar)
        member, place = batch.join(ids, params, cancellation)
        self.num_cached, self.drafted = place.num_cached, Drafted()
        runner.params, runner.num_cached, runner.drafted = params, self.num_cached, self.drafted
        generated: list[int] = []
        error: BaseException | None = None
        try:
            source = member.tokens()
            if matcher is not None:
                source = Constrained([member], matcher, len(ids)).tokens()
            # Closing ends the thread that posts masks. It must not use the member once that has
            # left: another request may be this member by then.
            with closing(source), cancellation.of(member.cancel):
                for token in spread(source):
                    if not generated:
                        # From now on other requests may copy what they share with the prompt.
                        batch.keep(place, ids)
                    generated.append(token.id)
                    self.drafted.count(token)
                    yield token
                    if token.end:
                        break
                    runner.ranks.owner.check()
        except BaseException as raised:
            error = raised
            raise
        finally:
            if runner.ranks.owner.is_here:
                # Leaves out the last token, which may not have run.
                known = [*ids, *generated[:-1]] if generated else None
                batch.leave(member, place, known, error)

    def scores(
        self,
        ids: list[int],
        at_once: int,
        *,
        cancellation: Cancellation | None = None,
        waits: bool = False,
    ) -> Generator[NDArray[np.float32], None, None]:
        """See Runner. No other request may run."""
        return self._batch.runner.scores(ids, at_once, cancellation=cancellation, waits=waits)


def batch_of(runner: Runner, slots: int) -> Batch | None:
    """Returns what runs `slots` requests at a time, which check_slots() has checked. None for 1."""
    if slots == 1:
        return None
    return Batch(runner, cast(Ranks[BatchExecutor], runner.ranks), slots)
