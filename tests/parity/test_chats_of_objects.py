"""Chats of objects against those that transformers makes of them."""

import dataclasses
import enum
import json
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from tiny_models import LLAMA, write_folder
from transformers import AutoTokenizer

from kccl.engine.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.long


def search(query: str, most: int = 3, kinds: list[Literal["a", "b"]] | None = None) -> dict:
    """
    Searches the index.

    Args:
        query (str): What to look for,
            in words.
        most: The most results. (choices: [3, 10])
        kinds: Their kinds: all
          if none is given.

    Returns:
        What was found.
    """


class Where(enum.Enum):
    HERE = "here"
    THERE = 2


class Map:
    def move(self, to: Where, by: tuple[int, float], by_name: dict[str, str | int], also: Any):
        """Moves.

        Args:
            to: Where to.
            by: How far.
            by_name: More.
            also: Anything.
        """


@dataclasses.dataclass
class Said:
    role: str
    content: Any = None
    tool_calls: Any = None


class Model(pydantic.BaseModel):
    role: Literal["user", "tool"]
    content: Any = None
    more: Said | None = None


def test_chats_of_objects(tmp_path):
    """Messages, tools and variables that are no plain data, and contents that are no text."""
    template = "{{ messages | tojson }}{{ tools | tojson }}{{ style }}{{ messages[0].content }}"
    write_folder(tmp_path, LLAMA, with_tokenizer=True)
    told = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        ours = checkpoint.tokenizer()
    chat = [
        Said("user", "Hi"),
        Model(role="tool", content={"degrees": 7}, more=Said("user", np.float64(2))),
        {"role": "assistant", "content": None},
        Said("assistant", None, [{"function": Said("x", 1)}]),
        {"role": "tool", "content": 3.5},
    ]
    more = {"tools": [search, Map().move, {"type": "function"}], "style": np.bool_(False)}
    more |= {"tokenize": False}
    wanted = theirs.apply_chat_template(chat, **more)
    del more["tokenize"]
    assert ours.chat_text(chat, add_generation_prompt=False, **more) == wanted
    holder = SimpleNamespace(messages=chat)
    assert ours.chat(holder, literal=True, **more) == ours.encode_literal(wanted)
