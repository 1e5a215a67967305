"""SentencePiece's own file, tokenizer.model, against SentencePiece."""

import json

import pytest
import sentencepiece
from pieces import write_pieces
from tiny_models import LLAMA, write_folder

import kccl
from kccl.engine import Engine
from kccl.engine.files.checkpoint import open_checkpoint

TEXTS = (
    "hello world",
    "  two  spaces ",
    "a\nb",
    "",
    "naïve 日本 🙂 12",
    "<tool>hello<tool> two",
    "▁x",
)
WORDS = ["hello world two spaces", "two hello world", "spaces hello two 12", "a naive world"] * 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of two kinds, and one that changes characters and spaces."""
    at = tmp_path_factory.mktemp("models")
    kept = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    for name, options in (
        ("bpe", kept | {"model_type": "bpe"}),
        ("unigram", kept | {"model_type": "unigram"}),
        ("changes", {"model_type": "bpe"}),
        ("bare", kept | {"model_type": "bpe", "add_dummy_prefix": False}),
        ("word", kept | {"model_type": "word", "byte_fallback": False, "vocab_size": 10}),
    ):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(WORDS),
            model_prefix=str(at / name),
            hard_vocab_limit=False,
            user_defined_symbols=["<tool>"],
            minloglevel=2,
            **{"vocab_size": 300, "byte_fallback": True} | options,
        )
    return at


@pytest.fixture
def folder(tmp_path, models):
    """folder(name): a folder with this model, and no tokenizer.json."""

    def write(name, **config):
        write_folder(tmp_path, LLAMA | {"vocab_size": 320})
        (tmp_path / "tokenizer.model").write_bytes((models / f"{name}.model").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def tokenizer_of(folder):
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tokenizer()


@pytest.mark.parametrize("name", ["bpe", "unigram", "changes", "bare"])
def test_ids_are_those_of_sentence_piece(models, folder, name):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(models / f"{name}.model"))
    ours = tokenizer_of(folder(name))
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.bos_id, ours.eos_ids, ours.pad_id) == (1, (2,), None)
    assert ours.encode("<s>hello")[0] == 1 and ours.decode([1, 2]) == ""


def test_the_configuration_counts_here_too(folder):
    more = {"content": "<end>", "special": True, "normalized": False}
    count = tokenizer_of(folder("bpe")).vocab_size
    tokenizer = tokenizer_of(
        folder(
            "bpe",
            add_bos_token=True,
            eos_token="<end>",
            added_tokens_decoder={str(count): more},
            chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        )
    )
    assert tokenizer.encode("hello")[0] == 1 and tokenizer.eos_ids == (count,)
    ids = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert ids == [*tokenizer.encode("hello"), count]


def test_a_tokenizer_of_llama_puts_one_space_in_front(folder):
    tokenizer = tokenizer_of(folder("bpe", tokenizer_class="LlamaTokenizer"))
    assert tokenizer.encode(" hello") == tokenizer.encode("hello")
    assert tokenizer.encode("<s>▁hello")[1:] == tokenizer.encode("hello")


@pytest.mark.parametrize("form", ["prepend", "never"])
@pytest.mark.parametrize(
    ("more", "spelt"),
    [
        ({}, "▁hello</s>hello"),
        ({"legacy": True, "add_prefix_space": None}, "▁hello</s>▁hello"),
        ({"add_prefix_space": False}, "hello</s>hello"),
    ],
)
def test_both_files_of_llama_give_the_same_ids(models, folder, form, more, spelt):
    by_model = tokenizer_of(at := folder("bpe", tokenizer_class="LlamaTokenizerFast", **more))
    write_pieces(at, models / "bpe.model", form)
    by_json = tokenizer_of(at)
    for text in (*TEXTS, " hello", "hello</s>hello"):
        assert by_json.encode(text, add_bos=False) == by_model.encode(text), text
        assert by_json.decode(by_model.encode(text)) == by_model.decode(by_model.encode(text))
    ids = by_json.encode("hello</s>hello", add_bos=False)
    assert "".join(map(by_json.name_of, ids)) == spelt


def test_a_class_that_spells_bytes_reads_no_pieces(models, folder):
    at = folder("bpe", tokenizer_class="Qwen2Tokenizer")
    told = "is no tokenizer of transformers' class Qwen2Tokenizer, with which transformers reads"
    with pytest.raises(kccl.Error, match=f"tokenizer.model {told}"):
        tokenizer_of(at)
    write_pieces(at, models / "bpe.model", "prepend")
    with pytest.raises(kccl.Error, match=f"tokenizer.json {told}"):
        tokenizer_of(at)


def test_an_engine_takes_text(folder):
    with Engine(folder("bpe"), blocks=1) as engine:
        answer = engine.generate("hello world", max_tokens=3, stop_ids=())
        assert answer.num_prompt == len(engine.tokenizer.encode("hello world"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has no pieces"),
        (b"\xff" * 40, "is no model of SentencePiece: "),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is no model of .*: it is a Git LFS pointer",
        ),
        (None, "is neither a BPE nor a unigram model: let transformers write a tokenizer.json"),
    ],
    ids=["empty", "garbage", "pointer", "word"],
)
def test_another_file_is_named(folder, content, told):
    path = folder("word")
    if content is not None:
        (path / "tokenizer.model").write_bytes(content)
    with pytest.raises(kccl.Error, match=rf"tokenizer\.model {told}"):
        tokenizer_of(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has no pieces: it is empty; download it again"),
        (b"IQ== 0\nIg== 1\n", "is a file of tiktoken, which is not read: let transformers write"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content, told):
    write_folder(tmp_path, LLAMA)
    (tmp_path / "tokenizer.model").write_bytes(content)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(kccl.Error, match=told):
        checkpoint.tokenizer()
