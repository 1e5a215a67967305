"""PyTorch as a peer on GPUs: compiled, with one CUDA graph for each token."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..peer import Peer, Room
from . import layers
from .decoder import EAGER, Decoder, Pieces, Span, Weights
from .device import Cpu, Device, Gpu, Step
from .experts import one_token
from .ranks import Alone, Kccl, Nccl, Ranks

# There are two forms: products by cuBLAS, or by torch.compile. Each decodes so many tokens after
# such a prompt, and the faster form is measured.
_TRIAL_PROMPT, _TRIAL_TOKENS = 64, 16


def alone(room: Room) -> Peer:
    """Opens PyTorch on one GPU."""
    return TorchPeer(room, Alone(), Gpu())


def with_nccl(room: Room) -> Peer:
    """Opens PyTorch on several GPUs, tensor-parallel, with NCCL. Collective."""
    ordinal = _use_gpu_of(room)
    return TorchPeer(room, Nccl(room.comm, ordinal), Gpu())


def with_kccl(room: Room) -> Peer:
    """Opens PyTorch on several GPUs, tensor-parallel, with KCCL. Collective."""
    _use_gpu_of(room)
    return TorchPeer(room, Kccl(room.comm), Gpu())


def _use_gpu_of(room: Room) -> int:
    """Makes the GPU of the room's communicator torch's current one. Returns its number."""
    ordinal: int = room.gpu_ordinal
    torch.cuda.set_device(ordinal)
    return ordinal


class TorchPeer(Peer):
    """The engine's model in PyTorch. Prompts run without compiler and graph."""

    def __init__(self, room: Room, ranks: Ranks, device: Device) -> None:
        self.library = "+".join(filter(None, ("torch", ranks.name)))
        self.version = " ".join(filter(None, (torch.__version__, ranks.name, ranks.version)))
        self.world_size = ranks.world_size
        self.backend = device.name
        self._ranks, self._device = ranks, device
        self._steps: dict[Any, tuple[Step, Span]] = {}
        with device.work():
            weights = room.shared(
                "weights in PyTorch",
                lambda: Weights(room.checkpoint, ranks.rank, ranks.world_size, device.name),
            )
            self._decoder = Decoder(weights, room.context, ranks)
            # Inputs of a step: the token, its position, and the index in _tokens at which the step
            # stores the token that it chooses.
            self._token, self._position, self._index = (
                torch.zeros(1, dtype=torch.int64, device=weights.device) for _ in range(3)
            )
            self._tokens = self._token.new_zeros(room.context)
        self._forms = {"": EAGER} if isinstance(device, Cpu) else _compiled_forms()
        times = {form: self._trial(form) for form in self._forms}
        self.form = ranks.of_rank_0(min(times, key=times.__getitem__))
        self._steps.clear()
        self.reset()

    def _trial(self, form: str) -> float:
        """Returns the seconds of _TRIAL_TOKENS tokens with this form of products."""
        self.form = form
        self._steps.clear()
        self.reset()
        token = self.extend([1] * _TRIAL_PROMPT)
        _, times = self.timed(token, _TRIAL_TOKENS)
        return times[-1] - times[0]

    def reset(self) -> None:
        self._kept = self._length = 0

    def extend(self, ids: Sequence[int]) -> int:
        with self._device.work():
            token = int(self._decoder.extend(ids, self._length))
        self._kept = self._length = self._length + len(ids)
        return token

    def step(self, token: int) -> int:
        ((token,), _) = self.timed(token, 1)
        return token

    def rewind(self) -> None:
        self._length = self._kept

    def timed(self, token: int, num_tokens: int) -> tuple[list[int], list[float]]:
        with self._device.work():
            step = self._step_for(self._length, self._length + num_tokens)
            self._begin(token)
            times = self._device.timed(step, num_tokens, self._meet)
            self._length += num_tokens
            return self._tokens[:num_tokens].tolist(), times

    def close(self) -> None:
        # Frees the graphs before the library is closed: see Ranks.close().
        self._steps.clear()
        del self._decoder
        gc.collect()
        self._ranks.close()

    def _meet(self) -> None:
        self._ranks.meet(self._token.device)

    def _begin(self, token: int) -> None:
        """Sets the inputs of the next step."""
        self._token.fill_(token)
        self._position.fill_(self._length)
        self._index.zero_()

    def _step_for(self, start: int, stop: int) -> Step:
        """Returns a step for the positions from start to stop - 1."""
        span = self._decoder.span(start, stop)
        if span.key not in self._steps:
            pieces = self._forms[self.form]

            def step() -> None:
                token = self._decoder.step(self._token, self._position, span, pieces)
                self._tokens.index_copy_(0, self._index, token)
                self._token.copy_(token)
                self._position.add_(1)
                self._index.add_(1)

            self._steps[span.key] = self._device.captured(step, lambda: self._begin(0)), span
        return self._steps[span.key][0]


@cache
def _compiled_forms() -> dict[str, Pieces]:
    """Returns the pieces with products by the library, and those with products by the compiler.

    A piece is compiled when it is first called in a process.
    """
    compiled = partial(torch.compile, fullgraph=True, dynamic=False)
    attention = torch.compile(layers.attention, fullgraph=True)

    def paged(qkv: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Tensor:
        # Makes the number of pages dynamic, so that one program serves any number.
        for pages in (keys, values):
            torch._dynamo.mark_dynamic(pages, 0)
        found: Tensor = attention(qkv, keys, values, *others)
        return found

    def pieces(product: layers.Product) -> Pieces:
        return Pieces(
            product=compiled(product) if product is layers.by_compiler else product,
            gated=compiled(lambda n, w13, bias: layers.gated(n, w13, product, bias)),
            add_and_norm=add_and_norm,
            attention=paged,
            experts=experts,
            best=best,
        )

    add_and_norm, best = compiled(layers.add_and_norm), compiled(layers.best)
    experts = compiled(one_token)
    return {"cuBLAS": pieces(layers.by_library), "Inductor": pieces(layers.by_compiler)}
