"""One rank of the host executor: pinned threads that decode a whole request by themselves."""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kccl

from ..checkpoint import Checkpoint
from ..program import Op, Program
from ..sample import SamplingParams
from .core import ffi, lib
from .packing import ROWS_AT_ONCE, PackedWeights, Parts, Progress, pair_order

# How long one look for the next token lasts: then the interpreter may handle Ctrl-C.
_LOOK_NS = 100_000_000
_ENDS = {
    lib.kKcclEngineStopId: "stop",
    lib.kKcclEngineMaxTokens: "max_tokens",
    lib.kKcclEngineContextFull: "context",
    lib.kKcclEngineCancelled: "cancelled",
}


class Token(NamedTuple):
    """A token as it was chosen.

    Attributes:
        id: The token.
        logprob: Its log-probability; NaN unless asked for.
        end: "" while the request goes on; "stop", "max_tokens" or "context" at its last token.
        time_s: When it was chosen, by time.monotonic().
    """

    id: int
    logprob: float
    end: str
    time_s: float


class HostExecutor:
    """One rank's threads, weights and KV cache. All ranks make the same calls.

    Attributes:
        program: The model's program.
        context: Positions that the KV cache has room for.
        nbytes: Of this rank's packed weights, the embedding's rows included.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        comm: kccl.Communicator,
        *,
        blocks: int,
        cpus: Sequence[int] = (),
        context: int = 0,
        progress: Progress = lambda nbytes: None,
    ) -> None:
        """Packs this rank's weights and starts its threads. Collective.

        Args:
            checkpoint: The model; may be closed afterwards.
            comm: Its ranks share the lanes. It stays open as long as this.
            blocks: Threads of each rank, the same on all.
            cpus: The core of each thread; empty: any.
            context: Positions to make room for; 0: the model's context.
            progress: See packing.Progress.
        """
        config = checkpoint.config
        if not 1 <= blocks <= lib.kKcclEngineMaxBlocks:
            raise kccl.InvalidArgument(
                f"blocks is {blocks}, must be from 1 to {lib.kKcclEngineMaxBlocks}"
            )
        if not 0 <= context <= config.context:
            raise kccl.InvalidArgument(
                f"context is {context}, must be from 1 to the model's, {config.context}"
            )
        self.program = Program(config)
        self.context = context or config.context
        self._comm = comm
        self._rank = comm.rank
        parts = Parts(self.program, comm.world_size)
        self._parts = parts
        self._order = pair_order(config.head_dim, is_interleaved=config.rope.is_interleaved)
        self._weights = PackedWeights(checkpoint, self.program, parts, comm.rank, progress)
        self._model = self._make_model()
        self._window = comm.window(lib.kccl_engine_window_bytes(self._model, comm.world_size))
        self.nbytes = self._weights.nbytes + self._place_embedding(checkpoint, progress)
        self._team = self._make_team(blocks, cpus)
        # All windows are complete, and waits have the usual limit from here on.
        comm.barrier()
        self._engine = lib.kccl_engine_open(self._model, self._team)
        if self._engine == ffi.NULL:
            raise kccl.BackendError(
                f"rank {comm.rank} has no memory for {self.context} positions: "
                f"{os.strerror(ffi.errno)}"
            )
        self._kept: Any = None

    def _place_embedding(self, checkpoint: Checkpoint, progress: Progress) -> int:
        """Copies this rank's rows to the window's beginning; returns their bytes."""
        first, end = self._parts.first_row[self._rank], self._parts.first_row[self._rank + 1]
        window, total = ffi.from_buffer(self._window.local), 0
        for start in range(first, end, ROWS_AT_ONCE):
            rows = checkpoint.rows("embedding", start, min(start + ROWS_AT_ONCE, end))
            some = ffi.from_buffer(np.ascontiguousarray(rows).view(np.uint16))
            ffi.memmove(window + total, some, len(some))
            total += len(some)
            progress(len(some))
        return total

    # ---- what the C side reads -------------------------------------------------------------------

    def _make_model(self) -> Any:
        c, program, parts = self.program.config, self.program, self._parts
        cosines, sines = (np.ascontiguousarray(t) for t in program.rotations(self.context))
        ops = ffi.new("KcclEngineOp[]", [self._op(op) for op in program.ops])
        self._alive = (cosines, sines, ops)
        lanes = c.num_lanes
        model = ffi.new("KcclEngineModel *")
        fields = {
            "num_ops": len(program.ops),
            "num_layers": c.num_layers,
            "num_lanes": lanes,
            "num_residuals": program.num_residuals,
            "num_in_flight": program.num_in_flight,
            "hidden": c.hidden,
            "heads": c.num_heads // lanes,
            "kv_heads": c.num_kv_heads // lanes,
            "ffn": c.ffn // lanes,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "num_head_groups": parts.num_groups,
            "context": self.context,
            "rounds_messages": c.message_dtype == "bfloat16",
            "norm_eps": c.norm_eps,
            "attention_scale": c.attention_scale,
            "ops": int(ffi.cast("uintptr_t", ops)),
            "cosines": cosines.ctypes.data,
            "sines": sines.ctypes.data,
        }
        for name, value in fields.items():
            setattr(model, name, value)
        for name in ("first_lane", "first_panel", "first_row"):
            for rank, value in enumerate(getattr(parts, name)):
                getattr(model, name)[rank] = value
        return model

    def _op(self, op: Op) -> dict[str, Any]:
        def address(suffix: str) -> int:
            names = [n for n in op.weights if n.rpartition(".")[2] in suffix.split()]
            return self._weights.norms[names[0]].ctypes.data if names else 0

        return {
            "kind": getattr(lib, "kKcclEngine" + op.kind.title().replace("_", "")),
            "layer": op.layer,
            "window": op.window,
            "module": -1 if op.module is None else op.module,
            "receives": -1 if op.receives is None else op.receives,
            "is_blocking": op.is_blocking,
            "sends": op.sends,
            "own_scale": op.own_scale,
            "weights": self._weights.address_of[op.index],
            "norm": address("attention_norm ffn_norm norm"),
            "q_norm": address("q_norm"),
            "k_norm": address("k_norm"),
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

    def start(self, ids: Sequence[int], params: SamplingParams, *, num_cached: int = 0) -> None:
        """Begins to generate behind `ids`, of which the cache has the first num_cached."""
        self._start(
            ids,
            task=lib.kKcclEngineGenerate,
            start=num_cached,
            max_tokens=params.max_tokens,
            top_k=params.top_k,
            wants_logprobs=params.logprobs,
            seed=params.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            stop_ids=params.stop_ids,
        )

    def tokens(self) -> Iterator[Token]:
        """The tokens of the request that was started, each as soon as it is chosen.

        Raises:
            kccl.Error: The logits are NaN. Or a rank was lost, or did not come.
        """
        token = ffi.new("KcclEngineToken *")
        while (found := lib.kccl_engine_next(self._engine, token, _LOOK_NS)) >= 0:
            if found == 0:
                continue
            if token.end == lib.kKcclEngineBadLogits:
                raise kccl.Error("the model's logits are NaN, or none is finite")
            if token.id >= 0:
                end = _ENDS.get(token.end, "")
                yield Token(token.id, token.logprob, end, token.time_ns * 1e-9)
        self._check()

    def cancel(self) -> None:
        """Ends the request at the next token; tokens() may yield some before."""
        lib.kccl_engine_cancel(self._engine)

    def start_scoring(self, ids: Sequence[int], out: NDArray[np.float32]) -> None:
        """Begins to write the logits behind each id to out, float32 [len(ids), vocab_size]."""
        self._start(ids, task=lib.kKcclEngineScore, out=out.ctypes.data, keep=out)

    def start_trace(self, ids: Sequence[int], op: Op, out: NDArray[np.float32]) -> None:
        """Begins to write what this rank has of an op's output to out, float32 [lanes or
        residuals, len(ids), values].
        """
        self._start(ids, task=lib.kKcclEngineTrace, stop_op=op.index, out=out.ctypes.data, keep=out)

    def as_reference(self, op: Op, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """A trace with the elements in the reference's order."""
        c = self.program.config
        if op.kind != "qkv":
            return out
        turned = (c.num_heads + c.num_kv_heads) // c.num_lanes * c.head_dim
        heads = out[..., :turned].reshape(*out.shape[:2], -1, c.head_dim)
        restored = np.empty_like(heads)
        restored[..., self._order] = heads
        parts = [restored.reshape(*out.shape[:2], -1), out[..., turned:]]
        return np.concatenate(parts, axis=-1)

    def start_streaming(self, turns: int) -> None:
        """Begins to read all weights so many times, and to do nothing else."""
        self._start([0], task=lib.kKcclEngineStream, max_tokens=turns)

    def wait(self) -> float:
        """Waits for the end of a request without tokens; returns the seconds that it took."""
        for _ in self.tokens():
            pass
        return self._check()

    def close(self) -> None:
        """Ends the threads."""
        if self._engine != ffi.NULL:
            lib.kccl_engine_close(self._engine)
            self._engine = ffi.NULL

    def _start(
        self, ids: Sequence[int], stop_ids: Sequence[int] = (), keep: Any = None, **fields: Any
    ) -> None:
        numbers, stops = ffi.new("int32_t[]", list(ids)), ffi.new("int32_t[]", list(stop_ids))
        request = ffi.new("KcclEngineRequest *")
        request.num_ids, request.num_stop_ids = len(ids), len(stop_ids)
        request.ids = int(ffi.cast("uintptr_t", numbers))
        request.stop_ids = int(ffi.cast("uintptr_t", stops))
        for name, value in fields.items():
            setattr(request, name, value)
        self._kept = (numbers, stops, keep)
        lib.kccl_engine_start(self._engine, request)

    def _check(self) -> float:
        seconds = ffi.new("double *")
        status = lib.kccl_engine_status(self._engine, seconds)
        if status != lib.kKcclOk:
            self._comm.check()
            raise kccl.Error(f"the executor failed with status {status}")
        return float(seconds[0]) if not math.isnan(seconds[0]) else 0.0
