"""The tokenizer that a GGUF file holds, built by the `tokenizers` library from its vocabulary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import kccl

from .extras import library
from .fields import Fields
from .tokenizer import Tokenizer, byte_level, guarded, sentence_piece

_MODELS = ("gpt2", "llama")
# Kinds of ids that end a text, the model's own end first.
_ENDS = ("eos", "eot", "eom")
# Kinds of tokens, as in the file.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# How text is split before merges, by the names that files give: the published patterns of Llama 3
# and Qwen 2, which differ in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _SPLIT.format(digits="{1,3}")
_QWEN2 = _SPLIT.format(digits="")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r")
_GPT2_NAMES = ("gpt-2", "gpt2")


def from_gguf(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer from a file's metadata.

    Raises:
        kccl.Error: A key is missing or wrong, or the tokenizer is of an unknown kind.
    """
    fields = Fields(path, metadata)
    model = fields.text("tokenizer.ggml.model")
    if model not in _MODELS:
        raise fields.wrong("tokenizer.ggml.model", f"one of {', '.join(_MODELS)}")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise kccl.Error(f"{path}: key tokenizer.ggml.tokens has a token twice")
    adds_space = model == "llama" and fields.boolean(
        "tokenizer.ggml.add_space_prefix", default=True
    )
    kinds = _numbers(fields, "tokenizer.ggml.token_type", len(tokens), "iu")
    if model == "gpt2":
        backend = guarded(path, _gpt2, fields, vocabulary)
    else:
        backend = guarded(path, _llama, fields, vocabulary, kinds, adds_space)
    guarded(path, _add, backend, tokens, kinds)
    ids = {
        kind: _optional_id(fields, kind, len(tokens))
        for kind in ("bos", *_ENDS, "unknown", "padding")
    }
    texts = {
        f"{kind}_token": tokens[number]
        for kind in ("bos", "eos", "unknown", "padding")
        if (number := ids[kind]) is not None
    }
    template = fields.text("tokenizer.chat_template", default="")
    # Where a file does not say, the families that begin with BOS.
    begins = model == "llama" or fields.value("tokenizer.ggml.pre") in _LLAMA3_NAMES
    return Tokenizer(
        backend,
        pieces=byte_level if model == "gpt2" else sentence_piece,
        where=path,
        bos_id=ids["bos"],
        eos_ids=[number for kind in _ENDS if (number := ids[kind]) is not None],
        pad_id=ids["padding"],
        adds_bos=fields.boolean("tokenizer.ggml.add_bos_token", default=begins),
        adds_space=adds_space,
        template=(template, path) if template else None,
        texts={
            "bos_token": texts.get("bos_token", ""),
            "eos_token": texts.get("eos_token", ""),
            "unk_token": texts.get("unknown_token", ""),
            "pad_token": texts.get("padding_token", ""),
        },
    )


def _gpt2(fields: Fields, vocabulary: dict[str, int]) -> Any:
    """Byte-level BPE."""
    tokenizers = library("tokenizers")
    split, bytes_of = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    name = fields.text("tokenizer.ggml.pre", default="gpt-2")
    whole = bytes_of(add_prefix_space=False, use_regex=False)
    if name in _LLAMA3_NAMES:
        steps = [split(tokenizers.Regex(_LLAMA3), "isolated"), whole]
    elif name in _QWEN2_NAMES:
        steps = [split(tokenizers.Regex(_QWEN2), "isolated"), whole]
    elif name in _DIGIT_NAMES:
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        steps = [digits, bytes_of(add_prefix_space=False, use_regex=True)]
    elif name in _GPT2_NAMES:
        steps = [bytes_of(add_prefix_space=False, use_regex=True)]
    else:
        known = (*_LLAMA3_NAMES, *_QWEN2_NAMES, *_DIGIT_NAMES, *_GPT2_NAMES)
        raise fields.wrong("tokenizer.ggml.pre", f"one of {', '.join(known)}")
    merges = []
    for merge in _strings(fields, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary,
            merges=merges,
            # A word that is a token of Llama 3 needs no merges to it.
            ignore_merges=name in _LLAMA3_NAMES,
        )
    )
    if name in _QWEN2_NAMES:
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    return backend


def _llama(fields: Fields, vocabulary: dict[str, int], kinds: Any, adds_space: bool) -> Any:
    """SentencePiece's BPE, whose merges follow from the scores of the pieces."""
    tokenizers = library("tokenizers")
    scores = _numbers(fields, "tokenizer.ggml.scores", len(vocabulary), "f")
    unknown = next((t for t, number in vocabulary.items() if kinds[number] == _UNKNOWN), None)
    merges = []
    for token, number in vocabulary.items():
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-scores[number], pair) for pair in pairs]
    merges.sort(key=lambda merge: merge[0])
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary,
            merges=[pair for _, pair in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [tokenizers.normalizers.Prepend("\u2581")] if adds_space else []
    steps.append(tokenizers.normalizers.Replace(" ", "\u2581"))
    backend.normalizer = tokenizers.normalizers.Sequence(steps)
    return backend


def _add(backend: Any, tokens: list[str], kinds: Any) -> None:
    """Makes tokens that are found in a text before it is split."""
    added = library("tokenizers").AddedToken
    ends = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    found: dict[bool, list[Any]] = {True: [], False: []}
    for number, token in enumerate(tokens):
        if (is_special := ends.get(int(kinds[number]))) is not None and token:
            found[is_special].append(added(token, special=is_special, normalized=False))
    backend.add_special_tokens(found[True])
    backend.add_tokens(found[False])


def _strings(fields: Fields, name: str) -> list[str]:
    value = fields.value(name)
    if not isinstance(value, list) or not value:
        raise fields.wrong(name, "a list of strings")
    return value


def _numbers(fields: Fields, name: str, count: int, kinds: str) -> Any:
    """An array of numbers, one for each token; `kinds` as in numpy's dtype.kind."""
    value = fields.value(name)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != count:
        raise fields.wrong(name, f"an array of {count} numbers")
    return value


def _optional_id(fields: Fields, kind: str, vocab_size: int) -> int | None:
    name = f"tokenizer.ggml.{kind}_token_id"
    if name not in fields:
        return None
    number = fields.integer(name)
    if not 0 <= number < vocab_size:
        raise fields.wrong(name, f"from 0 to {vocab_size - 1}")
    return number
