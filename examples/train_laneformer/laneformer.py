"""Laneformer in PyTorch, for training: delayed tensor parallelism on one GPU.

A lane is a rank of tensor parallelism with its own residual. Here the lanes are the first axis of
every activation, [lanes, sequences, tokens, values], so that one kernel runs all of them. Nothing
in a lane's slice reads another's except `Laneformer.add`, where the messages land.

A configuration is what config.json says. The rule of `add` is that of kccl/engine/model/program.py.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

_COMMON = {
    "architectures": ["LaneformerForCausalLM"],
    "model_type": "laneformer",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_interleaved": True,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "broadcast_delay": 2,
    "use_early_comm": False,
    "use_early_messages": True,
    "use_attention_comm": True,
    "use_mlp_comm": True,
    "lm_head_type": "replicate",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "message_dtype": "bfloat16",
    "sliding_window": None,
    "sliding_window_n_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
_BUNDLED = {
    **{"num_hidden_layers": 8, "num_lanes": 8, "hidden_size": 192, "intermediate_size": 768},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32},
    **{"vocab_size": 2048, "max_position_embeddings": 2048},
}
SHAPES = {
    # 5.9 million weights, 11.8 MB. A lane has one head of 32 and 96 columns of the MLP.
    "bundled": _BUNDLED,
    # 11.0 million weights: twice the layers, and nothing else.
    "deep": _BUNDLED | {"num_hidden_layers": 16},
    # 5.8 million weights, as many as a package may carry: twice the layers, two thirds the width.
    "slim": _BUNDLED | {"num_hidden_layers": 16, "hidden_size": 128, "intermediate_size": 512},
    # For tests and for trying the scripts on a CPU. Two query heads read a KV head, and layers 0
    # and 1 have a window, as in the 2B model.
    "tiny": {
        **{"num_hidden_layers": 5, "num_lanes": 4, "hidden_size": 64, "intermediate_size": 192},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
        **{"vocab_size": 512, "max_position_embeddings": 512},
        **{"sliding_window": 48, "sliding_window_n_layers": 2},
    },
}


def configuration(shape: str, **changes) -> dict:
    """The fields of config.json of a shape; `changes` replace some."""
    return _COMMON | SHAPES[shape] | changes


class Norm(nn.Module):
    """RMSNorm. All lanes share its weights."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["hidden_size"]))
        self.eps = config["rms_norm_eps"]

    def forward(self, x):
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LaneMatrix(nn.Module):
    """A matrix for each lane: [lanes, outputs, inputs]."""

    def __init__(self, config, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["num_lanes"], outputs, inputs))


def product(x, *matrices):
    """[lanes or 1, sequences, tokens, inputs] times the matrices, side by side.

    A product for each sequence of a lane. The gradient of a lane's matrix sums over very many
    tokens, and one product for it would leave most of a GPU idle.
    """
    weight = torch.cat([matrix.weight for matrix in matrices], dim=1)
    return torch.matmul(x, weight[:, None].transpose(-1, -2))


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        lanes, width = config["num_lanes"], config["hidden_size"]
        self.head_dim = config["head_dim"]
        self.num_queries = config["num_attention_heads"] // lanes
        self.num_keys = config["num_key_value_heads"] // lanes
        queries, keys = self.num_queries * self.head_dim, self.num_keys * self.head_dim
        self.wq = LaneMatrix(config, queries, width)
        self.wk = LaneMatrix(config, keys, width)
        self.wv = LaneMatrix(config, keys, width)
        self.wo = LaneMatrix(config, width, queries)
        has_window = layer < config["sliding_window_n_layers"]
        self.window = config["sliding_window"] if has_window else None

    def forward(self, x, cos, sin):
        qkv = product(x, self.wq, self.wk, self.wv)
        lanes, sequences, tokens, _ = qkv.shape
        # Attention treats each lane as a sequence: [lanes * sequences, heads, tokens, head_dim].
        heads = qkv.reshape(lanes * sequences, tokens, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.num_queries, self.num_keys, self.num_keys], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = None
        if self.window is not None:
            position = torch.arange(tokens, device=x.device)
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < self.window)
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_queries != self.num_keys,
        )
        out = out.transpose(1, 2).reshape(lanes, sequences, tokens, -1)
        return product(out, self.wo)


