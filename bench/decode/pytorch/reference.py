"""A mixture of experts in PyTorch, one layer at a time, to check the tokens of large ones.

The NumPy reference takes minutes for such a model, and a second copy of its weights fits into no
GPU. So this runs all positions of a prompt and an answer through a layer, and drops its weights.
Experts with random weights are drawn on the device (drawn.py). All is computed in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kccl
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.formats.base import Stored
from kccl.engine.model.experts import SWISH
from kccl.engine.model.program import Op, Program

from ..routers import Routers
from ..tokens import Expected, Oracle, expected_of, num_parts, tell_parts
from .drawn import beside, expert_matrix
from .matrices import on_device, values_of

# The rows of the head that are read at a time.
_ROWS = 8192


class LayerByLayer(Oracle):
    """Runs a model with one residual and experts."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        """Reads no weights yet. Raises kccl.Error if PyTorch has no such device."""
        if device != "cpu" and not torch.cuda.is_available():
            raise kccl.Error("PyTorch sees no GPU")
        self._checkpoint, self._device = checkpoint, torch.device(device)
        self._config = checkpoint.config
        self._program = Program(self._config)
        self._dtype: torch.dtype = getattr(torch, checkpoint.dtype)
        self._kept: dict[str, Tensor] = {}

    def expected(
        self,
        prompt: list[int],
        answer: list[int],
        after_part: Callable[[], object] | None = None,
        routers: Routers | None = None,
    ) -> Expected:
        """See Oracle."""
        ids, num_layers = [*prompt, *answer[:-1]], self._config.num_layers
        num = num_parts(prompt, answer, num_layers)

        def after_layer(layer: int) -> None:
            tell_parts(after_part, num, layer, num_layers)

        with torch.inference_mode():
            x = self._layers(ids, len(prompt) + len(answer), routers, after_layer)
            logits = self._logits(x[len(prompt) - 1 :])
        return expected_of(prompt, answer, logits, self._config.message_dtype, routers)

    def _layers(
        self,
        ids: Sequence[int],
        length: int,
        routers: Routers | None,
        after_layer: Callable[[int], None],
    ) -> Tensor:
        rows = {each: self._checkpoint.rows("embedding", each, each + 1) for each in set(ids)}
        table = np.concatenate([rows[each] for each in ids]).astype(np.float32)
        x = self._on_device(table)
        tables = self._program.rotations(length, 0, len(ids))
        self._cos, self._sin = (self._on_device(each)[:, None] for each in tables)
        routed = torch.empty(0)
        for op in self._program.ops:
            match op.kind:
                case "qkv":
                    heads = self._qkv(op, x)
                case "attend":
                    attended = self._attend(op, *heads)
                case "out":
                    x = x + self._out(op, attended)
                case "router":
                    n = self._normed(op, x)
                    (router,) = self._matrices(op)
                    routed = n @ router.T + sum(self._biases(op))
                case "expert_gate_up":
                    choice = self._choose(op, routed, routers)
                    gate_up = op
                case "expert_down":
                    x = x + self._experts(gate_up, op, n, *choice)
                    after_layer(op.layer)
        return x

    def _logits(self, x: Tensor) -> np.ndarray[Any, Any]:
        n = self._normed(self._program.by_name["final"], x)
        (name,) = self._program.by_name["head"].weights
        vocab_size, found = self._config.vocab_size, []
        for first in range(0, vocab_size, _ROWS):
            end = min(first + _ROWS, vocab_size)
            rows = self._kept_of(
                f"{name} {first}", partial(self._checkpoint.read_rows, name, first, end)
            )
            found.append((n @ rows.float().T).cpu())
        logits: np.ndarray[Any, Any] = torch.cat(found, 1).numpy()
        return logits

    # ---- attention -------------------------------------------------------------------------------

    def _qkv(self, op: Op, x: Tensor) -> list[Tensor]:
        """Returns queries, keys and values, [positions, heads, head_dim] each."""
        c, n = self._config, self._normed(op, x)
        biases, found = [*self._biases(op)], []
        norms = [self._vector(name) for name in op.head_norms()]
        for i, matrix in enumerate(self._matrices(op)):
            # Lanes have heads, in their order.
            heads = n @ matrix.flatten(0, 1).T
            if biases:
                heads = heads + biases[i].flatten()
            heads = heads.unflatten(-1, (-1, c.head_dim))
            if i < 2:
                if norms:
                    heads = _rms_norm(heads, norms[i], c.norm_eps)
                heads = self._rotated(heads)
            found.append(heads)
        return found

    def _rotated(self, heads: Tensor) -> Tensor:
        if self._config.rope.is_interleaved:
            a, b = heads[..., ::2], heads[..., 1::2]
        else:
            a, b = heads.chunk(2, -1)
        both = a * self._cos - b * self._sin, a * self._sin + b * self._cos
        if self._config.rope.is_interleaved:
            return torch.stack(both, -1).flatten(-2)
        return torch.cat(both, -1)

    def _attend(self, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns [positions, heads * head_dim]."""
        c, length = self._config, len(q)
        each = c.num_heads // c.num_kv_heads
        k, v = (part.repeat_interleave(each, 1).transpose(0, 1) for part in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * c.attention_scale
        at = torch.arange(length, device=self._device)
        is_hidden = at[None] > at[:, None]
        if op.window:
            is_hidden |= at[None] <= at[:, None] - op.window
        scores = scores.masked_fill(is_hidden, -torch.inf)
        for name in op.sinks():
            sinks = self._vector(name).reshape(-1, 1, 1).expand(-1, length, 1)
            scores = torch.cat((scores, sinks), -1)
        mixed = torch.softmax(scores, -1)[..., :length] @ v
        return mixed.transpose(0, 1).flatten(1)

    def _out(self, op: Op, attended: Tensor) -> Tensor:
        (matrix,) = self._matrices(op)  # [lanes, hidden, columns of a lane]
        return attended @ beside(matrix).T + sum(self._biases(op))

    # ---- experts ---------------------------------------------------------------------------------

    def _choose(self, op: Op, routed: Tensor, routers: Routers | None) -> tuple[Tensor, Tensor]:
        logits, experts = routed.cpu().numpy(), self._config.experts
        assert experts is not None
        if routers is None:
            ids, shares = experts.choose(logits)
        else:
            ids, shares = routers.choose(op.layer, 0, logits)
        return torch.from_numpy(ids).to(self._device), self._on_device(shares)

    def _experts(self, gate_up: Op, down: Op, n: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Returns the sum of the chosen experts' outputs."""
        total, limit = torch.zeros_like(n), self._config.swiglu_limit
        biases = gate_up.biases_of_products(), down.biases_of_products()
        matrices = gate_up.products(), down.products()
        for expert in torch.unique(ids).tolist():
            positions, places = torch.nonzero(ids == expert, as_tuple=True)
            w1, w3 = (self._matrix(name).flatten(0, 1) for name in matrices[0][expert])
            gate, up = n[positions] @ w1.T, n[positions] @ w3.T
            if biases[0]:
                b1, b3 = (self._vector(name).flatten() for name in biases[0][expert])
                gate, up = gate + b1, up + b3
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                acts = gate * torch.sigmoid(SWISH * gate) * (up + 1)
            else:
                acts = gate * torch.sigmoid(gate) * up
            (name,) = matrices[1][expert]
            own = acts @ beside(self._matrix(name)).T
            if biases[1]:
                own = own + self._vector(biases[1][expert][0])
            total.index_add_(0, positions, own * shares[positions, places][:, None])
        return total

    # ---- weights ---------------------------------------------------------------------------------

    def _normed(self, op: Op, x: Tensor) -> Tensor:
        (name,) = op.norms()
        return _rms_norm(x, self._vector(name), self._config.norm_eps)

    def _matrices(self, op: Op) -> list[Tensor]:
        return [self._matrix(name) for name in op.matrices()]

    def _biases(self, op: Op) -> list[Tensor]:
        return [self._vector(name) for name in op.biases]

    def _vector(self, name: str) -> Tensor:
        if name not in self._kept:
            vector = self._checkpoint.tensor(name).astype(np.float32)
            self._kept[name] = self._on_device(vector)
        return self._kept[name]

    def _matrix(self, name: str) -> Tensor:
        """Returns a matrix in FP32, [lanes, rows, columns]; the router has no lanes."""
        if "experts" in name.split("."):
            return expert_matrix(self._checkpoint, name, self._program.shapes[name], self._device)
        return self._kept_of(name, partial(self._checkpoint.read, name)).float()

    def _kept_of(self, name: str, read: Callable[[], Stored]) -> Tensor:
        """Returns weights that stay on the device: those outside the experts, in 16 bits."""
        if name not in self._kept:
            self._kept[name] = values_of(on_device(read(), self._device, self._dtype))
        return self._kept[name]

    def _on_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
