"""The interface of a file format, which reads a model's tensors and its tokenizer."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ..formats.base import Stored
from ..model.config import ModelConfig
from ..text.tokenizer import Tokenizer
from .blocks import Blocks
from .defaults import Defaults
from .drawn import Drawn
from .pairs import Pairs

CUT_AXIS = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1}
CUT_AXIS |= dict.fromkeys(("bq", "bk", "bv", "b1", "b3", "sinks"), 0)
"""Tensor within the layer -> the axis along which it is divided among lanes, in files that store
all lanes as one matrix or vector."""


Made = Drawn | Pairs | Blocks
"""How a device makes a tensor's words: it draws random numbers, or converts pairs or blocks."""


class Source(ABC):
    """A model in a file format.

    Attributes:
        path: The folder or file, for messages.
        config: The model's configuration.
        shapes: The shape of each tensor in the file.
        dtypes: The type in which the file stores each tensor: Format.in_files, as in "F16" or
            "Q4_1".
        names: Tensor of ModelConfig.shapes() -> its name in the file.
        ignored: Names of tensors in the file that the model does not need.
        is_stacked: Whether matrices in the file have the lane as their first axis, like the
            config's shapes.
        has_tokenizer: Whether there is a tokenizer beside the weights.
        files: The files with weights. Random weights have none.
        mapped_bytes: The bytes of the largest file that is mapped while a tensor is read. 0 means
            that none is mapped.
        notices: Sentences, one for each setting of the files that the engine does not follow.
    """

    path: Path
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    names: Mapping[str, str]
    ignored: frozenset[str] = frozenset()
    is_stacked: bool = False
    has_tokenizer: bool = False
    files: Collection[Path] = ()
    mapped_bytes: int = 0
    notices: tuple[str, ...] = ()

    @abstractmethod
    def file_of(self, name: str) -> Path:
        """Returns the file that holds a tensor, for messages."""

    def main_of(self, name: str) -> str:
        """Returns a tensor's name in the file, for messages. If `name` is made of several of the
        file's tensors, returns the name of the one with the numbers, not the scales.
        """
        return name

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Stored:
        """Reads the entries from start to stop - 1 of a tensor's first axis. Returns them in their
        stored format, in new memory.
        """

    def drawn(self, name: str) -> Made | None:
        """Returns how a device makes a tensor's words. None: they have to be read."""
        return None

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer beside the weights."""

    def defaults(self) -> Defaults:
        """Returns the sampling parameters that the files ask for.

        Raises:
            kccl.Error: A file is damaged.
        """
        return Defaults({}, {}, ())

    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text according to other files than the tokenizer's."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""


def layer_names(
    config: ModelConfig, whole: Mapping[str, str], per_layer: Mapping[str, str]
) -> dict[str, str]:
    """Returns Source.names: tensor of ModelConfig.shapes() -> its name in the file.

    Args:
        config: The model's configuration.
        whole: "embedding", "norm" and "head" -> the names in the file.
        per_layer: Tensor within the layer, as "wq" or "experts.w1" -> its name in the file, with
            "{}" for the layer's number, and a second "{}" for the expert's.
    """
    parts: Iterable[str] = config.layer_shapes()
    names = {}
    for part in parts:
        expert, _, matrix = part.removeprefix("experts.").rpartition(".")
        form = per_layer[f"experts.{matrix}" if expert else part]
        numbers = [expert] if expert else []
        for layer in range(config.num_layers):
            names[f"layers.{layer}.{part}"] = form.format(layer, *numbers)
    return {name: names.get(name) or whole[name] for name in config.shapes()}
