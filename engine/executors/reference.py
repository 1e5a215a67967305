"""The reference that executors are compared with: runs a model's program in NumPy, op by op.

Executors add up a product's sums in another order, so their bits differ. diff.py compares each op's
output with the one here. The reference uses the exact numbers that weights' formats mean.
Activations, the residual, the KV cache and all sums are FP32. Only a message, a module's output as
other lanes add it, is rounded to `config.message_dtype`. The monokernel rounds more: keys and
values to F16, and the vector of a product to twice the precision of the type that the matrix unit
multiplies (kernels/mma.cuh).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kccl import InvalidArgument

from ..files.checkpoint import Checkpoint
from ..model.experts import SWISH
from ..model.ops import KINDS, Vector
from ..model.program import Op, Program
from ..model.sample import SamplingParams, sample

Array = NDArray[Any]
MESSAGE_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


class Cache:
    """The keys and values of the positions so far: for each layer two arrays [KV heads, length,
    head_dim], float32.

    Args:
        request: The positions of the whole request, on which RoPE's frequencies may depend. None if
            the number is not known.
    """

    def __init__(self, request: int | None = None) -> None:
        self.request = request
        self.length = 0
        self._layers: dict[int, tuple[Array, Array]] = {}

    def append(self, layer: int, keys: Array, values: Array) -> tuple[Array, Array]:
        """Appends one run's keys and values after the first `length` positions. Returns the keys
        and values of all positions.
        """
        if self.length:
            old_keys, old_values = (old[:, : self.length] for old in self._layers[layer])
            keys = np.concatenate([old_keys, keys], axis=1)
            values = np.concatenate([old_values, values], axis=1)
        self._layers[layer] = keys, values
        return keys, values


@dataclass
class _Run:
    """The state of one run, which its ops share.

    Attributes:
        tokens: The ids.
        cache: The KV cache, to which the op "attend" appends.
        cos, sin: The cosines and sines of the ids' positions.
        vectors: The newest vector of each kind.
        messages: The messages that have not been added yet, by the module that sent them.
    """

    tokens: Array
    cache: Cache
    cos: Array
    sin: Array
    vectors: dict[Vector, Array] = field(default_factory=dict)
    messages: dict[int, Array] = field(default_factory=dict)

    def taken_by(self, op: Op) -> Array:
        """Returns the vector that an op takes. The op must not take the ids."""
        takes = KINDS[op.kind].takes
        assert takes is not None
        return self.vectors[takes]


Oracle = Callable[..., Array]
"""A method of Reference that computes an op's output: (op, run, biases, *weights)."""


