"""Reads a folder's special tokens, which five files may name. The tokens get the ids that
transformers gives them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kccl

from ..base.extras import library
from ..base.fields import Fields, read_optional

_MAP = "special_tokens_map.json"
_ADDED = "added_tokens.json"
# Fields that name one token each. A file may have further ones that end in "_token".
_NAMED = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
    "mask_token",
)
_NEEDED = ("bos_token", "eos_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_special_tokens(
    folder: Path, config: Fields, values: dict[str, Any], backend: Any, content: dict[str, Any]
) -> dict[str, str]:
    """Adds to a tokenizer's vocabulary the tokens that the files beside it name.

    Args:
        folder: The folder.
        config, values: tokenizer_config.json, as Fields and as a dict.
        backend: The tokenizers.Tokenizer to which the tokens are added.
        content: tokenizer.json. Empty if there is none.

    Returns:
        Field that names a token, as "bos_token" -> the token's text.

    Raises:
        kccl.Error: A file is damaged. The text names the file and the field.
    """
    values = dict(values)
    added: dict[int, Any] = {}
    older = Fields(folder / _MAP, {})
    if "added_tokens_decoder" in config:
        decoder = config.value("added_tokens_decoder")
        if not isinstance(decoder, dict):
            raise config.wrong("added_tokens_decoder", "an object")
        for number, token in decoder.items():
            if not number.isdecimal() or not isinstance(token, dict):
                raise config.wrong("added_tokens_decoder", "an object with ids and tokens")
            added[int(number)] = _token(config, "added_tokens_decoder", token)
    else:
        older = Fields(folder / _MAP, read_optional(folder / _MAP))
        values |= {name: older.value(name) for name in older.names()}
        added = _older(folder, config, values, content)
    texts = {name: text for name in _names(values) if (text := _text(config, values, name))}
    given = [(name, values[name]) for name in texts]
    given += [(name, each) for name, found in _extras(values) for each in found]
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    missing = [token for _, token in sorted(added.items()) if repr(token) not in known]
    seen = {token.content for token in added.values()}
    # Tokens that the backend has already keep their flags.
    seen |= {token.content for token in backend.get_added_tokens_decoder().values()}
    for name, value in given:
        token = _named_token(older if name in older else config, name, value)
        if token.content not in seen:
            missing.append(token)
        seen.add(token.content)
    named = {_content(value) for _, value in given}
    for token in missing:
        token.special = token.special or token.content in named
    backend.add_tokens(missing)
    _mark(backend, named)
    return texts


def _mark(backend: Any, named: set[str]) -> None:
    """Makes the named tokens control tokens, even if the tokenizer has them as ordinary tokens."""
    tokens = [each for each in backend.get_added_tokens_decoder().values() if each.content in named]
    backend.add_special_tokens(tokens)


def _older(
    folder: Path, config: Fields, values: dict[str, Any], content: dict[str, Any]
) -> dict[int, Any]:
    """Returns id -> token, for folders whose tokenizer_config.json has no added_tokens_decoder."""
    named = {text for name in _names(values) if (text := _text(config, values, name))}
    named |= {_content(each) for _, found in _extras(values) for each in found}
    make = library("tokenizers").AddedToken
    file = Fields(folder / _ADDED, read_optional(folder / _ADDED))
    added: dict[int, Any] = {}
    for text, number in read_optional(folder / _ADDED).items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise file.wrong(text, "an id")
        is_special = text in named
        added[number] = make(text, normalized=not is_special, special=is_special)
    for token in content.get("added_tokens") or []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            added[token["id"]] = _token(config, "added_tokens", token)
    return added


def _names(values: dict[str, Any]) -> Iterable[str]:
    """Returns the fields that name one token each."""
    own = [
        name
        for name, value in values.items()
        if name.endswith("_token") and name not in _NAMED and isinstance(value, str | dict)
    ]
    return (*_NAMED, *own)


def _text(config: Fields, values: dict[str, Any], name: str) -> str | None:
    """Returns the text of the token that a field names. Returns None if it names none. Some files
    have an object with more fields instead of a text.
    """
    value = _content(values.get(name))
    if value is None or isinstance(value, str):
        return value
    if name in _NEEDED:
        raise kccl.Error(f"{config.path}: field {name} is {value!r:.80}, must be a string")
    # A wrong value of another field is ignored, because decoding does not need it.
    return None


def _extras(values: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Returns special tokens that are listed without names: (field, tokens), or []."""
    for name in _EXTRA:
        found: Any = values.get(name)
        if isinstance(found, dict):
            found = list(found.values())
        if found and isinstance(found, list):
            texts = [each for each in found if isinstance(_content(each), str) and _content(each)]
            return [(name, texts)]
        if found:
            break
    return []


def _content(value: Any) -> Any:
    """Returns a token's text. Some files have an object with flags, whose content is the text."""
    return value.get("content") if isinstance(value, dict) else value


def _named_token(fields: Fields, name: str, value: Any) -> Any:
    """Makes a special token from a text, or from an object with flags."""
    if isinstance(value, str):
        return library("tokenizers").AddedToken(value, special=True, normalized=False)
    return _token(fields, name, {**value, "special": True})


def _token(config: Fields, name: str, token: dict[str, Any]) -> Any:
    """Makes a token from an object with a content and flags."""
    text = token.get("content")
    flags = {flag: token[flag] for flag in _FLAGS if flag in token}
    if not isinstance(text, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise config.wrong(name, "tokens with a content and flags")
    return library("tokenizers").AddedToken(text, **flags)
