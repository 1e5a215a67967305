"""Chat templates: messages to the text that a model was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import kccl

from .extras import library
from .fields import one_line


class ChatTemplate:
    """A template in Jinja, rendered in its sandbox as Hugging Face's libraries do."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """Compiles the template.

        Args:
            source: The template.
            tokens: What the template may use besides the messages, as in "bos_token".
            where: The file, for messages.

        Raises:
            kccl.Error: It is no template.
        """
        jinja2 = library("jinja2")
        sandbox = library("jinja2.sandbox")
        self._where = where
        self._tokens = dict(tokens)
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # Jinja's own filter escapes for HTML.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise kccl.Error(f"{where}: the chat template is wrong: {one_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation.

        Args:
            messages: Each has "role" and "content".
            add_generation_prompt: Ends with what precedes the model's answer.

        Raises:
            InvalidArgument: A message lacks its role or its content.
            kccl.Error: The template refuses the messages, or fails.
        """
        for index, message in enumerate(messages):
            is_message = isinstance(message, Mapping)
            if not is_message or not all(
                isinstance(message.get(name), str) for name in ("role", "content")
            ):
                raise kccl.InvalidArgument(
                    f"messages[{index}] is {message!r}, must have a role and a content"
                )
        try:
            text: str = self._template.render(
                **self._tokens,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
            )
        # A template is a program: what it does with these messages may fail in any way.
        except Exception as error:
            raise kccl.Error(
                f"{self._where}: the chat template fails: {one_line(error)}"
            ) from error
        return text


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise kccl.Error(message)
