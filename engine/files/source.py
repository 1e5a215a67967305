"""What a file format must offer: tensors under the file's names, and the tokenizer beside them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..model.config import ModelConfig
from ..text.tokenizer import Tokenizer


class Source(ABC):
    """A file format: tensors under the names that the file gives them.

    Attributes:
        path: The folder or file, for messages.
        config: The model's configuration.
        shapes: Shape of each tensor in the file.
        dtypes: How the file stores each of them, as in "F16" or "Q4_1".
        names: The file's name of each of the config's tensors.
        ignored: The file's names of tensors that the model does not need.
        is_stacked: Matrices lie in the file with the lane first, as the config's shapes are.
        has_tokenizer: Whether there is a tokenizer beside the weights.
        mapped_bytes: Of address space, which the largest file takes while a tensor is read.
    """

    path: Path
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    names: Mapping[str, str]
    ignored: frozenset[str] = frozenset()
    is_stacked: bool = False
    has_tokenizer: bool = False
    mapped_bytes: int = 0

    @abstractmethod
    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Entries start to stop - 1 of a tensor's first axis: BF16, FP16 or FP32, a new array."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights."""

    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text, where the files say so without their tokenizer."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""


def layer_names(
    config: ModelConfig, whole: Mapping[str, str], per_layer: Mapping[str, str]
) -> dict[str, str]:
    """The file's name of each of the config's tensors.

    Args:
        config: The model's configuration.
        whole: The file's names of "embedding", "norm" and "head".
        per_layer: Of a layer's tensors, as in "wq", with "{}" for the layer.
    """
    parts: Iterable[str] = config.layer_shapes()
    names = {
        f"layers.{layer}.{part}": per_layer[part].format(layer)
        for part in parts
        for layer in range(config.num_layers)
    }
    return {name: names.get(name) or whole[name] for name in config.shapes()}
