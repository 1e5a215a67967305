"""Runs one rank of the host executor: pinned threads in C++ that decode a whole request."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.core import ffi, lib
from ..files.checkpoint import Checkpoint
from ..files.packed_cache import PackedCache
from ..model.batches import Member
from ..model.drafts import OFF, Drafts
from ..model.executor import BEGINNING, Place, Token, Traced
from ..model.ngrams import Ngrams
from ..model.ops import KINDS, Vector
from ..model.program import Op, Program
from ..model.rotations import Rotations, pair_order
from ..model.sample import SamplingParams
from ..model.structs import rule_of
from ..model.timeline import Stamps
from ..model.variant import USUAL, Variant
from .drafting import Drafting, predicting
from .host_requests import LOOK_NS, HostMember, fields_of, fields_of_drafts, request_of, token_of
from .packing import (
    PANELS_AT_ONCE,
    ROWS,
    PackedWeights,
    Parts,
    Progress,
    format_number,
    number_of,
    shape_of,
)


class HostExecutor:
    """One rank's threads, weights and KV cache: an Executor (executor.py). `nbytes` counts the
    packed weights and this rank's rows of the embedding.
    """

    kv_item_bytes = 4
    traces_several = False
    device = ""

    def __init__(
        self,
        checkpoint: Checkpoint,
        comm: kccl.Communicator,
        *,
        blocks: int,
        cpus: Sequence[int] = (),
        context: int,
        slots: int = 1,
        ngrams: Ngrams | None = None,
        progress: Progress = lambda nbytes: None,
        packed: PackedCache | None = None,
    ) -> None:
        """Packs this rank's weights and starts its threads. Collective: all ranks must call it.

        Args:
            checkpoint: The model. The caller may close it afterwards.
            comm: The communicator whose ranks share the lanes. It must stay open as long as this
                object.
            blocks: The threads of each rank, equally many on all ranks.
            cpus: The core to which each thread is pinned. If empty, threads may run on any core.
            context: The positions that a slot of the KV cache has room for.
            slots: The number of sequences that the KV cache keeps, each in a slot.
            ngrams: The table of n-grams from which drafts come.
            progress: See packing.Progress.
            packed: The folder that keeps packed weights; None: they are not kept.

        Raises:
            InvalidArgument: An argument is out of range.
            BackendError: There is no memory, or a thread cannot start.
        """
        config = checkpoint.config
        if not 1 <= blocks <= lib.kKcclEngineMaxBlocks:
            raise kccl.InvalidArgument(
                f"blocks is {blocks}, must be from 1 to {lib.kKcclEngineMaxBlocks}"
            )
        self.program = Program(config, checkpoint.formats)
        self.context = context
        self.num_slots = slots
        self._comm = comm
        self._rank = comm.rank
        parts = Parts(self.program, comm.world_size)
        self._parts = parts
        self._order = pair_order(config.head_dim, is_interleaved=config.rope.is_interleaved)
        given = checkpoint, self.program, parts, comm.rank, progress, packed
        self._weights = PackedWeights(*given)
        self.rotations = Rotations(self.program, context)
        self._model = self._make_model()
        self._window = comm.window(lib.kccl_engine_window_bytes(self._model, comm.world_size))
        self.nbytes = self._weights.nbytes + self._place_embedding(checkpoint, progress)
        self._team = self._make_team(blocks, cpus)
        self.cpus: Sequence[int] = tuple(cpus or os.sched_getaffinity(0))
        # After the first barrier, all ranks' windows are complete. The second one shows that the
        # first has succeeded on all ranks. From then on waits have the usual timeout, no longer the
        # first call's.
        comm.barrier()
        comm.barrier()
        self._kept: Any = None
        self.drafts: Drafts = OFF
        self._ngrams = ngrams
        self._drafting: Drafting | None = None
        # Guards _engine, which close() frees, while a C function uses it. Reentrant, because the
        # garbage collector may end a request in this thread during such a call.
        self._guard = threading.RLock()
        # How many threads are in _in_use(). close() waits until there is none.
        self._num_users, self._unused = 0, threading.Condition(self._guard)
        self._engine = lib.kccl_engine_open(self._model, self._team)
        if self._engine == ffi.NULL:
            raise kccl.BackendError(
                f"rank {comm.rank} cannot start {blocks} threads with {self.context} positions: "
                f"{os.strerror(ffi.errno)}"
            )

    def _place_embedding(self, checkpoint: Checkpoint, progress: Progress) -> int:
        """Copies this rank's rows of the embedding to the beginning of its window, where all ranks
        can read them. Returns the number of bytes.
        """
        first, end = self._parts.first_row[self._rank], self._parts.first_row[self._rank + 1]
        window, total = ffi.from_buffer(self._window.local), 0
        at_once = PANELS_AT_ONCE * ROWS
        for start in range(first, end, at_once):
            rows = checkpoint.read_rows("embedding", start, min(start + at_once, end))
            some = ffi.from_buffer(np.ascontiguousarray(rows.words))
            ffi.memmove(window + total, some, len(some))
            total += len(some)
            progress(len(some))
        return total

    # ---- what the C side reads -------------------------------------------------------------------

    def _make_model(self) -> Any:
        program, parts = self.program, self._parts
        ops = ffi.new("KcclEngineOp[]", [self._op(op) for op in program.ops])
        self._alive = ops
        model = shape_of(program, parts)
        model.context = self.context
        model.num_slots = self.num_slots
        model.ops = int(ffi.cast("uintptr_t", ops))
        model.cosines = self.rotations.cosines.ctypes.data
        model.sines = self.rotations.sines.ctypes.data
        return model

    def _op(self, op: Op) -> dict[str, Any]:
        kind = KINDS[op.kind]
        names = {name.rpartition(".")[2]: name for name in op.weights}

        def address(norm: str) -> int:
            return self._weights.norms[names[norm]].ctypes.data if norm in names else 0

        q_norm, k_norm = kind.head_norms or ("", "")
        return {
            "kind": number_of(op),
            "layer": op.layer,
            "num_vectors": op.shape[0],
            "width": op.shape[1],
            "window": op.window,
            "module": op.module,
            "rule": rule_of(op),
            "parts": [
                (format_number(part.format), part.first) for part in self._weights.parts_of(op)
            ],
            "weights": self._weights.address_of[op.index],
            "norm": address(kind.norm),
            "q_norm": address(q_norm),
            "k_norm": address(k_norm),
            "bias": self._weights.biases[op.index].ctypes.data if op.biases else 0,
            "sinks": self._weights.sinks[op.index].ctypes.data if op.sinks() else 0,
        }

    def _make_team(self, blocks: int, cpus: Sequence[int]) -> Any:
        team = ffi.new("KcclEngineTeam *")
        comm = self._comm.device_comm(channels=1, max_bytes=64, exchange_bytes=64)
        ffi.memmove(ffi.addressof(team.comm), comm.data, len(comm.data))
        for rank, address in enumerate(self._window.addresses):
            team.window[rank] = address
        team.num_blocks = blocks
        for block in range(lib.kKcclEngineMaxBlocks):
            team.cpus[block] = cpus[block] if block < len(cpus) else -1
        return team

    # ---- requests --------------------------------------------------------------------------------

    def prepare(self, params: SamplingParams, *, overlaps: bool = True) -> None:
        """See Executor."""
        if not overlaps:
            raise kccl.InvalidArgument("overlaps is False, must be True on backend 'host'")

    def start(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        place: Place = BEGINNING,
        overlaps: bool = True,
    ) -> None:
        """See Executor."""
        drafts, drafting = self.drafts, None
        drafter = predicting(len(ids), drafts.prediction) if drafts.prediction else drafts.drafter
        # Rank 0 makes the drafts for all ranks. So the others have no drafter.
        if drafter is not None and self._rank == 0:
            drafting = Drafting(drafter, self.program.config.vocab_size, self)
        self._start(
            ids,
            task=lib.kKcclEngineGenerate,
            **fields_of_drafts(drafts, self._ngrams),
            drafter=drafting.address if drafting else 0,
            drafter_context=drafting.context if drafting else 0,
            keep=drafting,
            place=place,
            stop_ids=params.stop_ids,
            biases=params.biases,
            **fields_of(params),
        )
        self._drafting = drafting

    def start_batch(self) -> None:
        """See BatchExecutor."""
        self._start([0], task=lib.kKcclEngineBatch)

    def join(self, ids: Sequence[int], params: SamplingParams, place: Place) -> Member:
        """See BatchExecutor."""
        fields = fields_of(params) | {"task": lib.kKcclEngineGenerate}
        fields |= fields_of_drafts(self.drafts, self._ngrams)
        asked = request_of(ids, place, params.stop_ids, params.biases, fields)
        return HostMember(self._in_use, self._check, *asked)

    def tokens(self) -> Iterator[Token]:
        """See Executor."""
        token = ffi.new("KcclEngineToken *")
        while (found := self._call(lib.kccl_engine_next, token, LOOK_NS)) >= 0:
            if self._drafting is not None and self._drafting.error is not None:
                # The request still runs in C++: the caller must end it with end(), as after any
                # other failure.
                raise self._drafting.error
            if found != 0:
                yield token_of(token)
        self._check()

    def post_mask(self, position: int, words: NDArray[np.uint32]) -> None:
        """See Executor. Rank 0 chooses the tokens for all ranks, so only it needs the mask."""
        if self._rank == 0:
            words = np.ascontiguousarray(words, np.uint32)
            address = ffi.cast("uint32_t *", words.ctypes.data)
            self._call(lib.kccl_engine_post_mask, position, address)

    def cancel(self) -> None:
        """See Executor."""
        self._call(lib.kccl_engine_cancel)

    def end(self) -> None:
        """See Executor."""
        self._call(lib.kccl_engine_cancel)
        token = ffi.new("KcclEngineToken *")
        while self._call(lib.kccl_engine_next, token, LOOK_NS) >= 0:
            pass
        self._kept = self._drafting = None
        self._check()

    def prepare_scoring(self) -> None:
        """See Executor."""

    def start_scoring(
        self,
        ids: Sequence[int],
        out: NDArray[np.float32],
        *,
        writes_shared: bool,
        place: Place = BEGINNING,
    ) -> None:
        """See Executor."""
        self._start(
            ids,
            task=lib.kKcclEngineScore,
            place=place,
            out=out.ctypes.data,
            writes_shared=writes_shared,
            keep=out,
        )

    def start_trace(self, ids: Sequence[int], outs: Traced, *, writes_shared: bool) -> None:
        """See Executor."""
        ((op_index, out),) = outs.items()
        self._start(
            ids,
            task=lib.kKcclEngineTrace,
            stop_op=op_index,
            out=out.ctypes.data,
            writes_shared=writes_shared,
            keep=out,
        )

    def as_reference(self, op: Op, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """See Executor."""
        c = self.program.config
        if KINDS[op.kind].gives is not Vector.HEADS:
            return out
        turned = (c.num_heads + c.num_kv_heads) // c.num_lanes * c.head_dim
        heads = out[..., :turned].reshape(*out.shape[:2], -1, c.head_dim)
        restored = np.empty_like(heads)
        restored[..., self._order] = heads
        parts = [restored.reshape(*out.shape[:2], -1), out[..., turned:]]
        return np.concatenate(parts, axis=-1)

    def start_streaming(self, turns: int) -> None:
        """See Executor."""
        self._start([0], task=lib.kKcclEngineStream, max_tokens=turns)

    def use(self, variant: Variant) -> None:
        """See Executor."""
        if variant != USUAL:
            raise kccl.InvalidArgument("backend 'host' has no kernel of which there are variants")

    def start_timeline(
        self, ids: Sequence[int], place: Place, token_steps: int, out: list[Stamps]
    ) -> None:
        """See Executor."""
        raise kccl.InvalidArgument("backend 'host' has no kernel that traces")

    def wait(self) -> float:
        """See Executor."""
        for _ in self.tokens():
            pass
        return self._check()

    def close(self) -> None:
        """See Executor."""
        with self._unused:
            engine, self._engine = self._engine, ffi.NULL
            self._unused.wait_for(lambda: self._num_users == 0)
        if engine != ffi.NULL:
            lib.kccl_engine_close(engine)
            self._weights.close()

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Calls a C function with the executor. Raises kccl.Error if the executor is closed."""
        with self._guard:
            if self._engine == ffi.NULL:
                raise kccl.Error("the engine is closed")
            return function(self._engine, *arguments)

    @contextmanager
    def _in_use(self) -> Iterator[Any]:
        """Makes a context in which the C executor stays open, for calls of several threads at once.
        Raises kccl.Error if the executor is closed.
        """
        with self._guard:
            if self._engine == ffi.NULL:
                raise kccl.Error("the engine is closed")
            self._num_users += 1
            engine = self._engine
        try:
            yield engine
        finally:
            with self._unused:
                self._num_users -= 1
                self._unused.notify_all()

    def _start(
        self,
        ids: Sequence[int],
        *,
        place: Place = BEGINNING,
        stop_ids: Sequence[int] = (),
        biases: Sequence[tuple[int, float]] = (),
        keep: Any = None,
        **fields: Any,
    ) -> None:
        request, arrays = request_of(ids, place, stop_ids, biases, fields)
        # The C++ threads read these arrays, so they are kept alive until the request has ended.
        before, self._kept = self._kept, (arrays, keep)
        if self._call(lib.kccl_engine_start, request) != 0:
            self._kept = before
            raise kccl.Error(f"rank {self._rank} still works on the request before")

    def _check(self) -> float:
        seconds = ffi.new("double *")
        status = self._call(lib.kccl_engine_status, seconds)
        if status != lib.kKcclOk:
            slowest_s = 0.0 if self._drafting is None else self._drafting.slowest_s
            if slowest_s > self._comm.timeout:
                raise kccl.Timeout(
                    f"the drafter took {slowest_s:.3g} s, must return within KCCL_TIMEOUT, "
                    f"{self._comm.timeout:g} s",
                    rank=self._rank,
                    waited_s=slowest_s,
                )
            self._comm.check()
            raise kccl.Error(f"the executor failed with status {status}")
        return float(seconds[0])
