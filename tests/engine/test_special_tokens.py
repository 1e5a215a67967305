"""Special tokens and ends of answers, wherever a folder names them."""

import json

import pytest
from tiny_models import LLAMA, write_folder

import kccl
from kccl.engine import Engine
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.text.tokenizer_folder import from_folder

HELLO = 262


@pytest.fixture
def folder(tmp_path):
    """A folder whose vocabulary has 264 ids, for a model with 300 rows."""
    write_folder(tmp_path, LLAMA, with_tokenizer=True)
    return tmp_path


def rewrite(folder, name, **changes):
    file = folder / f"{name}.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    file.write_text(json.dumps(content))


def tokenizer_of(folder):
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tokenizer()


def decoder(**tokens):
    return {
        str(number): {"content": text, "special": True, "normalized": False}
        for text, number in tokens.items()
    }


@pytest.mark.parametrize(
    ("files", "is_special"),
    [
        ({"tokenizer_config": {"additional_special_tokens": ["<a>", "<b>"]}}, True),
        ({"tokenizer_config": {"extra_special_tokens": ["<a>", "<b>"]}}, True),
        ({"tokenizer_config": {"a_token": "<a>", "b_token": {"content": "<b>"}}}, True),
        ({"tokenizer_config": {"eos_token": "<a>", "pad_token": "<b>"}}, True),
        ({"special_tokens_map": {"additional_special_tokens": ["<a>", "<b>"]}}, True),
        ({"special_tokens_map": {"sep_token": "<a>", "cls_token": "<b>"}}, True),
        ({"added_tokens": {"<b>": 265, "<a>": 264}}, False),
        (
            {"added_tokens": {"<b>": 265, "<a>": 264}}
            | {"special_tokens_map": {"additional_special_tokens": ["<a>", "<b>"]}},
            True,
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": decoder(**{"<a>": 264, "<b>": 265})}},
            True,
        ),
    ],
)
def test_tokens_are_added(folder, files, is_special):
    for name, changes in files.items():
        rewrite(folder, name, **changes)
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("hello<b>hello<a>", add_bos=False) == [HELLO, 265, HELLO, 264]
    assert ({264, 265} <= tokenizer.special_ids) is is_special
    assert tokenizer.decode([264, HELLO]) == ("hello" if is_special else "<a>hello")


@pytest.mark.parametrize("name", ["special_tokens_map", "tokenizer_config"])
@pytest.mark.parametrize("field", ["pad_token", "extra_special_tokens"])
def test_tokens_that_are_objects_have_flags(folder, name, field):
    token = {"content": "<a>", "lstrip": True, "rstrip": False}
    rewrite(folder, name, **{field: token if field == "pad_token" else [token]})
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("hello  <a>hello", add_bos=False) == [HELLO, 264, HELLO]
    assert 264 in tokenizer.special_ids
    token["lstrip"] = 1
    rewrite(folder, name, **{field: token if field == "pad_token" else [token]})
    with pytest.raises(kccl.Error, match=rf"{name}\.json: field {field} is .* must be tokens with"):
        tokenizer_of(folder)


def test_special_tokens_may_be_split(folder):
    rewrite(folder, "tokenizer_config", split_special_tokens=True)
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("</s>")[0] == 0 and 1 not in tokenizer.encode("</s>")


def test_the_class_of_a_family_splits_words(folder):
    """transformers' Qwen2Tokenizer composes characters, whatever tokenizer.json says."""
    assert len(tokenizer_of(folder).encode("e\u0301", add_bos=False)) == 3
    rewrite(folder, "tokenizer_config", tokenizer_class="Qwen2TokenizerFast")
    assert len(tokenizer_of(folder).encode("e\u0301", add_bos=False)) == 2


def test_the_map_counts_before_the_configuration(folder):
    rewrite(folder, "special_tokens_map", bos_token="<pad>")
    assert tokenizer_of(folder).bos_id == 2
    # Not where the configuration lists its tokens.
    rewrite(folder, "tokenizer_config", added_tokens_decoder={})
    assert tokenizer_of(folder).bos_id == 0


# ---- Ends ---------------------------------------------------------------------------------------


