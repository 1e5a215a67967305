"""Computes the bytes that a token must read, which bound its speed."""

from .config import ModelConfig
from .program import Program


def kv_bytes(config: ModelConfig, position: int, item_bytes: int) -> int:
    """Returns the bytes of keys and values that the token at a position reads, including its own
    key and value. Positions count from 0.
    """
    seen = 0
    for layer in range(config.num_layers):
        window = config.window_of(layer)
        seen += min(position + 1, window) if window else position + 1
    return seen * 2 * config.num_kv_heads * config.head_dim * item_bytes


def bytes_per_token(program: Program, position: int, kv_item_bytes: int) -> int:
    """Returns the bytes of weights, keys and values that the token at a position reads."""
    return program.streamed_bytes() + kv_bytes(program.config, position, kv_item_bytes)
