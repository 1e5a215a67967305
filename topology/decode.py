"""Predicts how fast a machine decodes one request, from the bytes of a token and the chain of ops.

To make a token, all GPUs at once read all weights and all earlier keys and values from memory. This
is called the stream. The token's ops wait for each other, layer by layer. This is called the chain.
Stream and chain overlap in part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cost
from .graph import Graph
from .model import Machine

LAYER_US = 11.8
"""Microseconds of a layer's chain if nothing had to be read from memory. Fitted to H200 GPUs."""
OVERLAP = 1.2
"""The p of the p-norm that adds the times of stream and chain. With 1 the times are added; with
infinity the longer one counts alone. Fitted."""
DECODE_ERROR = 0.1
"""The relative error of predictions on the machines to which the constants are fitted."""
_KV_BYTES = 2
_EXCHANGES = 2  # number of exchanges between GPUs in each layer
_EXCHANGED_BYTES = 4  # bytes of each value that an exchange sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model on which its predicted speed depends.

    Attributes:
        source: Where the numbers are from.
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: As in the model's config.
        weight_bits: Bits of a weight.
        weight_bytes: Bytes of weights that a token reads; 0 if they follow from the sizes above.
        stored_bytes: Bytes of all weights if a token reads only some of them; else 0.
        window, window_layers: `window_layers` of the layers see only the last `window` positions.
            The others see all.
        is_delayed: Whether layers use what GPUs send each other only some layers later, so that no
            op waits for an exchange.
        published: Sentences with speeds that others have published, and who.
    """

    source: str
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int = 0
    ffn: int = 0
    heads: int = 0
    vocab: int = 0
    weight_bits: int = 16
    weight_bytes: int = 0
    stored_bytes: int = 0
    window: int = 0
    window_layers: int = 0
    is_delayed: bool = False
    published: tuple[str, ...] = ()

    @property
    def is_sparse(self) -> bool:
        """Whether a token reads only some of the weights, as in a mixture of experts."""
        return self.weight_bytes != 0

    @property
    def bytes_in_memory(self) -> int:
        """The bytes of all weights."""
        return self.stored_bytes or self._weights()

    def bytes_per_token(self, position: int) -> int:
        """Returns the bytes of weights, keys and values that the token at a position reads."""
        pairs = 2 * self.kv_heads * self.head_dim
        seen = (self.layers - self.window_layers) * (position + 1)
        seen += self.window_layers * min(position + 1, self.window)
        return self._weights() + seen * pairs * _KV_BYTES

    def _weights(self) -> int:
        if self.weight_bytes:
            return self.weight_bytes
        width = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        layer = self.hidden * width + 3 * self.hidden * self.ffn
        return (self.layers * layer + self.vocab * self.hidden) * self.weight_bits // 8


def models() -> dict[str, Shape]:
    """Returns the shapes recorded with this package, by file name without suffix."""
    folder = Path(__file__).parent / "models"
    return {
        path.stem: _shape(json.loads(path.read_text("utf-8")))
        for path in sorted(folder.glob("*.json"))
    }


def _shape(record: dict[str, Any]) -> Shape:
    return Shape(**record | {"published": tuple(record.get("published", ()))})


def predict_token(
    machine: Machine, shape: Shape, position: int, world_size: int | None = None
) -> tuple[float, float]:
    """Predicts the time of a token, with and without the chain.

    Args:
        machine: The machine.
        shape: The model.
        position: The token's position, from 0 on.
        world_size: Number of GPUs that share the weights; default: all, but at most 8.

    Returns:
        Microseconds of a token, and of its stream alone, which is the bound by bandwidth.

    Raises:
        ValueError: The machine has fewer GPUs, their bandwidth is not known, or their memory does
            not hold the weights.
    """
    gpus = Graph(machine).gpus
    most = min(len(gpus), cost.MOST_RANKS)
    ranks = most if world_size is None else world_size
    if not 1 <= ranks <= most:
        raise ValueError(f"there are {ranks} ranks, must be 1 to {most}: GPUs, and at most 8")
    gbps = 0.0
    for gpu in gpus[:ranks]:
        if gpu.bandwidth_gbps is None:
            raise ValueError(f"the bandwidth of {gpu.id}'s memory is not known")
        gbps += gpu.bandwidth_gbps.value
    room = [gpu.memory_bytes.value for gpu in gpus[:ranks] if gpu.memory_bytes]
    if len(room) == ranks and shape.bytes_in_memory > sum(room):
        raise ValueError(
            f"the weights are {shape.bytes_in_memory / 1e9:,.0f} GB, and the memory of {ranks} "
            f"GPUs is {sum(room) / 1e9:,.0f} GB"
        )
    stream = shape.bytes_per_token(position) / gbps / 1e3
    chain = LAYER_US * shape.layers
    if ranks > 1 and not shape.is_delayed:
        call = cost.Call(
            algorithm="all_reduce_one_shot_ll16",
            nbytes=shape.hidden * _EXCHANGED_BYTES,
            world_size=ranks,
            mode="in_kernel",
            complete="slice",
        )
        chain += _EXCHANGES * shape.layers * cost.predict(machine, call)
    return float((stream**OVERLAP + chain**OVERLAP) ** (1 / OVERLAP)), stream
