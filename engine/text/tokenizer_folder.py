"""Reads the tokenizer of a folder in Hugging Face's layout."""

from pathlib import Path
from typing import Any

import kccl

from ..base.extras import library
from ..base.fields import Fields, read_json, read_optional
from .chat_files import read_templates
from .special_tokens import add_special_tokens
from .tokenizer import Pieces, Tokenizer, byte_level, guarded, sentence_piece, vocab_size_of
from .tokenizer_classes import MERGES, VOCABULARY, class_of, of_merges, rebuilt
from .tokenizer_model import MODEL, read_model

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
# Files that name ids, in order of precedence. config.json also names the model's family.
_WITH_IDS = ("generation_config.json", "config.json")


def has_tokenizer(folder: Path) -> bool:
    """Tells whether a folder has a tokenizer. Does not read it, so it may be damaged."""
    return any((folder / name).exists() for name in (TOKENIZER, MODEL, VOCABULARY))


def from_folder(folder: Path, vocab_size: int, *, is_laneformer: bool) -> Tokenizer:
    """Reads tokenizer.json, or else tokenizer.model or vocab.json, and the special tokens in the
    files beside it.

    Args:
        folder: The folder.
        vocab_size: The number of the model's ids. The tokenizer may have fewer tokens.
        is_laneformer: Whether the model is a Laneformer. Then add_bos_token decides about BOS.

    Raises:
        kccl.Error: A file is missing or damaged, or the tokenizer is of an unknown kind.
    """
    values = read_optional(folder / _CONFIG)
    config = Fields(folder / _CONFIG, values)
    file, content = folder / TOKENIZER, {}
    is_there = file.exists() or file.is_symlink()
    is_model = not is_there and (folder / MODEL).exists()
    is_merges = not is_there and not is_model and (folder / VOCABULARY).exists()
    pieces: Pieces = byte_level
    others = _with_ids(folder)
    if is_there:
        content = read_json(file)
    # transformers has no Laneformers, so there is no class to follow.
    named = "" if is_laneformer else class_of(config, others[-1], content)
    if is_model:
        file = folder / MODEL
        backend, adds_space, texts = guarded(file, read_model, file, config, named)
        values = texts | values
        pieces = sentence_piece
    elif is_merges:
        file = folder / VOCABULARY
        backend, adds_space, texts = guarded(file, of_merges, folder, named, config)
        values = texts | values
    else:
        if not is_there:
            raise kccl.Error(
                f"{folder} has neither {TOKENIZER} nor {MODEL}, nor {VOCABULARY} with {MERGES}"
            )
        # Reads the file here: the library cannot open a path that is not UTF-8.
        backend = guarded(file, library("tokenizers").Tokenizer.from_buffer, file.read_bytes())
        if named:
            backend, pieces, adds_space, texts = guarded(
                file, rebuilt, file, backend, content, named, config
            )
            values = texts | values
        else:
            pieces, adds_space = _kind(file, content)
    # A tokenizer.json may ask for truncation or padding, which would change texts silently.
    backend.no_truncation()
    backend.no_padding()
    # If split_special_tokens is true, control tokens that are spelt out in a text stay text.
    backend.encode_special_tokens = config.boolean("split_special_tokens", default=False)
    texts = guarded(file, add_special_tokens, folder, config, values, backend, content)
    ids = {
        name: None if (text := texts.get(f"{name}_token")) is None else backend.token_to_id(text)
        for name in ("bos", "eos", "pad")
    }
    size = vocab_size_of(backend)
    eos_ids = _first_ids(others, "eos_token_id", max(size, vocab_size))
    if not eos_ids and ids["eos"] is not None:
        eos_ids = [ids["eos"]]
    bos_id = ids["bos"]
    if bos_id is None:
        bos_id = _usable_id(others, "bos_token_id", size)
    prefix: list[int] = []
    suffix: list[int] = []
    if backend.post_processor is not None:
        prefix, suffix = _around(file, backend)
    # If there is a tokenizer.json, transformers ignores add_bos_token and add_eos_token, and uses
    # the file's post-processor, if any. Laneformers' tokenizer.json has none, but the two fields
    # count.
    elif is_model or is_merges or is_laneformer:
        prefix = _if_asked(config, "add_bos_token", bos_id)
        suffix = _if_asked(config, "add_eos_token", ids["eos"])
    return Tokenizer(
        backend,
        pieces=pieces,
        where=file,
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=_usable_id(others, "pad_token_id", size) if ids["pad"] is None else ids["pad"],
        prefix=prefix,
        suffix=suffix,
        adds_space=adds_space,
        templates=read_templates(folder, config),
        texts=texts,
    )