def rotate(x, cos, sin):
    """RoPE: turns the pairs (2i, 2i + 1) by their position's angles, in FP32."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner, width = config["intermediate_size"] // config["num_lanes"], config["hidden_size"]
        self.w1 = LaneMatrix(config, inner, width)
        self.w3 = LaneMatrix(config, inner, width)
        self.w2 = LaneMatrix(config, width, inner)

    def forward(self, x):
        gate, up = product(x, self.w1, self.w3).chunk(2, dim=-1)
        return product(functional.silu(gate) * up, self.w2)


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(config), Norm(config)
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        layers = range(config["num_hidden_layers"])
        self.layers = nn.ModuleList(Layer(config, layer) for layer in layers)
        self.norm = Norm(config)


class Laneformer(nn.Module):
    """The model. Its state dict has the names of a checkpoint's tensors."""

    def __init__(self, config: dict, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.num_lanes = config["num_lanes"]
        # Module n is the attention (even) or the MLP (odd) of layer n // 2.
        self.delay = 2 * config["broadcast_delay"]
        self.communicates = (config["use_attention_comm"], config["use_mlp_comm"])
        if self.delay == 0 and not all(self.communicates):
            raise ValueError("broadcast_delay 0 sums the lanes of every module")
        if config["lm_head_type"] != "replicate":
            raise ValueError("lm_head_type must be replicate")
        self.message_dtype = getattr(torch, config["message_dtype"])
        # Only for comparisons: no checkpoint has this field.
        self.scales_lone = config.get("scales_lone", True)
        self.model = Model(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        cos, sin = rotations(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draws new weights, on the CPU, so that every device gets the same."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            kind = name.split(".")[-2]
            if kind.endswith("norm"):
                weight.fill_(1)
            elif kind in ("wo", "w2", "lm_head"):
                # Modules add nothing at first, and all tokens are equally likely.
                weight.zero_()
            else:
                spread = 1.0 if kind == "tok_embeddings" else weight.shape[-1] ** -0.5
                weight.copy_(spread * torch.randn(weight.shape, generator=generator))

    def forward(self, ids):
        """[sequences, tokens] to logits [sequences, tokens, vocab_size]."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.model.tok_embeddings(ids)[None]
        if self.delay:
            x = x.expand(self.num_lanes, -1, -1, -1)
        messages = {}
        for index, layer in enumerate(self.model.layers):
            out = layer.attention(layer.attention_norm(x), cos, sin)
            x = self.add(x, out, 2 * index, messages)
            out = layer.feed_forward(layer.ffn_norm(x))
            x = self.add(x, out, 2 * index + 1, messages)
        return self.lm_head(self.model.norm(x).mean(dim=0))

    def add(self, x, out, module, messages):
        """The lanes' residuals after a module with the outputs `out`: FP32.

        `messages` has what earlier modules sent, by module.
        """
        message = out.to(self.message_dtype)
        is_early = module < self.delay
        if self.sends(module):
            messages[module] = message
        if self.delay == 0 or (is_early and self.config["use_early_comm"]):
            return x + message.float().sum(dim=0, keepdim=True)
        # A lane that adds nobody else's outputs scales its own, to the size of the sum of as many
        # independent ones.
        is_alone = is_early or not self.communicates[module % 2]
        x = x + (math.sqrt(self.num_lanes) * out if is_alone and self.scales_lone else out)
        past = messages.pop(module - self.delay, None)
        if past is None:
            return x
        past = past.float()
        return x + (past.sum(dim=0, keepdim=True) - past)

    def sends(self, module: int) -> bool:
        """Whether the module's messages land at a later one."""
        lands = self.delay and module + self.delay < 2 * self.config["num_hidden_layers"]
        is_in_time = module >= self.delay or self.config["use_early_messages"]
        return bool(lands) and is_in_time and self.communicates[module % 2]


def rotations(config) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of RoPE: FP32 [positions, head_dim / 2] each."""
    exponents = torch.arange(0, config["head_dim"], 2, dtype=torch.float64) / config["head_dim"]
    positions = torch.arange(config["max_position_embeddings"], dtype=torch.float64)
    angles = torch.outer(positions, config["rope_theta"] ** -exponents)
    return angles.cos().float(), angles.sin().float()


def save(folder: Path, module: Laneformer, tokenizer: Path, end: str) -> None:
    """Writes the folder that kccl.engine loads: weights in BF16, config.json, the tokenizer.

    `end` is the token that begins and ends a text.

    Raises:
        ValueError: The engine would run another model.
    """
    if not module.scales_lone:
        raise ValueError("scales_lone is False: the engine always scales lone outputs")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in module.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", module.config)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    context = module.config["max_position_embeddings"]
    special = {"bos_token": end, "eos_token": end, "add_bos_token": True, "add_eos_token": False}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    write_json(folder / "tokenizer_config.json", special | kind)


def load(folder: Path) -> Laneformer:
    """The module of a folder that save() wrote, with its weights as FP32."""
    module = Laneformer(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    module.load_state_dict({name: value.float() for name, value in weights.items()})
    return module.eval()


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
