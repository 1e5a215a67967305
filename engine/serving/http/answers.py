"""Answers requests to chat and completions: submits the choices, and sends them as one object or as
events.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kccl

from ...text.pieces import Piece
from ..jobs import Generate
from ..reading import Reader
from ..submission import Submission
from ..tools.events import Event
from .bodies import Sampled
from .errors import ApiError
from .events import DONE, Events, EventStream, event
from .service import Service, usage

# Seconds between two checks whether the client is still connected, while a non-streamed answer is
# made.
_LOOK_S = 0.2
# The HTTP status of an answer whose client has closed its connection, as in nginx.
CLIENT_LEFT = 499


@dataclass
class Choice:
    """One of the answers to a request.

    Attributes:
        index: The choice's number among the request's answers.
        submission: The submission that gives its pieces.
        reader: Separates thoughts and calls from its text.
        pieces: The pieces so far.
        news: The events that the newest piece completed.
        num_thoughts: The number of tokens of thoughts, including the marker at their end.
    """

    index: int
    submission: Submission[Piece]
    reader: Reader = field(default_factory=Reader)
    pieces: list[Piece] = field(default_factory=list)
    news: list[Event] = field(default_factory=list)
    num_thoughts: int = 0

    @property
    def text(self) -> str:
        """Returns the text so far, as the model wrote it."""
        return "".join(piece.text for piece in self.pieces)

    def take(self, piece: Piece) -> None:
        """Adds the answer's next piece: updates `pieces`, `news` and `num_thoughts`."""
        self.num_thoughts += self.reader.is_thinking
        self.pieces.append(piece)
        self.news = self.reader.push(piece.text, is_last=bool(piece.end))

    @property
    def end(self) -> str:
        """Returns the newest piece's Piece.end. Returns "" before the first piece."""
        return self.pieces[-1].end if self.pieces else ""


Chunk = dict[str, Any]
Chunks = Callable[[Choice, Piece | None], list[Chunk]]
"""A function that makes the `choices` entries of a choice's next events, at least one for a piece.
Its arguments are the choice and the newest piece, or None before the first piece.
"""


def submit(
    service: Service,
    body: Sampled,
    prompts: Sequence[list[int]],
    given: dict[str, Any],
    *,
    shown: tuple[int, ...] = (),
    reader: Callable[[], Reader] = Reader,
) -> list[Choice]:
    """Submits all choices of a request to the queue, `n` for each prompt. If one is refused,
    cancels the others.

    Args:
        service: The engine.
        body: The body of the request.
        prompts: The ids of each prompt.
        given: Fields of SamplingParams besides those of the body.
        shown: Control tokens whose names are part of the text.
        reader: Makes the reader of a choice.

    Raises:
        ApiError: A parameter is wrong, or the queue is full.
    """
    engine, choices = service.engine, list[Choice]()
    fields = service.fields(body) | given
    check_number(service, body, len(prompts))
    try:
        for ids in prompts:
            for number in range(body.n or 1):
                # Choices with equal seeds would be equal. So each adds its number to the seed.
                seed = {"seed": (fields["seed"] + number) % 2**64} if "seed" in fields else {}
                params = engine.params_for(**{"max_tokens": engine.context} | fields | seed)
                submission = service.submit(Generate(ids, params, shown))
                choices.append(Choice(len(choices), submission, reader()))
    except BaseException as error:
        for each in choices:
            each.submission.cancel()
        if isinstance(error, kccl.InvalidArgument):
            # The error's first word is the name of the wrong field.
            raise ApiError(400, str(error), param=str(error).partition(" ")[0]) from None
        raise
    return choices


def check_number(service: Service, body: Sampled, num_prompts: int) -> None:
    """Raises ApiError if the request has more choices than the queue can ever hold."""
    number, most = num_prompts * (body.n or 1), service.engine.sessions.limit + 1
    if number > most:
        name = "prompt" if num_prompts > 1 else "n"
        raise ApiError(
            400,
            f"{name} asks for {number} answers, must ask for at most {most}: one runs and "
            f"{most - 1} may wait",
            param=name,
        )


