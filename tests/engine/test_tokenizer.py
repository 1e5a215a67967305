"""Tokenizers from folders and from GGUF files, streams of text, chat templates."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LLAMA, MESSAGES, byte_vocabulary, write_folder, write_gguf

import kccl
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.text.chat import ChatTemplate

TEXT = "hello world, 12\n naïve 日本 🙂"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """One tokenizer from a folder, from a GGUF file, and of SentencePiece's kind."""
    at = tmp_path_factory.mktemp("tokenizers")
    write_folder(at / "folder", LLAMA, with_tokenizer=True)
    write_gguf(at / "bytes.gguf")
    write_gguf(at / "pieces.gguf", change=sentence_pieces)
    found = {}
    for name in ("folder", "bytes.gguf", "pieces.gguf"):
        with open_checkpoint(at / name) as checkpoint:
            found[name.partition(".")[0]] = checkpoint.tokenizer()
    return found


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
# A piece's score is its rank among the merges.
WORDS = ["▁h", "el", "lo", "▁hel", "▁hello", "▁w"]
LETTERS = list("▁helowrd,12")


def sentence_pieces(writer):
    tokens = [*PIECES, *WORDS, *LETTERS]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def test_ids_of_a_folder(tokenizers):
    tokenizer = tokenizers["folder"]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (1, 2), 2)
    assert tokenizer.adds_bos and tokenizer.special_ids == {0, 1, 2}
    tokens, _ = byte_vocabulary()
    assert tokenizer.vocab_size == len(tokens)
    hello = tokens.index("hello")
    assert tokenizer.encode("hello") == [0, hello]
    assert tokenizer.encode("hello", add_bos=False) == [hello]
    assert tokenizer.encode("hello</s>", add_bos=False) == [hello, 1]
    assert tokenizer.encode("", add_bos=False) == []


def test_gguf_and_folder_agree(tokenizers):
    folder, file = tokenizers["folder"], tokenizers["bytes"]
    for text in (TEXT, "hello</s>hello", "  a\t\n", "don't"):
        assert file.encode(text, add_bos=False) == folder.encode(text, add_bos=False)
    # The file does not say that texts begin with BOS.
    assert not file.adds_bos and file.bos_id == 0
    assert file.eos_ids == (1,)


def test_digits_of_smollm_stay_apart(tmp_path):
    tokens, merges = byte_vocabulary()

    def change(writer):
        writer.add_token_list([*tokens, "12"])
        writer.add_token_types([3] * 3 + [1] * (len(tokens) - 2))
        writer.add_token_merges([*(f"{left} {right}" for left, right in merges), "1 2"])

    one, two, pair = tokens.index("1"), tokens.index("2"), len(tokens)
    for name, wanted in (("smollm", [one, two]), ("llama-bpe", [pair]), ("qwen2", [one, two])):

        def named(writer, name=name):
            change(writer)
            writer.add_tokenizer_pre(name)

        write_gguf(tmp_path / "m.gguf", change=named)
        with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
            tokenizer = checkpoint.tokenizer()
        assert tokenizer.encode("12", add_bos=False) == wanted, name
        assert tokenizer.adds_bos == (name == "llama-bpe")


def test_sentence_pieces(tokenizers):
    tokenizer = tokenizers["pieces"]
    tokens = [*PIECES, *WORDS, *LETTERS]
    assert tokenizer.adds_bos and tokenizer.bos_id == 1
    ids = tokenizer.encode("hello world", add_bos=False)
    assert [tokens[number] for number in ids] == ["▁hello", "▁w", "o", "r", "l", "d"]
    # What is no piece is spelt in bytes.
    assert tokenizer.encode("x", add_bos=False)[1] == 3 + ord("x")
    # A text begins with a space that was put there; a continuation with a space of its own.
    assert tokenizer.decode(ids) == "hello world"
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) == " hello world"
    # Where other text stands in front, nothing is put there, and control tokens stay text.
    for text in ("hello", " hello", "a</s>b", ""):
        ids = tokenizer.encode_literal(text, follows=True)
        assert b"".join(map(tokenizer.bytes_of, ids)) == text.encode()


@pytest.mark.parametrize("name", ["folder", "bytes", "pieces"])
@settings(deadline=None)
@given(text=st.text())
def test_texts_come_back(tokenizers, name, text):
    tokenizer = tokenizers[name]
    if any(control in text for control in ("<s>", "</s>", "<pad>", "<unk>", "\u2581")):
        return
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["folder", "bytes", "pieces"])
def test_a_long_text_has_the_ids_of_its_parts(tokenizers, name):
    """Long texts are encoded so that other threads go on, short ones are not."""
    tokenizer = tokenizers[name]
    text = "hello w\u00f6rld\n" * 2000
    ids = tokenizer.encode(text)
    assert ids == tokenizer._begun(tokenizer._backend.encode(text, add_special_tokens=False).ids)
    assert len(text) <= len(ids) * tokenizer.longest