def named_ends(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a text by eos_token_id in _WITH_IDS. Does not read the tokenizer."""
    return tuple(_first_ids(_with_ids(folder), "eos_token_id", vocab_size))


def unusable(folder: Path, vocab_size: int) -> tuple[str, ...]:
    """Returns notices about mistakes in a folder's files that do not prevent all requests: ids of
    eos_token_id that do not exist, and chat templates that cannot be read.
    """
    found = []
    for fields in _with_ids(folder):
        named = fields.value("eos_token_id")
        ids = [each for each in (named if isinstance(named, list) else [named]) if each is not None]
        # -1 stands for no id, as in transformers.
        known = (-1, *_ids(fields, "eos_token_id", vocab_size))
        if wrong := [number for number in ids if number not in known]:
            found.append(
                f"{fields.path.name} has {wrong[0]!r:.30} among eos_token_id, which ends nothing: "
                f"the model's ids are from 0 to {vocab_size - 1}"
            )
        if ids:
            break
    try:
        values = read_optional(folder / _CONFIG)
    except kccl.Error:
        # from_folder() raises this error when the tokenizer is needed.
        return tuple(found)
    templates = read_templates(folder, Fields(folder / _CONFIG, values))
    found += [f"{each.error}; chats are refused" for each in templates.values() if each.error]
    return tuple(found)


def _with_ids(folder: Path) -> list[Fields]:
    return [Fields(folder / name, read_optional(folder / name)) for name in _WITH_IDS]


def _around(file: Path, backend: Any) -> tuple[list[int], list[int]]:
    """Returns the ids that the backend's post-processor puts before and after a text."""
    bare = guarded(file, backend.encode, "a", None, False, False).ids
    whole = guarded(file, backend.encode, "a").ids
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise kccl.Error(f"{file}: field post_processor changes a text's own ids, which is not known")


def _if_asked(config: Fields, name: str, number: int | None) -> list[int]:
    is_asked = config.boolean(name, default=False)
    return [number] if is_asked and number is not None else []


def _first_ids(others: list[Fields], name: str, vocab_size: int) -> list[int]:
    """Returns the ids of a field, from the first file that has some below vocab_size."""
    for fields in others:
        if ids := _ids(fields, name, vocab_size):
            return ids
    return []


def _ids(fields: Fields, name: str, vocab_size: int) -> list[int]:
    """Returns those ids of a field that are from 0 to vocab_size - 1."""
    value = fields.value(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in ids):
        raise fields.wrong(name, "an id or a list of ids")
    return [number for number in ids if 0 <= number < vocab_size]


def _usable_id(others: list[Fields], name: str, vocab_size: int) -> int | None:
    """Returns the first valid id that a file has in this field, or None. A wrong id is ignored,
    because decoding may not need it.
    """
    for fields in others:
        value = fields.value(name)
        for number in value if isinstance(value, list) else [value]:
            is_id = isinstance(number, int) and not isinstance(number, bool)
            if is_id and 0 <= number < vocab_size:
                return int(number)
    return None


def _kind(file: Path, content: dict[str, Any]) -> tuple[Pieces, bool]:
    """Returns how the vocabulary spells bytes, and whether a space is put in front of a text."""
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
