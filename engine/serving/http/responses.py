"""Answers requests to /v1/responses. The server stores no responses, so each request must have its
whole conversation.
"""

import contextlib
import time
from functools import partial
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..jobs import Generate
from .answers import CLIENT_LEFT, Choice, cancel, collected, submit, usage_of
from .calling import calling_of, chosen
from .errors import ApiError, wrong_value
from .events import Events, EventStream, event, written
from .prompts import ids_of_chat
from .readings import reading_of
from .response_bodies import ResponseBody
from .response_output import Output, output_of
from .service import Service, finish_reason, new_id

_COMPLETED, _INCOMPLETE = "completed", "incomplete"


async def responses(service: Service, request: Request) -> Response:
    """Answers a conversation."""
    body = await service.body(request, ResponseBody)
    service.check_model(body.model)
    body.refuse_what_needs_a_store()
    echoed = _echoed(body)
    calling = calling_of(
        service,
        [each.function() for each in body.tools or []],
        chosen(body.tool_choice, "name"),
        is_parallel=body.parallel_tool_calls,
    )
    variables = body.chat_template_kwargs or {}
    ids = await ids_of_chat(service, body.messages(), variables, tools=calling.tools, param="input")
    ids = service.checked(ids, "input")
    most = body.max_output_tokens
    given: dict[str, Any] = {} if most is None else {"max_tokens": most}
    asked = await body.grammar_of_text(service.engine)
    reading = await reading_of(service, ids, calling, asked, "text.format")
    given |= reading.grammar
    one = body.model_copy(update={"n": None})
    (choice,) = submit(service, one, [ids], given, shown=reading.shown, reader=reading.reader)
    made = _Made(service, body, echoed, choice)
    began = time.monotonic()
    if body.stream:
        return EventStream(_events(service, made, choice, began), partial(cancel, [choice]))
    if not await collected(service, request, [choice], began):
        return Response(status_code=CLIENT_LEFT)
    status = _status(choice)
    return JSONResponse(made.told(status, output_of(choice.reader, status)))


def _status(choice: Choice) -> str:
    return _INCOMPLETE if finish_reason(choice.end) == "length" else _COMPLETED


def _echoed(body: ResponseBody) -> dict[str, Any]:
    """Returns the fields that a response repeats from its request.

    Raises:
        ApiError: A field cannot be written into the response.
    """
    found = {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "text": {"format": body.format()},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [each.model_dump(exclude_unset=True) for each in body.tools or []],
        "user": body.user,
    }
    for name, value in found.items():
        try:
            written(value).encode()
        except ValueError:
            told = "JSON without NaN and infinity, and text that UTF-8 can encode"
            raise wrong_value(name, value, told) from None
    return found


class _Made:
    """Makes the JSON object of a response, in each status that it passes."""

    def __init__(
        self, service: Service, body: ResponseBody, echoed: dict[str, Any], choice: Choice
    ) -> None:
        job = choice.submission.job
        assert isinstance(job, Generate)
        self._choice = choice
        self._head = {
            "id": new_id("resp", "_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or service.settings.names[0],
        }
        self._rest: dict[str, Any] = {
            **echoed,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
            "truncation": "disabled",
        }

    def told(
        self, status: str, output: list[dict[str, Any]], error: ApiError | None = None
    ) -> dict[str, Any]:
        """Returns the JSON object of the response in a status, with its output so far."""
        is_incomplete, has_ended = status == _INCOMPLETE, status in (_COMPLETED, _INCOMPLETE)
        failed = error and {"code": "server_error", "message": str(error)}
        return {
            **self._head,
            "status": status,
            "error": failed,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": output,
            **self._rest,
            "usage": _usage(self._choice) if has_ended else None,
        }


def _usage(choice: Choice) -> dict[str, Any]:
    counts = usage_of([choice])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }


async def _events(service: Service, made: _Made, choice: Choice, began: float) -> Events:
    """Yields the events of a stream."""
    output, numbers = Output(), count()

    def typed(kind: str, **more: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers)} | more, kind)

    try:
        for kind in ("response.created", "response.in_progress"):
            yield typed(kind, response=made.told("in_progress", []))
        async with contextlib.aclosing(service.pieces(choice.submission, began)) as pieces:
            async for piece in pieces:
                choice.take(piece)
                for told in output.take(choice.news):
                    yield typed(told.pop("type"), **told)
        status = _status(choice)
        for told in output.finish(status):
            yield typed(told.pop("type"), **told)
        yield typed(f"response.{status}", response=made.told(status, output.items))
    except ApiError as error:
        yield typed("response.failed", response=made.told("failed", output.items, error))
