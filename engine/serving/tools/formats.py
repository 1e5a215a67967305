"""Finds the format in which a model writes calls, by the text of its chat template."""

import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

import kccl

from ...text import harmony
from ...text.tokenizer import Tokenizer
from . import hermes, llama, mistral
from .harmony import HarmonyReader
from .hermes import HermesReader
from .llama import LlamaReader
from .mistral import MistralReader
from .reader import CallReader

# The length of a call's id in Mistral's templates, which refuse any other.
_MISTRAL_ID_LENGTH = 9


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(_MISTRAL_ID_LENGTH))


@dataclass(frozen=True)
class Format:
    """A format of calls.

    Attributes:
        name: The common name of the format.
        signs: Groups of texts. A template that has all texts of one group uses this format, unless
            it has one of `others`.
        others: Texts that only templates of other formats have.
        controls: The texts that mark calls. They may be control tokens of a vocabulary.
        kind: The class of readers that find calls.
        new_id: Makes the id of a call.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    others: tuple[str, ...]
    controls: tuple[str, ...]
    kind: type[CallReader]
    new_id: Callable[[], str] = _new_id

    def reader(self, names: Collection[str], most: int | None) -> CallReader:
        """Makes a reader that finds the calls in an answer. Arguments are as in CallReader."""
        return self.kind(names, self.new_id, most)

    def is_in(self, source: str) -> bool:
        """Tells whether a chat template writes calls in this format."""
        if any(other in source for other in self.others):
            return False
        return any(all(sign in source for sign in group) for group in self.signs)


FORMATS = (
    Format(
        "Mistral",
        ((mistral.BEGIN,),),
        (),
        (mistral.BEGIN, mistral.ID, mistral.ARGUMENTS),
        MistralReader,
        _short_id,
    ),
    Format(
        "Hermes",
        ((hermes.BEGIN,),),
        # Qwen3-Coder and GLM also have <tool_call>, but their calls are no JSON. They are not
        # supported.
        ("<function=", "<arg_key>"),
        (hermes.BEGIN, hermes.END),
        HermesReader,
    ),
    Format(
        "Llama 3",
        ((llama.TAG,), ("<|start_header_id|>", '"parameters"')),
        (),
        (llama.TAG,),
        LlamaReader,
    ),
    Format(
        "harmony",
        ((harmony.CHANNEL, harmony.MESSAGE),),
        (),
        harmony.MARKERS,
        HarmonyReader,
    ),
)


def format_of(tokenizer: Tokenizer) -> Format:
    """Returns the format in which a model writes calls.

    Raises:
        kccl.Error: The model's chat template takes no tools, or writes calls in no known format.
    """
    if not tokenizer.takes_tools():
        raise kccl.Error("the model's chat template takes no tools")
    source = tokenizer.template_source(with_tools=True)
    found = next((each for each in FORMATS if each.is_in(source)), None)
    if found is None:
        known = ", ".join(f"{each.name} ({each.controls[0]})" for each in FORMATS)
        raise kccl.Error(
            f"the model's chat template writes calls in none of the formats that are read: {known}"
        )
    return found
