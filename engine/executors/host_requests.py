"""Requests and tokens as the host executor's C interface has them (host/api.inc)."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.core import ENDS, ffi, lib
from ..model.drafts import HOST_PACE, Drafts
from ..model.executor import EndedElsewhere, Place, Token, bad_logits
from ..model.ngrams import Ngrams
from ..model.sample import SamplingParams
from ..model.structs import sampling_of

DTYPE = "bfloat16"
"""The dtype to which weights are converted, unless the executor multiplies the stored format."""
MOST_OF_TABLE = 1
"""The most drafts that a pass has from a table of n-grams."""
LOOK_NS = 100_000_000
"""The timeout of one wait in C for the next token. Python handles Ctrl-C between two waits."""


def fields_of(params: SamplingParams) -> dict[str, Any]:
    """Returns the fields of a KcclEngineRequest that say how tokens are chosen."""
    return {
        "max_tokens": params.max_tokens,
        "sampling": sampling_of(params),
        "num_alternatives": params.top_logprobs,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "is_masked": params.grammar is not None,
    }


def fields_of_drafts(drafts: Drafts, table: Ngrams | None) -> dict[str, Any]:
    """Returns the fields of a KcclEngineRequest that say how drafts are made, without a drafter."""
    pace = HOST_PACE.packed if drafts.adapts else 0
    fields: dict[str, Any] = {"most_drafts": drafts.most, "draft_pace": pace}
    # A draft saves time on the host if at least half of such drafts are accepted. The first draft
    # that a table gives in a pass comes near that share, and later ones stay far below it
    # (bench/LOG.md). So a pass takes one draft from the table, and none where the engine chooses
    # the number of drafts.
    if table is not None and drafts.uses_ngrams and not drafts.adapts:
        fields["ngrams"] = table.at(table.words.ctypes.data, MOST_OF_TABLE)
    return fields


def request_of(
    ids: Sequence[int],
    place: Place,
    stop_ids: Sequence[int],
    biases: Sequence[tuple[int, float]],
    fields: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Returns a KcclEngineRequest, and the arrays that it points to, which must live as long as the
    request runs.
    """
    request = ffi.new("KcclEngineRequest *")
    arrays: dict[str, Any] = {
        "ids": ffi.new("int32_t[]", list(ids)),
        "stop_ids": ffi.new("int32_t[]", list(stop_ids)),
        "bias_ids": ffi.new("int32_t[]", [token for token, _ in biases]),
        "biases": ffi.new("double[]", [bias for _, bias in biases]),
    }
    for name, array in arrays.items():
        setattr(request, name, int(ffi.cast("uintptr_t", array)))
    request.num_ids, request.num_stop_ids = len(ids), len(stop_ids)
    request.num_biases = len(biases)
    request.slot, request.source, request.start = place
    for name, value in fields.items():
        setattr(request, name, value)
    return request, arrays


def token_of(token: Any) -> Token:
    """Returns what a KcclEngineToken says.

    Raises:
        EndedElsewhere: The request was cancelled.
        kccl.Error: The logits are not finite.
    """
    if token.end == lib.kKcclEngineBadLogits:
        raise bad_logits(DTYPE)
    if token.end == lib.kKcclEngineCancelled:
        raise EndedElsewhere
    return Token(
        token.id,
        token.logprob,
        ENDS[token.end],
        token.time_ns * 1e-9,
        tuple(
            (token.alternatives[i].id, token.alternatives[i].logprob)
            for i in range(token.num_alternatives)
        ),
        getattr(token, "pass"),
        token.num_drafts,
        bool(token.is_draft),
    )


class HostMember:
    """A request of a batch on the host: a Member (model/batches.py)."""

    def __init__(
        self,
        in_use: Callable[[], AbstractContextManager[Any]],
        check: Callable[[], float],
        request: Any,
        arrays: Any,
    ) -> None:
        """Adds the request to the batch.

        Args:
            in_use: Makes contexts in which the C executor, which entering returns, stays open.
            check: Raises kccl.Error if a wait of the executor has failed.
            request, arrays: From request_of().

        Raises:
            kccl.Error: No batch runs, or there is no memory for the logits of a request with a
                grammar.
        """
        self._in_use, self._check, self._arrays = in_use, check, arrays
        with in_use() as engine:
            self._number = lib.kccl_engine_join(engine, request)
        if self._number == -2:
            raise kccl.Error("there is no memory for the logits of a request with a grammar")
        if self._number < 0:
            check()
            raise kccl.Error("the executor runs no batch that this request could join")

    def tokens(self) -> Generator[Token, None, None]:
        """See Member."""
        token = ffi.new("KcclEngineToken *")
        while True:
            with self._in_use() as engine:
                found = lib.kccl_engine_next_of(engine, self._number, token, LOOK_NS)
            if found > 0:
                yield token_of(token)
            elif found < 0:
                break
        self._check()

    def post_mask(self, position: int, words: NDArray[np.uint32]) -> None:
        """See Member."""
        words = np.ascontiguousarray(words, np.uint32)
        address = ffi.cast("uint32_t *", words.ctypes.data)
        with self._in_use() as engine:
            lib.kccl_engine_post_mask_of(engine, self._number, position, address)

    def cancel(self) -> None:
        """See Member."""
        with self._in_use() as engine:
            lib.kccl_engine_cancel_of(engine, self._number)

    def leave(self) -> None:
        """See Member."""
        left = 0
        # A closed executor raises kccl.Error: its close() has ended the request.
        with suppress(kccl.Error):
            while not left:
                with self._in_use() as engine:
                    left = lib.kccl_engine_leave(engine, self._number, LOOK_NS)
        self._arrays = None
