"""Builds a tokenizer from the vocabulary in a GGUF file, with the `tokenizers` library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import kccl

from ..base.extras import library
from ..base.fields import Fields
from .chat import DEFAULT, Template
from .pretokenizers import PRE_TOKENIZERS, PreTokenizer
from .tokenizer import Tokenizer, byte_level, guarded, sentence_piece
from .tokenizer_pieces import (
    CONTROL,
    NORMAL,
    add_control_tokens,
    bpe_of_pieces,
    spell_spaces,
)

_TEMPLATE = "tokenizer.chat_template"
_MODELS = ("gpt2", "llama")
# Values of tokenizer.ggml.model in files without a vocabulary.
_NONE = ("none", "no_vocab")
# The kinds of ids that end a text, as in the names of the file's keys. The model's own end comes
# first.
_ENDS = ("eos", "eot", "eom")
_NEEDED = ("bos", *_ENDS)
# Some programs write this id for a special token that does not exist.
_NO_ID = 2**32 - 1
# SentencePiece's default ids, for files that have no such keys.
_PIECES = {"bos": 1, "eos": 2, "unknown": 0}
# The texts of tokens that end an answer, even if the file does not mark them as control tokens.
# This is llama.cpp's list. It is needed because few files name the end of a turn by its id.
_END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "[e~["),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    # These mark parts of prompts for infilling, or separate files. They end an answer, too.
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
# If a vocabulary has one of these pairs, <|end|> ends a message but not the answer.
_MESSAGE_END = "<|end|>"
_ANSWER_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"})


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Tells whether a file has a tokenizer. The engine may not support it."""
    return metadata.get("tokenizer.ggml.model") not in (None, *_NONE)


