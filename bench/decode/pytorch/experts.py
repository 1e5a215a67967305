"""The experts of a layer in PyTorch.

All their matrices are on the device, in 16 bits. The step of one token gathers those of the chosen
experts by index, so that its shapes are static and a CUDA graph can hold it. A prompt goes expert
by expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.model.experts import SWISH
from kccl.engine.model.ops import KINDS
from kccl.engine.model.program import Op, Program

from .drawn import beside, expert_matrix
from .matrices import on_device, values_of


class Mixture(NamedTuple):
    """A layer's router and experts.

    Attributes:
        router: FP32 [experts, hidden].
        w13: The rows of the gates and then those of up, [experts, 2 * ffn, hidden].
        w2: [experts, hidden, ffn].
        biases: Those of the three, FP32 [experts], [experts, 2 * ffn] and [experts, hidden]; None:
            there are none.
        chosen, is_normalised, limit: As Experts and ModelConfig.swiglu_limit have them.
    """

    router: Tensor
    w13: Tensor
    w2: Tensor
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
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

    def matrix(name: str) -> Tensor:
        return expert_matrix(checkpoint, name, program.shapes[name], device)

    w13 = torch.empty((experts.num, 2 * config.ffn, config.hidden), dtype=dtype, device=device)
    w2 = torch.empty((experts.num, config.hidden, config.ffn), dtype=dtype, device=device)
    for expert in range(experts.num):
        gate, up = gate_up.products()[expert]
        w13[expert, : config.ffn] = matrix(gate).flatten(0, 1)
        w13[expert, config.ffn :] = matrix(up).flatten(0, 1)
        w2[expert] = beside(matrix(down.products()[expert][0]))
    (name,) = router.matrices()
    of_router = values_of(on_device(checkpoint.read(name), device, torch.float32))
    bias = vector(router.biases[0]) if router.biases else None
    return Mixture(
        of_router.view(experts.num, config.hidden),
        w13,
        w2,
        (bias, of_experts(gate_up), of_experts(down)),
        experts.chosen,
        experts.is_normalised,
        config.swiglu_limit,
    )


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
    dtype = mixture.w13.dtype
    ids, shares = choose(n[0], mixture)
    ids, shares, x = ids[0], shares[0], n[0, 0].to(dtype).float()
    both = (mixture.w13[ids].float() * x).sum(-1)
    if mixture.biases[1] is not None:
        both = both + mixture.biases[1][ids]
    acts = _activated(both, mixture.limit).to(dtype).float()
    out = (mixture.w2[ids].float() * acts[:, None]).sum(-1)
    if mixture.biases[2] is not None:
        out = out + mixture.biases[2][ids]
    return (out * shares[:, None]).sum(0)[None, None]


def many_tokens(n: Tensor, mixture: Mixture) -> Tensor:
    """Computes the same for many positions, [1, positions, hidden]. It waits for the device."""
    ids, shares = choose(n[0], mixture)
    x, total = n[0].to(mixture.w13.dtype), torch.zeros_like(n[0])
    for expert in torch.unique(ids).tolist():
        positions, places = torch.nonzero(ids == expert, as_tuple=True)
        both = (x[positions] @ mixture.w13[expert].T).float()
        if mixture.biases[1] is not None:
            both = both + mixture.biases[1][expert]
        acts = _activated(both, mixture.limit).to(x.dtype)
        out = (acts @ mixture.w2[expert].T).float()
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
