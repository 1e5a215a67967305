"""Chat templates: what they may use, and where a folder or a file has them."""

import dataclasses
import json
import types

import numpy as np
import pytest
from tiny_models import LLAMA, MESSAGES, write_folder, write_gguf

import kccl
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.text.chat import ChatTemplate

TOOLS = [{"name": "é", "b": 1, "a": 2}]


def render(source, messages=MESSAGES, **variables):
    template = ChatTemplate(source, {"bos_token": "<s>"}, "here")
    return template.render(messages, variables, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{% generation %}{{ bos_token }}{% endgeneration %}!", "<s>!"),
        ("{%- generation -%} {% set x = 1 %}{{ x }} {%- endgeneration -%} ", "1"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{{ loop.index }}"
            "{% endgeneration %}{% endfor %}",
            "Hi1",
        ),
        ("{{ tools | tojson }}", '[{"name": "é", "b": 1, "a": 2}]'),
        ("{{ tools | tojson(ensure_ascii=True) }}", '[{"name": "\\u00e9", "b": 1, "a": 2}]'),
        ("{{ tools | tojson(sort_keys=True) }}", '[{"a": 2, "b": 1, "name": "é"}]'),
        ("{{ tools | tojson(separators=(',', ':')) }}", '[{"name":"é","b":1,"a":2}]'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ enable_thinking }}{{ documents }}{{ other is defined }}", "False[]False"),
        # A variable that is given counts before a token of the same name.
        ("{{ bos_token }}{{ eos_token }}", "<s>end"),
    ],
)
def test_what_templates_may_use(source, wanted):
    options = {"enable_thinking": False, "eos_token": "end"}
    assert render(source, tools=TOOLS, documents=[], **options) == wanted


def test_a_token_may_be_replaced():
    assert render("{{ bos_token }}", bos_token="x") == "x"


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"content": "x", "name": None}, "content role"),
        ({"content": [{"type": "text", "text": "x"}]}, "content role"),
        ({"content": None, "tool_calls": []}, "role tool_calls"),
        ({"content": "x", "reasoning": "y"}, "content reasoning reasoning_content role thinking"),
    ],
)
def test_fields_of_a_message(message, wanted):
    source = "{{ messages[0].keys() | sort | join(' ') }}"
    assert render(source, [{"role": "assistant"} | message]) == wanted


@dataclasses.dataclass
class Said:
    role: str
    content: object = None


def add(a: int, b: float = 0.5):
    """Adds.

    Args:
        a: One.
        b: The other,
            which may be absent. (choices: [0.5, 1])
    """


def test_messages_and_tools_may_be_objects():
    source = "{{ messages | tojson }} {{ tools | tojson }}"
    chat = [Said("user", {"a": np.int32(1)}), {"role": "assistant", "content": None}]
    parameters = {
        "a": {"type": "integer", "description": "One."},
        "b": {
            "type": "number",
            "enum": [0.5, 1],
            "description": "The other, which may be absent.",
        },
    }
    function = {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": parameters, "required": ["a"]},
    }
    wanted = [{"role": "user", "content": {"a": 1}}, {"role": "assistant"}]
    told = [json.dumps(each) for each in (wanted, [{"type": "function", "function": function}])]
    assert render(source, chat, tools=[add]) == " ".join(told)
    assert render(source, types.SimpleNamespace(messages=chat), tools=[add]) == " ".join(told)


def bare(a):
    """A.

    Args:
        a: One.
    """


def of_object(a: object):
    """A.

    Args:
        a: One.
    """


@pytest.mark.parametrize(
    ("messages", "variables", "told"),
    [
        ([], {}, "messages is empty, must have at least one message"),
        ([MESSAGES], {}, r"messages\[0\] is a list, must be a message: give one conversation"),
        (["x"], {}, r"messages\[0\] is 'x', must be a message with a role"),
        ([{"role": None}], {}, r"messages\[0\] is {'role': None}, must be a message with a role"),
        (Said("user"), {}, "messages is of type Said, must be a list of messages"),
        (
            [{"role": "user", "content": [{"image": object()}]}],
            {},
            r"messages\[0\].content\[0\].image is of type object, must be text, a number",
        ),
        (MESSAGES, {"tools": {}}, "tools is of type dict, must be a list of objects"),
        (MESSAGES, {"tools": [print]}, r"tools\[0\] is of type builtin.*, or a function with type"),
        (MESSAGES, {"tools": [render]}, r"tools\[0\], the function render, has no docstring"),
        (MESSAGES, {"tools": [bare]}, "the function bare, has no type hint of a, must have one"),
        (MESSAGES, {"tools": [of_object]}, "has the type hint <class 'object'> of a, which no sch"),
        (MESSAGES, {"documents": ["x"]}, r"documents\[0\] is of type str, must be an object$"),
        (MESSAGES, {"x": object()}, "x is of type object, must be text"),
    ],
)
def test_what_is_no_data_is_named(messages, variables, told):
    with pytest.raises(kccl.InvalidArgument, match=f"^(.*, )?{told}"):
        render("{{ tools }}{{ documents }}", messages, **variables)


