"""Folders with vocab.json and merges.txt against what transformers makes of them."""

import json

import pytest
from tiny_models import LLAMA, QWEN3, write_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

import kccl
from kccl.engine.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.long

TEXTS = (
    "def mean(values):\n    return sum(values) / len(values)  # 12345 values\n\n\n",
    "I'LL say it's 3.14,\r\n\tcafe\u0301 and caf\u00e9; \u4f60\u597d\U0001f600  end <|endoftext|>x",
    " <|im_start|>user\nHi<|im_end|>",
    "",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DECODER = {
    str(300 + number): {"content": text, "special": True, "normalized": False}
    | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    for number, text in enumerate(SPECIAL)
}
# Each: the model, tokenizer_config.json, and special_tokens_map.json.
FOLDERS = {
    "qwen2": (QWEN3, {"tokenizer_class": "Qwen2Tokenizer"}, {}),
    "qwen2 as published": (
        QWEN3,
        {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": DECODER}
        | {"eos_token": "<|im_end|>", "bos_token": None, "additional_special_tokens": SPECIAL[1:]},
        {},
    ),
    "qwen2 with a space": (
        QWEN3,
        {"tokenizer_class": "Qwen2TokenizerFast", "add_prefix_space": True},
        {},
    ),
    "gpt2": (LLAMA, {"tokenizer_class": "GPT2Tokenizer"}, {}),
    "gpt2 with a space": (
        LLAMA,
        {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
        {},
    ),
    "gpt2 with bos": (LLAMA, {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, {}),
    "gpt2 and a map": (
        LLAMA,
        {"tokenizer_class": "GPT2Tokenizer"},
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]},
    ),
}


@pytest.fixture(scope="module")
def trained():
    """A byte-level vocabulary of 300 tokens with merges of both kinds' words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator([*TEXTS[:3]] * 3, trainer)
    return backend.model


def write(folder, trained, model, config, names):
    write_folder(folder, model | {"vocab_size": 310})
    trained.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if names:
        (folder / "special_tokens_map.json").write_text(json.dumps(names))


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(tmp_path, trained, name):
    write(tmp_path, trained, *FOLDERS[name])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        ours = checkpoint.tokenizer()
    assert type(theirs).__name__ == FOLDERS[name][1]["tokenizer_class"].removesuffix("Fast")
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids, text
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.pad_id) == (theirs.bos_token_id, theirs.pad_token_id)


@pytest.mark.parametrize("named", ["BloomTokenizer", None])
def test_other_classes_are_refused_by_name(tmp_path, trained, named):
    write(tmp_path, trained, LLAMA, {"tokenizer_class": named} if named else {}, {})
    told = f"tokenizer_class is '{named}'" if named else "there is no tokenizer_class"
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(kccl.Error, match=f"{told}, must be one of GPT2Tokenizer, Qwen2Tokenizer"),
    ):
        checkpoint.tokenizer()
