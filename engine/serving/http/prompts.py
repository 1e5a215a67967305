"""Converts the prompt of a request to ids."""

import asyncio
from typing import Any

import kccl

from ...text.infill import Gap, gap_between
from ...text.tokenizer import check_utf8
from .bodies import Completion, Message
from .errors import ApiError, wrong_value
from .service import Service

# Arguments of Tokenizer.chat() that only the server may set.
_OWN = frozenset({"add_generation_prompt", "literal", "template", "tools"})


async def ids_of_text(
    service: Service, prompt: str | list[int], *, add_bos: bool = True
) -> list[int]:
    """Returns the ids of a prompt, which may be ids already. Encodes in another thread, so that the
    event loop goes on.

    Raises:
        ApiError: UTF-8 cannot encode the text, or it is too long for the context.
    """
    if not isinstance(prompt, str):
        return prompt
    _check_length(service, len(prompt), "prompt")
    try:
        return await asyncio.to_thread(service.engine.tokenizer.encode, prompt, add_bos=add_bos)
    except kccl.InvalidArgument as error:
        raise ApiError(400, str(error), param="prompt") from None


async def gap_of(service: Service, body: Completion, prompt: str | list[int]) -> Gap:
    """Returns the prompt whose answer fills the gap between a text and the body's suffix.

    Raises:
        ApiError: The vocabulary lacks the tokens for a gap, a text is wrong, or the body has fields
            that exclude a suffix.
    """
    suffix = body.suffix or ""
    if not isinstance(prompt, str):
        raise wrong_value("suffix", suffix, "empty if prompt has ids: it must be text")
    if body.echo:
        raise wrong_value("suffix", suffix, "empty if echo is true")
    for name, text in (("prompt", prompt), ("suffix", suffix)):
        _check_length(service, len(text), name)
        try:
            check_utf8(text)
        except kccl.InvalidArgument as error:
            raise ApiError(400, f"{name}: {error}", param=name) from None
    try:
        return await asyncio.to_thread(gap_between, service.engine.tokenizer, prompt, suffix)
    except kccl.Error as error:
        raise ApiError(
            400, f"suffix is {suffix!r:.100}, must be empty: {error}", param="suffix"
        ) from None


async def ids_of_chat(
    service: Service,
    messages: list[Message],
    variables: dict[str, Any],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    param: str = "messages",
) -> list[int]:
    """Returns the ids of a conversation. Control tokens that are spelt out in messages and tools
    stay text. Encodes in another thread, so that the event loop goes on.

    Args:
        service: The engine.
        messages: The conversation.
        variables: Variables of the chat template, by name.
        tools: The tools that the model may call, in the form that chat templates take. None means
            that there are none.
        add_generation_prompt: See Tokenizer.chat().
        param: The field that has the messages, for errors.

    Raises:
        ApiError: The model has no chat template, the template refuses the messages, a variable is
            wrong, or the messages are too long for the context.
    """
    if wrong := _OWN & variables.keys():
        raise wrong_value("chat_template_kwargs", min(wrong), "variables of the chat template")
    if not service.engine.tokenizer.has_chat_template:
        raise ApiError(400, "the model has no chat template: use /v1/completions", param=param)
    given = [message.given() for message in messages]
    try:
        # Thoughts do not count, because templates may leave out those of earlier turns.
        said = [[each["content"], each.get("tool_calls")] for each in given]
        _check_length(service, _characters(said), param)
        _check_length(service, _characters(tools), "tools")
        return await asyncio.to_thread(
            service.engine.tokenizer.chat,
            given,
            literal=True,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **variables,
        )
    except kccl.Error as error:
        # If a variable is wrong, the error's first word is its name.
        is_variable = str(error).partition(" ")[0] in variables
        param = "chat_template_kwargs" if is_variable else param
        raise ApiError(400, str(error), param=param) from None


def _characters(value: Any) -> int:
    """Returns the number of characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _check_length(service: Service, characters: int, param: str) -> None:
    """Raises ApiError for a text that is too long for the context, even if all its tokens are as
    long as the longest. Such a text is not encoded, which might take long.
    """
    most = service.most_characters
    if characters > most:
        raise ApiError(
            400,
            f"{param} has {characters} characters, must have at most {most}: the context has "
            f"{service.engine.context} tokens",
            param=param,
            code="context_length_exceeded",
        )
