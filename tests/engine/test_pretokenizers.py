"""Tokenizers in GGUF files: how each kind splits a text, and which tokens end an answer."""

import numpy as np
import pytest
from tiny_models import byte_vocabulary, write_gguf

import kccl
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.text.pretokenizers import PRE_TOKENIZERS

TEXT = "Hello HTTPServer's 12345 I'LL don't\n\n  (x)!?\t日本語ÉCOLE `é` 1½"
# By the rules of each kind: "·" is where a text is split, "_" a space. DeepSeek LLM's punctuation
# includes Latin letters.
SPLITS = {
    "falcon3 smaug-bpe llama-bpe": (
        "Hello·_HTTPServer·'s·_·123·45·_I·'LL·_don·'t·\n\n·_·_(·x·)!?·\t日本語ÉCOLE·_`·é·`·_·1½"
    ),
    "qwen2": (
        "Hello·_HTTPServer·'s·_·1·2·3·4·5·_I·'LL·_don·'t·\n\n·_·_(·x·)!?·\t日本語ÉCOLE·_`·é·`·_·1·½"
    ),
    "tekken": (
        "Hello·_HTTPServer·'s·_·1·2·3·4·5·_I·'LL·_don·'t·\n\n·_·_(·x·)!?·\t日本語·ÉCOLE·_`·é·`·_·1·½"
    ),
    "gpt-4o": (
        "Hello·_HTTPServer's·_·123·45·_I'LL·_don't·\n\n·_·_(·x·)!?·\t日本語·ÉCOLE·_`·é·`·_·1½"
    ),
    "deepseek-llm": (
        "Hello·_HTTPServer·'·s·_·12345·_I·'·LL·_don·'·t·\n·\n·_·_(·x·)!?·\t·日本語·É·COLE·_`·é·`·_·1½"
    ),
    "deepseek-coder": (
        "Hello·_HTTPServer·'·s·_·1·2·3·4·5·_I·'·LL·_don·'·t·\n·\n·_·_(·x·)!?·\t·日本語·ÉCOLE·_`·é·`_·1·½"
    ),
    "deepseek-v3": (
        "Hello·_HTTPServer·'s·_·123·45·_I·'LL·_don·'t·\n\n·_·_(·x·)!?·\t·日本語·ÉCOLE·_`·é·`·_·1½"
    ),
    "smollm starcoder": (
        "Hello·_HTTPServer·'s·_·1·2·3·4·5·_I·'·LL·_don·'t·\n\n_·_(·x·)!?·\t·日本語ÉCOLE·_`·é·`·_·1·½"
    ),
    "gpt-2": "Hello·_HTTPServer·'s·_12345·_I·'·LL·_don·'t·\n\n_·_(·x·)!?·\t·日本語ÉCOLE·_`·é·`·_1½",
    "falcon": (
        "Hello·_HTTPServer·'·s·_·123·45·_I·'·LL·_don·'·t·\n\n__·(·x·)!?·\t·日本語ÉCOLE·_·`·é·`·_1½"
    ),
    "default": (
        "Hello·_HTTPServer·'·s·_·123·45·_I·'·LL·_don·'·t·\n\n__·(·x·)!?·\t·日本語ÉCOLE·_`·é·`·_·1½"
    ),
}


@pytest.mark.parametrize("names", SPLITS)
def test_splits(names):
    for name in names.split():
        steps = PRE_TOKENIZERS[name].steps()
        spans = [span for _, span in steps.pre_tokenize_str(TEXT)]
        found = "·".join(TEXT[start:stop] for start, stop in spans)
        assert found.replace(" ", "_") == SPLITS[names], name


def tokenizer_of(tmp_path, *more, change=None, kinds=None):
    """A tokenizer whose vocabulary ends with these tokens, of these kinds."""
    tokens, _ = byte_vocabulary()
    kinds = kinds or [1] * len(more)

    def changed(writer):
        writer.add_token_list([*tokens, *more])
        writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3) + kinds)
        if change is not None:
            change(writer)

    write_gguf(tmp_path / "m.gguf", change=changed)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        return checkpoint.tokenizer()


