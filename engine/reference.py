"""The engine's oracle: the program of a model in NumPy, in FP32, one op after the other.

Executors differ from it only in the order of a product's sum, so each op's output is compared with
the one here (diff.py). Weights are BF16 and exact. Activations, the residual, the KV cache and all
sums are FP32. A lane's message is rounded to `config.message_dtype`, and nothing else is.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kccl import InvalidArgument

from .program import Op, Program
from .sample import SamplingParams, sample

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

Array = np.ndarray[Any, Any]
MESSAGE_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


class Cache:
    """The keys and values of the positions so far: for each layer two arrays [KV heads, length,
    head_dim], float32.
    """

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Array, Array]] = {}

    def append(self, layer: int, keys: Array, values: Array) -> tuple[Array, Array]:
        """Puts what one run adds behind the first `length` positions, and returns all."""
        new = (keys, values)
        if self.length:
            old = self._layers[layer]
            new = tuple(
                np.concatenate([o[:, : self.length], n], 1) for o, n in zip(old, new, strict=True)
            )
        self._layers[layer] = new
        return new


class Reference:
    """Runs a checkpoint's program. Keeps each weight that it has read, in FP32, unless told not to.

    Arrays are [lanes or residuals, positions, values], see Op.shape.
    """

    def __init__(self, checkpoint: "Checkpoint", *, keep_weights: bool = True) -> None:
        self.config = checkpoint.config
        self.program = Program(self.config)
        self._checkpoint = checkpoint
        self._kept: dict[str, Array] | None = {} if keep_weights else None

    # ---- running -------------------------------------------------------------------------------

    def logits(self, ids: Sequence[int], cache: Cache | None = None) -> Array:
        """The logits behind each of `ids`: float32 [len(ids), vocab_size]."""
        return self.run_until(ids, len(self.program.ops) - 1, cache)[0]

    def trace(self, ids: Sequence[int]) -> dict[str, Array]:
        """Each op's output by the op's name: float32 [lanes or residuals, len(ids), values]."""
        return {op.name: output for op, output in self.steps(ids)}

    def run_until(self, ids: Sequence[int], op_index: int, cache: Cache | None = None) -> Array:
        """The output of one op: float32 [lanes or residuals, len(ids), values]."""
        for op, output in self.steps(ids, cache):
            if op.index == op_index:
                break
        else:
            raise InvalidArgument(f"op_index is {op_index}, must be below {len(self.program.ops)}")
        return output

    def generate(self, ids: Sequence[int], params: SamplingParams) -> Iterator[tuple[int, float]]:
        """Yields each new id and its log-probability, until a stop id (which it yields too),
        max_tokens, or the end of the context. Stop strings are the caller's.
        """
        history, cache = list(ids), Cache()
        new = history
        for _ in range(min(params.max_tokens, self.config.context - len(history))):
            logits = self.logits(new, cache)[-1]
            token, logprob = sample(logits, params, position=len(history), history=history)
            yield token, logprob
            if token in params.stop_ids:
                return
            new = [token]
            history.append(token)

    def steps(self, ids: Sequence[int], cache: Cache | None = None) -> Iterator[tuple[Op, Array]]:
        """Runs `ids` behind the positions in the cache; yields each op and its output.

        The cache grows when the last op has run: a caller that stops earlier leaves it as it was.

        Raises:
            InvalidArgument: No ids, an id outside the vocabulary, or more positions than the
                context.
        """
        tokens = np.asarray(ids)
        c = self.config
        cache = Cache() if cache is None else cache
        if not (tokens.ndim == 1 and tokens.size and tokens.dtype.kind in "iu"):
            raise InvalidArgument(f"ids is {ids!r}, must be a sequence of at least one integer")
        if tokens.min() < 0 or tokens.max() >= c.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < c.vocab_size)
            raise InvalidArgument(f"ids has {wrong}, must be from 0 to {c.vocab_size - 1}")
        end = cache.length + tokens.size
        if end > c.context:
            raise InvalidArgument(
                f"ids end at position {end}, must be within the context, {c.context}"
            )
        cos, sin = (table[cache.length :] for table in self.program.rotations(end))
        x = residual = self._weight("embedding")[tokens][None].repeat(self.program.num_residuals, 0)
        messages: dict[int, Array] = {}
        for op in self.program.ops:
            weights = (self._weight(name) for name in op.weights)
            match op.kind:
                case "qkv":
                    x = self._qkv(residual, cos, sin, *weights)
                case "attend":
                    x = self._attend(op, x, cache)
                case "gate_up":
                    x = self._gate_up(residual, *weights)
                case "out" | "down":
                    x = residual = self._exchange(op, residual, product(x, *weights), messages)
                case "final":
                    x = self._final(residual, *weights)
                case "head":
                    x = self._head(x, *weights)
            yield op, x
        cache.length = end

    def _weight(self, name: str) -> Array:
        if self._kept is None:
            return self._checkpoint.tensor(name).astype(np.float32)
        if name not in self._kept:
            self._kept[name] = self._checkpoint.tensor(name).astype(np.float32)
        return self._kept[name]

    # ---- ops, in the program's order -----------------------------------------------------------

    def _qkv(
        self,
        x: Array,
        cos: Array,
        sin: Array,
        norm: Array,
        wq: Array,
        wk: Array,
        wv: Array,
        *qk_norm: Array,
    ) -> Array:
        """The queries, keys and values of the new positions, side by side."""
        n = self._rms_norm(x, norm)
        parts = []
        for index, w in enumerate((wq, wk, wv)):
            heads = self._split(product(n, w))
            if index < 2:
                if qk_norm:
                    heads = self._rms_norm(heads, qk_norm[index])
                heads = self._rotate(heads, cos[:, None], sin[:, None])
            parts.append(heads.reshape(*heads.shape[:2], -1))
        return np.concatenate(parts, axis=-1)

    def _attend(self, op: Op, qkv: Array, cache: Cache) -> Array:
        """Softmax attention of the new queries. Query head h reads KV head h // (heads per KV
        head), which its own lane has.
        """
        c = self.config
        lanes, length, _ = qkv.shape
        heads = np.moveaxis(self._split(qkv), 2, 1)  # lane, head, position, head_dim
        cuts = np.cumsum([c.num_heads // lanes, c.num_kv_heads // lanes])
        q, k, v = (part.reshape(-1, length, c.head_dim) for part in np.split(heads, cuts, 1))
        k, v = cache.append(op.layer, k, v)
        q = q.reshape(c.num_kv_heads, -1, length, c.head_dim)
        scores = product(q, k[:, None]) * np.float32(c.attention_scale)
        key = np.arange(k.shape[1])
        query = key[-length:, None]
        hidden = key > query
        if op.window:
            hidden |= key <= query - op.window
        scores[..., hidden] = -np.inf
        e = np.exp(scores - scores.max(-1, keepdims=True))
        out = e / e.sum(-1, keepdims=True) @ v[:, None]
        return np.moveaxis(out.reshape(lanes, -1, length, c.head_dim), 1, 2).reshape(
            lanes, length, -1
        )

    def _exchange(self, op: Op, x: Array, own: Array, messages: dict[int, Array]) -> Array:
        """The residual after a module with the outputs `own`, by the rule of program.py."""
        sent = own.astype(MESSAGE_DTYPES[self.config.message_dtype]).astype(np.float32)
        if op.sends:
            messages[op.module] = sent
        if op.is_blocking:
            return x + reduce(np.add, sent)
        x = x + np.float32(op.own_scale) * own
        if op.receives is not None:
            past = messages.pop(op.receives)
            others = [[m for j, m in enumerate(past) if j != lane] for lane in range(len(past))]
            x = x + np.stack([reduce(np.add, each) for each in others])
        return x

    def _gate_up(self, x: Array, norm: Array, w1: Array, w3: Array) -> Array:
        n = self._rms_norm(x, norm)
        gate = product(n, w1)
        return gate / (1 + np.exp(-gate)) * product(n, w3)

    def _final(self, x: Array, norm: Array) -> Array:
        """The normalised residual, averaged over the lanes unless each lane has its own logits."""
        n = self._rms_norm(x, norm)
        if self.config.lm_head == "replicate":
            n = (reduce(np.add, n) / np.float32(len(n)))[None]
        return n

    def _head(self, n: Array, head: Array) -> Array:
        """Logits; with a head that is parallel over the vocabulary, lane l's are the l-th part."""
        parts = product(n, head.reshape(len(n), -1, head.shape[1]))
        return np.concatenate(parts, axis=-1)[None]

    # ---- what ops share ------------------------------------------------------------------------

    def _rms_norm(self, x: Array, weight: Array) -> Array:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.config.norm_eps))
        return x * scale * weight

    def _split(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        """Turns the pairs (2i, 2i + 1), or (i, i + head_dim / 2), by their position's angles."""
        half = x.shape[-1] // 2
        out = np.empty_like(x)
        pairs = (np.s_[..., 0::2], np.s_[..., 1::2])
        if not self.config.rope.is_interleaved:
            pairs = (np.s_[..., :half], np.s_[..., half:])
        a, b = x[pairs[0]], x[pairs[1]]
        out[pairs[0]], out[pairs[1]] = a * cos - b * sin, a * sin + b * cos
        return out


def product(x: Array, w: Array) -> Array:
    """x [..., positions, n] times the rows of w [..., rows, n], for each lane: [..., positions,
    rows].
    """
    return x @ w.swapaxes(-1, -2)