class Reference:
    """Runs a checkpoint's program. If keep_weights is True, it keeps each weight in FP32 once it
    has read it.

    Arrays are [lanes or residuals, positions, values], see Op.shape.
    """

    def __init__(self, checkpoint: Checkpoint, *, keep_weights: bool = True) -> None:
        self.config = checkpoint.config
        self.program = Program(self.config)
        self._checkpoint = checkpoint
        self._keep = keep_weights
        self._kept: dict[str, Array] = {}

    # ---- running -------------------------------------------------------------------------------

    def logits(self, ids: Sequence[int], cache: Cache | None = None) -> Array:
        """Returns the logits after each of `ids`: float32 [len(ids), vocab_size]."""
        (logits,) = self.run_until(ids, len(self.program.ops) - 1, cache)
        return logits

    def trace(self, ids: Sequence[int]) -> dict[str, Array]:
        """Returns each op's output by the op's name: float32 [lanes or residuals, len(ids),
        values].
        """
        return {op.name: output for op, output in self.steps(ids)}

    def run_until(self, ids: Sequence[int], op_index: int, cache: Cache | None = None) -> Array:
        """Returns the output of one op: float32 [lanes or residuals, len(ids), values]."""
        for op, output in self.steps(ids, cache):
            if op.index == op_index:
                return output
        raise InvalidArgument(f"op_index is {op_index}, must be below {len(self.program.ops)}")

    def generate(self, ids: Sequence[int], params: SamplingParams) -> Iterator[tuple[int, float]]:
        """Yields each new id and its log-probability. Ends after a stop id, at max_tokens, or at
        the end of the context. The caller must check for stop strings.

        Raises:
            InvalidArgument: As steps(); or the context has no room after `ids`.
        """
        room = self.config.longest_context - len(ids)
        if room < 1:
            raise InvalidArgument(
                f"ids has {len(ids)} tokens, must be fewer than the context, "
                f"{self.config.longest_context}"
            )
        num = min(params.max_tokens, room)
        history, cache = list(ids), Cache(len(ids) + num)
        new = history
        for _ in range(num):
            logits = self.logits(new, cache)[-1]
            token, logprob = sample(logits, params, len(history), history, len(ids))
            yield token, logprob
            if token in params.stop_ids:
                return
            new = [token]
            history.append(token)

    def steps(self, ids: Sequence[int], cache: Cache | None = None) -> Iterator[tuple[Op, Array]]:
        """Runs `ids` after the positions in the cache, and yields each op and its output.

        The cache's length grows only when the last op has run. If a caller stops earlier, the cache
        counts as unchanged.

        Raises:
            InvalidArgument: There are no ids, an id is outside the vocabulary, or there are more
                positions than the context or the cache's request has. Or the cache was filled with
                other frequencies of RoPE.
        """
        tokens = np.asarray(ids)
        c = self.config
        cache = Cache() if cache is None else cache
        if not (tokens.ndim == 1 and tokens.size and tokens.dtype.kind in "iu"):
            raise InvalidArgument(f"ids is {ids!r}, must be a sequence of at least one integer")
        if tokens.min() < 0 or tokens.max() >= c.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < c.vocab_size)
            raise InvalidArgument(f"ids has {wrong}, must be from 0 to {c.vocab_size - 1}")
        end, context = cache.length + tokens.size, c.longest_context
        if end > context:
            raise InvalidArgument(
                f"ids end at position {end}, must be within the context, {context}"
            )
        run = _Run(tokens, cache, *self._rotations(cache, end))
        for op in self.program.ops:
            kind = KINDS[op.kind]
            oracle: Oracle = getattr(self, f"_{kind.oracle}")
            # The oracle of an op with experts reads the weights of the chosen experts itself.
            of_op = ((), ()) if kind.has_experts else (op.biases, op.weights)
            biases, weights = (map(self._weight, names) for names in of_op)
            # `weights` is an iterator, so no name here keeps these weights alive while the next
            # op's are read.
            x = run.vectors[kind.gives] = oracle(op, run, list(biases), *weights)
            if op is self.program.ops[-1]:
                cache.length = end
            yield op, x

    def _rotations(self, cache: Cache, end: int) -> tuple[Array, Array]:
        """Returns the cosines and sines of the positions from the cache's length to end - 1."""
        request = end if cache.request is None else cache.request
        if end > request:
            raise InvalidArgument(
                f"ids end at position {end}, must be within the cache's request, {request}"
            )
        old, new = (
            self.program.reach(length or end, self.config.longest_context)
            for length in (cache.length, request)
        )
        if cache.request is None and old != new:
            raise InvalidArgument(
                f"RoPE's frequencies differ between requests of {cache.length} and {end} "
                "positions: give Cache the number of the whole request"
            )
        return self.program.rotations(request, cache.length, end)

    def _weight(self, name: str) -> Array:
        if name in self._kept:
            return self._kept[name]
        weight = self._checkpoint.read(name).to_float32()
        if self._keep:
            self._kept[name] = weight
        return weight

    # ---- oracles: OpKind.oracle names them. Each has the arguments of Oracle --------------------

    def _embed(self, op: Op, run: _Run, biases: Sequence[Array], table: Array) -> Array:
        return table[run.tokens][None].repeat(self.program.num_residuals, 0)

    def _qkv(self, op: Op, run: _Run, biases: Sequence[Array], *weights: Array) -> Array:
        """Returns the queries, keys and values of the new positions, side by side."""
        norm, wq, wk, wv, *qk_norm = weights
        n = self._rms_norm(run.taken_by(op), norm)
        parts = []
        for index, w in enumerate((wq, wk, wv)):
            heads = self._split(product(n, w, *biases[index : index + 1]))
            if index < 2:
                if qk_norm:
                    heads = self._rms_norm(heads, qk_norm[index])
                heads = self._rotate(heads, run.cos[:, None], run.sin[:, None])
            parts.append(heads.reshape(*heads.shape[:2], -1))
        return np.concatenate(parts, axis=-1)

    def _attend(self, op: Op, run: _Run, biases: Sequence[Array], *sinks: Array) -> Array:
        """Computes softmax attention of the new positions' queries over all keys so far. A sink is
        one more logit of the softmax, and has no value.
        """
        c = self.config
        qkv = run.taken_by(op)
        lanes, length, _ = qkv.shape
        # q, k and v become [heads of all lanes, positions, head_dim].
        heads = self._split(qkv).swapaxes(1, 2)
        cuts = np.cumsum([c.num_heads // lanes, c.num_kv_heads // lanes])
        q, k, v = (part.reshape(-1, length, c.head_dim) for part in np.split(heads, cuts, axis=1))
        k, v = run.cache.append(op.layer, k, v)
        # Query head h uses KV head h // (query heads per KV head), which is in the same lane.
        grouped = q.reshape(c.num_kv_heads, -1, length, c.head_dim)
        scores = product(grouped, k[:, None]) * np.float32(c.attention_scale)
        key = np.arange(k.shape[1])
        query = key[-length:, None]
        is_hidden = key > query
        if op.window:
            is_hidden |= key <= query - op.window
        scores[..., is_hidden] = -np.inf
        for sink in sinks:
            of_heads = sink.reshape(c.num_kv_heads, -1, 1, 1)
            of_queries = np.broadcast_to(of_heads, (*scores.shape[:-1], 1))
            scores = np.concatenate([scores, of_queries], axis=-1)
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (e / e.sum(axis=-1, keepdims=True))[..., : key.size] @ v[:, None]
        by_lane = mixed.reshape(lanes, -1, length, c.head_dim).swapaxes(1, 2)
        return by_lane.reshape(lanes, length, -1)

    def _exchange(self, op: Op, run: _Run, bias: Sequence[Array], w: Array) -> Array:
        return self._added(op, run, product(run.taken_by(op), w), bias)

    def _added(self, op: Op, run: _Run, own: Array, bias: Sequence[Array]) -> Array:
        """Returns the residual after a module, by the rule of program.py.

        Args:
            op, run: As an oracle takes them.
            own: Each lane's output.
            bias: A sequence with the op's bias, or an empty one.
        """
        x = run.vectors[Vector.RESIDUAL]
        sent = own.astype(MESSAGE_DTYPES[self.config.message_dtype]).astype(np.float32)
        if op.sends:
            run.messages[op.module] = sent
        if op.is_blocking:
            return x + total([*sent, *bias])
        x = x + np.float32(op.own_scale) * own
        if op.receives is not None:
            past = run.messages.pop(op.receives)
            x = x + np.stack([total(np.delete(past, lane, axis=0)) for lane in range(len(past))])
        return x

    def _swiglu(
        self, op: Op, run: _Run, biases: Sequence[Array], norm: Array, w1: Array, w3: Array
    ) -> Array:
        n = self._rms_norm(run.taken_by(op), norm)
        return self._activated(n, biases, (w1, w3))

    def _router(
        self, op: Op, run: _Run, bias: Sequence[Array], norm: Array, router: Array
    ) -> Array:
        return product(self._rms_norm(run.taken_by(op), norm), router, *bias)

    def _expert_gate_up(self, op: Op, run: _Run, biases: Sequence[Array]) -> Array:
        """Returns the activations of each position's chosen experts, concatenated in the order of
        the experts' ids.
        """
        (norm,) = op.norms()
        n, lanes = self._rms_norm(run.taken_by(op), self._weight(norm)), self.config.num_lanes
        ids, _ = self._chosen(run)
        acts = np.empty((lanes, *ids.shape, op.shape[1] // ids.shape[1]), np.float32)
        for expert in np.unique(ids):
            positions, places = np.nonzero(ids == expert)
            weights, own = self._of_expert(op, expert)
            acts[:, positions, places] = self._activated(n[:, positions], own, weights)
        return acts.reshape(lanes, len(ids), -1)

    def _expert_down(self, op: Op, run: _Run, biases: Sequence[Array]) -> Array:
        """Adds up the outputs of the chosen experts, in the order of their ids."""
        acts = run.taken_by(op)
        ids, shares = self._chosen(run)
        each = acts.reshape(*acts.shape[:2], ids.shape[1], -1)
        own = np.zeros((len(acts), *ids.shape[:1], op.shape[1]), np.float32)
        bias = np.zeros(own.shape[1:], np.float32)
        for expert in np.unique(ids):
            positions, places = np.nonzero(ids == expert)
            (w2,), of_expert = self._of_expert(op, expert)
            share = shares[positions, places][:, None]
            own[:, positions] += share * product(each[:, positions, places], w2)
            for each_bias in of_expert:
                bias[positions] += share * each_bias
        return self._added(op, run, own, [bias] if op.biases else [])

    def _final(self, op: Op, run: _Run, biases: Sequence[Array], norm: Array) -> Array:
        """Applies the last norm to each residual. Returns the mean over the residuals. If each lane
        makes a part of the logits, returns all residuals instead.
        """
        n = self._rms_norm(run.taken_by(op), norm)
        if self.program.num_head_parts == 1:
            n = total(n)[None] / np.float32(len(n))
        return n

    def _head(self, op: Op, run: _Run, biases: Sequence[Array], head: Array) -> Array:
        """Returns the logits. If lm_head is "vocab_parallel", lane l makes part l of them."""
        n = run.taken_by(op)
        parts = product(n, head.reshape(len(n), -1, head.shape[1]))
        return np.concatenate(parts, axis=-1)[None]

    # ---- what ops share ------------------------------------------------------------------------

    def _chosen(self, run: _Run) -> tuple[Array, Array]:
        """Returns the ids of each position's chosen experts, and the factors by which the experts'
        outputs are multiplied, [positions, chosen] each.
        """
        experts = self.config.experts
        assert experts is not None
        (logits,) = run.vectors[Vector.ROUTED]
        return experts.choose(logits)

    def _of_expert(self, op: Op, expert: int) -> tuple[list[Array], list[Array]]:
        """Returns the matrices of one expert, and its biases."""
        biases = op.biases_of_products()
        names = op.products()[expert], biases[expert] if biases else ()
        return [*map(self._weight, names[0])], [*map(self._weight, names[1])]

    def _activated(self, n: Array, biases: Sequence[Array], weights: Sequence[Array]) -> Array:
        """Returns the activations of a feed-forward block, by ModelConfig.swiglu_limit's rule."""
        gate, up = (product(n, w, *biases[i : i + 1]) for i, w in enumerate(weights))
        scale = np.float32(1)
        if limit := np.float32(self.config.swiglu_limit):
            gate, up, scale = np.minimum(gate, limit), up.clip(-limit, limit) + 1, np.float32(SWISH)
        # exp overflows to infinity for very negative gates, and then the result is 0.
        with np.errstate(over="ignore"):
            activated: Array = gate / (1 + np.exp(-scale * gate)) * up
        return activated

    def _rms_norm(self, x: Array, weight: Array) -> Array:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x * (1 / np.sqrt(mean_square + np.float32(self.config.norm_eps))) * weight

    def _split(self, x: Array) -> Array:
        """Returns x with heads on an axis of their own: [lanes, positions, heads, head_dim]."""
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotates pairs of elements by their position's angles. A pair is (2i, 2i + 1) if RoPE is
        interleaved, else (i, i + head_dim / 2).
        """
        # Splits off an axis of length 2: the two elements of a pair.
        axis = -1 if self.config.rope.is_interleaved else -2
        pairs = x.reshape(*x.shape[:-1], *((-1, 2) if axis == -1 else (2, -1)))
        a, b = pairs.take(0, axis), pairs.take(1, axis)
        turned = np.stack([a * cos - b * sin, a * sin + b * cos], axis)
        return turned.reshape(x.shape)


def product(x: Array, w: Array, bias: Array | None = None) -> Array:
    """Returns x @ w^T + bias, [..., positions, rows]. x is [..., positions, n], w [..., rows, n],
    and bias [..., rows].
    """
    sums = x @ w.swapaxes(-1, -2)
    return sums if bias is None else sums + bias[..., None, :]


def total(parts: Sequence[Array] | Array) -> Array:
    """Returns the sum of the parts, from the first one to the last."""
    return sum(parts[1:], start=parts[0])
