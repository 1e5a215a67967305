"""Laneformer in PyTorch, written from the specification alone: no code of the engine.

It runs whole sequences, as in training: all lanes at once, no cache.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class Norm(nn.Module):
    def __init__(self, config, width=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width or config["hidden_size"]))
        self.eps = config["rms_norm_eps"]

    def forward(self, x):
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LaneLinear(nn.Module):
    """One matrix a lane. [batch, position, lane, inputs] to [batch, position, lane, outputs]."""

    def __init__(self, config, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["num_lanes"], outputs, inputs))

    def forward(self, x):
        return torch.einsum("bsli,loi->bslo", x, self.weight)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        lanes, width = config["num_lanes"], config["hidden_size"]
        self.head_dim = config["head_dim"]
        queries = config["num_attention_heads"] * self.head_dim // lanes
        keys = config["num_key_value_heads"] * self.head_dim // lanes
        self.wq = LaneLinear(config, queries, width)
        self.wk = LaneLinear(config, keys, width)
        self.wv = LaneLinear(config, keys, width)
        self.wo = LaneLinear(config, width, queries)
        is_sliding = layer < config["swa_layers"]
        self.window = config["sliding_window"] if is_sliding else None

    def forward(self, x):
        batch, length, lanes, _ = x.shape
        # Lanes hold neighbouring heads: lane and head within the lane are one index.
        q, k, v = (
            project(x).reshape(batch, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        q, k = self.rotate(q), self.rotate(k)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = distance >= 0
        if self.window is not None:
            mask &= distance < self.window
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, lanes, -1))

    def rotate(self, x):
        """Multiplies the pairs (2i, 2i + 1), as complex numbers, by e^(i position frequency)."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        frequencies = self.config["rope_theta"] ** -exponents
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequencies)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner = config["intermediate_size"] // config["num_lanes"]
        self.w1 = LaneLinear(config, inner, config["hidden_size"])
        self.w3 = LaneLinear(config, inner, config["hidden_size"])
        self.w2 = LaneLinear(config, config["hidden_size"], inner)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


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
    """The model by its config.json. Its state dict has the names of a checkpoint."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Model(config)
        if config["lm_head_type"] == "vocab_parallel":
            outputs = config["vocab_size"] // config["num_lanes"]
            self.lm_head = LaneLinear(config, outputs, config["hidden_size"])
        else:
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, ids):
        """[batch, length] to logits [batch, length, vocab_size]."""
        lanes = self.config["num_lanes"]
        x = self.model.tok_embeddings(ids)[:, :, None].expand(-1, -1, lanes, -1)
        sent = {"attention": [], "feed_forward": []}
        for index, layer in enumerate(self.model.layers):
            out = layer.attention(layer.attention_norm(x))
            x = self.add(x, out, "attention", index, sent["attention"])
            out = layer.feed_forward(layer.ffn_norm(x))
            x = self.add(x, out, "feed_forward", index, sent["feed_forward"])
        x = self.model.norm(x)
        if self.config["lm_head_type"] == "vocab_parallel":
            return self.lm_head(x).flatten(-2)
        return self.lm_head(x.mean(dim=2))

    def add(self, x, out, kind, index, sent):
        """The residual of each lane behind a module."""
        config = self.config
        delay = config["broadcast_delay"]
        dtype = getattr(torch, config["message_dtype"])
        message = out.to(dtype).to(out.dtype)
        sent.append(message if index >= delay or config["use_early_messages"] else None)
        if delay == 0 or (index < delay and config["use_early_comm"]):
            return x + message.sum(dim=2, keepdim=True)
        uses = {"attention": "use_attention_comm", "feed_forward": "use_mlp_comm"}[kind]
        if index < delay or not config[uses]:
            return x + math.sqrt(config["num_lanes"]) * out
        past = sent[index - delay]
        return x + out if past is None else x + out + past.sum(dim=2, keepdim=True) - past
