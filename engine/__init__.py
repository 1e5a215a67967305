"""The engine: decodes one request at a time from a real checkpoint. The model's lanes (shares of
its heads and MLP columns) are spread over the ranks.

from kccl.engine import Engine

with Engine("smollm2", ranks=2) as engine:
    for piece in engine.stream("The capital of France is", max_tokens=16):
        print(piece.text, end="", flush=True)
"""

from .api import Engine
from .files.checkpoint import Checkpoint, open_checkpoint
from .model.drafts import Drafts
from .model.grammar import Grammar
from .model.sample import SamplingParams
from .serving.conversation import Conversation
from .serving.sessions import QueueFull
from .serving.submission import Submission
from .text.pieces import Answer, Piece

__all__ = [
    "Answer",
    "Checkpoint",
    "Conversation",
    "Drafts",
    "Engine",
    "Grammar",
    "Piece",
    "QueueFull",
    "SamplingParams",
    "Submission",
    "open_checkpoint",
]


def __dir__() -> list[str]:
    return __all__
