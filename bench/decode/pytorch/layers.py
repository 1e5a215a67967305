"""The functions of a decode step in PyTorch. They are pure, and each is compiled once.

Activations are [lanes, positions, values]. Products are computed in the weights' dtype, and of
weights with fewer than 16 bits in FP32. Norms, sums over keys and the residual are in FP32, which
costs nothing if a compiler fuses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .matrices import Grouped, Matrix, changed

PAGE = 128
"""Positions of a page of the KV cache."""
# The most parts into which the search for the largest logit is divided.
_PARTS = 256

Product = Callable[[Tensor, Matrix], Tensor]
"""x [lanes, positions, n] and w [lanes, rows, n] to [lanes, positions, rows]."""


@dataclass(frozen=True)
class Heads:
    """The attention of one lane.

    Attributes:
        queries, keys: The number of query heads, and of KV heads.
        head_dim: Elements of a head.
        scale: The factor of the products of queries and keys.
        eps: The epsilon of the norms of queries and keys.
        is_interleaved: Whether RoPE rotates the pairs (2i, 2i + 1), and not (i, i + head_dim / 2).
    """

    queries: int
    keys: int
    head_dim: int
    scale: float
    eps: float
    is_interleaved: bool


def by_library(x: Tensor, w: Matrix) -> Tensor:
    """Multiplies x with w by the GPU vendor's library, which knows no groups of columns: w then
    becomes a matrix of x's dtype before. Has the type Product.
    """
    if isinstance(w, Grouped):
        w = w.values().to(x.dtype)
    if len(w) == 1:
        return functional.linear(x, w[0])
    return torch.bmm(x, w.transpose(1, 2))


def by_compiler(x: Tensor, w: Matrix) -> Tensor:
    """Multiplies x, which must have one position, with w, in a form that torch.compile turns into
    one loop. Has the type Product.
    """
    if isinstance(w, Grouped):
        parts = w.split()
        # The axes of a group's columns: one, or for int4 (blocks, halves, 16).
        of_groups = x.float().unflatten(-1, (w.scales.shape[2], -1))
        if len(parts) == 1:
            products = parts[0] * of_groups * w.scales
        else:
            low, high = of_groups.unflatten(-1, (-1, 2, 16)).unbind(-2)
            products = (parts[0] * low + parts[1] * high) * w.scales[..., None]
        return products.flatten(2).sum(-1)[:, None].to(x.dtype)
    return (x.float() * w.float()).sum(-1)[:, None].to(x.dtype)


def add_and_norm(
    x: Tensor,
    own: Tensor | None,
    scale: Tensor,
    landed: Tensor | None,
    past: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Adds a module's output and messages to the residual, and normalises the sum.

    Args:
        x: The residual, FP32.
        own: A module's output for each lane.
        scale: The factor of `own`.
        landed: The sum of a message over all lanes. If it is None and `past` is not, this rank has
            all lanes, and the sum is that of `past`.
        past: Each lane's own part of `landed`, which is subtracted: a lane does not receive it.
        weight: The weights of the norm.
        eps: Added to the mean square.
        dtype: The dtype of the normalised sum.

    Returns:
        The residual, and the normalised residual in `dtype`.
    """
    if own is not None:
        x = x + scale * own.float()
    if past is not None:
        total = past.float().sum(0, keepdim=True) if landed is None else landed.float()
        x = x + (total - past.float())
    elif landed is not None:
        x = x + landed.float()
    return x, _rms_norm(x, weight, eps).to(dtype)


def attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    first_key: Tensor,
    window: Tensor,
    rotation: tuple[Tensor, Tensor],
    qk_norm: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    heads: Heads,
) -> Tensor:
    """Appends keys and values to the KV cache, and computes softmax attention of the queries.

    Each page is a separate product, so that a GPU has work for all multiprocessors.

    Args:
        qkv: [lanes, positions, (queries + 2 * keys) * head_dim].
        keys, values: Pages of the cache, [pages, KV heads of all lanes, PAGE, head_dim].
        position: The position of each new token, [positions].
        first_key: Position of the first page's first entry, a number.
        window: Keys that a query sees, its own included, a number.
        rotation: Cosines and sines of all positions, FP32 [context, head_dim / 2].
        qk_norm: Weights of the norms of queries and keys.
        bias: The bias of the rows of `qkv`, FP32; None: it has none.
        sinks: A logit without a value for each query head, FP32; None: there are none.
        heads: The number of heads of a lane.

    Returns:
        [lanes, positions, queries * head_dim].
    """
    if bias is not None:
        qkv = (qkv.float() + bias).to(qkv.dtype)
    lanes, length, _ = qkv.shape
    pages, size = len(keys), heads.head_dim
    split = qkv.view(lanes, length, -1, size).transpose(1, 2)
    q, k, v = split.split((heads.queries, heads.keys, heads.keys), 1)
    if qk_norm is not None:
        q, k = (
            _rms_norm(part.float(), w, heads.eps) for part, w in zip((q, k), qk_norm, strict=True)
        )
    cos, sin = (table[position] for table in rotation)
    q, k = (_rotate(part.float(), cos, sin, heads.is_interleaved) for part in (q, k))
    at = position - first_key
    for cache, new in ((keys, k), (values, v)):
        # Makes positions the first axis: the target below has them first, because its two index
        # arrays have a slice between them.
        rows = new.reshape(-1, length, size).transpose(0, 1)
        cache[at // PAGE, :, at % PAGE] = rows.to(cache.dtype)
    kv_heads = lanes * heads.keys
    # Query head h reads KV head h // (query heads per KV head).
    grouped = q.reshape(1, kv_heads, -1, size).to(qkv.dtype)
    scores = torch.matmul(grouped, keys.transpose(2, 3)).float() * heads.scale
    scores = scores.view(pages, kv_heads, -1, length, PAGE)
    entry = torch.arange(pages * PAGE, device=qkv.device).view(pages, 1, PAGE) + first_key
    query = position[:, None]
    is_seen = (entry <= query) & (entry > query - window)
    scores = scores.masked_fill(~is_seen[:, None, None], -torch.inf)
    most = scores.amax((0, 4), keepdim=True)
    if sinks is not None:
        own = sinks.view(1, kv_heads, -1, 1, 1)
        most = torch.maximum(most, own)
    e = torch.exp(scores - most)
    total = e.sum((0, 4))
    if sinks is not None:
        total = total + torch.exp(own - most)[0, ..., 0]
    mixed = torch.matmul(e.view(pages, kv_heads, -1, PAGE).to(qkv.dtype), values)
    mixed = mixed.float().sum(0) / total.view(kv_heads, -1, 1)
    return mixed.view(lanes, -1, length, size).transpose(1, 2).flatten(2).to(qkv.dtype)


def gated(n: Tensor, w13: Matrix, product: Product, bias: Tensor | None = None) -> Tensor:
    """Computes SwiGLU. w13 has the rows of the gate and then those of up, and so has `bias`, which
    is FP32 or None.
    """
    if product is by_compiler:
        gate = product(n, changed(w13, lambda w: w.chunk(2, 1)[0]))
        up = product(n, changed(w13, lambda w: w.chunk(2, 1)[1]))
    else:
        gate, up = product(n, w13).chunk(2, -1)
    gate, up = gate.float(), up.float()
    if bias is not None:
        gate, up = (part + own for part, own in zip((gate, up), bias.chunk(2), strict=True))
    return (functional.silu(gate) * up).to(n.dtype)


def best(logits: Tensor) -> Tensor:
    """Returns the largest logit and its index: FP32 [2], which is exact below 2^24."""
    flat = logits.flatten().float()
    # Searches in parts, because the compiler would run a single search on one block.
    parts = flat.view(math.gcd(flat.numel(), _PARTS), -1)
    values, places = parts.max(1)
    part = values.argmax(0, keepdim=True)
    index = part * parts.shape[1] + places.gather(0, part)
    return torch.cat((values.gather(0, part), index.float()))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """Applies RoPE to heads, [lanes, heads, positions, head_dim]."""
    if is_interleaved:
        a, b = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
