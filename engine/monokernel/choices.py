"""Prepares the choice of tokens in the monokernel: fills in its fields of the task, and allocates
its memory.

For the ids whose rows of the head it has, a rank holds marks (which ids the prompt or the answer
has), counts (how often the answer has an id) and biases.
"""

import ctypes
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.core import lib
from ..model.program import Program
from ..model.sample import SamplingParams
from ..model.structs import sampling_of
from .layout import head_ids, head_rows
from .memory import Arena
from .task import TOKEN_BYTES, tokens_at

MOST_STOP_IDS = 64
_MOST_ALTERNATIVES: int = lib.kKcclEngineMaxAlternatives


def penalizes_answer(params: SamplingParams) -> bool:
    """Tells whether the kernel must count how often each id occurs in the answer."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0


class Choices:
    """A rank's memory for the choice of tokens."""

    def __init__(
        self,
        task: Any,
        mailbox: Any,
        program: Program,
        comm: kccl.Communicator,
        arena: Arena,
        context: int,
        columns: int = 1,
    ) -> None:
        """Allocates the memory. Collective.

        Args:
            task: The rank's KcclDecodeTask, which gets the addresses that all requests use.
            mailbox: The rank's KcclDecodeMailbox.
            program: The model's program.
            comm: The communicator of all ranks.
            arena: Allocates the memory.
            context: The positions that a slot of the KV cache has room for.
            columns: The most positions that a token step runs.
        """
        rows = head_rows(program, comm.world_size)
        self._arena, self._mailbox = arena, mailbox
        self._ids = head_ids(program, comm.rank, comm.world_size)
        self._vocab_size = program.config.vocab_size
        task.stop_ids = arena.allocate(4 * MOST_STOP_IDS)
        task.own_logits = arena.allocate(4 * rows * columns)
        self._marks, self._counts = arena.allocate(4 * rows), arena.allocate(4 * rows)
        self._biases = arena.allocate(8 * rows)
        num = context * _MOST_ALTERNATIVES
        task.alternatives = arena.on_host(TOKEN_BYTES * num)
        self._alternatives = tokens_at(task.alternatives, num)
        self._mask_bytes = (program.config.vocab_size + 31) // 32 * 4
        self._mask = arena.on_host(self._mask_bytes)
        self._order = threading.Lock()

    def give_to(self, task: Any, params: SamplingParams) -> None:
        """Fills in the fields of a KcclDecodeTask that say how tokens are chosen, and the memory to
        which they point.
        """
        if params.stop_ids:
            self._arena.write(task.stop_ids, np.asarray(params.stop_ids, np.int32))
        task.num_stop_ids = len(params.stop_ids)
        task.sampling = sampling_of(params)
        task.marks = self._marks if params.repetition_penalty != 1 else 0
        task.counts = self._counts if penalizes_answer(params) else 0
        task.presence_penalty = params.presence_penalty
        task.frequency_penalty = params.frequency_penalty
        task.logit_biases = self._biases if params.biases else 0
        if params.biases:
            biases = np.zeros(len(self._ids))
            for token, bias in params.biases:
                if token in self._ids:
                    biases[token - self._ids.start] = bias
            self._arena.write(self._biases, biases)
        task.num_alternatives = min(params.top_logprobs, self._vocab_size)
        task.mask = self._mask if params.grammar is not None else 0
        # Position 0 means that there is no mask. The prompt has at least one id, so no mask is for
        # position 0.
        self._mailbox.masked = self._mailbox.awaited = 0

    def post_mask(self, position: int, words: NDArray[np.uint32]) -> None:
        """Gives the kernel the mask of a position: Executor.post_mask()."""
        words = np.ascontiguousarray(words, np.uint32)
        # The kernel reads the mask once it sees the position. Releasing the lock and acquiring it
        # again orders the two writes.
        with self._order:
            ctypes.memmove(self._mask, words.ctypes.data, self._mask_bytes)
        with self._order:
            self._mailbox.masked = position

    def alternatives(self, task: Any, index: int) -> list[Any]:
        """Returns the likeliest ids that the kernel wrote for the answer's token number `index`, as
        KcclDecodeTokens, the likeliest first.
        """
        first = index * _MOST_ALTERNATIVES
        return [self._alternatives[first + i] for i in range(task.num_alternatives)]