@pytest.mark.parametrize("name", ["folder", "bytes", "pieces"])
@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 400)))
def test_a_stream_gives_the_same_text(tokenizers, name, ids):
    tokenizer = tokenizers[name]
    stream = tokenizer.stream()
    pieces = [stream.push(number) for number in ids]
    streamed = "".join(pieces) + stream.flush()
    assert streamed == b"".join(map(tokenizer.bytes_of, ids)).decode(errors="replace")
    assert streamed.removeprefix(" " if name == "pieces" else "") == tokenizer.decode(ids)


def test_a_character_appears_when_it_is_complete(tokenizers):
    tokenizer = tokenizers["folder"]
    stream = tokenizer.stream()
    ids = tokenizer.encode("é🙂", add_bos=False)
    assert [stream.push(number) for number in ids] == ["", "é", "", "", "", "🙂"]
    assert stream.flush() == ""
    assert stream.push(ids[0]) == "" and stream.flush() == "\ufffd"


def test_control_tokens_and_ids_without_a_token_decode_to_nothing(tokenizers):
    tokenizer = tokenizers["folder"]
    assert tokenizer.decode([0, *tokenizer.encode("hello"), 1, tokenizer.vocab_size]) == "hello"
    named = tokenizer.decode([0, *tokenizer.encode("hello"), 1], skip_special_tokens=False)
    assert named == "<s><s>hello</s>" and tokenizer.name_of(1) == "</s>"
    with pytest.raises(kccl.InvalidArgument, match="id -1 is negative"):
        tokenizer.decode([-1])


def test_text_that_is_no_utf8_is_refused(tokenizers):
    text = b"ab\xff".decode(errors="surrogateescape")
    with pytest.raises(kccl.InvalidArgument, match=r"not valid UTF-8: character 2 is '\\udcff'"):
        tokenizers["folder"].encode(text)


# ---- Chats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["folder", "bytes"])
def test_chat(tokenizers, name):
    tokenizer = tokenizers[name]
    text = tokenizer.chat_text(MESSAGES)
    assert text == "<s><|user|>Hi\n<|assistant|>"
    assert tokenizer.chat_text(MESSAGES, add_generation_prompt=False) == "<s><|user|>Hi\n"
    ids = tokenizer.chat(MESSAGES)
    # The template writes BOS, and nobody else, whichever way the text goes.
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    assert tokenizer.encode(text) == tokenizer.encode(text, add_bos=False) == ids


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}", "the chat template is wrong: Unexpected end of template"),
        ("{{ raise_exception('no system') }}", "the chat template fails: no system"),
        ("{{ messages[0].content.nothing() }}", "the chat template fails: 'str object' has no"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: access to attribute '__class__'"),
        ("{{ 1 / 0 }}", "the chat template fails: division by zero"),
    ],
)
def test_a_template_that_fails_is_named(source, told):
    with pytest.raises(kccl.Error, match=f"^here: {told}"):
        ChatTemplate(source, {}, "here").render(MESSAGES, {}, add_generation_prompt=True)


def test_what_templates_may_use():
    source = "{{ messages | tojson }}{% for x in [1, 2] %}{% break %}{% endfor %}"
    text = ChatTemplate(source, {}, "").render(
        [{"role": "user", "content": "<é>"}], {}, add_generation_prompt=True
    )
    assert text == '[{"role": "user", "content": "<é>"}]'
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}, "").render(
        MESSAGES, {}, add_generation_prompt=True
    )
    assert len(year) == 4


@pytest.mark.parametrize("messages", [["Hi"], [{"content": "x"}], [{"role": 1, "content": "x"}]])
def test_a_message_lacks_something(tokenizers, messages):
    with pytest.raises(
        kccl.InvalidArgument, match=r"messages\[0\] is .* must be a message with a role"
    ):
        tokenizers["folder"].chat(messages)


# ---- What a folder may hold --------------------------------------------------------------------


def rewrite(file, **changes):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "folder", LLAMA, with_tokenizer=True)
    return tmp_path / "folder"


def tokenizer_of(folder):
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tokenizer()


