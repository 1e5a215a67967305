"""A model's shape and settings, whatever file they come from."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Literal, get_args

from kccl import InvalidArgument

from ..base.core import lib
from .experts import Experts
from .ops import BIASES, KINDS, layer_of
from .rope import Rope, check_positive

Family = Literal[
    "laneformer", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"
]
FAMILIES: tuple[Family, ...] = get_args(Family)
LM_HEADS = ("replicate", "vocab_parallel")
MESSAGE_DTYPES = ("bfloat16", "float32")
_BIAS_NAMES = frozenset(name for names in BIASES.values() for name in names)
MAX_LANES: int = lib.kKcclEngineMaxLanes
# The most layers, far above those of any model. A damaged file may name any number, and loops over
# so many layers would not end.
_MAX_LAYERS = 4096
# The most experts of all layers together, because loops run over these, too.
_MAX_EXPERTS = 1 << 17
_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's configuration, checked when it is made.

    Attributes:
        family: One of FAMILIES.
        num_layers, num_lanes: The number of layers and of lanes. Neither depends on the number of
            ranks.
        hidden: The width of the residual.
        ffn: The width of a feed-forward block over all lanes. An expert is one such block.
        num_heads, num_kv_heads: The number of query heads, and of KV heads, over all lanes.
        head_dim: The elements of a head.
        vocab_size: Rows of the embedding.
        context: The most positions that a sequence should have, as the model's file says. See
            longest_context.
        norm_eps: Added to the mean square in RMSNorm.
        rope: The rotary position embedding.
        window: How many keys a query sees in layers with a window, its own key included. 0: no
            layer has a window.
        window_layers: The layers that have the window. An integer n: the first n layers. A tuple:
            the layers' numbers in ascending order. A tuple (0, ..., n - 1) becomes n.
        biases: The kinds of ops whose products have biases, in the order of BIASES.
        is_tied: Whether the head is the embedding.
        has_qk_norm: Whether queries and keys pass an RMSNorm over head_dim before RoPE (Qwen3).
        has_sinks: Whether each head has an attention sink: a learned logit that joins the softmax
            and has no value (gpt-oss).
        experts: The experts of each layer. None means that each layer has one feed-forward block.
        swiglu_limit: If 0, the feed-forward block computes silu(gate) * up. Otherwise it follows
            gpt-oss: it clamps gate to at most this limit and up to +-limit, and computes
            (up + 1) * gate * sigmoid(1.702 * gate).
        attention_scale: Multiplies the products of queries and keys. 0 stands for head_dim ** -0.5.
        delay: After how many layers the other lanes add a lane's message. 0: all lanes share one
            residual, and add up their outputs in lane order after each module, as in ordinary
            models.
        early_comm: Whether the first `delay` layers sum over all lanes at once. Otherwise they
            scale each lane's own output by sqrt(num_lanes).
        early_messages: Whether the first `delay` layers send messages. The other lanes add these
            `delay` layers later.
        attention_comm, mlp_comm: Whether attention, and feed-forward blocks, send messages.
        lm_head: "replicate", or "vocab_parallel": lane l makes the logits of the l-th part of the
            vocabulary from its own residual, and nothing is averaged.
        message_dtype: The type to which a lane's message is rounded before the others add it.

    Args:
        names: Maps these fields to their names in the model's file, for messages of errors; None:
            the names above.

    Raises:
        InvalidArgument: A field is wrong; the text names it.
    """

    family: Family
    num_layers: int
    num_lanes: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)
    window: int = 0
    window_layers: int | tuple[int, ...] = 0
    biases: tuple[str, ...] = ()
    is_tied: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    experts: Experts | None = None
    swiglu_limit: float = 0.0
    attention_scale: float = 0.0
    delay: int = 0
    early_comm: bool = False
    early_messages: bool = True
    attention_comm: bool = True
    mlp_comm: bool = True
    lm_head: Literal["replicate", "vocab_parallel"] = "replicate"
    message_dtype: Literal["bfloat16", "float32"] = "float32"
    names: InitVar[Mapping[str, str] | None] = None

    def __post_init__(self, names: Mapping[str, str] | None) -> None:
        called = {each.name: each.name for each in fields(self)} | dict(names or {})

        def check_ints(names: str, least: int, most: int) -> None:
            for name in names.split():
                _check_int(called[name], getattr(self, name), least, most)

        _check_choice(called["family"], self.family, FAMILIES)
        _check_choice(called["lm_head"], self.lm_head, LM_HEADS)
        _check_choice(called["message_dtype"], self.message_dtype, MESSAGE_DTYPES)
        check_ints("hidden ffn num_heads num_kv_heads head_dim vocab_size context", 1, _MAX_SIZE)
        check_ints("num_layers", 1, _MAX_LAYERS)
        check_ints("num_lanes", 1, MAX_LANES)
        check_ints("window", 0, _MAX_SIZE)
        self._check_window_layers(called["window_layers"])
        check_ints("delay", 0, self.num_layers)
        if not isinstance(self.experts, Experts | None):
            raise InvalidArgument(
                f"{called['experts']} is {reprlib.repr(self.experts)}, must be Experts or None"
            )
        if self.experts is not None and self.num_layers * self.experts.num > _MAX_EXPERTS:
            raise InvalidArgument(
                f"{called['num_layers']} is {self.num_layers}, with {self.experts.num} experts "
                f"each, must have at most {_MAX_EXPERTS} experts together"
            )
        if not isinstance(self.biases, tuple) or list(self.biases) != [
            kind for kind in BIASES if kind in self.biases
        ]:
            raise InvalidArgument(
                f"{called['biases']} is {reprlib.repr(self.biases)}, must be a tuple of some of "
                f"{', '.join(BIASES)}, in this order"
            )
        switches = ("is_tied", "has_qk_norm", "has_sinks", "early_comm", "early_messages")
        for name in (*switches, "attention_comm", "mlp_comm"):
            _check_bool(called[name], getattr(self, name))
        check_positive(called["norm_eps"], self.norm_eps)
        if self.attention_scale == 0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        check_positive(called["attention_scale"], self.attention_scale)
        if self.swiglu_limit != 0:
            check_positive(called["swiglu_limit"], self.swiglu_limit)
        self._check_together(called)
        # Raises InvalidArgument if the RoPE scaling does not fit head_dim.
        self.rope.frequencies(self.head_dim)

    def _check_window_layers(self, called: str) -> None:
        layers = self.window_layers
        if not isinstance(layers, tuple):
            _check_int(called, layers, 0, self.num_layers)
            return
        if not all(isinstance(each, int) for each in layers) or list(layers) != [
            layer for layer in range(self.num_layers) if layer in layers
        ]:
            raise InvalidArgument(
                f"{called} is {reprlib.repr(layers)}, must be numbers of layers in ascending "
                f"order, from 0 to {self.num_layers - 1}"
            )
        if layers == tuple(range(len(layers))):
            object.__setattr__(self, "window_layers", len(layers))

    def _check_together(self, called: Mapping[str, str]) -> None:
        """Checks fields against each other."""

        def check_divisible(name: str, by: str) -> None:
            value, divisor = getattr(self, name), getattr(self, by)
            if value % divisor:
                raise InvalidArgument(
                    f"{called[name]} is {value}, must be divisible by {called[by]}, {divisor}"
                )

        if self.head_dim % 2 or self.head_dim > 2**16:
            raise InvalidArgument(
                f"{called['head_dim']} is {self.head_dim}, must be even, because RoPE turns "
                "pairs, and at most 65536"
            )
        for name in ("num_heads", "num_kv_heads", "ffn"):
            check_divisible(name, "num_lanes")
        check_divisible("num_heads", "num_kv_heads")
        if (self.window == 0) != (self.window_layers == 0):
            raise InvalidArgument(
                f"{called['window']} is {self.window} and {called['window_layers']} is "
                f"{self.window_layers}, must be both 0 or neither"
            )
        if self.lm_head == "vocab_parallel":
            check_divisible("vocab_size", "num_lanes")
            if self.is_tied:
                raise InvalidArgument(
                    f"{called['lm_head']} is 'vocab_parallel', so {called['is_tied']} must be False"
                )
        misplaced = [kind for kind in self.biases if KINDS[kind] not in layer_of(self)]
        if misplaced:
            told = "only mixtures have" if self.experts is None else "mixtures do not have"
            raise InvalidArgument(f"{called['biases']} has {misplaced[0]!r}, which {told}")
        if self.family == "laneformer":
            for name in ("has_sinks", "experts", "swiglu_limit"):
                if getattr(self, name):
                    raise InvalidArgument(
                        f"{called[name]} is {getattr(self, name)!r}, which a Laneformer does not "
                        "have"
                    )
            if self.biases:
                raise InvalidArgument(
                    f"{called['biases']} is {self.biases!r}, which a Laneformer does not have"
                )
        else:
            changed = [
                name
                for name, ordinary in (
                    *(("delay", 0), ("lm_head", "replicate"), ("message_dtype", "float32")),
                    *(("attention_comm", True), ("mlp_comm", True)),
                )
                if getattr(self, name) != ordinary
            ]
            if changed:
                raise InvalidArgument(
                    f"{called[changed[0]]} is {getattr(self, changed[0])!r}, "
                    f"which models of the family {self.family} do not have"
                )
        for name in ("attention_comm", "mlp_comm"):
            if self.delay == 0 and not getattr(self, name):
                raise InvalidArgument(
                    f"{called[name]} is False, must be True where {called['delay']} is 0: lanes "
                    "that share a residual add up each module's outputs"
                )

    @property
    def longest_context(self) -> int:
        """Returns the most positions that a sequence may have. A RoPE scaling may permit more than
        `context`.
        """
        return self.rope.longest(self.context)

    def window_of(self, layer: int) -> int:
        """Returns how many keys a query of this layer sees, its own included. 0 means that it sees
        all.
        """
        layers = self.window_layers
        has_window = layer in layers if isinstance(layers, tuple) else layer < layers
        return self.window if has_window else 0

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of one layer's tensors by their names within the layer, as in "wq" or
        "experts.5.w1".

        Matrices are divided among lanes: [lanes, rows, columns]. The router is not.
        """
        lanes = self.num_lanes
        heads, kv_heads = (n // lanes * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        shapes: dict[str, tuple[int, ...]] = {
            "wq": (lanes, heads, self.hidden),
            "wk": (lanes, kv_heads, self.hidden),
            "wv": (lanes, kv_heads, self.hidden),
            "wo": (lanes, self.hidden, heads),
            "attention_norm": (self.hidden,),
            "ffn_norm": (self.hidden,),
        }
        mlp = {
            "w1": (lanes, self.ffn // lanes, self.hidden),
            "w3": (lanes, self.ffn // lanes, self.hidden),
            "w2": (lanes, self.hidden, self.ffn // lanes),
        }
        if self.experts is None:
            shapes |= mlp
        else:
            shapes["router"] = (self.experts.num, self.hidden)
            for expert in range(self.experts.num):
                shapes |= {f"experts.{expert}.{name}": shape for name, shape in mlp.items()}
        if self.has_qk_norm:
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.has_sinks:
            shapes["sinks"] = (lanes, self.num_heads // lanes)
        for kind in (KINDS[each] for each in self.biases):
            matrices = (name for name in kind.tensors(self) if not is_vector(name))
            for name, matrix in zip(kind.bias_tensors(self), matrices, strict=True):
                *of_lane, _ = shapes[matrix]
                # The output of an op that ends a module is summed over the lanes. Its bias is added
                # once to this sum, so it is not divided among lanes.
                shapes[name] = (self.hidden,) if kind.ends_module else tuple(of_lane)
        return shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all tensors by their names, as in "embedding", "layers.3.wq",
        "head".
        """
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, self.hidden)}
        each = self.layer_shapes()
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in each.items()}
        shapes["norm"] = (self.hidden,)
        if not self.is_tied:
            shapes["head"] = (self.vocab_size, self.hidden)
        return shapes

    def num_parameters(self) -> int:
        """Returns the number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes().values())


def is_vector(name: str) -> bool:
    """Tells whether a tensor is a norm's, a bias or attention sinks: small, and kept in FP32."""
    part = name.rpartition(".")[2]
    return part.endswith("norm") or part in _BIAS_NAMES or part == "sinks"


def lanes_for(num_heads: int, num_kv_heads: int, ffn: int, block: int = 1) -> int:
    """Returns the number of lanes of an ordinary model: the largest number up to MAX_LANES that
    divides num_heads, num_kv_heads and ffn.

    Args:
        num_heads, num_kv_heads, ffn: As in ModelConfig.
        block: The columns that share a scale. If it divides ffn, each lane's share of ffn is a
            whole number of blocks.
    """
    if ffn % block == 0:
        ffn //= block
    return max(
        lanes
        for lanes in range(1, MAX_LANES + 1)
        if num_kv_heads % lanes == num_heads % lanes == ffn % lanes == 0
    )


def _check_int(name: str, value: int, least: int, most: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not (is_int and least <= value <= most):
        raise InvalidArgument(f"{name} is {value!r}, must be an integer from {least} to {most}")


def _check_bool(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}, must be True or False")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(f"{name} is {value!r}, must be one of {', '.join(choices)}")
