"""Builds a tokenizer of SentencePiece's kind from its pieces, wherever they come from."""

from collections.abc import Sequence
from typing import Any

from ..base.extras import library

# The kinds of pieces, in SentencePiece's files and in GGUF files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# The character that stands for a space.
SPACE = "\u2581"


def bpe_of_pieces(
    tokens: Sequence[str], scores: Any, kinds: Sequence[int], only: int | None = None
) -> Any:
    """Returns a tokenizers.Tokenizer whose merges follow from the scores of the pieces.

    Args:
        tokens: The pieces by their ids. No piece may be there twice.
        scores: A number for each; the higher, the earlier two pieces become this one.
        kinds: The kind of each piece.
        only: Merges use pieces of this kind; None: of all kinds.
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
    """Returns a normalizer that writes spaces as pieces do. If asked, it puts a space in front of
    each text between control tokens.
    """
    normalizers = library("tokenizers").normalizers
    steps = [normalizers.Prepend(SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def add_control_tokens(backend: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Makes tokens that are found in a text before it is split. Arguments are those of
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