@pytest.fixture
def tokenizer_of(tmp_path):
    """tokenizer_of(field, files): of a folder whose configuration has this chat_template."""

    def write(field, files=()):
        folder = tmp_path / "folder"
        write_folder(folder, LLAMA, with_tokenizer=True)
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": field}))
        for name in files:
            (folder / name).write_text(name)
        with open_checkpoint(folder) as checkpoint:
            return checkpoint.tokenizer()

    return write


@pytest.mark.parametrize("name", ["name", "source", "variables"])
def test_a_variable_may_have_any_name(tokenizer_of, name):
    tokenizer = tokenizer_of(f"{{{{ {name} }}}}")
    assert tokenizer.chat_text(MESSAGES, **{name: "x"}) == "x"
    assert tokenizer.chat(MESSAGES, **{name: "x"}) == tokenizer.encode("x", add_bos=False)


def test_a_variable_that_the_template_does_not_use_is_refused(tokenizer_of):
    source = "{% if enable_thinking is defined %}1{% endif %}{{ bos_token }}"
    tokenizer = tokenizer_of(f"{source}{{{{ messages[0].content }}}}")
    told = "^enable_thinkng is no variable of the chat template, which has enable_thinking$"
    for call in (tokenizer.chat, tokenizer.chat_text):
        with pytest.raises(kccl.InvalidArgument, match=told):
            call(MESSAGES, enable_thinkng=False)
    for name in ("x", "self"):
        with pytest.raises(kccl.InvalidArgument, match=rf"^{name} is no variable"):
            tokenizer.chat(MESSAGES, **{name: 1})
    assert tokenizer.chat_text(MESSAGES, enable_thinking=True, bos_token="") == "1Hi"


@pytest.mark.parametrize("messages", ["hi", b"hi", None, MESSAGES[0], 1])
def test_messages_are_a_list(tokenizer_of, messages):
    kind = type(messages).__name__
    with pytest.raises(kccl.InvalidArgument, match=f"messages is of type {kind}, must be a list"):
        tokenizer_of("x").chat(messages)


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


def test_the_template_that_suits(tokenizer_of):
    tokenizer = tokenizer_of(NAMED)
    assert tokenizer.chat_text(MESSAGES) == "D"
    assert tokenizer.chat_text(MESSAGES, tools=TOOLS) == "T"
    assert tokenizer.chat_text(MESSAGES, tools=TOOLS, template="default") == "D"
    with pytest.raises(kccl.InvalidArgument, match="is 'x', must be one of 'default', 'tool_use'"):
        tokenizer.chat_text(MESSAGES, template="x")
    for name in ("tokenize", "continue_final_message", "chat_template"):
        with pytest.raises(
            kccl.InvalidArgument, match=f"^{name} is no variable of a chat template"
        ):
            tokenizer.chat(MESSAGES, **{name: True})
    assert tokenizer_of("one").chat_text(MESSAGES, tools=TOOLS) == "one"
    with pytest.raises(kccl.InvalidArgument, match="is 'default', must be one of 'tool_use'"):
        tokenizer_of(NAMED[1:]).chat_text(MESSAGES)


def test_files_count_before_the_configuration(tokenizer_of):
    more = "additional_chat_templates/tool_use.jinja"
    tokenizer = tokenizer_of(NAMED, ["chat_template.jinja"])
    assert tokenizer.chat_text(MESSAGES, tools=TOOLS) == "chat_template.jinja"
    tokenizer = tokenizer_of("one", ["chat_template.jinja", more])
    assert tokenizer.chat_text(MESSAGES) == "chat_template.jinja"
    assert tokenizer.chat_text(MESSAGES, tools=TOOLS) == more


def test_templates_of_a_gguf_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", change=lambda writer: writer.add_chat_template(NAMED))
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    assert tokenizer.chat_text(MESSAGES) == "D"
    assert tokenizer.chat_text(MESSAGES, tools=TOOLS) == "T"


@pytest.mark.parametrize("written", ["{{ bos_token }}", ""])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_of_a_gguf_file_begins_once(tmp_path, written, adds_bos):
    def change(writer):
        writer.add_add_bos_token(adds_bos)
        writer.add_chat_template(f"{written}{{{{ messages[0].content }}}}")

    write_gguf(tmp_path / "m.gguf", change=change)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    wanted = [tokenizer.bos_id] if written or adds_bos else []
    assert tokenizer.chat(MESSAGES) == [*wanted, *tokenizer.encode("Hi", add_bos=False)]