def named_ends(path: Path, metadata: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a text, by a file's keys and its tokens' texts. Works even if the
    engine does not support the tokenizer.
    """
    fields = Fields(path, metadata)
    ids = _ids(fields, "", vocab_size)
    named = [number for kind in _ENDS if (number := ids[kind]) is not None]
    tokens = _tokens(fields) if "tokenizer.ggml.tokens" in fields else []
    return tuple(dict.fromkeys([*named, *_ends_by_text(tokens)]))


def from_gguf(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer from a file's metadata.

    Raises:
        kccl.Error: A key is missing or wrong, or the tokenizer is of an unknown kind.
    """
    fields = Fields(path, metadata)
    model = fields.text("tokenizer.ggml.model")
    if model not in _MODELS:
        raise fields.wrong("tokenizer.ggml.model", f"one of {', '.join(_MODELS)}")
    tokens = _tokens(fields)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise kccl.Error(f"{path}: key tokenizer.ggml.tokens has a token twice")
    adds_space = model == "llama" and fields.boolean(
        "tokenizer.ggml.add_space_prefix", default=True
    )
    ids = _ids(fields, model, len(tokens))
    named = [number for kind in _ENDS if (number := ids[kind]) is not None]
    eos_ids = list(dict.fromkeys([*named, *_ends_by_text(tokens)]))
    kinds = _kinds(fields, len(tokens), eos_ids)
    if model == "gpt2":
        kind_of_text = _pre_tokenizer(fields)
        begins = kind_of_text.adds_bos
        backend = guarded(path, _gpt2, fields, vocabulary, kind_of_text)
    else:
        begins = True
        backend = guarded(path, _llama, fields, tokens, kinds, adds_space)
    guarded(path, add_control_tokens, backend, tokens, kinds)
    texts = {
        f"{short}_token": "" if (number := ids[kind]) is None else tokens[number]
        for short, kind in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    adds_bos = fields.boolean("tokenizer.ggml.add_bos_token", default=begins)
    adds_eos = fields.boolean("tokenizer.ggml.add_eos_token", default=False)
    return Tokenizer(
        backend,
        pieces=byte_level if model == "gpt2" else sentence_piece,
        where=path,
        bos_id=ids["bos"],
        eos_ids=eos_ids,
        pad_id=ids["padding"],
        prefix=[ids["bos"]] if adds_bos and ids["bos"] is not None else [],
        suffix=[ids["eos"]] if adds_eos and ids["eos"] is not None else [],
        adds_space=adds_space,
        templates=_templates(fields),
        texts=texts,
        # As in llama.cpp, conversations get the prefix if the template does not write it.
        begins_chats=True,
    )


def _templates(fields: Fields) -> dict[str, Template]:
    """Returns name -> chat template. Key _TEMPLATE has the default, and _TEMPLATE.NAME others."""
    path = str(fields.path)
    try:
        found = {DEFAULT: fields.text(_TEMPLATE, default="")}
    except kccl.Error as error:
        return {DEFAULT: Template("", path, str(error))}
    names = fields.value("tokenizer.chat_templates")
    for name in names if isinstance(names, list) else []:
        found[name] = fields.text(f"{_TEMPLATE}.{name}", default="")
    return {name: Template(text, path) for name, text in found.items() if text}


def _tokens(fields: Fields) -> list[str]:
    """Returns the vocabulary. Gives a name to each empty token with which files pad it, because
    tokens must differ.
    """
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    return [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]


def _ends_by_text(tokens: list[str]) -> list[int]:
    found = {token: number for number, token in enumerate(tokens) if token in _END_TEXTS}
    if any(pair <= found.keys() for pair in _ANSWER_ENDS):
        found.pop(_MESSAGE_END, None)
    return list(found.values())


def _kinds(fields: Fields, count: int, eos_ids: list[int]) -> Any:
    """Returns the kind of each token. End tokens are control tokens, whatever the file says."""
    name = "tokenizer.ggml.token_type"
    kinds = _numbers(fields, name, count, "iu") if name in fields else np.full(count, NORMAL)
    kinds = kinds.copy()
    kinds[eos_ids] = CONTROL
    return kinds


def _pre_tokenizer(fields: Fields) -> PreTokenizer:
    name = fields.text("tokenizer.ggml.pre", default="default")
    if name not in PRE_TOKENIZERS:
        raise fields.wrong("tokenizer.ggml.pre", f"one of {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _gpt2(fields: Fields, vocabulary: dict[str, int], kind: PreTokenizer) -> Any:
    """Builds a byte-level BPE tokenizer."""
    tokenizers = library("tokenizers")
    merges = []
    for merge in _strings(fields, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind.takes_words)
    )
    if kind.composes:
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = kind.steps()
    return backend


def _llama(fields: Fields, tokens: list[str], kinds: Any, adds_space: bool) -> Any:
    """Builds a tokenizer of SentencePiece's BPE."""
    name = "tokenizer.ggml.scores"
    count = len(tokens)
    scores = _numbers(fields, name, count, "if") if name in fields else np.zeros(count)
    backend = bpe_of_pieces(tokens, scores, kinds)
    spell_spaces(backend, adds_space=adds_space)
    return backend


def _strings(fields: Fields, name: str) -> list[str]:
    value = fields.value(name)
    if not isinstance(value, list) or not value:
        raise fields.wrong(name, "a list of strings")
    for number, each in enumerate(value):
        try:
            each.encode()
        # GgufFile decodes bytes that are not UTF-8 as surrogates.
        except UnicodeEncodeError as error:
            raw = each.encode(errors="surrogateescape")
            raise kccl.Error(
                f"{fields.path}: entry {number} of {name} is {raw!r:.60}, must be valid UTF-8"
            ) from error
    return value


def _numbers(fields: Fields, name: str, count: int, kinds: str) -> Any:
    """Returns an array of numbers, one for each token. `kinds` has the allowed dtype.kind."""
    value = fields.value(name)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) < count:
        raise fields.wrong(name, f"an array of {count} numbers")
    return value[:count]


def unusable_ids(path: Path, metadata: Mapping[str, Any], vocab_size: int) -> tuple[str, ...]:
    """Returns notices about keys whose id of BOS or of a text's end does not exist."""
    fields = Fields(path, metadata)
    found = []
    for kind in _NEEDED:
        value = fields.value(name := _key_of(kind))
        if value not in (None, _NO_ID) and not _is_id(value, vocab_size):
            found.append(
                f"{path.name} has {name} = {value!r:.30}, which is not used: the model's ids are "
                f"from 0 to {vocab_size - 1}"
            )
    return tuple(found)


def _ids(fields: Fields, model: str, vocab_size: int) -> dict[str, int | None]:
    """Returns kind of special token -> id, or None. If an id is missing or does not exist, uses
    SentencePiece's default for model "llama", as llama.cpp does.
    """
    found: dict[str, int | None] = {}
    for kind in (*_NEEDED, "unknown", "padding"):
        value = fields.value(_key_of(kind))
        if not _is_id(value, vocab_size):
            value = _PIECES.get(kind) if model == "llama" else None
        found[kind] = value if _is_id(value, vocab_size) else None
    return found


def _key_of(kind: str) -> str:
    return f"tokenizer.ggml.{kind}_token_id"


def _is_id(value: Any, vocab_size: int) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and 0 <= value < vocab_size
