"""The experts of a layer in PyTorch.

All their matrices are on the device, in MXFP4 if they are stored so, else in 16 bits. The step of
one token gathers those of the chosen experts by index, so that its shapes are static and a CUDA
graph can hold it. A prompt goes expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.model.experts import SWISH
from kccl.engine.model.ops import KINDS
from kccl.engine.model.program import Op, Program

from .drawn import beside, expert_matrix, packed_matrix
from .matrices import on_device, values_of
from .packed import Packed

Matrices: TypeAlias = "Tensor | Packed"


class Mixture(NamedTuple):
    """A layer's router and experts.

    Attributes:
        router: FP32 [experts, hidden].
        w13: The rows of the gates and then those of up, [experts, 2 * ffn, hidden].
        w2: [experts, hidden, ffn].
        biases: Those of the three, FP32 [experts], [experts, 2 * ffn] and [experts, hidden]; None:
            there are none.
        dtype: That of vectors, to which products' inputs are rounded.
        chosen, is_normalised, limit: As Experts and ModelConfig.swiglu_limit have them.
    """

    router: Tensor
    w13: Matrices
    w2: Matrices
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    dtype: torch.dtype
    chosen: int
    is_normalised: bool
    limit: float


def is_of_mixture(kind: str) -> bool:
    """Tells whether a Mixture has the weights of a kind of op."""
    return kind == "router" or KINDS[kind].has_experts


def read_mixture(
    checkpoint: Checkpoint, program: Program, layer: int, device: torch.device, dtype: torch.dtype
) -> Mixture:
    """Reads a layer's router and experts onto a device."""
    config, experts = program.config, program.config.experts
    assert experts is not None
    ops = {op.kind: op for op in program.ops if op.layer == layer}
    router, gate_up, down = (ops[kind] for kind in ("router", "expert_gate_up", "expert_down"))

    def vector(name: str) -> Tensor:
        return torch.from_numpy(checkpoint.tensor(name)).float().flatten().to(device)

    def of_experts(op: Op) -> Tensor | None:
        names = op.biases_of_products()
        if not names:
            return None
        return torch.stack([torch.cat([vector(each) for each in of_one]) for of_one in names])

    def matrix(name: str) -> Matrices:
        shape = program.shapes[name]
        packed = packed_matrix(checkpoint, name, shape, device)
        return expert_matrix(checkpoint, name, shape, device) if packed is None else packed

    def w13(expert: int) -> Matrices:
        gate, up = (
            _changed(matrix(name), lambda each: each.flatten(0, 1))
            for name in gate_up.products()[expert]
        )
        if isinstance(gate, Packed) and isinstance(up, Packed):
            return Packed(*map(torch.cat, zip(gate, up, strict=True)))
        assert isinstance(gate, Tensor) and isinstance(up, Tensor)
        return torch.cat((gate, up)).to(dtype)

    def w2(expert: int) -> Matrices:
        found = _changed(matrix(down.products()[expert][0]), beside)
        return found if isinstance(found, Packed) else found.to(dtype)

    (name,) = router.matrices()
    of_router = values_of(on_device(checkpoint.read(name), device, torch.float32))
    bias = vector(router.biases[0]) if router.biases else None
    return Mixture(
        of_router.view(experts.num, config.hidden),
        _all(experts.num, w13),
        _all(experts.num, w2),
        (bias, of_experts(gate_up), of_experts(down)),
        dtype,
        experts.chosen,
        experts.is_normalised,
        config.swiglu_limit,
    )


def _changed(matrix: Matrices, change: Callable[[Tensor], Tensor]) -> Matrices:
    return Packed(*map(change, matrix)) if isinstance(matrix, Packed) else change(matrix)


def _all(num: int, one: Callable[[int], Matrices]) -> Matrices:
    """Returns one(i) for each i below `num`, below each other."""
    first = one(0)
    parts = first if isinstance(first, Packed) else (first,)
    found = [part.new_empty((num, *part.shape)) for part in parts]
    for i in range(num):
        made = one(i)
        for to, part in zip(found, made if isinstance(made, Packed) else (made,), strict=True):
            to[i] = part
    return Packed(*found) if isinstance(first, Packed) else found[0]


def choose(n: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Returns the chosen experts of each position and their weights, [positions, chosen] each.

    Args:
        n: The normalised residual, FP32 [positions, hidden].
        mixture: The layer's.
    """
    logits = n @ mixture.router.T
    if mixture.biases[0] is not None:
        logits = logits + mixture.biases[0]
    of_chosen, ids = logits.topk(mixture.chosen, -1)
    if mixture.is_normalised:
        return ids, torch.softmax(of_chosen, -1)
    return ids, torch.softmax(logits, -1).gather(-1, ids)


def one_token(n: Tensor, mixture: Mixture) -> Tensor:
    """Computes the experts of one token, in a form that torch.compile turns into loops which read
    the chosen matrices where they lie.

    Args:
        n: FP32 [1, 1, hidden].
        mixture: The layer's.

    Returns:
        The sum of the chosen experts' outputs, as `n`.
    """
    dtype = mixture.dtype
    ids, shares = choose(n[0], mixture)
    ids, shares, x = ids[0], shares[0], n[0, 0].to(dtype).float()
    both = _products(mixture.w13, ids, x)
    if mixture.biases[1] is not None:
        both = both + mixture.biases[1][ids]
    acts = _activated(both, mixture.limit).to(dtype).float()
    out = _products(mixture.w2, ids, acts)
    if mixture.biases[2] is not None:
        out = out + mixture.biases[2][ids]
    return (out * shares[:, None]).sum(0)[None, None]


def _products(matrices: Matrices, ids: Tensor, x: Tensor) -> Tensor:
    """Multiplies the chosen matrices by a vector, or each by its own one."""
    if isinstance(matrices, Packed):
        return matrices.of(ids).times(x)
    return (matrices[ids].float() * x[..., None, :]).sum(-1)


def _one_of(matrices: Matrices, expert: int, dtype: torch.dtype) -> Tensor:
    if isinstance(matrices, Packed):
        return matrices.of(expert).values().to(dtype)
    return matrices[expert]


def many_tokens(n: Tensor, mixture: Mixture) -> Tensor:
    """Computes the same for many positions, [1, positions, hidden]. It waits for the device."""
    ids, shares = choose(n[0], mixture)
    x, total = n[0].to(mixture.dtype), torch.zeros_like(n[0])
    for expert in torch.unique(ids).tolist():
        positions, places = torch.nonzero(ids == expert, as_tuple=True)
        both = (x[positions] @ _one_of(mixture.w13, expert, x.dtype).T).float()
        if mixture.biases[1] is not None:
            both = both + mixture.biases[1][expert]
        acts = _activated(both, mixture.limit).to(x.dtype)
        out = (acts @ _one_of(mixture.w2, expert, x.dtype).T).float()
        if mixture.biases[2] is not None:
            out = out + mixture.biases[2][expert]
        total.index_add_(0, positions, out * shares[positions, places][:, None])
    return total[None]


def _activated(both: Tensor, limit: float) -> Tensor:
    """Returns what the last product multiplies; `both` has the gates and then the others."""
    gate, up = both.chunk(2, -1)
    if limit == 0:
        return gate * torch.sigmoid(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(SWISH * gate) * (up + 1)
