"""What a decode step in PyTorch is made of: pure functions, each of which is compiled once.

Activations are [lanes, positions, values]. Products are in the weights' type. Norms, sums over
keys and the residual are in FP32, which costs nothing where a compiler fuses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

PAGE = 128
"""Positions of a page of the KV cache."""
# Most parts in which the largest logit is searched.
_PARTS = 256

Product = Callable[[Tensor, Tensor], Tensor]
"""x [lanes, positions, n] and w [lanes, rows, n] to [lanes, positions, rows]."""


@dataclass(frozen=True)
class Heads:
    """The attention of one lane.

    Attributes:
        queries, keys: Heads of each kind.
        head_dim: Elements of a head.
        scale: Multiplies the products of queries and keys.
        eps: The epsilon of the norms of queries and keys.
        is_interleaved: RoPE turns the pairs (2i, 2i + 1); otherwise (i, i + head_dim / 2).
    """

    queries: int
    keys: int
    head_dim: int
    scale: float
    eps: float
    is_interleaved: bool


def by_library(x: Tensor, w: Tensor) -> Tensor:
    """Returns a Product by the vendor's library."""
    if len(w) == 1:
        return functional.linear(x, w[0])
    return torch.bmm(x, w.transpose(1, 2))


def by_compiler(x: Tensor, w: Tensor) -> Tensor:
    """Returns a Product for one position, which the compiler turns into a loop of its own."""
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
    """Adds to the residual what a module made, and normalises the sum.

    Args:
        x: The residual, FP32.
        own: A module's output for each lane.
        scale: The factor of `own`.
        landed: A sum over all lanes. None with `past`: its sum, because this rank has all lanes.
        past: What `landed` has of each lane, which does not receive it.
        weight: The weights of the norm.
        eps: Added to the mean square.
        dtype: The dtype of the normalised sum.

    Returns:
        The residual, and the same normalised.
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
    heads: Heads,
) -> Tensor:
    """Appends keys and values to the cache; softmax attention of the queries over all.

    Each page is a product of its own, so that a GPU has work for all multiprocessors.

    Args:
        qkv: [lanes, positions, (queries + 2 * keys) * head_dim].
        keys, values: Pages of the cache, [pages, KV heads of all lanes, PAGE, head_dim].
        position: The position of each new token, [positions].
        first_key: Position of the first page's first entry, a number.
        window: Keys that a query sees, its own included, a number.
        rotation: Cosines and sines of all positions, FP32 [context, head_dim / 2].
        qk_norm: Weights of the norms of queries and keys.
        bias: The bias of the rows of `qkv`, FP32; None: it has none.
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
        # Positions first, as two index arrays on both sides of a slice have it.
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
    e = torch.exp(scores - scores.amax((0, 4), keepdim=True))
    mixed = torch.matmul(e.view(pages, kv_heads, -1, PAGE).to(qkv.dtype), values)
    mixed = mixed.float().sum(0) / e.sum((0, 4)).view(kv_heads, -1, 1)
    return mixed.view(lanes, -1, length, size).transpose(1, 2).flatten(2).to(qkv.dtype)


def gated(n: Tensor, w13: Tensor, product: Product, bias: Tensor | None = None) -> Tensor:
    """SwiGLU. w13 has the gate's rows, then the other ones; so has `bias`, FP32 or None."""
    if product is by_compiler:
        gate, up = (product(n, w) for w in w13.chunk(2, 1))
    else:
        gate, up = product(n, w13).chunk(2, -1)
    gate, up = gate.float(), up.float()
    if bias is not None:
        gate, up = (part + own for part, own in zip((gate, up), bias.chunk(2), strict=True))
    return (functional.silu(gate) * up).to(n.dtype)


def best(logits: Tensor) -> Tensor:
    """Returns the largest logit and its index: FP32 [2], which is exact below 2^24."""
    flat = logits.flatten().float()
    # In parts, because the compiler gives one such search to one block.
    parts = flat.view(math.gcd(flat.numel(), _PARTS), -1)
    values, places = parts.max(1)
    part = values.argmax(0, keepdim=True)
    index = part * parts.shape[1] + places.gather(0, part)
    return torch.cat((values.gather(0, part), index.float()))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """heads: [lanes, heads, positions, head_dim]."""
    if is_interleaved:
        a, b = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
