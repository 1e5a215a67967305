"""The optimizers: Muon for the lanes' matrices, AdamW for all other weights."""

import torch

# Coefficients of the quintic iteration that brings all singular values near 1 within five turns.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_TURNS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is made orthogonal: all its singular values become 1.

    A lane's part of a matrix is a matrix of its own. The update's root mean square is 0.2 times the
    learning rate, about AdamW's, whatever the shape. The momentum is BF16: the iteration is, too.
    """

    def __init__(self, weights, lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(weights, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for weights in by_shape.values():
                self._update(weights, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, weights, lr, momentum, weight_decay) -> None:
        """One step of weights of one shape, [lanes, rows, columns], all in one go."""
        for weight in weights:
            if "momentum" not in self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight, dtype=torch.bfloat16)
        gradients = [weight.grad.bfloat16() for weight in weights]
        buffers = [self.state[weight]["momentum"] for weight in weights]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)
        updates = orthogonal(torch.stack(ahead)).float()
        size = 0.2 * max(weights[0].shape[-2:]) ** 0.5
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, list(updates.unbind()), alpha=-lr * size)

    def load_state_dict(self, state_dict) -> None:
        """As the base class, which would give the momentum the dtype of the weights."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["momentum"] = state["momentum"].bfloat16()


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrices, about: [..., rows, columns], BF16."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_TURNS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.mT if is_tall else x


def optimizers(module, *, is_fused: bool) -> list[torch.optim.Optimizer]:
    """The optimizers of a Laneformer. Each group's "base_lr" is its rate before the schedule."""
    lanes, tables, norms = [], [], []
    for name, weight in module.named_parameters():
        is_table = name.startswith(("model.tok_embeddings", "lm_head"))
        (lanes if weight.ndim == 3 else tables if is_table else norms).append((name, weight))
    head, embedding = (
        [weight for name, weight in tables if name.startswith("lm_head") == is_head]
        for is_head in (True, False)
    )
    groups = [
        {"params": embedding, "lr": EMBEDDING_LR},
        {"params": head, "lr": HEAD_LR},
        {"params": [weight for _, weight in norms], "lr": NORM_LR},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0, fused=is_fused)
    muon = Muon([weight for _, weight in lanes], lr=MATRIX_LR)
    for optimizer in (adam, muon):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [adam, muon]


# For batches of 65,536 tokens.
MATRIX_LR = 5e-3
EMBEDDING_LR = 3e-2
HEAD_LR = 3e-3
NORM_LR = 3e-3
