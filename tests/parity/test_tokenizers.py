"""Tokenizers and chat templates of folders against those that transformers makes of them."""

import json

import pytest
from pieces import FORMS, write_pieces
from tiny_models import LLAMA, MESSAGES, write_folder
from transformers import AutoTokenizer

import kccl
from kccl.engine.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.long

NEW = ["<|im_start|>", "<|im_end|>", "[PAD]", "<tool>"]
TEXT = "hello <|im_start|>hello<|im_end|> w</s>[PAD] <tool> <s>he"


def added(text, number, special=True, **flags):
    token = {"content": text, "lstrip": False, "rstrip": False, "single_word": False}
    return {str(number): token | {"normalized": False, "special": special} | flags}


# Each: file -> fields that are added to it.
FOLDERS = {
    "nothing": {},
    "config.additional": {"tokenizer_config": {"additional_special_tokens": NEW}},
    "config.extra": {"tokenizer_config": {"extra_special_tokens": NEW[:2]}},
    "config.extra by name": {
        "tokenizer_config": {"extra_special_tokens": {"tool_token": "<tool>"}}
    },
    "config.own name": {"tokenizer_config": {"tool_token": "<tool>"}},
    "config.pad": {"tokenizer_config": {"pad_token": "[PAD]"}},
    "config.eos": {"tokenizer_config": {"eos_token": "<|im_end|>"}},
    "decoder": {
        "tokenizer_config": {
            "added_tokens_decoder": added("<|im_start|>", 264) | added("<|im_end|>", 265),
            "eos_token": "<|im_end|>",
        }
    },
    "decoder not special": {
        "tokenizer_config": {"added_tokens_decoder": added("<tool>", 264, special=False)}
    },
    "decoder strips": {
        "tokenizer_config": {
            "added_tokens_decoder": added("<tool>", 264, lstrip=True)
            | added("<|im_end|>", 265, rstrip=True)
        }
    },
    "decoder changes": {
        "tokenizer_config": {"added_tokens_decoder": added("</s>", 1, lstrip=True, rstrip=True)}
    },
    "decoder and map": {
        "tokenizer_config": {"added_tokens_decoder": added("<tool>", 264)},
        "special_tokens_map": {"eos_token": "<|im_end|>"},
    },
    "map": {
        "special_tokens_map": {
            "eos_token": {"content": "<|im_end|>", "lstrip": False, "normalized": False},
            "pad_token": "[PAD]",
            "additional_special_tokens": ["<|im_start|>", "<tool>"],
        }
    },
    "map strips": {
        "special_tokens_map": {
            "pad_token": {"content": "[PAD]", "lstrip": True, "rstrip": True},
            "extra_special_tokens": [{"content": "<tool>", "lstrip": True, "normalized": True}],
        }
    },
    "config strips": {
        "tokenizer_config": {
            "pad_token": {"__type": "AddedToken", "content": "[PAD]", "lstrip": True}
        }
    },
    "split": {"tokenizer_config": {"split_special_tokens": True}},
    "added": {"added_tokens": {"<|im_end|>": 265, "<|im_start|>": 264}},
    "added and map": {
        "added_tokens": {"<|im_end|>": 265, "<|im_start|>": 264, "<tool>": 266},
        "special_tokens_map": {"eos_token": "<|im_end|>"},
    },
    "added and additional": {
        "added_tokens": {"<|im_end|>": 265, "<|im_start|>": 264, "<tool>": 266},
        "tokenizer_config": {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    },
    "a word becomes special": {"tokenizer_config": {"additional_special_tokens": ["hello"]}},
}


def write(folder, files):
    write_folder(folder, LLAMA, with_tokenizer=True)
    plain = {"tokenizer_config": {"eos_token": "</s>"}}
    for name in {*plain, *files}:
        file = folder / f"{name}.json"
        content = json.loads(file.read_text()) if file.exists() else {}
        content |= plain.get(name, {}) | files.get(name, {})
        content = {key: value for key, value in content.items() if value is not None}
        file.write_text(json.dumps(content))
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tokenizer(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens(tmp_path, name):
    ours, theirs = write(tmp_path, FOLDERS[name])
    assert ours.encode(TEXT) == theirs(TEXT).input_ids
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.pad_id) == (theirs.bos_token_id, theirs.pad_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)
    ids = theirs(TEXT).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    # Without other files, the tokenizer's own end counts.
    (tmp_path / "generation_config.json").unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tokenizer().eos_ids == (theirs.eos_token_id,)


def processor(*parts):
    """A post-processor: "A" is the text."""
    pieces = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if each == "A"
        else {"SpecialToken": {"id": each, "type_id": 0}}
        for each in parts
    ]
    ids = {"<s>": 0, "</s>": 1, "<pad>": 2}
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            each: {"id": each, "ids": [ids[each]], "tokens": [each]} for each in {*parts} - {"A"}
        },
    }


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize(
    "post",
    [
        None,
        processor("<s>", "A"),
        processor("A"),
        processor("<s>", "A", "</s>"),
        processor("<pad>", "<s>", "A"),
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    ids=["no processor", "bos", "none", "both", "two", "bytes"],
)
@pytest.mark.parametrize("kind", [None, "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_a_post_processor_decides(tmp_path, post, asked, kind):
    ours, theirs = write(
        tmp_path,
        {
            "tokenizer": {"post_processor": post},
            "tokenizer_config": {
                **{"add_bos_token": asked, "add_eos_token": asked, "tokenizer_class": kind}
            },
        },
    )
    for text in ("hello w", "", "\n"):
        assert ours.encode(text) == theirs(text).input_ids


SPACES = (
    "hello world",
    "  two  spaces ",
    "<s>hello</s> x",
    "▁x",
    "e\u0301 12 hello 12345",
    " hello",
)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [None, "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("more", [{}, {"legacy": True}, {"add_prefix_space": False}])
def test_the_class_decides(tmp_path, models, family, kind, more):
    """Also where the vocabulary has pieces. A class that spells bytes cannot read these."""
    config = LLAMA | {"vocab_size": 320, "model_type": family, "head_dim": 4, "architectures": None}
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": kind} | more
    told = json.dumps({name: value for name, value in named.items() if value is not None})
    for form in ("bytes", *FORMS):
        folder = tmp_path / form
        write_folder(folder, config, with_tokenizer=form == "bytes")
        (folder / "tokenizer_config.json").write_text(told)
        if form != "bytes":
            write_pieces(folder, models / "bpe.model", form)
        theirs = AutoTokenizer.from_pretrained(folder)
        with open_checkpoint(folder) as checkpoint:
            if form != "bytes" and type(theirs).__name__ in ("GPT2Tokenizer", "Qwen2Tokenizer"):
                with pytest.raises(kccl.Error, match="is no tokenizer of transformers' class"):
                    checkpoint.tokenizer()
                continue
            ours = checkpoint.tokenizer()
        for text in SPACES:
            ids = theirs(text).input_ids
            wanted = ids[1:] if ids[:1] * 2 == ids[:2] else ids
            assert ours.encode(text) == wanted, (form, text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# ---- Chats --------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "é<add>", "parameters": {"b": 1, "a": [2]}}}]
CHAT = [
    {"role": "system", "content": "Be <short> & é."},
    *MESSAGES,
    {"role": "assistant", "content": "Well", "reasoning_content": "So", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    {"role": "tool", "content": "3"},
    {"role": "user", "content": [{"type": "text", "text": "What?"}]},
]
TEMPLATES = {
    "generation": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}"
        "  {{- m.role }}: {{ m.content }}\n{% endif %}{%- endfor %}|"
    ),
    "generation with spaces": (
        "{%- for m in messages -%}\n    {%- generation -%}\n  {% set x = m.role %}{{ x }} "
        "{%- endgeneration %}\n{% endfor %}"
    ),
    "tojson": (
        "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(ensure_ascii=True) }}"
        "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}{{ tools|tojson(4) }}"
        "{{ tools | tojson(indent='-') }}"
    ),
    "variables": (
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
        "{{ style }}{{ documents }}{{ pad_token }}{{ unk_token }}{{ add_generation_prompt }}"
    ),
    "loops": (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
        "{% if loop.last %}{% break %}{% endif %}{{ m.role }}{{ m.thinking }}"
        "{{ m.reasoning_content }}{{ 'tool_calls' in m }}{{ 'content' in m }}\n{% endfor %}"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=1) }}"
    ),
}
OPTIONS = {"enable_thinking": False, "style": {"a": [1, "é"]}}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "documents": [{"title": "t", "text": "x"}]}])
def test_chats(tmp_path, name, more):
    ours, theirs = write(tmp_path, {"tokenizer_config": {"chat_template": TEMPLATES[name]}})
    # Others are refused, which transformers passes over.
    used = {option: value for option, value in OPTIONS.items() if option in TEMPLATES[name]}
    for prompt in (False, True):
        kept = {"add_generation_prompt": prompt, **more, **used}
        text = theirs.apply_chat_template(CHAT, tokenize=False, **kept)
        assert ours.chat_text(CHAT, **kept) == text
        ids = theirs.apply_chat_template(CHAT, return_dict=False, **kept)
        assert ours.chat(CHAT, **kept) == ids


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("field", "files"),
    [
        ("one", {}),
        (NAMED, {}),
        (None, {"chat_template.jinja": "file"}),
        ("one", {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "F"}),
        (NAMED, {"chat_template.jinja": "file"}),
        (NAMED, {"additional_chat_templates/default.jinja": "F"}),
    ],
)
def test_where_templates_lie(tmp_path, field, files):
    (tmp_path / "additional_chat_templates").mkdir()
    for file, source in files.items():
        (tmp_path / file).write_text(source)
    ours, theirs = write(tmp_path, {"tokenizer_config": {"chat_template": field}})
    for tools in (None, TOOLS):
        kept = {"tools": tools, "add_generation_prompt": True}
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, **kept)
        assert ours.chat_text(MESSAGES, **kept) == text


