"""Chat templates: programs in Jinja that turn messages into text, in the form that a model was
trained on.
"""

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
# If a model has a template of this name, it is used for conversations with tools.
_WITH_TOOLS = "tool_use"
# Arguments of transformers' apply_chat_template() that are no variables of a template. Callers who
# pass them get an error that says what to do.
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
# Variables that may be passed to any template, even if it does not use them.
_ALWAYS = frozenset({"tools", "documents"})
# Variables that every template has, and that no caller may set.
_GIVEN = frozenset({"add_generation_prompt", "messages", "raise_exception", "strftime_now"})


@dataclass(frozen=True)
class Template:
    """A template in Jinja.

    Attributes:
        source: The template.
        where: Its file, for messages.
        error: Why the template cannot be read. "" if it can. Raised as an error when the template
            is used.
    """

    source: str
    where: str
    error: str = ""


class ChatTemplates:
    """The templates of a model, by name."""

    def __init__(self, templates: Mapping[str, Template], tokens: Mapping[str, str]) -> None:
        """Stores the templates. A template is compiled when it is first used.

        Args:
            templates: Name -> template. If there is only one, its name is "default".
            tokens: Variables that have the text of a token, as in "bos_token".
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
        """Renders a conversation with the template `name`: ChatTemplate.render(). If `name` is
        None, takes "tool_use" for a conversation with tools if there is one, else "default".

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
        """Returns the source of the template for a conversation with tools, or without. Returns ""
        if there is none.
        """
        found = self._templates.get(self._suits(with_tools=with_tools))
        return found.source if found else ""

    def takes_tools(self) -> bool:
        """Tells whether the template for conversations with tools uses the variable "tools"."""
        return bool(self) and "tools" in self._template(self._suits(with_tools=True)).variables

    def _suits(self, *, with_tools: bool) -> str:
        """Returns the name of the template for a conversation with tools, or without."""
        return _WITH_TOOLS if with_tools and _WITH_TOOLS in self._templates else DEFAULT

    def _template(self, name: Any) -> "ChatTemplate":
        """Returns the template of this name, compiled.

        Raises:
            InvalidArgument: There is no template of this name.
            kccl.Error: The template cannot be read, or is no Jinja.
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
        variables: The names of the variables that the template reads but does not set itself.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """Compiles the template.

        Args:
            source: The template.
            tokens: Variables that have the text of a token, as in "bos_token".
            where: The file, for messages.

        Raises:
            kccl.Error: The source is no Jinja.
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
        # Replaces Jinja's own filter, which escapes characters for HTML.
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
            add_generation_prompt: Whether the text ends with the header of the model's answer.

        Raises:
            InvalidArgument: The messages are no list, a message lacks its role, or a value is no
                plain data.
            kccl.Error: The template raises an error.
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
        # A template is a program, which may raise any exception.
        except Exception as error:
            raise kccl.Error(
                f"{self._where}: the chat template fails: {one_line(error)}"
            ) from error
        return text


def _generation_blocks() -> Any:
    """Returns an extension of Jinja for the block `generation`. Templates mark an assistant's text
    with it, for training. The extension leaves the text unchanged.
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