@pytest.mark.parametrize(
    ("name", "takes_words", "adds_bos"),
    [
        ("falcon3", True, True),
        ("tekken", True, True),
        ("smaug-bpe", False, False),
        ("deepseek-llm", False, False),
        ("default", False, False),
    ],
)
def test_what_else_a_name_means(tmp_path, name, takes_words, adds_bos):
    # No merge leads to this token.
    tokenizer = tokenizer_of(tmp_path, "xyz", change=lambda w: w.add_tokenizer_pre(name))
    whole = [tokenizer.vocab_size - 1]
    assert (tokenizer.encode("xyz", add_bos=False) == whole) is takes_words
    assert tokenizer.adds_bos is adds_bos


def test_a_file_without_a_name_is_of_the_default_kind(tmp_path):
    def change(writer):
        del writer.kv_data[0]["tokenizer.ggml.pre"]

    tokenizer = tokenizer_of(tmp_path, change=change)
    wanted = tokenizer_of(tmp_path, change=lambda w: w.add_tokenizer_pre("default"))
    assert tokenizer.encode(TEXT) == wanted.encode(TEXT)


# ---- Ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>"),
        *("_<EOT>", "<|end_of_text|>", "<|eom_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    ],
)
@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user"])
def test_the_end_of_a_turn_is_known_by_its_text(tmp_path, text, kind):
    tokenizer = tokenizer_of(tmp_path, text, kinds=[kind])
    number = tokenizer.vocab_size - 1
    # The end that the file names by its id is first.
    assert tokenizer.eos_ids == (1, number)
    assert number in tokenizer.special_ids and tokenizer.decode([number]) == ""
    assert tokenizer.encode(f"hello{text}", add_bos=False)[-1] == number


def test_the_end_of_a_message_is_no_end_where_answers_have_others(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "<|end|>", "<|return|>", "<|call|>", kinds=[3, 3, 3])
    end = tokenizer.vocab_size - 3
    assert tokenizer.eos_ids == (1, end + 1, end + 2)


def test_an_end_that_the_file_types_as_text_prints_nothing(tmp_path):
    tokens, _ = byte_vocabulary()

    def change(writer):
        writer.add_token_types([1] * len(tokens))

    write_gguf(tmp_path / "m.gguf", change=change)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    assert tokenizer.eos_ids == (1,) and tokenizer.decode([1]) == ""


def test_padding_that_is_no_token_does_not_matter(tmp_path):
    def change(writer):
        writer.add_pad_token_id(5000)
        writer.add_unk_token_id(264)

    assert tokenizer_of(tmp_path, change=change).pad_id is None


@pytest.mark.parametrize(
    ("bos", "eos", "told"),
    [
        (
            5000,
            1,
            ["m.gguf has tokenizer.ggml.bos_token_id = 5000, which is not used: the model's"],
        ),
        (
            0,
            5000,
            ["m.gguf has tokenizer.ggml.eos_token_id = 5000, which is not used: the model's"],
        ),
        (2**32 - 1, 2**32 - 1, []),
    ],
)
def test_ids_that_are_no_tokens_count_as_none(tmp_path, bos, eos, told):
    def change(writer):
        writer.add_bos_token_id(bos)
        writer.add_eos_token_id(eos)

    write_gguf(tmp_path / "m.gguf", change=change)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert [notice[: len(told[0])] for notice in checkpoint.notices] == told
        tokenizer = checkpoint.tokenizer()
    # "</s>" ends an answer by its text.
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None if bos else 0, (1,))


def test_a_token_that_is_no_text_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"hell", b"\xffell", 1))
    told = r"m\.gguf: entry \d+ of tokenizer\.ggml\.tokens is b'\\xffell', must be valid UTF-8"
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint, pytest.raises(kccl.Error, match=told):
        checkpoint.tokenizer()


@pytest.mark.parametrize("name", ["none", "no_vocab"])
def test_a_file_may_say_that_it_has_no_tokenizer(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", change=lambda writer: writer.add_tokenizer_model(name))
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert not checkpoint.has_tokenizer


def test_what_a_file_may_leave_out(tmp_path):
    def change(writer):
        del writer.kv_data[0]["tokenizer.ggml.token_type"]

    # Vocabularies are filled up with empty tokens.
    tokenizer = tokenizer_of(tmp_path, "", "", change=change)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"

    def pieces(writer):
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁h"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1])
        writer.add_token_scores(np.zeros(len(tokens), np.float32).tolist())
        for name in ("bos", "eos"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}_token_id"]

    write_gguf(tmp_path / "m.gguf", change=pieces)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    # SentencePiece's own.
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2,), True)
