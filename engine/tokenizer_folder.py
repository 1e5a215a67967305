"""The tokenizer of a folder in Hugging Face's layout."""

from pathlib import Path
from typing import Any

import kccl

from .extras import library
from .fields import Fields, one_line, read_json
from .tokenizer import Pieces, Tokenizer, byte_level, guarded, sentence_piece, vocab_size_of

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
# Files that name ids; for BOS and PAD the first that has one counts.
_WITH_IDS = ("generation_config.json", "config.json")
_TEXTS = ("bos_token", "eos_token", "pad_token", "unk_token")


def from_folder(folder: Path) -> Tokenizer:
    """Reads tokenizer.json, and what the files beside it say about special tokens.

    Raises:
        kccl.Error: A file is missing or damaged, or the tokenizer is of an unknown kind.
    """
    file = folder / TOKENIZER
    tokenizers = library("tokenizers")
    content = read_json(file)
    backend = guarded(file, tokenizers.Tokenizer.from_file, str(file))
    # A text is never cut or filled up unseen.
    backend.no_truncation()
    backend.no_padding()
    config = _optional(folder / _CONFIG)
    texts = {name: text for name in _TEXTS if (text := _text(config, name)) is not None}
    others = [_optional(folder / name) for name in _WITH_IDS]
    bos_id = _first_id(backend, texts, "bos", others)
    size = vocab_size_of(backend)
    eos_ids = [number for other in others for number in _ids(other, "eos_token_id", size)]
    if "eos_token" in texts:
        eos_ids.append(_id_of(backend, texts["eos_token"], config, "eos_token"))
    pieces, adds_space = _kind(file, content)
    if "add_bos_token" in config:
        adds_bos = config.boolean("add_bos_token")
    else:
        # Then the tokenizer itself puts BOS in front.
        adds_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    return Tokenizer(
        backend,
        pieces=pieces,
        where=file,
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=_first_id(backend, texts, "pad", others),
        adds_bos=adds_bos,
        adds_space=adds_space,
        template=_template(folder, config),
        texts=texts,
    )


def _optional(file: Path) -> Fields:
    return Fields(file, read_json(file) if file.exists() else {})


def _text(config: Fields, name: str) -> str | None:
    """The text of a special token, which some files give as an object with more fields."""
    value = config.value(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise config.wrong(name, "a string")
    return value


def _id_of(backend: Any, text: str, config: Fields, name: str) -> int:
    number: int | None = backend.token_to_id(text)
    if number is None:
        raise config.wrong(name, "a token of the vocabulary")
    return number


def _first_id(backend: Any, texts: dict[str, str], kind: str, others: list[Fields]) -> int | None:
    text = texts.get(f"{kind}_token")
    number: int | None = None if text is None else backend.token_to_id(text)
    if number is not None:
        return number
    size = vocab_size_of(backend)
    named = [number for other in others for number in _ids(other, f"{kind}_token_id", size)]
    return named[0] if named else None


def _ids(fields: Fields, name: str, vocab_size: int) -> list[int]:
    """One id, or a list of ids."""
    value = fields.value(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in ids):
        raise fields.wrong(name, "an id or a list of ids")
    if not all(0 <= number < vocab_size for number in ids):
        raise fields.wrong(name, f"from 0 to {vocab_size - 1}, the ids of {TOKENIZER}")
    return ids


def _kind(file: Path, content: dict[str, Any]) -> tuple[Pieces, bool]:
    """How the vocabulary spells bytes, and whether a space is put in front of a text."""
    decoder = content.get("decoder")
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {step.get("type"): step for step in steps if isinstance(step, dict)}
    if "ByteLevel" in kinds:
        return byte_level, False
    if "Metaspace" in kinds:
        return sentence_piece, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return sentence_piece, "Strip" in kinds
    raise kccl.Error(f"{file}: field decoder has {sorted(map(str, kinds))}, which is not known")


def _template(folder: Path, config: Fields) -> tuple[str, Path] | None:
    """The chat template, and the file that has it."""
    file = folder / _TEMPLATE
    if file.exists():
        if not file.is_file():
            raise kccl.Error(f"{file} is no ordinary file")
        try:
            return file.read_text(encoding="utf-8"), file
        except (OSError, UnicodeDecodeError) as error:
            raise kccl.Error(f"cannot read {file}: {one_line(error)}") from error
    value = config.value("chat_template")
    # Several templates by name.
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise config.wrong("chat_template", "a string, or a list of templates with names")
    return None if value is None else (value, config.path)
