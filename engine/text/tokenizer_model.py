"""Reads a folder's tokenizer from tokenizer.model, SentencePiece's own file."""

import re
from pathlib import Path
from typing import Any

import kccl

from ..base.extras import library
from ..base.fields import Fields, one_line
from ..base.lookalikes import lookalike
from .tokenizer_classes import LLAMA, spell_as_llama, spells_bytes, wrong_class
from .tokenizer_pieces import (
    NORMAL,
    SPACE,
    USER_DEFINED,
    add_control_tokens,
    bpe_of_pieces,
)

MODEL = "tokenizer.model"
# The values of the file's model_type that are supported.
_UNIGRAM, _BPE = 1, 2
# A line of a file of tiktoken: a token in base 64, and its rank.
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
CONVERT = "let transformers write a tokenizer.json (AutoTokenizer and save_pretrained())"


def read_model(file: Path, config: Fields, named: str) -> tuple[Any, bool, dict[str, str]]:
    """Reads a tokenizer.model.

    Args:
        file: The file.
        config: The fields of tokenizer_config.json.
        named: The class with which transformers reads the file, from class_of().

    Returns:
        A tokenizers.Tokenizer, whether it puts a space in front of a text, and the special tokens
        that the file itself names, as in "bos_token" -> "<s>".

    Raises:
        kccl.Error: The file is damaged, or of a kind that is not supported.
    """
    if spells_bytes(named):
        raise wrong_class(file, named)
    proto = _proto(file)
    trained, normal = proto.trainer_spec, proto.normalizer_spec
    if trained.model_type not in (_UNIGRAM, _BPE):
        raise kccl.Error(f"{file} is neither a BPE nor a unigram model: {CONVERT}")
    tokens = [each.piece for each in proto.pieces]
    scores, kinds = [each.score for each in proto.pieces], [each.type for each in proto.pieces]
    if not tokens:
        raise kccl.Error(f"{file} has no pieces{lookalike(file)}")
    if len(set(tokens)) != len(tokens):
        raise kccl.Error(f"{file} has a piece twice")
    backend = _backend(trained, tokens, scores, kinds)
    if named == LLAMA:
        adds_space = spell_as_llama(backend, config)
        add_control_tokens(backend, tokens, kinds)
    else:
        adds_space = bool(normal.add_dummy_prefix)
        # `legacy` counts as false if it is null, and as true if the field is missing.
        is_once = config.is_null("legacy") or not config.boolean("legacy", default=True)
        _prepare(backend, normal, is_once=is_once)
        add_control_tokens(
            backend, tokens, [kind if kind != USER_DEFINED else NORMAL for kind in kinds]
        )
        _keep_whole(
            backend, [t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
        )
    texts = {
        "bos_token": (trained.bos_id, trained.bos_piece),
        "eos_token": (trained.eos_id, trained.eos_piece),
        "unk_token": (trained.unk_id, trained.unk_piece),
    }
    return (
        backend,
        adds_space,
        {name: text for name, (number, text) in texts.items() if number >= 0},
    )


def _backend(trained: Any, tokens: list[str], scores: list[float], kinds: list[int]) -> Any:
    if trained.model_type == _BPE:
        return bpe_of_pieces(tokens, scores, kinds, only=NORMAL)
    tokenizers = library("tokenizers")
    return tokenizers.Tokenizer(
        tokenizers.models.Unigram(
            list(zip(tokens, scores, strict=True)),
            unk_id=trained.unk_id if trained.unk_id >= 0 else None,
            byte_fallback=bool(trained.byte_fallback),
        )
    )


def _prepare(backend: Any, normal: Any, *, is_once: bool) -> None:
    """Sets how a text is normalised before it is divided into pieces.

    Args:
        backend: A tokenizers.Tokenizer.
        normal: The file's own rules.
        is_once: Where a space is added. True: in front of the whole text only. False: in front of
            each text between control tokens.
    """
    tokenizers = library("tokenizers")
    made, regex = tokenizers.normalizers, tokenizers.Regex
    steps = []
    if normal.precompiled_charsmap:
        steps.append(made.Precompiled(normal.precompiled_charsmap))
    if normal.remove_extra_whitespaces:
        steps += [made.Replace(regex(r"\A +| +\z"), ""), made.Replace(regex(" {2,}"), " ")]
    if normal.escape_whitespaces:
        steps.append(made.Replace(" ", SPACE))
    if normal.add_dummy_prefix and not is_once:
        steps.append(made.Prepend(SPACE))
    backend.normalizer = made.Sequence(steps)
    if normal.add_dummy_prefix and is_once:
        spaces = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.pre_tokenizer = spaces


def _keep_whole(backend: Any, pieces: list[str]) -> None:
    """Sets that a text is split at user-defined pieces, so that these are always found as a whole,
    and never merged with other text.
    """
    if not pieces:
        return
    tokenizers = library("tokenizers")
    pattern = "|".join(map(re.escape, sorted(pieces, key=len, reverse=True)))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    before = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*before, split])
    if isinstance(backend.model, tokenizers.models.BPE):
        backend.model.ignore_merges = True


def _proto(file: Path) -> Any:
    # Parses the protobuf, because SentencePiece's own reader does not give all kinds of pieces.
    messages = library("sentencepiece.sentencepiece_model_pb2")
    errors = library("google.protobuf.message")
    proto = messages.ModelProto()
    try:
        content = file.read_bytes()
        if _TIKTOKEN.match(content):
            raise kccl.Error(f"{file} is a file of tiktoken, which is not read: {CONVERT}")
        proto.ParseFromString(content)
    except OSError as error:
        raise kccl.Error(f"cannot read {file}: {error.strerror}") from error
    except (errors.DecodeError, ValueError) as error:
        told = lookalike(file) or f": {one_line(error)}"
        raise kccl.Error(f"{file} is no model of SentencePiece{told}") from error
    return proto
