"""Reads the special tokens of a folder, which five files may name. Their ids are those of
transformers.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kccl

from ..base.extras import library
from ..base.fields import Fields, read_optional

_MAP = "special_tokens_map.json"
_ADDED = "added_tokens.json"
# A file may also name tokens of its own, whose names end in "_token".
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
    """Adds the tokens that the files beside a tokenizer name to its vocabulary.

    Args:
        folder: The folder.
        config, values: tokenizer_config.json, as fields and as it is.
        backend: A tokenizers.Tokenizer, which is changed.
        content: Its tokenizer.json; empty where there is none.

    Returns:
        The texts of named tokens, as in "bos_token".

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
    # A token of the tokenizer's own file keeps the flags that it has there.
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
    """Makes the named tokens control tokens, even if the tokenizer has them as ordinary text."""
    tokens = [each for each in backend.get_added_tokens_decoder().values() if each.content in named]
    backend.add_special_tokens(tokens)


def _older(
    folder: Path, config: Fields, values: dict[str, Any], content: dict[str, Any]
) -> dict[int, Any]:
    """Returns tokens by id, where tokenizer_config.json does not list them."""
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
    """Returns the text of a named token, which some files give as an object with more fields."""
    value = _content(values.get(name))
    if value is None or isinstance(value, str):
        return value
    if name in _NEEDED:
        raise kccl.Error(f"{config.path}: field {name} is {value!r:.80}, must be a string")
    # Decoding needs no other field.
    return None


def _extras(values: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Returns further special tokens, which have no name, with the field that lists them."""
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
    """Returns the text of a token, which some files give as an object with flags."""
    return value.get("content") if isinstance(value, dict) else value


def _named_token(fields: Fields, name: str, value: Any) -> Any:
    """Returns a special token, with the flags that its object has."""
    if isinstance(value, str):
        return library("tokenizers").AddedToken(value, special=True, normalized=False)
    return _token(fields, name, {**value, "special": True})


def _token(config: Fields, name: str, token: dict[str, Any]) -> Any:
    """Returns a token as a file describes it."""
    text = token.get("content")
    flags = {flag: token[flag] for flag in _FLAGS if flag in token}
    if not isinstance(text, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise config.wrong(name, "tokens with a content and flags")
    return library("tokenizers").AddedToken(text, **flags)
