"""Reads vocab.json and merges.txt, the files of byte-level tokenizers before tokenizer.json.

They do not say how a text is split into words, nor which tokens are special: that is in
transformers' code, in the class that tokenizer_config.json names.
"""

from pathlib import Path
from typing import Any, NamedTuple

import kccl

from ..base.extras import library
from ..base.fields import Fields
from .pretokenizers import PRE_TOKENIZERS

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_END = "<|endoftext|>"


class _Kind(NamedTuple):
    """A class of tokenizers in transformers.

    Attributes:
        pre: Its pre-tokenizer, by the name in GGUF files; None: GPT-2's, which puts a space in
            front of the text and not of each word.
        texts: Its special tokens, where no file names them.
    """

    pre: str | None
    texts: dict[str, str | None]


_KINDS = {
    "GPT2Tokenizer": _Kind(None, dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)),
    "Qwen2Tokenizer": _Kind("qwen2", dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END)),
}


def read_merges(folder: Path, config: Fields) -> tuple[Any, bool, dict[str, str | None]]:
    """Reads the two files.

    Args:
        folder: The folder.
        config: tokenizer_config.json.

    Returns:
        A tokenizers.Tokenizer, whether it puts a space in front of a text, and the texts of the
        tokens that its class names.

    Raises:
        kccl.Error: A file is missing or damaged, or the class is not known.
    """
    named = config.text("tokenizer_class", default="")
    kind = _KINDS.get(named.removesuffix("Fast"))
    if kind is None:
        told = f"field tokenizer_class is {named!r}" if named else "there is no tokenizer_class"
        raise kccl.Error(
            f"{config.path}: {told}, must be one of {', '.join(_KINDS)} to use {VOCABULARY}, or "
            "let transformers write a tokenizer.json (AutoTokenizer and save_pretrained())"
        )
    if not (folder / MERGES).is_file():
        raise kccl.Error(f"{folder} has {VOCABULARY} and no {MERGES}")
    adds_space = config.boolean("add_prefix_space", default=False)
    tokenizers = library("tokenizers")
    model = tokenizers.models.BPE.from_file(str(folder / VOCABULARY), str(folder / MERGES))
    backend = tokenizers.Tokenizer(model)
    if kind.pre is None:
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        backend.pre_tokenizer = byte_level(add_prefix_space=adds_space)
    else:
        known = PRE_TOKENIZERS[kind.pre]
        backend.normalizer = tokenizers.normalizers.NFC() if known.composes else None
        backend.pre_tokenizer = known.steps(adds_space=adds_space)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend, adds_space, kind.texts
