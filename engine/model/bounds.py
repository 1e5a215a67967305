"""What memory allows: the bytes that a token must read."""

from .config import ModelConfig


def kv_bytes(config: ModelConfig, position: int, item_bytes: int) -> int:
    """Bytes of keys and values that the token at a position reads, from 0 on, its own included."""
    seen = 0
    for layer in range(config.num_layers):
        window = config.window_of(layer)
        seen += min(position + 1, window) if window else position + 1
    return seen * 2 * config.num_kv_heads * config.head_dim * item_bytes


def bytes_per_token(config: ModelConfig, position: int, kv_item_bytes: int) -> int:
    """Bytes of weights, keys and values that the token at a position reads."""
    return config.streamed_bytes() + kv_bytes(config, position, kv_item_bytes)
