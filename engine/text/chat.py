"""Chat templates: they turn messages into text in the form that a model was trained on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import kccl

from ..base.extras import library
from ..base.fields import one_line
from . import harmony
from .chat_data import conversation_of, variables_of

DEFAULT = "default"
# The name of the template that is used with tools, if the model has one of this name.
_WITH_TOOLS = "tool_use"
# Arguments of transformers' apply_chat_template() that are no variables of a template.
_NOT_VARIABLES = frozenset(
    {"chat_template", "continue_final_message", "conversation", "max_length", "messages"}
    | {
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
    }
    | {"tokenize", "tokenizer_kwargs", "truncation"}
)
# Variables that chat() itself sets. A template that does not use them ignores them.
_ALWAYS = frozenset({"tools", "documents"})
# Variables that every template has, and that no caller may set.
_GIVEN = frozenset({"add_generation_prompt", "messages", "raise_exception", "strftime_now"})


@dataclass(frozen=True)
class Template:
    """A template in Jinja.

    Attributes:
        source: The template.
        where: Its file, for messages.
        error: Why it cannot be read, for whoever uses it; "" if it can.
    """

    source: str
    where: str
    error: str = ""


class ChatTemplates:
    """The templates of a model, by name."""

    def __init__(self, templates: Mapping[str, Template], tokens: Mapping[str, str]) -> None:
        """Takes templates, which are compiled when they are first used.

        Args:
            templates: Templates by name; a single one is called "default".
            tokens: Texts of tokens that a template may use besides the messages, as in "bos_token".
        """
        self._templates = dict(templates)
        self._tokens = dict(tokens)
        self._compiled: dict[str, ChatTemplate] = {}

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        name: str | None = None,
    ) -> str:
        """Renders a conversation by the template of this name, as ChatTemplate.render() does. None:
        the template that suits.

        Raises:
            InvalidArgument: There is no such template, or it does not use one of the variables.
        """
        if wrong := _NOT_VARIABLES & variables.keys():
            raise kccl.InvalidArgument(
                f"{min(wrong)} is no variable of a chat template: chat() gives ids, chat_text() "
                "text, and template=... names one of several templates"
            )
        if name is None:
            name = self._suits(with_tools=variables.get("tools") is not None)
        found = self._template(name)
        own = found.variables - _GIVEN
        if unused := variables.keys() - own - self._tokens.keys() - _ALWAYS:
            known = ", ".join(sorted(own - self._tokens.keys()))
            raise kccl.InvalidArgument(
                f"{min(unused)} is no variable of the chat template, which has "
                f"{known or 'none of its own'}"
            )
        return found.render(messages, variables, add_generation_prompt=add_generation_prompt)

    def source(self, *, with_tools: bool) -> str:
        """Returns the text of the template that suits; "" if there is none."""
        found = self._templates.get(self._suits(with_tools=with_tools))
        return found.source if found else ""

    def takes_tools(self) -> bool:
        """Tells whether the template for tools uses them."""
        return bool(self) and "tools" in self._template(self._suits(with_tools=True)).variables

    def _suits(self, *, with_tools: bool) -> str:
        """Returns the name of the template for a conversation with tools, or without."""
        return _WITH_TOOLS if with_tools and _WITH_TOOLS in self._templates else DEFAULT

    def _template(self, name: Any) -> "ChatTemplate":
        """Returns the template of this name, compiled.

        Raises:
            InvalidArgument: There is none.
        """
        if not isinstance(name, str) or name not in self._templates:
            known = ", ".join(map(repr, self._templates))
            raise kccl.InvalidArgument(f"template is {name!r}, must be one of {known}")
        if name not in self._compiled:
            template = self._templates[name]
            if template.error:
                raise kccl.Error(template.error)
            self._compiled[name] = ChatTemplate(template.source, self._tokens, template.where)
        return self._compiled[name]


class ChatTemplate:
    """A template in Jinja, rendered in its sandbox as Hugging Face's libraries do.

    Attributes:
        variables: The names of variables that it uses and does not set itself.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """Compiles the template.

        Args:
            source: The template.
            tokens: Texts of tokens that the template may use besides the messages, as in
                "bos_token".
            where: The file, for messages.

        Raises:
            kccl.Error: It is no template.
        """
        jinja2 = library("jinja2")
        sandbox = library("jinja2.sandbox")
        self._where = where
        self._tokens = dict(tokens)
        self._is_harmony = harmony.is_in(source)
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation_blocks()],
        )
        # This filter replaces Jinja's own, which escapes for HTML.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(
                library("jinja2.meta").find_undeclared_variables(environment.parse(source))
            )
        except (jinja2.TemplateError, RecursionError) as error:
            raise kccl.Error(f"{where}: the chat template is wrong: {one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Returns the text of a conversation.

        Args:
            messages: As conversation_of() takes them.
            variables: The template's variables, by name, as in "enable_thinking". "tools" has
                functions that the model may call, or their JSON schemas. "documents" has texts to
                answer from, each with "title" and "text".
            add_generation_prompt: Whether the text ends with what precedes the model's answer.

        Raises:
            InvalidArgument: The messages are no list, a message lacks its role, or something is no
                plain data.
            kccl.Error: The template refuses the messages, or fails.
        """
        said = conversation_of(messages)
        if self._is_harmony:
            said = list(map(harmony.with_calls, said))
        given = {
            **{"tools": None, "documents": None, **self._tokens, **variables_of(variables)},
            "messages": said,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text: str = self._template.render(given)
        # A template is a program, which may fail in any way on these messages.
        except Exception as error:
            raise kccl.Error(
                f"{self._where}: the chat template fails: {one_line(error)}"
            ) from error
        return text


def _generation_blocks() -> Any:
    """Returns an extension of Jinja. It has the block `generation`, which marks an assistant's text
    for training; the block gives its text unchanged.
    """
    jinja2, extensions = library("jinja2"), library("jinja2.ext")

    def parse(self: Any, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("text_of")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def text_of(self: Any, caller: Any) -> Any:
        return caller()

    members = {"tags": {"generation"}, "parse": parse, "text_of": text_of, "__module__": __name__}
    return type("GenerationBlocks", (extensions.Extension,), members)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise kccl.Error(message)