async def answer(
    service: Service,
    request: Request,
    body: Sampled,
    choices: list[Choice],
    head: dict[str, Any],
    *,
    kind: str,
    chunk: Chunks,
    whole: Callable[[Choice], dict[str, Any]],
    begins: bool = False,
) -> Response:
    """Returns the answer to a request: a stream of events, or one object.

    Args:
        service: The engine.
        request: The request. If its client disconnects, the choices are cancelled.
        body: The body of the request.
        choices: The choices that submit() has returned.
        head: The fields with which each event, and the object, begins.
        kind: The field "object" of events.
        chunk: Makes a choice's entries of events: see Chunks.
        whole: Makes a choice's entry of the object.
        begins: Whether each choice has an event before its first piece.
    """
    began = time.monotonic()
    if body.stream:
        events = _events(service, body, choices, head | {"object": kind}, chunk, begins, began)
        return EventStream(events, partial(cancel, choices))
    if not await collected(service, request, choices, began):
        return Response(status_code=CLIENT_LEFT)
    counts = {"choices": [whole(choice) for choice in choices], "usage": usage_of(choices)}
    return JSONResponse(head | counts)


async def collected(
    service: Service, request: Request, choices: list[Choice], began: float
) -> bool:
    """Waits until all choices are complete, or the client disconnects. In the second case cancels
    those that are not complete. Returns whether all are complete.
    """

    async def collect() -> None:
        for choice in choices:
            async with contextlib.aclosing(service.pieces(choice.submission, began)) as pieces:
                async for piece in pieces:
                    choice.take(piece)

    try:
        return await with_client(request, collect())
    finally:
        cancel(choices)


async def _events(
    service: Service,
    body: Sampled,
    choices: list[Choice],
    head: dict[str, Any],
    chunk: Chunks,
    begins: bool,
    began: float,
) -> Events:
    """Yields the events of a stream: one choice after the other, and DONE."""
    try:
        for choice in choices:
            if begins:
                for made in chunk(choice, None):
                    yield event(head | {"choices": [made]})
            last = began
            pieces = service.pieces(choice.submission, began)
            async with contextlib.aclosing(pieces) as coming:
                async for piece in coming:
                    choice.take(piece)
                    timing: dict[str, Any] = {}
                    if body.kccl:
                        position = len(choice.submission.job.ids) + len(choice.pieces) - 1
                        timing["kccl"] = service.timing(piece, last, position)
                    last = piece.time_s
                    for made in chunk(choice, piece):
                        yield event(head | {"choices": [made]} | timing)
                        # If a token makes several events, only the first one has its time.
                        timing = {}
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(head | {"choices": [], "usage": usage_of(choices)})
    except ApiError as error:
        yield event(error.body())
    yield DONE


def cancel(choices: list[Choice]) -> None:
    """Cancels the choices that have not ended."""
    for choice in choices:
        if choice.submission.end is None:
            # cancel() may block, so it must not run on the event loop's thread.
            asyncio.get_running_loop().run_in_executor(None, choice.submission.cancel)


def usage_of(choices: list[Choice]) -> dict[str, Any]:
    """Returns the counts of tokens of a request."""
    # A prompt counts once, however many choices it has.
    prompts = dict[int, Submission[Piece]]()
    for choice in choices:
        # A prompt's first choice says how many tokens were cached before the request. Later ones
        # would also count the tokens that the first has left in the cache.
        prompts.setdefault(id(choice.submission.job.ids), choice.submission)
    first = list(prompts.values())
    return usage(
        sum(len(each.job.ids) for each in first),
        sum(len(choice.pieces) for choice in choices),
        sum(max(each.num_cached, 0) for each in first),
        sum(choice.num_thoughts for choice in choices),
        [choice.submission.drafted for choice in choices],
    )


async def with_client(request: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Runs a coroutine until it ends. If the client disconnects before, cancels the coroutine.
    Returns whether it has ended. Raises what it raises.
    """
    working = asyncio.create_task(work)
    try:
        while not working.done():
            await asyncio.wait([working], timeout=_LOOK_S)
            if not working.done() and await request.is_disconnected():
                return False
        working.result()
        return True
    finally:
        working.cancel()
