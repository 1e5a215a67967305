"""Reads the chat templates of a folder in Hugging Face's layout."""

from collections.abc import Mapping
from pathlib import Path

import kccl

from ..base.fields import Fields, one_line
from .chat import DEFAULT, Template

_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"


def read_templates(folder: Path, config: Fields) -> Mapping[str, Template]:
    """Returns templates by name. If there are files *.jinja, the templates in tokenizer_config.json
    are ignored. If reading fails, returns a template whose `error` is raised only when it is used,
    because requests of plain text need none.
    """
    try:
        return _read_all(folder, config)
    except kccl.Error as error:
        return {DEFAULT: Template("", str(config.path), str(error))}


def _read_all(folder: Path, config: Fields) -> Mapping[str, Template]:
    files = {each.stem: each for each in sorted((folder / _MORE).glob("*.jinja"))}
    if (folder / _FILE).exists():
        files[DEFAULT] = folder / _FILE
    if files:
        return {name: Template(_read(file), str(file)) for name, file in files.items()}
    value, where = config.value("chat_template"), str(config.path)
    if isinstance(value, list):
        value = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
    elif isinstance(value, str):
        value = {DEFAULT: value}
    elif value is None:
        value = {}
    if not isinstance(value, dict) or not all(
        isinstance(each, str) for item in value.items() for each in item
    ):
        raise config.wrong("chat_template", "a string, or a list of templates with names")
    return {name: Template(source, where) for name, source in value.items()}


def _read(file: Path) -> str:
    if not file.is_file():
        raise kccl.Error(f"{file} is no ordinary file")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise kccl.Error(f"cannot read {file}: {one_line(error)}") from error
