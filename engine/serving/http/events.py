"""Server-sent events: an answer in parts, each sent as soon as it is made."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send

# The seconds between two comments that keep an idle connection open.
_PING_S = 15
_PING = b": wait\n\n"
# These headers tell proxies to pass each event on at once, and not to store it.
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

Events = AsyncGenerator[bytes, None]
"""Yields the bytes of events in order. event() makes them, or they are DONE."""

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of /v1/chat/completions or /v1/completions."""


def written(value: Any) -> str:
    """Returns a value as JSON without line breaks, as an event needs it.

    Raises:
        ValueError: The value has NaN or an infinity.
    """
    return _ENCODER.encode(value)


def event(data: dict[str, Any], kind: str = "") -> bytes:
    """Returns the bytes of an event.

    Args:
        data: The fields of the object.
        kind: The event's type. "" means that it has none.
    """
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {written(data)}\n\n".encode()


class EventStream(StreamingResponse):
    """An answer that is a stream of events. Sends comments while no event comes, which keep the
    connection open. Closes the generator of events if the client disconnects.

    starlette's own class sends no comments, and leaves the generator to the garbage collector.
    sse-starlette does both, but takes more of the server's time for each event (bench/LOG.md).
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, on_end: Callable[[], None]) -> None:
        """Prepares an answer.

        Args:
            events: Yields the events.
            on_end: Called once, when the answer has ended. Unlike a `finally` in `events`, it is
                also called if the client disconnects before the generator began.
        """
        super().__init__(events, headers=_HEADERS)
        self._events, self._on_end = events, on_end

    async def stream_response(self, send: Send) -> None:
        """Sends the header, the events and the end."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **head})
            pinging = asyncio.create_task(_ping(send))
            try:
                async with contextlib.aclosing(self._events) as events:
                    async for each in events:
                        await send({"type": "http.response.body", "body": each, "more_body": True})
            finally:
                pinging.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()


async def _ping(send: Send) -> None:
    """Sends a comment every _PING_S seconds. Each body is sent as a whole, so comments come between
    events.
    """
    while True:
        await asyncio.sleep(_PING_S)
        await send({"type": "http.response.body", "body": _PING, "more_body": True})
