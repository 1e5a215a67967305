"""Answers requests to /v1/chat/completions."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...text.pieces import Piece
from .answers import Choice, answer, submit
from .bodies import Chat
from .calling import calling_of, chosen
from .deltas import deltas_of, message_of
from .errors import wrong_value
from .prompts import ids_of_chat
from .readings import reading_of
from .service import STOP, Service, clipped, finish_reason, new_id
from .structured import grammar_of
from .tokens import spelt


async def chat(service: Service, request: Request) -> Response:
    """Answers a conversation."""
    body = await service.body(request, Chat)
    service.check_model(body.model)
    functions = [each.function for each in body.tools or []]
    calling = calling_of(
        service,
        functions,
        chosen(body.tool_choice, "function.name"),
        is_parallel=body.parallel_tool_calls,
    )
    variables = body.chat_template_kwargs or {}
    ids = await ids_of_chat(service, body.messages, variables, tools=calling.tools)
    ids = service.checked(ids, "messages")
    most = body.max_completion_tokens or body.max_tokens
    given: dict[str, Any] = {} if most is None else {"max_tokens": most}
    if body.top_logprobs and not body.logprobs:
        raise wrong_value("top_logprobs", body.top_logprobs, "0 if logprobs is not true")
    given |= {"logprobs": bool(body.logprobs), "top_logprobs": body.top_logprobs or 0}
    asked = await grammar_of(service.engine, body)
    reading = await reading_of(service, ids, calling, asked, "response_format")
    given |= reading.grammar
    choices = submit(service, body, [ids], given, shown=reading.shown, reader=reading.reader)
    head = {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model or service.settings.names[0],
    }

    def logprobs(pieces: list[Piece]) -> dict[str, Any] | None:
        if not body.logprobs:
            return None
        return {"content": [_logprob(service, piece) for piece in pieces], "refusal": None}

    def finish(choice: Choice, num_calls: int) -> str | None:
        if choice.end == STOP and num_calls > 0:
            return "tool_calls"
        return finish_reason(choice.end) if choice.end else None

    def chunk(choice: Choice, piece: Piece | None) -> list[dict[str, Any]]:
        told: dict[str, Any] = {"index": choice.index, "logprobs": None, "finish_reason": None}
        if piece is None:
            return [told | {"delta": {"role": "assistant", "content": ""}}]
        # Even a token without text makes an event, because clients show each token's probability.
        found = deltas_of(choice.news) or [{} if choice.reader.divides else {"content": ""}]
        made = [told | {"delta": delta} for delta in found]
        made[0]["logprobs"] = logprobs([piece])
        made[-1]["finish_reason"] = finish(choice, choice.reader.num_begun)
        return made

    def whole(choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": message_of(choice.reader),
            "logprobs": logprobs(choice.pieces),
            "finish_reason": finish(choice, len(choice.reader.calls)),
        }

    return await answer(
        service,
        request,
        body,
        choices,
        head,
        kind="chat.completion.chunk",
        chunk=chunk,
        whole=whole,
        begins=True,
    )


def _logprob(service: Service, piece: Piece) -> dict[str, Any]:
    """Returns a token's log-probability and alternatives, in the form of OpenAI's API."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        text, raw = spelt(service.engine.tokenizer, token)
        return {"token": text, "logprob": clipped(logprob), "bytes": list(raw)}

    others = [told(*each) for each in piece.alternatives]
    return {**told(piece.id, piece.logprob), "top_logprobs": others}