def test_the_first_file_with_ends_counts(folder):
    rewrite(folder, "config", eos_token_id=[5, 6])
    rewrite(folder, "generation_config", eos_token_id=[7, 8])
    assert tokenizer_of(folder).eos_ids == (7, 8)
    rewrite(folder, "generation_config", eos_token_id=None)
    assert tokenizer_of(folder).eos_ids == (5, 6)
    rewrite(folder, "config", eos_token_id=None)
    assert tokenizer_of(folder).eos_ids == (1,)
    rewrite(folder, "config", eos_token_id=-2)
    assert tokenizer_of(folder).eos_ids == (1,)
    rewrite(folder, "config", eos_token_id="</s>")
    with pytest.raises(
        kccl.Error, match=r"config\.json: field eos_token_id is .* must be an id or"
    ):
        tokenizer_of(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config", {"pad_token_id": -1}),
        ("config", {"pad_token_id": 99_999}),
        ("generation_config", {"pad_token_id": "x"}),
        ("config", {"bos_token_id": -1}),
        ("tokenizer_config", {"pad_token": 3}),
        ("tokenizer_config", {"pad_token": None, "unk_token": ["x"]}),
    ],
)
def test_tokens_that_decoding_does_not_need_may_be_wrong(folder, name, changes):
    rewrite(folder, name, **changes)
    if name != "tokenizer_config":
        rewrite(folder, "tokenizer_config", bos_token=None, pad_token=None, add_bos_token=None)
    tokenizer = tokenizer_of(folder)
    assert tokenizer.pad_id is None and tokenizer.encode("hello")[-1] == HELLO


def test_padding_that_the_model_has_no_row_for(tmp_path):
    write_folder(tmp_path, LLAMA | {"vocab_size": 264}, with_tokenizer=True)
    rewrite(tmp_path, "tokenizer_config", pad_token="[PAD]", added_tokens_decoder=None)
    with Engine(tmp_path, blocks=1) as engine:
        assert engine.tokenizer.pad_id is None
        assert len(engine.generate("hello", max_tokens=3, stop_ids=()).ids) == 3
        # It has an id, as in transformers, which the model has not.
        with pytest.raises(kccl.InvalidArgument, match="the prompt has id 264, must be from 0"):
            engine.generate("hello[PAD]")
    rewrite(tmp_path, "tokenizer", post_processor=processor(264))
    with pytest.raises(kccl.Error, match="texts begin or end with id 264, must be below 264"):
        tokenizer_of(tmp_path)


# ---- BOS ----------------------------------------------------------------------------------------


def processor(*numbers):
    """Puts these ids in front."""
    names = {0: "<s>", 2: "<pad>", 264: "[PAD]"}
    used = {names[n]: {"id": names[n], "ids": [n], "tokens": [names[n]]} for n in numbers}
    single = [{"SpecialToken": {"id": names[n], "type_id": 0}} for n in numbers]
    single.append({"Sequence": {"id": "A", "type_id": 0}})
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("numbers", [(), (0,), (2, 0)])
def test_a_post_processor_decides_how_texts_begin(folder, asked, numbers):
    rewrite(folder, "tokenizer_config", add_bos_token=asked)
    rewrite(folder, "tokenizer", post_processor=processor(*numbers))
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("hello") == [*numbers, HELLO]
    assert tokenizer.adds_bos is bool(numbers)
    # A text that begins with them has them once.
    spelt = "".join({0: "<s>", 2: "<pad>"}[number] for number in numbers)
    assert tokenizer.encode(f"{spelt}hello") == [*numbers, HELLO]


def test_without_a_post_processor_the_configuration_decides_for_a_laneformer_only(folder):
    rewrite(folder, "tokenizer", post_processor=None)
    rewrite(folder, "tokenizer_config", add_bos_token=True, add_eos_token=True)
    assert tokenizer_of(folder).encode("hello") == [HELLO]
    laneformer = from_folder(folder, LLAMA["vocab_size"], is_laneformer=True)
    assert laneformer.encode("hello") == [0, HELLO, 1]


def test_a_chat_begins_once(folder):
    messages = [{"role": "user", "content": "hello"}]
    with Engine(folder, blocks=1) as engine:
        ids = engine.tokenizer.chat(messages)
        answers = [
            engine.generate(prompt, max_tokens=4, stop_ids=())
            for prompt in (ids, engine.tokenizer.chat_text(messages))
        ]
    assert ids.count(0) == 1
    assert {each.num_prompt for each in answers} == {len(ids)}
    assert answers[0].ids == answers[1].ids
