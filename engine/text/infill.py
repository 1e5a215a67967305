"""Makes prompts for models that were trained to fill the gap between two texts."""

from dataclasses import dataclass

import kccl

from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Infill:
    """The form of a family's prompts: prefix, text before the gap, suffix, text after the gap, and
    middle.

    Attributes:
        family: The family of models.
        prefix, suffix, middle: The three control tokens of a prompt.
        ends: Tokens that end an answer. A vocabulary may lack some of them.
    """

    family: str
    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()


FAMILIES = (
    Infill(
        "Qwen2.5-Coder",
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    ),
    Infill(
        "StarCoder",
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<|endoftext|>", "<fim_pad>", "<file_sep>"),
    ),
    Infill("CodeLlama", "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),
    Infill(
        "DeepSeek-Coder",
        *(
            "<\uff5cfim\u2581begin\uff5c>",
            "<\uff5cfim\u2581hole\uff5c>",
            "<\uff5cfim\u2581end\uff5c>",
        ),
        ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    ),
)
"""The families that are supported, in the order in which they are tried."""


@dataclass(frozen=True)
class Gap:
    """A prompt whose answer fills a gap.

    Attributes:
        ids: The prompt's ids.
        stop_ids: Ids that must end the answer, besides the model's usual ones.
    """

    ids: list[int]
    stop_ids: list[int]


def gap_between(tokenizer: Tokenizer, before: str, behind: str) -> Gap:
    """Returns the prompt whose answer fills the gap between two texts. Control tokens that are
    spelt out in the texts stay text.

    Args:
        tokenizer: The model's tokenizer.
        before, behind: The texts.

    Raises:
        InvalidArgument: A text is not valid UTF-8.
        kccl.Error: The vocabulary lacks the tokens.
    """
    family, (prefix, suffix, middle) = _family_of(tokenizer)
    ids = [
        *tokenizer.prefix,
        prefix,
        *tokenizer.encode_literal(before),
        suffix,
        *tokenizer.encode_literal(behind, follows=True),
        middle,
    ]
    ends = (tokenizer.id_of(name) for name in family.ends)
    return Gap(ids, [number for number in ends if number is not None])


def _family_of(tokenizer: Tokenizer) -> tuple[Infill, tuple[int, int, int]]:
    """Returns the family whose tokens the vocabulary has, and their ids."""
    lacking = []
    for family in FAMILIES:
        names = (family.prefix, family.suffix, family.middle)
        found = [tokenizer.id_of(name) for name in names]
        prefix, suffix, middle = found
        if prefix is not None and suffix is not None and middle is not None:
            return family, (prefix, suffix, middle)
        missing = [name for name, number in zip(names, found, strict=True) if number is None]
        lacking.append((len(missing), f"{' '.join(missing)} ({family.family})"))
    fewest = min(number for number, _ in lacking)
    told = ", ".join(text for number, text in lacking if number == fewest)
    raise kccl.Error(f"the vocabulary lacks the tokens for a gap: {told}")
