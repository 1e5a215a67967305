"""Runs several requests at the same time on a device: a rank with batches (model/batches.py).

A batch runs in rounds, each of which is one launch of a kernel with seats (kernels/seats.cuh). A
round ends when one of its requests ends, or when another one waits. Between two rounds at most one
request joins: its prompt runs alone, into its slot of the KV cache. Rank 0 decides who joins, and
tells the other ranks.

A request with a grammar is left out of rounds until it has the mask of its first token, and behind
a round that ended because its mask had not come. So the others do not wait for it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import kccl

from ..base.core import lib
from ..model.executor import Place
from ..model.sample import SamplingParams
from ..monokernel import task as structs
from ..monokernel.compiled import check_sampling, wants_sampling
from ..monokernel.launching import Compiled
from ..monokernel.seats import Seat, Seats
from .device import DeviceExecutor
from .device_member import DeviceMember
from .requests import check_ids

# Seconds between two polls of a request for its next token. As many threads as there are requests
# poll, and they must leave time to the one that launches rounds.
_LOOK_S, _LOOK_AT_SIMULATOR_S = 200e-6, 1e-3


@dataclass
class _Running:
    """A request as each rank knows it.

    Attributes:
        number: The number of its seat.
        params: How tokens are chosen.
        num_ids: The length of its prompt.
        made: How many tokens of the answer there are.
        lacks_mask: Whether it is left out of rounds until it has a mask.
        has_ended: Whether the last of them ended the request.
    """

    number: int
    params: SamplingParams
    num_ids: int
    made: int = 0
    lacks_mask: bool = False
    has_ended: bool = False


class BatchedDevice(DeviceExecutor):
    """A DeviceExecutor that runs up to Tuning.seats requests at the same time: a BatchExecutor."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """See DeviceExecutor."""
        super().__init__(*args, **settings)
        requests = self._tuning.seats
        self.dtype = self._dtype
        self._seats = Seats(
            requests, self._task, self.program, self._comm, self._arena, self.context
        )
        self._changed = threading.Condition()
        # Only rank 0 has any of these: who waits, who joins now, and all who have not left.
        self._waiting: list[DeviceMember] = []
        self._joining: DeviceMember | None = None
        self._members: list[DeviceMember] = []
        self._is_batch = self._is_ending = False
        self._round = 0  # the number of the round that runs; 0: none
        # The seats that wait for a mask, and whether one of them does so no more; on rank 0.
        self._left_out: set[int] = set()
        self._comes_back = False
        self._batch_error: BaseException | None = None
        self._of_rounds: dict[bool, Compiled] = {}  # by whether it samples

    def _prepare_round(self, requests: Sequence[SamplingParams]) -> None:
        """Compiles and loads the kernel for these requests, if it is a new one. No kernel runs on
        any rank then, because a GPU may load none while a kernel waits for another rank.
        """
        samples = any(map(wants_sampling, requests))
        if samples not in self._of_rounds:
            columns = self._tuning.seats
            self._of_rounds[samples] = self._kernels.get(
                samples=samples, columns=columns, has_seats=True
            )
            task = structs.new_task(self._task)
            structs.begin(task, self._mailbox)
            task.only_reads, task.num_ids, task.num_seats = 1, 0, 0
            self._grids.decode(self._of_rounds[samples], task)
            self._launcher.wait()
            self._comm.gather_objects(None)
        self._round_decoder = self._of_rounds[samples]

    # ---- what Batch calls ------------------------------------------------------------------------

    def start_batch(self) -> None:
        """See BatchExecutor."""
        self._begin()
        with self._changed:
            self._is_batch, self._is_ending = True, False
            self._waiting, self._members, self._batch_error = [], [], None
        self._work.start(self._run_batch)

    def join(self, ids: Sequence[int], params: SamplingParams, place: Place) -> DeviceMember:
        """See BatchExecutor.

        Raises:
            InvalidArgument: The request has a grammar, and there are several ranks.
        """
        ids = check_ids(ids, self.context, room=1)
        world_size = self._comm.world_size
        if params.grammar is not None and world_size > 1:
            raise kccl.InvalidArgument(
                f"grammar is given, must be None with slots on {world_size} ranks of backend "
                f"{self._comm.backend!r}, where only rank 0 has masks; with one slot it runs"
            )
        check_sampling(params)
        look_s = _LOOK_S if self.device else _LOOK_AT_SIMULATOR_S
        with self._changed:
            if not self._is_batch or self._is_ending or self._batch_error is not None:
                raise kccl.Error("the executor runs no batch that this request could join")
            taken = {each.number for each in self._members}
            number = next(i for i in range(len(self._seats.all)) if i not in taken)
            order = {"number": number, "ids": ids, "params": params.to_json()}
            order["place"] = list(place)
            member = DeviceMember(self, number, order, look_s)
            self._waiting.append(member)
            self._members.append(member)
            self._end_round()
            self._changed.notify_all()
        return member

    def cancel(self) -> None:
        """See Executor. Ends the batch, if one runs."""
        with self._changed:
            if not self._is_batch:
                super().cancel()
                return
            self._is_ending = True
            for each in self._members:
                self._cancel(each)
            self._changed.notify_all()

    # ---- what members call -----------------------------------------------------------------------

    def seat(self, number: int) -> Seat:
        """Returns a seat."""
        return self._seats.all[number]

    def check(self) -> None:
        """Raises kccl.Error if the batch has failed, or the executor is closed."""
        if self._batch_error is not None:
            raise kccl.Error(f"the batch has failed: {self._batch_error}") from self._batch_error
        if self._is_closed:
            raise kccl.Error("the engine is closed")

    def until(self, is_true: Callable[[], bool]) -> None:
        """Waits until is_true(), which is called with the lock held. Raises as check()."""
        with self._changed:
            self._changed.wait_for(
                lambda: is_true() or self._batch_error is not None or self._is_closed
            )
            if not is_true():
                self.check()

    def cancel_member(self, member: DeviceMember) -> None:
        """Asks a member to end."""
        with self._changed:
            self._cancel(member)
            self._changed.notify_all()

    def _cancel(self, member: DeviceMember) -> None:
        member.is_cancelled = True
        if member in self._waiting:
            self._waiting.remove(member)
            member.is_over = True
        elif member.task is not None and not member.is_over:
            self.seat(member.number).mailbox.cancelled = member.task.number
            self._come_back(member)

    def has_mask(self, member: DeviceMember, position: int) -> None:
        """Records that a member's seat has the mask of a position."""
        with self._changed:
            member.masked = position
            self._come_back(member)
            self._changed.notify_all()

    def _come_back(self, member: DeviceMember) -> None:
        """Ends the round that runs, if a member was left out of it. Called with the lock held."""
        if member.number in self._left_out:
            self._left_out.discard(member.number)
            self._comes_back = True
            self._end_round()

    def leave(self, member: DeviceMember) -> None:
        """Ends a member, and gives its seat away."""
        with self._changed:
            self._cancel(member)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: member.is_over or self._batch_error is not None or not self._is_batch
            )
            self._members.remove(member)

    # ---- rounds ----------------------------------------------------------------------------------

    def _run_batch(self) -> None:
        try:
            running: list[_Running] = []
            while (order := self._comm.gather_objects(self._order(running))[0]) is not None:
                joins = order["joins"]
                some = [each for each in running if each.number in order["runs"]]
                params = [each.params for each in some]
                if joins is not None:
                    params.append(SamplingParams.from_json(joins["params"]))
                self._prepare_round(params)
                if joins is not None:
                    joined = self._admit(joins, params[-1])
                    running.append(joined)
                    if not joined.lacks_mask:
                        some.append(joined)
                if some:
                    self._run_round(some)
                running = [each for each in running if not each.has_ended]
        except BaseException as error:
            self._batch_error = error
            raise
        finally:
            with self._changed:
                self._is_batch = False
                self._changed.notify_all()

    def _order(self, running: Sequence[_Running]) -> dict[str, Any] | None:
        """Returns what rank 0 tells the others: which seats' requests run in the next round, and
        who joins before it, or None at the batch's end. Waits while there is nothing to do. The
        other ranks tell nothing.
        """
        if self._comm.rank != 0:
            return None
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready(running) or self._waiting or (self._is_ending and not running)
            )
            ready = self._ready(running)
            self._comes_back = False
            if not self._waiting:
                return {"joins": None, "runs": ready} if ready else None
            self._joining = self._waiting.pop(0)
            return {"joins": self._joining.order, "runs": ready}

    def _ready(self, running: Sequence[_Running]) -> list[int]:
        """Returns the numbers of the seats whose requests can run, and marks the others as lacking
        a mask. Called with the lock held.
        """
        members = {each.number: each for each in self._members if each.task is not None}
        for each in running:
            member = members[each.number]
            # The kernel ends a cancelled request.
            if member.is_cancelled or member.masked == each.num_ids + each.made:
                each.lacks_mask = False
        self._left_out = {each.number for each in running if each.lacks_mask}
        return [each.number for each in running if not each.lacks_mask]

    def _admit(self, order: dict[str, Any], params: SamplingParams) -> _Running:
        """Gives a request its seat, and runs its prompt but for the last id."""
        ids, place, seat = order["ids"], Place(*order["place"]), self.seat(order["number"])
        structs.begin(self._task, self._mailbox)
        seat.begin(self._task, self._loaded.caches[place.slot], place.num_cached, ids, params)
        joined = _Running(order["number"], params, len(ids))
        joined.lacks_mask = params.grammar is not None
        if self._comm.rank == 0:
            with self._changed:
                assert self._joining is not None
                if joined.lacks_mask:
                    self._left_out.add(joined.number)
                self._joining.task = seat.task
                if self._joining.is_cancelled:
                    self._cancel(self._joining)
                self._changed.notify_all()
        self._copy_beginning(place)
        self._run_prompt(seat.task)
        return joined

    def _run_prompt(self, task: Any) -> None:
        """Runs a request's ids that the cache does not have, but for the last one."""
        prefill = structs.split_off_prefill(task, self._tuning, self._passes)
        if prefill is not None:
            self._passes += structs.num_passes(prefill, self._tuning)
            self._grids.prefill(prefill)
        elif task.start < task.num_ids - 1:
            # Prompts run one position at a time, by the usual kernel.
            prompt = structs.new_task(task)
            task.start = prompt.num_ids = task.num_ids - 1
            prompt.mailbox, prompt.max_tokens = self._task.mailbox, 0
            self._grids.decode(self._kernels.usual, prompt)
            self._launcher.wait()
            self._comm.check()

    def _run_round(self, running: Sequence[_Running]) -> None:
        """Runs token steps until a request ends or another one waits."""
        task, seats = self._task, [self.seat(each.number) for each in running]
        structs.begin(task, self._mailbox)
        self._seats.give_to(task, seats)
        self._loaded.choices.give_to(task, SamplingParams())
        with self._changed:
            self._round = task.number
            if self._waiting or self._comes_back:
                self._end_round()
        self._grids.decode(self._round_decoder, task)
        self._launcher.wait()
        with self._changed:
            self._round = 0
        self._comm.check()
        steps = (self._mailbox.token_steps - task.token_step) % (1 << 32)
        for each, seat in zip(running, seats, strict=True):
            # The last token step of a round makes no token of a request without its mask.
            each.made += steps
            if seat.tokens[each.made - 1].number != seat.task.number:
                each.made, each.lacks_mask = each.made - 1, True
                if each.made == 0:
                    continue
            last, end = structs.id_and_end(seat.tokens[each.made - 1])
            each.has_ended = end != lib.kKcclEngineGoesOn
            if not each.has_ended:
                seat.goes_on(each.made, last)
        if self._comm.rank == 0:
            with self._changed:
                over = {each.number for each in running if each.has_ended}
                for member in self._members:
                    if member.number in over and member.task is not None:
                        member.is_over = True
                self._changed.notify_all()

    def _end_round(self) -> None:
        """Asks the round that runs to end. Called with the lock held."""
        if self._round:
            self._mailbox.cancelled = self._round
