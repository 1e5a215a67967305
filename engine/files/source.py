"""The interface of a file format: tensors under the file's names, and the tokenizer beside them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..formats.base import Stored
from ..model.config import ModelConfig
from ..text.tokenizer import Tokenizer
from .defaults import Defaults

CUT_AXIS = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1}
CUT_AXIS |= dict.fromkeys(("bq", "bk", "bv", "b1", "b3", "sinks"), 0)
"""The axis along which a tensor is cut into lanes, where the file stores all lanes as one matrix or
vector."""


class Source(ABC):
    """A file format: tensors under the names that the file gives them.

    Attributes:
        path: The folder or file, for messages.
        config: The model's configuration.
        shapes: The shape of each tensor in the file.
        dtypes: The type in which the file stores each tensor: Format.in_files, as in "F16" or
            "Q4_1".
        names: The file's name of each of the config's tensors.
        ignored: The file's names of tensors that the model does not need.
        is_stacked: Whether matrices in the file have the lane as their first axis, like the
            config's shapes.
        has_tokenizer: Whether there is a tokenizer beside the weights.
        mapped_bytes: The bytes of address space that the largest file takes while a tensor is read.
        notices: Sentences, one for each thing that the files ask for and the engine does otherwise.
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
    notices: tuple[str, ...] = ()

    @abstractmethod
    def file_of(self, name: str) -> Path:
        """Returns the file that holds a tensor, for messages."""

    def main_of(self, name: str) -> str:
        """Returns the name of a tensor that the file has, for messages: that of the numbers of a
        matrix whose scales are a tensor of their own.
        """
        return name

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Stored:
        """Returns the entries from start to stop - 1 of a tensor's first axis, as they are stored,
        in new memory.
        """

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer beside the weights."""

    def defaults(self) -> Defaults:
        """Returns how the files ask to be sampled.

        Raises:
            kccl.Error: A file is damaged.
        """
        return Defaults({}, {}, ())

    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text, where the files name them outside their tokenizer."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""


def layer_names(
    config: ModelConfig, whole: Mapping[str, str], per_layer: Mapping[str, str]
) -> dict[str, str]:
    """Returns the file's name of each of the config's tensors.

    Args:
        config: The model's configuration.
        whole: The file's names of "embedding", "norm" and "head".
        per_layer: The file's names of a layer's tensors, by names as "wq" or "experts.w1", with
            "{}" for the layer, and for the expert.
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