def test_templates_in_other_places(folder):
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    rewrite(folder / "tokenizer_config.json", chat_template=named)
    assert tokenizer_of(folder).chat_text(MESSAGES) == "y"
    (folder / "chat_template.jinja").write_text("z")
    assert tokenizer_of(folder).chat_text(MESSAGES) == "z"
    (folder / "chat_template.jinja").write_text("{% for")
    with pytest.raises(kccl.Error, match=r"chat_template\.jinja: the chat template is wrong"):
        tokenizer_of(folder).chat_text(MESSAGES)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").mkdir()
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.notices[-1].endswith("is no ordinary file; chats are refused")
        assert checkpoint.tokenizer().encode("hello") and checkpoint.tokenizer().has_chat_template
        with pytest.raises(kccl.Error, match=r"chat_template\.jinja is no ordinary file"):
            checkpoint.tokenizer().chat(MESSAGES)
    (folder / "chat_template.jinja").rmdir()
    rewrite(folder / "tokenizer_config.json", chat_template="{{ nothing.more }}")
    with pytest.raises(kccl.Error, match=r"tokenizer_config\.json: the chat template fails"):
        tokenizer_of(folder).chat_text(MESSAGES)
    rewrite(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(kccl.Error, match=r"tokenizer\.json has no chat template"):
        tokenizer_of(folder).chat_text(MESSAGES)


def test_bos_from_the_tokenizer_itself(folder):
    assert tokenizer_of(folder).adds_bos
    rewrite(folder / "tokenizer.json", post_processor=None)
    assert not tokenizer_of(folder).adds_bos


def test_ids_from_the_models_configuration(folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").unlink()
    rewrite(folder / "config.json", bos_token_id=0, eos_token_id=1, pad_token_id=None)
    tokenizer = tokenizer_of(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (1,), None)


def test_an_end_may_have_no_token(folder):
    rewrite(folder / "generation_config.json", eos_token_id=[-1, 280, 1])
    tokenizer = tokenizer_of(folder)
    assert tokenizer.eos_ids == (280, 1) and tokenizer.vocab_size <= 280
    assert tokenizer.decode([280]) == ""
    # -1 stands for none, so the tokenizer's own end counts.
    rewrite(folder / "generation_config.json", eos_token_id=-1)
    assert tokenizer_of(folder).eos_ids == (1,)


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("generation_config.json", {"eos_token_id": ["x"]}, "must be an id or a list of ids"),
        ("tokenizer_config.json", {"bos_token": 3}, "field bos_token is 3, must be a string"),
        ("tokenizer_config.json", {"added_tokens_decoder": 1}, "decoder is 1, must be an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": 1}}, "an object with ids and tok"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"1": {"content": "x", "special": 1}}},
            "must be tokens with a content and flags",
        ),
        ("added_tokens.json", {"<x>": "1"}, r"added_tokens\.json: field <x> is '1', must be an id"),
        ("tokenizer.json", {"model": {"type": "Other"}}, "tokenizer.json: the tokenizer is wrong"),
        (
            "tokenizer.json",
            {"decoder": {"type": "Fuse"}},
            r"field decoder has \['Fuse'\], which is",
        ),
    ],
)
def test_a_wrong_file_is_named(folder, file, changes, told):
    rewrite(folder / file, **changes)
    with pytest.raises(kccl.Error, match=told) as caught:
        tokenizer_of(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_that_is_missing_or_too_large(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    missing = r"has neither tokenizer\.json nor tokenizer\.model"
    with pytest.raises(kccl.Error, match=rf"{missing}, nor vocab\.json with merges\.txt$"):
        tokenizer_of(folder)
    write_folder(tmp_path / "small", LLAMA | {"vocab_size": 8}, with_tokenizer=True)
    with pytest.raises(kccl.Error, match="has 264 ids, must have at most 8, the rows"):
        tokenizer_of(tmp_path / "small")


@pytest.mark.parametrize(
    ("vocabulary", "merges", "named", "told"),
    [
        ("{}", "", None, "there is no tokenizer_class, must be one of GPT2Tokenizer, Qwen2Tok"),
        ("{}", "", "T5Tokenizer", "tokenizer_class is 'T5Tokenizer', must be one of GPT2Tokenizer"),
        ("{}", None, "GPT2Tokenizer", r"has vocab\.json and no merges\.txt"),
        ("[", "", "GPT2Tokenizer", r"vocab\.json: the tokenizer is wrong"),
        ('{"a": 0, "b": 1}', "a b\n", "GPT2Tokenizer", r"vocab\.json: the tokenizer is wrong"),
        ('{"a": 0}', "a\n", "GPT2Tokenizer", r"vocab\.json: the tokenizer is wrong"),
    ],
)
def test_wrong_files_of_merges_are_named(folder, vocabulary, merges, named, told):
    """tests/parity compares what right ones give with transformers."""
    (folder / "tokenizer.json").unlink()
    rewrite(folder / "tokenizer_config.json", tokenizer_class=named)
    (folder / "vocab.json").write_text(vocabulary)
    if merges is not None:
        (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    with pytest.raises(kccl.Error, match=told) as caught:
        tokenizer_of(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: w.add_tokenizer_model("bert"), "tokenizer.ggml.model is 'bert', must be one"),
        (lambda w: w.add_tokenizer_pre("other"), "tokenizer.ggml.pre is 'other', must be one of"),
        (lambda w: w.add_token_list(["a"] * 3), "tokenizer.ggml.tokens has a token twice"),
        (lambda w: w.add_token_types([1, 1]), "token_type is .* must be an array of 264 numbers"),
        (lambda w: w.add_token_merges(["q z", "h e"]), "Token `qz` out of vocabulary"),
    ],
)
def test_a_wrong_tokenizer_in_a_file_is_named(tmp_path, change, told):
    write_gguf(tmp_path / "m.gguf", change=change)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint, pytest.raises(kccl.Error, match=told):
        checkpoint.tokenizer()
