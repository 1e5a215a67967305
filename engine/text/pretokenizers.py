"""The patterns by which byte-level tokenizers in GGUF files split a text into words.

A file has no patterns, only a pre-tokenizer's name. The patterns here are those that each
tokenizer's authors published, in the syntax of the `tokenizers` library. If they published none, as
for "default", the pattern follows llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.extras import library


@dataclass(frozen=True)
class PreTokenizer:
    """How a kind of tokenizer prepares a text.

    Attributes:
        patterns: Applied one after the other. Each splits the pieces so far into its matches and
            the text between these.
        takes_words: Whether a word that equals a token becomes this token, without merges.
        adds_bos: Whether texts begin with BOS, if the file does not say.
        composes: Whether a text is first normalised to Unicode's NFC.
    """

    patterns: tuple[str, ...]
    takes_words: bool = False
    adds_bos: bool = False
    composes: bool = False

    def steps(self, *, adds_space: bool = False) -> Any:
        """Makes the pre-tokenizer of the `tokenizers` library. If adds_space is True, it puts a
        space in front of each word that has none.
        """
        tokenizers = library("tokenizers")
        made = tokenizers.pre_tokenizers
        splits = [made.Split(tokenizers.Regex(pattern), "isolated") for pattern in self.patterns]
        return made.Sequence(
            [*splits, made.ByteLevel(add_prefix_space=adds_space, use_regex=False)]
        )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _words(digits: str) -> str:
    """Returns the pattern of Llama 3 or Qwen 2. They differ in `digits`, the pattern of numbers."""
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return f"{_ENDINGS}|{letters}|{digits}|{_OTHERS}|{_SPACES}"


def _cased_words(digits: str, endings: str = "") -> str:
    """Returns a pattern that splits words at capitals: Tekken's, or with `endings`, as in "'s",
    GPT-4o's.
    """
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    others = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return (
        f"{before}{upper}*{lower}+{endings}|{before}{upper}+{lower}*{endings}|{digits}|{others}|"
        f"{_SPACES}"
    )


_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(_DIGIT),)
# The letters of DeepSeek's pattern for words: those that have upper and lower case.
_CASED = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}"
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}"
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}"
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}"
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}"
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}"
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}"
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}"
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}"
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)
# This matches Chinese characters and Hangul, and all characters from U+0800 to the Chinese ones.
_CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_SEED = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
)
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"

_NAMES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(_LLAMA3, takes_words=True, adds_bos=True),
    ),
    ("glm4", PreTokenizer(_LLAMA3, takes_words=True)),
    ("smaug-bpe dbrx chatglm-bpe", PreTokenizer(_LLAMA3)),
    ("qwen2 deepseek-r1-qwen", PreTokenizer(_QWEN2, composes=True)),
    ("megrez kormo stablelm2 hunyuan grok-2", PreTokenizer(_QWEN2)),
    ("qwen35", PreTokenizer(_QWEN35)),
    (
        "tekken",
        PreTokenizer((_cased_words(_DIGIT),), takes_words=True, adds_bos=True),
    ),
    ("gpt-4o llama4 kanana2", PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_ENDINGS}?"),))),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense", PreTokenizer(_DEEPSEEK3)),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
        PreTokenizer((_DIGIT, _GPT2)),
    ),
    (
        "gpt-2 gpt2 mpt olmo jais phi-2 trillion exaone4 gigachat mellum a.x-4.0",
        PreTokenizer((_GPT2,)),
    ),
    ("falcon", PreTokenizer(_FALCON)),
    ("seed-coder", PreTokenizer(_SEED)),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _DIGIT))),
    ("default", PreTokenizer(_DEFAULT)),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: each for names, each in _NAMES for name in names.split()
}
"""The name in a file's key tokenizer.ggml.pre -> the pre-tokenizer. No key means "default"."""
