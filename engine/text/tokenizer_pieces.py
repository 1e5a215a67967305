"""Builds a tokenizer of SentencePiece's kind from its pieces, for tokenizer.model and GGUF."""

from collections.abc import Sequence
from typing import Any

from ..base.extras import library

# The kinds of pieces, in SentencePiece's files and in GGUF files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Pieces spell a space with this character.
SPACE = "\u2581"


def bpe_of_pieces(
    tokens: Sequence[str], scores: Any, kinds: Sequence[int], only: int | None = None
) -> Any:
    """Returns a tokenizers.Tokenizer with BPE. Derives its merges from the scores of the pieces.

    Args:
        tokens: The pieces, in the order of their ids. They must differ.
        scores: A number for each piece. Of two merges, the one whose result has the higher score
            comes first.
        kinds: The kind of each piece.
        only: Merges use only pieces of this kind. If None, they use all pieces.
    """
    tokenizers = library("tokenizers")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merged = {t for t, kind in zip(tokens, kinds, strict=True) if only in (None, kind)}
    merges = []
    for number, token in enumerate(tokens):
        if token not in merged:
            continue
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in merged and pair[1] in merged]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-scores[number], pair) for pair in pairs]
    merges.sort(key=lambda merge: merge[0])
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    return tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary,
            merges=[pair for _, pair in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )


def spell_spaces(backend: Any, *, adds_space: bool) -> None:
    """Sets a normalizer that spells spaces as pieces do. If adds_space is True, it also puts a
    space in front of each text between control tokens.
    """
    normalizers = library("tokenizers").normalizers
    steps = [normalizers.Prepend(SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def add_control_tokens(backend: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Adds control tokens, unknown tokens and user-defined pieces to a tokenizers.Tokenizer as
    added tokens, which are found in a text before it is split. tokens, kinds: as in
    bpe_of_pieces().
    """
    added = library("tokenizers").AddedToken
    special, ordinary = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN) and token:
            special.append(added(token, special=True, normalized=False))
        elif kind == USER_DEFINED and token:
            ordinary.append(added(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(ordinary)