# ---- SentencePiece's own file -------------------------------------------------------------------

PIECES_TEXTS = (
    *("hello world", "  two  spaces ", "a\nb", "", "<s>hello</s> x", "▁x", "naïve 日本 🙂 12345"),
    *("<tool>hello <tool> x", "[PAD]hi <|im_end|> there"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A BPE and a unigram model."""
    import sentencepiece

    at = tmp_path_factory.mktemp("models")
    words = [f"{word} {number} hello world two" for number, word in enumerate(TEXT.split() * 40)]
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(words),
            model_prefix=str(at / kind),
            model_type=kind,
            vocab_size=300,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            user_defined_symbols=["<tool>"],
            minloglevel=2,
        )
    return at


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bpe", "LlamaTokenizer"), ("bpe", "LlamaTokenizerFast"), ("bpe", None), ("unigram", None)],
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": added("<|im_end|>", 300), "pad_token": "[PAD]"},
        {"legacy": False},
    ],
)
def test_sentence_pieces(tmp_path, models, kind, name, more):
    write_folder(tmp_path, LLAMA | {"vocab_size": 320})
    (tmp_path / "tokenizer.model").write_bytes((models / f"{kind}.model").read_bytes())
    config = more if name is None else more | {"tokenizer_class": name}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        ours = checkpoint.tokenizer()
    for text in PIECES_TEXTS:
        # BOS that a text spells out itself is not put in front again.
        ids = theirs(text).input_ids
        wanted = ids[1:] if ids[:2] == [1, 1] else ids
        assert ours.encode(text) == wanted, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_ids, ours.pad_id) == (1, (2,), theirs.pad_token_id)
