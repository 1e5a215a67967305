"""The engine: decodes one request at a time from a real checkpoint, its lanes spread over ranks.

from kccl.engine import Engine

with Engine("smollm2", ranks=2) as engine:
    for piece in engine.stream("The capital of France is", max_tokens=16):
        print(piece.text, end="", flush=True)
"""

from .api import Answer, Engine
from .files.checkpoint import Checkpoint, open_checkpoint
from .model.sample import SamplingParams
from .text.pieces import Piece

__all__ = ["Answer", "Checkpoint", "Engine", "Piece", "SamplingParams", "open_checkpoint"]


def __dir__() -> list[str]:
    return __all__
