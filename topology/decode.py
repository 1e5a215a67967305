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
MIXTURE_LAYER_US, MIXTURE_WORK_US = 23.8, 17.4
"""Microseconds that a layer with experts takes beside reading its weights: those that do not depend
on the number of GPUs, and those that the GPUs divide among them. Fitted to one and two H200."""
OVERLAP = 1.2
"""The p of the p-norm that adds the times of stream and chain. With 1 the times are added; with
infinity the longer one counts alone. Fitted."""
DECODE_ERROR = 0.15
"""More than the largest relative error of a prediction that was compared with a record."""
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
        recorded_ranks: The most GPUs on which records of H200 and H100 have this model in 16 bits,
            or a mixture of experts as it is stored; 0 if none has.
        recorded_position: The last position in these records.
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
    recorded_ranks: int = 0
    recorded_position: int = 0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The predicted time of a token.

    Attributes:
        us: Microseconds.
        bound_us: Microseconds of the stream alone, which is the bound by bandwidth.
        ranks: Number of GPUs.
        is_compared: Whether records have this model on such GPUs, on as many of them, and at as
            late a position.
        is_bound: Whether `us` is the least time, as of a mixture of experts that no record has. It
            has no range then.
        sources: Ids of the sources of the machine's figures.
    """

    us: float
    bound_us: float
    ranks: int
    is_compared: bool
    is_bound: bool
    sources: frozenset[str]

    @property
    def error(self) -> float:
        """The relative error of `us`, which is assumed if `is_compared` is false."""
        return DECODE_ERROR if self.is_compared else cost.UNMEASURED_ERROR

    @property
    def range_us(self) -> tuple[float, float]:
        """The least and most microseconds that the error allows; no less than the bound."""
        return max(self.us * (1 - self.error), self.bound_us), self.us * (1 + self.error)


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
) -> Projection:
    """Predicts the time of a token.

    Args:
        machine: The machine.
        shape: The model.
        position: The token's position, from 0 on.
        world_size: Number of GPUs that share the weights; default: all, but at most 8.

    Raises:
        ValueError: The machine has fewer GPUs, their bandwidth is not known, or their memory does
            not hold the weights.
    """
    graph = Graph(machine)
    gpus = graph.gpus
    most = min(len(gpus), cost.MOST_RANKS)
    ranks = most if world_size is None else world_size
    if not 1 <= ranks <= most:
        raise ValueError(f"there are {ranks} ranks, must be 1 to {most}: GPUs, and at most 8")
    gbps, used = 0.0, set[str]()
    for gpu in gpus[:ranks]:
        if gpu.bandwidth_gbps is None:
            raise ValueError(f"the bandwidth of {gpu.id}'s memory is not known")
        gbps += gpu.bandwidth_gbps.value
        used.add(gpu.bandwidth_gbps.source)
    room = [gpu.memory_bytes.value for gpu in gpus[:ranks] if gpu.memory_bytes]
    if len(room) == ranks and shape.bytes_in_memory > sum(room):
        raise ValueError(
            f"the weights are {shape.bytes_in_memory / 1e9:,.0f} GB, and the memory of {ranks} "
            f"GPUs is {sum(room) / 1e9:,.0f} GB"
        )
    stream = shape.bytes_per_token(position) / gbps / 1e3
    has_record = shape.recorded_ranks > 0
    layer = LAYER_US
    if shape.is_sparse and has_record:
        layer = MIXTURE_LAYER_US + MIXTURE_WORK_US / ranks
    chain = layer * shape.layers
    is_measured = all(graph.sources[source].kind == "measured" for source in used)
    if ranks > 1 and not shape.is_delayed:
        figures = cost.figures_of(machine, ranks)
        is_measured, used = is_measured and figures.is_measured, used | figures.sources
        call = cost.Call(
            algorithm="all_reduce_one_shot_ll16",
            nbytes=shape.hidden * _EXCHANGED_BYTES,
            world_size=ranks,
            mode="in_kernel",
            complete="slice",
        )
        chain += _EXCHANGES * shape.layers * cost.predict_by(figures, call)
    return Projection(
        us=float((stream**OVERLAP + chain**OVERLAP) ** (1 / OVERLAP)),
        bound_us=stream,
        ranks=ranks,
        is_compared=is_measured
        and ranks <= shape.recorded_ranks
        and position <= shape.recorded_position,
        is_bound=shape.is_sparse and not has_record,
        sources=frozenset(used),
    )
