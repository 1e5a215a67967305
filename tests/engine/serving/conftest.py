"""Tiny chat models, and models that say what a test wants."""

import contextlib

import pytest
from chat_templates import KINDS
from scripted import scripted
from tiny_models import LLAMA, write_folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A folder with random weights, a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    write_folder(folder, LLAMA | {"max_position_embeddings": 2048}, with_tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(kind): (client, script) of a model with a template of that kind, for a module."""
    with contextlib.ExitStack() as stack:
        opened = {}

        def get(kind):
            if kind not in opened:
                folder = tmp_path_factory.mktemp("models") / kind
                opened[kind] = stack.enter_context(scripted(folder, *KINDS[kind]))
            client, script = opened[kind]
            script.pause_s, script.answers = 0, [""]
            return client, script

        yield get


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory):
    """A model with more weights: an answer takes seconds, so that a person can stop it."""
    folder = tmp_path_factory.mktemp("models") / "slow-chat"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    write_folder(folder, LLAMA | sizes | {"max_position_embeddings": 2048}, with_tokenizer=True)
    return folder
