"""A model in PyTorch: this rank's weights, and a decoder with a static KV cache.

It runs the engine's program of ops (engine/model/program.py). A lane is a share of the heads and of
the MLP's columns. In a Laneformer each lane has its own residual, and other lanes add its outputs
(its messages) some layers later. There the lanes of a rank are the batch of each product. In
ordinary models all lanes share one residual, and the lanes of a rank are joined to one matrix. On
several ranks, messages are summed on a second stream while the layers in between are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kccl
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.model.ops import BIASES, KINDS
from kccl.engine.model.program import Op, Program

from . import layers
from .experts import Mixture, is_of_mixture, many_tokens, read_mixture
from .layers import PAGE, Heads, Product
from .matrices import Matrix, changed, on_device, stacked
from .ranks import Ranks

# The number of positions of a prompt that run at once.
_CHUNK = 512
# torch.compile makes dimensions of size 0 and 1 constants. So a call has at least this many pages.
_LEAST_PAGES = 2


@dataclass(frozen=True)
class Pieces:
    """The functions of layers.py that a step calls, compiled or not."""

    product: Product
    gated: Callable[[Tensor, Matrix, Tensor | None], Tensor]
    add_and_norm: Callable[..., tuple[Tensor, Tensor]] = layers.add_and_norm
    attention: Callable[..., Tensor] = layers.attention
    experts: Callable[[Tensor, Mixture], Tensor] = many_tokens
    best: Callable[[Tensor], Tensor] = layers.best


EAGER = Pieces(
    layers.by_library, lambda n, w13, bias: layers.gated(n, w13, layers.by_library, bias)
)


class Weights:
    """One rank's weights on a device.

    Attributes:
        program: The model's program.
        device, dtype: The device, and the dtype of vectors and of matrices of 16 bits. By default
            the checkpoint's dtype.
        residuals: The number of residuals on this rank: 1, or the number of its lanes.
        merged: The number of lanes in a matrix: all of this rank's if they share one residual,
            else 1.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rank: int,
        world_size: int,
        device: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = checkpoint.config
        if config.experts is not None and world_size > 1:
            raise kccl.Error("it runs a mixture of experts on one GPU only")
        if config.experts is None and config.swiglu_limit:
            raise kccl.Error("it has no limited gate outside experts")
        if config.num_lanes % world_size:
            raise kccl.InvalidArgument(
                f"world_size is {world_size}, must divide the model's {config.num_lanes} lanes for "
                "PyTorch"
            )
        self.program = Program(config)
        self.device = torch.device(device)
        self.dtype: torch.dtype = dtype or getattr(torch, checkpoint.dtype)
        self._checkpoint = checkpoint
        each = config.num_lanes // world_size
        self._lanes = range(rank * each, (rank + 1) * each)
        is_shared = self.program.num_residuals == 1
        self.residuals, self.merged = (1, each) if is_shared else (each, 1)
        self.embedding = self._whole("embedding", 0, config.vocab_size)
        self.layers = [self._layer(layer) for layer in range(config.num_layers)]
        self.norm = self._norm("norm")
        self.first_id, stop = (config.vocab_size * each // world_size for each in (rank, rank + 1))
        if config.is_tied:
            head = self.embedding[self.first_id : stop]
        else:
            head = self._whole("head", self.first_id, stop)
        count = self.residuals if config.lm_head == "vocab_parallel" else 1
        self.head = head.view(count, -1, config.hidden)
        del self._checkpoint
        # Waits until the weights are on the device, so that any stream may use them.
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _layer(self, layer: int) -> dict[str, Any]:
        def matrices(names: str) -> Matrix:
            found = []
            for name in names.split():
                stored = self._checkpoint.read(f"layers.{layer}.{name}", self._lanes)
                w = on_device(stored, self.device, self.dtype)
                if self.merged > 1:
                    is_joint_in = name in ("wo", "w2")
                    w = changed(w, _beside if is_joint_in else _below)
                found.append(w)
            return stacked(found)

        config = self.program.config
        found: dict[str, Any] = {"wqkv": matrices("wq wk wv"), "wo": matrices("wo")}
        if config.experts is None:
            found |= {"w13": matrices("w1 w3"), "w2": matrices("w2")}
        else:
            found["experts"] = read_mixture(
                self._checkpoint, self.program, layer, self.device, self.dtype
            )
        if config.has_sinks:
            sinks = self._checkpoint.tensor(f"layers.{layer}.sinks", self._lanes)
            found["sinks"] = torch.from_numpy(sinks).float().flatten().to(self.device)
        norms = ["attention_norm", "ffn_norm"] + ["q_norm", "k_norm"] * config.has_qk_norm
        found |= {name: self._norm(f"layers.{layer}.{name}") for name in norms}
        biases = (kind for kind in config.biases if kind in BIASES and not is_of_mixture(kind))
        return found | {kind: self._bias(layer, kind) for kind in biases}

    def _bias(self, layer: int, kind: str) -> Tensor:
        """Returns the bias of an op's rows on this rank. The rows of "out" and "down" are summed
        over the ranks, so the first rank has their whole bias, and the others have zeros.
        """
        names = [f"layers.{layer}.{name}" for name in BIASES[kind]]
        if KINDS[kind].ends_module:
            bias = self._norm(*names)
            return bias if self._lanes.start == 0 else torch.zeros_like(bias)
        parts = [torch.from_numpy(self._checkpoint.tensor(name, self._lanes)) for name in names]
        return torch.cat([part.flatten() for part in parts]).to(self.device)

    def _whole(self, name: str, start: int, stop: int) -> Tensor:
        """Returns rows of embedding or head, which have 16 bits in all formats."""
        found = on_device(self._checkpoint.read_rows(name, start, stop), self.device, self.dtype)
        assert isinstance(found, Tensor)
        return found

    def _norm(self, name: str) -> Tensor:
        return torch.from_numpy(self._checkpoint.tensor(name)).to(self.device)


def _beside(lanes: Tensor) -> Tensor:
    """Joins the columns of all lanes: [lanes, rows, ...] to [1, rows, lanes * columns, ...]."""
    return lanes.transpose(0, 1).flatten(1, 2)[None]


def _below(lanes: Tensor) -> Tensor:
    """Joins the rows of all lanes: [lanes, rows, ...] to [1, lanes * rows, ...]."""
    return lanes.flatten(0, 1)[None]


class Span:
    """The pages of the KV cache that queries at some positions read.

    Attributes:
        seen: Window of a layer, in keys -> (the first page, the page after the last one).
    """

    def __init__(self, windows: set[int], start: int, stop: int, device: torch.device) -> None:
        end = max(-(-stop // PAGE), _LEAST_PAGES)
        self.seen = {
            window: (min(max(start + 1 - window, 0) // PAGE, end - _LEAST_PAGES), end)
            for window in windows
        }
        self.key = tuple(sorted(self.seen.items()))
        self._tensors = {
            window: tuple(torch.tensor(number, device=device) for number in (first * PAGE, window))
            for window, (first, _) in self.seen.items()
        }

    def tensors(self, window: int) -> tuple[Tensor, ...]:
        """Returns the arguments `first_key` and `window` of layers.attention(), for a window."""
        return self._tensors[window]


class Decoder:
    """Decodes one sequence greedily, with its own KV cache."""

    def __init__(self, weights: Weights, context: int, ranks: Ranks) -> None:
        self._w, self._ranks = weights, ranks
        self.config = config = weights.program.config
        self.device, self._dtype = weights.device, weights.dtype
        self._heads = Heads(
            config.num_heads // ranks.world_size // weights.residuals,
            config.num_kv_heads // ranks.world_size // weights.residuals,
            config.head_dim,
            config.attention_scale,
            config.norm_eps,
            config.rope.is_interleaved,
        )
        pages = max(-(-context // PAGE), _LEAST_PAGES)
        shape = (pages, config.num_kv_heads // ranks.world_size, PAGE, config.head_dim)
        self._cache = [
            tuple(torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(2))
            for _ in weights.layers
        ]
        if not config.rope.is_fixed:
            raise kccl.Error(
                "it does not know RoPE whose frequencies depend on the request's length"
            )
        tables = weights.program.rotations(pages * PAGE)
        self._rotation = tuple(torch.from_numpy(table).to(self.device) for table in tables)
        # The window of a layer without one is the whole context.
        self._windows = [
            config.window_of(layer) or pages * PAGE for layer in range(config.num_layers)
        ]
        self._scales = {
            op.own_scale: torch.tensor(op.own_scale, dtype=torch.float32, device=self.device)
            for op in weights.program.ops
        }
        self._modules = [op for op in weights.program.ops if KINDS[op.kind].ends_module]
        is_overlapped = ranks.world_size > 1 and self.device.type == "cuda"
        self._side = torch.cuda.Stream() if is_overlapped else None

    def span(self, start: int, stop: int) -> Span:
        """Returns the pages that the queries at positions start to stop - 1 read."""
        return Span(set(self._windows), start, stop, self.device)

    def extend(self, ids: Sequence[int], start: int) -> Tensor:
        """Runs a prompt at positions `start` on. Returns the likeliest next id: int64 [1]."""
        for first in range(0, len(ids), _CHUNK):
            some = torch.tensor(ids[first : first + _CHUNK], device=self.device)
            position = torch.arange(len(some), device=self.device) + start + first
            span = self.span(start + first, start + first + len(some))
            token = self.step(some, position, span, EAGER)
        return token

    def step(self, ids: Tensor, position: Tensor, span: Span, pieces: Pieces) -> Tensor:
        """Enqueues a step. Returns the likeliest id after the last of `ids`: int64 [1].

        Args:
            ids: int64 [positions].
            position: The position of each id, int64 [positions].
            span: The span of these positions.
            pieces: The functions to call; compiled ones may be for one position only.
        """
        w, config = self._w, self.config
        x = w.embedding[ids].float().repeat(w.residuals, 1, 1)
        came = self._nothing
        sent: dict[int, tuple[Tensor, Any]] = {}
        for op in self._modules:
            weights = w.layers[op.layer]
            norm = weights["attention_norm" if op.kind == "out" else "ffn_norm"]
            # A router's choice would change with BF16's rounding.
            dtype = torch.float32 if op.kind == "expert_down" else self._dtype
            x, n = pieces.add_and_norm(x, *came, norm, config.norm_eps, dtype)
            if op.kind == "out":
                out = self._attend(n, op.layer, position, span, pieces)
            elif op.kind == "expert_down":
                out = pieces.experts(n, weights["experts"])
            else:
                gated = pieces.gated(n, weights["w13"], weights.get("gate_up"))
                out = pieces.product(gated, weights["w2"])
            if op.kind in weights:
                out = out + weights[op.kind].to(out.dtype)
            came = self._exchange(op, out, sent)
        x, n = pieces.add_and_norm(x, *came, w.norm, config.norm_eps, self._dtype)
        n = n[:, -1:]
        if config.lm_head == "replicate" and w.program.num_residuals > 1:
            n = self._ranks.sum(n.float().sum(0, keepdim=True)) / config.num_lanes
        mine = pieces.best(pieces.product(n.to(self._dtype), w.head))
        return self._ranks.best(mine, w.first_id)

    def _attend(
        self, n: Tensor, layer: int, position: Tensor, span: Span, pieces: Pieces
    ) -> Tensor:
        weights, window = self._w.layers[layer], self._windows[layer]
        first, stop = span.seen[window]
        keys, values = (cache[first:stop] for cache in self._cache[layer])
        qk_norm = (weights["q_norm"], weights["k_norm"]) if self.config.has_qk_norm else None
        mixed = pieces.attention(
            pieces.product(n, weights["wqkv"]),
            *(keys, values, position, *span.tensors(window)),
            *(self._rotation, qk_norm, weights.get("qkv"), weights.get("sinks"), self._heads),
        )
        return pieces.product(mixed, weights["wo"])

    # ---- messages --------------------------------------------------------------------------------

    @property
    def _nothing(self) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
        return None, self._scales[1.0], None, None

    def _exchange(
        self, op: Op, out: Tensor, sent: dict[int, tuple[Tensor, Any]]
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """Sends and receives the messages of a module, by the rule of model/program.py. Returns the
        arguments own, scale, landed and past of add_and_norm().
        """
        if op.sends:
            sent[op.module] = out, self._start_sum(out)
        if op.is_blocking:
            if len(out) == 1 and not op.sends:
                return self._ranks.sum(out), self._scales[1.0], None, None
            return None, self._scales[1.0], self._ranks.sum(out.sum(0, keepdim=True)), None
        landed = past = None
        if op.receives is not None:
            past, started = sent.pop(op.receives)
            landed = self._end_sum(started)
        return out, self._scales[op.own_scale], landed, past

    def _start_sum(self, out: Tensor) -> Any:
        """Starts the sum over all lanes. Returns the sum, and the event on the side stream after
        which it is ready; None instead of the event if the sum is on the current stream. With one
        rank it returns None, because add_and_norm() then sums the lanes itself.
        """
        if self._ranks.world_size == 1:
            return None
        if self._side is None:
            return self._ranks.sum(out.sum(0, keepdim=True)), None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            total = self._ranks.sum(out.sum(0, keepdim=True))
            return total, self._side.record_event()

    def _end_sum(self, started: Any) -> Tensor | None:
        if started is None:
            return None
        total: Tensor
        total, event = started
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return total
