"""Finds the class with which transformers (release 5.24) reads a folder's tokenizer.

Some classes ignore what tokenizer.json says about spaces, words and Unicode, and have rules of
their own. For such a class the engine follows these rules, so that ids are those of transformers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kccl

from ..base.extras import library
from ..base.fields import Fields
from .pretokenizers import PRE_TOKENIZERS
from .tokenizer import Pieces, byte_level, sentence_piece
from .tokenizer_pieces import SPACE

LLAMA = "LlamaTokenizer"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
_QWEN2, _GPT2 = "Qwen2Tokenizer", "GPT2Tokenizer"
_END = "<|endoftext|>"
# Family -> its class, if the folder names none.
_OF_FAMILY = dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), _QWEN2)
# The families for which transformers ignores the class that a folder names. For those in _BY_FILE
# it follows tokenizer.json, unless the package mistral-common reads a tekken.json. For those in
# _BY_CLASS it uses the family's own class.
_BY_FILE, _BY_CLASS = ("mistral", "mixtral"), ("qwen2",)


@dataclass(frozen=True)
class _Class:
    """A class of tokenizers.

    Attributes:
        texts: Its special tokens, if no file names them, as in "bos_token" -> "<s>".
        spells_bytes: Whether its vocabulary spells bytes as GPT-2 does. If not, as SentencePiece.
        prepare: Sets the class's rules in a tokenizers.Tokenizer, by tokenizer_config.json. Returns
            whether the tokenizer puts a space in front of a text.
    """

    texts: Mapping[str, str]
    spells_bytes: bool
    prepare: Callable[[Any, Fields], bool]


def class_of(config: Fields, model: Fields, content: Mapping[str, Any]) -> str:
    """Returns the name of the class whose rules replace tokenizer.json's. Returns "" if there is
    none.

    Args:
        config: The fields of tokenizer_config.json.
        model: The fields of config.json.
        content: tokenizer.json. Empty if there is none.
    """
    family = model.text("model_type", default="")
    if family in _BY_FILE:
        return ""
    if family in _BY_CLASS:
        return _OF_FAMILY[family]
    named = config.text("tokenizer_class", default="") or model.text("tokenizer_class", default="")
    found = named.removesuffix("Fast") or _OF_FAMILY.get(family, "")
    # Some folders, as Llama 3's, name LlamaTokenizer but have a byte-level tokenizer. Then
    # tokenizer.json counts, not the class.
    if found == LLAMA and any(
        '"ByteLevel"' in json.dumps(value) for name, value in content.items() if name != "model"
    ):
        return ""
    return found if found in _CLASSES else ""


def rebuilt(
    file: Path, loaded: Any, content: Mapping[str, Any], named: str, config: Fields
) -> tuple[Any, Pieces, bool, dict[str, str]]:
    """Makes the tokenizer of a class from a tokenizer.json.

    Returns a tokenizers.Tokenizer without added tokens, how its vocabulary spells bytes, whether it
    puts a space in front of a text, and the class's special tokens (_Class.texts).

    Args:
        file: The path of tokenizer.json.
        loaded: The tokenizers.Tokenizer that the file describes.
        content: The content of the file.
        named: The class, from class_of().
        config: The fields of tokenizer_config.json.

    Raises:
        kccl.Error: The class cannot read such a file.
    """
    made = _CLASSES[named]
    kind = (content.get("model") or {}).get("type")
    if kind not in (None, "BPE") or made.spells_bytes != (
        '"ByteLevel"' in json.dumps(content.get("decoder"))
    ):
        raise wrong_class(file, named)
    backend = library("tokenizers").Tokenizer(loaded.model)
    backend.post_processor = loaded.post_processor
    adds_space = made.prepare(backend, config)
    pieces = byte_level if made.spells_bytes else sentence_piece
    return backend, pieces, adds_space, dict(made.texts)


def wrong_class(file: Path, named: str) -> kccl.Error:
    """Returns the error for a file that the class cannot read."""
    return kccl.Error(
        f"{file} is no tokenizer of transformers' class {named}, with which transformers reads "
        "this folder: correct tokenizer_class in tokenizer_config.json"
    )


def spells_bytes(named: str) -> bool:
    """Tells whether a class reads only vocabularies that spell bytes as GPT-2 does."""
    return bool(named) and _CLASSES[named].spells_bytes


def of_merges(folder: Path, named: str, config: Fields) -> tuple[Any, bool, dict[str, str]]:
    """Makes a tokenizer from vocab.json and merges.txt, the older files of byte-level tokenizers.
    These files do not say how a text is split into words, nor which tokens are special. So the
    class must be known.

    Args:
        folder: The folder.
        named: The class, from class_of().
        config: The fields of tokenizer_config.json.

    Returns:
        A tokenizers.Tokenizer, whether it puts a space in front of a text, and the class's special
        tokens (_Class.texts).

    Raises:
        kccl.Error: A file is missing or damaged, or the class is not known.
    """
    known = sorted(name for name, each in _CLASSES.items() if each.spells_bytes)
    if named not in known:
        told = config.text("tokenizer_class", default="")
        told = f"field tokenizer_class is {told!r}" if told else "there is no tokenizer_class"
        raise kccl.Error(
            f"{config.path}: {told}, must be one of {', '.join(known)} to use {VOCABULARY}, or "
            "let transformers write a tokenizer.json (AutoTokenizer and save_pretrained())"
        )
    if not (folder / MERGES).is_file():
        raise kccl.Error(f"{folder} has {VOCABULARY} and no {MERGES}")
    tokenizers = library("tokenizers")
    model = tokenizers.models.BPE.from_file(str(folder / VOCABULARY), str(folder / MERGES))
    backend = tokenizers.Tokenizer(model)
    return backend, _CLASSES[named].prepare(backend, config), dict(_CLASSES[named].texts)


def spell_as_llama(backend: Any, config: Fields) -> bool:
    """Sets the rules of LlamaTokenizer: it puts a space in front of a text that begins with none.
    If `legacy` is true, it does so with each text between control tokens. Returns whether it adds
    spaces at all.
    """
    tokenizers = library("tokenizers")
    made = tokenizers.decoders
    adds_space = config.boolean("add_prefix_space", default=True)
    scheme = "always" if config.boolean("legacy", default=False) else "first"
    backend.normalizer = None
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        prepend_scheme=scheme if adds_space else "never", split=False
    )
    strips = [made.Strip(content=" ", left=1)] if adds_space else []
    steps = [made.Replace(SPACE, " "), made.ByteFallback(), made.Fuse(), *strips]
    backend.decoder = made.Sequence(steps)
    _set_model(backend.model, fuses=True)
    return adds_space


def _spell_as_qwen2(backend: Any, config: Fields) -> bool:
    known, tokenizers = PRE_TOKENIZERS["qwen2"], library("tokenizers")
    adds_space = config.boolean("add_prefix_space", default=False)
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = known.steps(adds_space=adds_space)
    backend.decoder = tokenizers.decoders.ByteLevel()
    _set_model(backend.model, fuses=False)
    return adds_space


def _spell_as_gpt2(backend: Any, config: Fields) -> bool:
    tokenizers = library("tokenizers")
    adds_space = config.boolean("add_prefix_space", default=False)
    backend.normalizer = None
    # Unlike Qwen2's, this pre-tokenizer puts a space in front of the text only, not of each word.
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    backend.decoder = tokenizers.decoders.ByteLevel()
    _set_model(backend.model, fuses=False)
    return adds_space


def _set_model(model: Any, *, fuses: bool) -> None:
    """Makes all words pass the merges. Sets whether characters that no token has become bytes."""
    model.unk_token, model.dropout, model.ignore_merges = None, None, False
    model.fuse_unk = model.byte_fallback = fuses


def _named(names: str, text: str) -> dict[str, str]:
    return {f"{name}_token": text for name in names.split()}


_CLASSES = {
    LLAMA: _Class(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, False, spell_as_llama
    ),
    _QWEN2: _Class(_named("unk eos pad", _END), True, _spell_as_qwen2),
    _GPT2: _Class(_named("unk bos eos", _END), True, _spell_as_gpt2),
}
