"""A rank's memory for requests that run at the same time: see kernels/seats.cuh."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import kccl

from ..base.core import ffi
from ..model.program import Program
from ..model.sample import SamplingParams
from . import task as structs
from .choices import Choices
from .memory import Arena


class Seat:
    """The memory of one request.

    Attributes:
        task: The KcclDecodeTask of the request that has the seat.
        mailbox, tokens: KcclDecodeMailbox and KcclDecodeToken [context], in host memory that the
            kernel reads and writes.
        choices: Prepares the choice of the request's tokens.
    """

    def __init__(
        self, task: Any, program: Program, comm: kccl.Communicator, arena: Arena, context: int
    ) -> None:
        """Allocates the memory. Collective. `task` has the addresses that all requests share."""
        self.task = structs.new_task(task)
        self.task.mailbox = arena.on_host(structs.MAILBOX_BYTES)
        self.mailbox = structs.mailbox_at(self.task.mailbox)
        self.task.ids = arena.allocate(4 * context)
        self.choices = Choices(self.task, self.mailbox, program, comm, arena, context)
        self.task.tokens = arena.on_host(structs.TOKEN_BYTES * context)
        self.tokens = structs.tokens_at(self.task.tokens, context)
        self._arena = arena

    def begin(
        self, shared: Any, cache: int, start: int, ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Gives the seat to a request.

        Args:
            shared: The rank's KcclDecodeTask, with the number that the request gets.
            cache: The address of its slot of the KV cache.
            start: How many positions the cache has already.
            ids, params: The prompt, and how tokens are chosen.
        """
        task, kept = structs.new_task(shared), self.task
        for name in ("mailbox", "ids", "stop_ids", "alternatives", "tokens"):
            setattr(task, name, getattr(kept, name))
        task.cache, task.start = cache, start
        task.num_ids, task.max_tokens = len(ids), params.max_tokens
        self._arena.write(task.ids, np.asarray(ids, np.int32))
        self.choices.give_to(task, params)
        self.task = task

    def goes_on(self, num_made: int, last: int) -> None:
        """Prepares the next round of the request, whose answer has num_made tokens. `last` is the
        id of the last one.
        """
        self.task.start = self.task.num_ids - 1 + num_made
        self._arena.write(self.task.ids + 4 * self.task.start, np.asarray([last], np.int32))


class Seats:
    """All seats of a rank."""

    def __init__(
        self,
        number: int,
        task: Any,
        program: Program,
        comm: kccl.Communicator,
        arena: Arena,
        context: int,
    ) -> None:
        """Allocates the memory of `number` seats. The others are as in Seat. Collective."""
        self.all = [Seat(task, program, comm, arena, context) for _ in range(number)]
        self._address = arena.allocate(number * ffi.sizeof("KcclDecodeTask"))
        self._arena = arena

    def give_to(self, task: Any, seats: Sequence[Seat]) -> None:
        """Makes `task`, which structs.begin() has prepared, a round of these seats' requests."""
        data = b"".join(bytes(ffi.buffer(seat.task)) for seat in seats)
        self._arena.write(self._address, np.frombuffer(data, np.uint8))
        task.seats, task.num_seats = self._address, len(seats)
        task.start = task.num_ids = 0
        task.max_tokens = 1
