"""What a model thinks, on a terminal and elsewhere."""

import chat_templates as templates
import pytest
from scripted import write_model

from kccl.engine.commands.thoughts import Thoughts
from kccl.engine.files.checkpoint import open_checkpoint

SAID = ["<thi", "nk>\nhm", "\n</think>\n\nH", "i"]


@pytest.mark.parametrize(
    ("special", "is_terminal", "shown"),
    [
        (False, True, ["", "\x1b[2mhm\x1b[22m", "\n\nH", "i"]),
        (False, False, SAID),
        (True, True, SAID),
    ],
)
def test_thoughts_are_dim(tmp_path, special, is_terminal, shown):
    tokens = [(name, special) for name, _ in templates.HERMES_TOKENS]
    write_model(tmp_path / "m", templates.HERMES, tokens)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    ids = tokenizer.chat([{"role": "user", "content": "Hi"}])
    thoughts = Thoughts(tokenizer, ids, is_terminal=is_terminal)
    assert [thoughts.shown(each, is_last=each == "i") for each in SAID] == shown
