"""What all endpoints use: reads bodies and parameters, submits jobs to the engine, and receives
their results.
"""

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

import kccl

from ...api import Engine
from ...executors.requests import prompt_ids
from ...model.executor import Drafted
from ...text.pieces import Piece
from ..jobs import Job, Scored
from ..sessions import FATAL, QueueFull
from ..submission import CANCELLED, End, Submission
from .bodies import Sampled
from .errors import ApiError, of_validation, wrong_value
from .metrics import Metrics
from .nesting import MOST_LEVELS, nests_too_deeply

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

# The timeout of a request's body, in seconds.
_BODY_S = 30.0
_RETRY_S = 1
# The header Retry-After while the engine restarts, in seconds.
_RESTART_S = 5
# The most digits of a token's id.
_MOST_DIGITS = 12
# The least log-probability in answers. It stands for minus infinity, which JSON cannot represent.
_LEAST_LOGPROB = -9999.0
# Fields of bodies that have the same name and meaning in SamplingParams.
_SAME = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
STOP = "stop"
"""Piece.end of an answer that ended by a stop id, a stop string or its grammar."""
_FINISH = {STOP: "stop", "max_tokens": "length", "context": "length"}


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
        names: The names that requests may use for the model. Answers have the first one.
        most_body: The most bytes of a request's body.
        bandwidth: The bytes a second at which the engine reads weights. NaN: the caches hold the
            weights, so the memory's bandwidth is no bound.
        compare: The origin of a server whose answers the page shows beside this one's, as in
            "http://127.0.0.1:8001"; "": there is none.
    """

    names: tuple[str, ...]
    most_body: int = 8 << 20
    bandwidth: float = math.nan
    compare: str = ""


class Service:
    """An engine, with the functions that endpoints need.

    Attributes:
        engine: The engine. replace() sets another one after a restart. Its owner must close it.
        restarts: Whether an engine that has failed is restarted.
        settings: The settings of the server.
        metrics: The counts of its requests and answers.
        created: When the server started, in seconds since 1970.
        most_characters: The most characters of a text that fits into the context, if all its tokens
            are as long as the vocabulary's longest.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.restarts = False
        self.metrics = Metrics(lambda: self.engine.sessions)
        self.created = int(time.time())
        self.most_characters = engine.context * engine.tokenizer.longest

    def replace(self, engine: Engine | None) -> None:
        """Sets the engine for all later requests, which must have the same model. Called with None
        if the engine has failed and will not be restarted.
        """
        if engine is None:
            self.restarts = False
        else:
            self.engine = engine

    # ---- requests --------------------------------------------------------------------------------

    async def body(self, request: Request, kind: type[B]) -> B:
        """Reads the body of a request.

        Raises:
            ApiError: The body is too long, comes too slowly, or does not match `kind`.
        """
        most, found = self.settings.most_body, bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    found += part
                    if len(found) > most:
                        raise ApiError(
                            413, f"the body has more than {most} bytes, must have at most {most}"
                        )
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {_BODY_S:g} s") from None
        try:
            given = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ApiError(400, f"the body is of type {type(given).__name__}, must be an object")
        if nests_too_deeply(given):
            raise ApiError(400, f"the body nests deeper than {MOST_LEVELS} levels, must not")
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            raise of_validation(error) from None

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless the name is one of the model's, or None."""
        if name is not None and name not in self.settings.names:
            known = " or ".join(map(repr, self.settings.names))
            raise ApiError(
                404,
                f"model is {name!r:.200}, must be {known}",
                param="model",
                code="model_not_found",
            )

    def fields(self, body: Sampled) -> dict[str, Any]:
        """Returns the fields of SamplingParams that a body has, without max_tokens.

        Raises:
            ApiError: A field is wrong.
        """
        found = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        if body.top_k is not None:
            # In vLLM's API -1 means all tokens, as 0 does here.
            found["top_k"] = max(body.top_k, 0)
        if body.seed is not None:
            found["seed"] = body.seed % 2**64
        if body.stop is not None:
            found["stop"] = body.stop
        if body.logit_bias:
            size = self.engine.config.vocab_size
            for name in body.logit_bias:
                # The length is checked first, because int() raises for thousands of digits.
                is_id = name.isdecimal() and name.isascii() and len(name) <= _MOST_DIGITS
                if not is_id or int(name) >= size:
                    raise wrong_value("logit_bias", name, f"ids from 0 to {size - 1}")
            found["logit_bias"] = {int(name): bias for name, bias in body.logit_bias.items()}
        return found

    def checked(self, ids: list[int], param: str, room: int = 1) -> list[int]:
        """Checks the ids of a prompt, and returns them.

        Args:
            ids: The prompt's ids.
            param: The field that has the prompt, for errors.
            room: How many more ids the context must have room for.

        Raises:
            ApiError: The prompt is empty, has ids that do not exist, or is too long.
        """
        engine = self.engine
        try:
            ids = prompt_ids(ids, lambda _: [], engine.config.vocab_size)
        except kccl.InvalidArgument as error:
            raise ApiError(400, str(error), param=param) from None
        most = engine.context - room
        if len(ids) > most:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, {len(ids) - most} too many: it must have at "
                f"most {most} in a context of {engine.context}",
                param=param,
                code="context_length_exceeded",
            )
        return ids

    # ---- answers ---------------------------------------------------------------------------------

    def submit(self, job: Job[T]) -> Submission[T]:
        """Submits a job to the queue.

        Raises:
            ApiError: The queue is full, or the engine has failed.
        """
        try:
            return self.engine.sessions.submit(job)
        except QueueFull as error:
            raise ApiError(
                429, str(error), code="queue_full", headers={"Retry-After": str(_RETRY_S)}
            ) from None
        except kccl.Error as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: BaseException) -> ApiError:
        """Returns the error for a request that the engine cannot run, because it has failed."""
        headers = {"Retry-After": str(_RESTART_S)} if self.restarts else {}
        return ApiError(503, str(error), code="engine_unavailable", headers=headers)

    async def items(self, submission: Submission[T]) -> AsyncGenerator[T, None]:
        """Yields the results of a submission. If the caller stops iterating, the submission is
        cancelled.

        Raises:
            ApiError: The request failed.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[T | End] = asyncio.Queue()

        def arrive(item: T | End) -> None:
            # call_soon_threadsafe() raises RuntimeError if the event loop is closed, because the
            # server has ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        submission.listen(arrive)
        try:
            while not isinstance(item := await arrived.get(), End):
                yield item
                if not arrived.empty():
                    # While results are queued, get() does not suspend this coroutine. sleep(0)
                    # lets others run, and a disconnect be noticed.
                    await asyncio.sleep(0)
            if item.error is not None:
                if isinstance(item.error, FATAL):
                    raise self._unavailable(item.error)
                status = 400 if isinstance(item.error, kccl.InvalidArgument) else 500
                raise ApiError(status, str(item.error))
            if item.reason == CANCELLED:
                raise ApiError(503, "the request was cancelled: the server ends")
        finally:
            if submission.end is None:
                # cancel() may block, so it must not run on the event loop's thread.
                loop.run_in_executor(None, submission.cancel)

    async def pieces(
        self, submission: Submission[Piece], began: float
    ) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of an answer, and counts them in the metrics.

        Args:
            submission: The answer.
            began: When the request came, by time.monotonic().
        """
        metrics, last, end = self.metrics, began, "left"
        try:
            async with contextlib.aclosing(self.items(submission)) as items:
                async for piece in items:
                    if last == began:
                        metrics.prompt_tokens.inc(len(submission.job.ids))
                        metrics.cached_tokens.inc(max(submission.num_cached, 0))
                        metrics.first_token.observe(piece.time_s - began)
                    else:
                        metrics.token.observe(piece.time_s - last)
                    last, end = piece.time_s, piece.end or "left"
                    metrics.answer_tokens.inc()
                    yield piece
        except ApiError:
            end = "failed"
            raise
        finally:
            metrics.drafts.inc(submission.drafted.proposed)
            metrics.accepted_drafts.inc(submission.drafted.accepted)
            metrics.ends.labels(end).inc()

    async def scores(self, submission: Submission[Scored]) -> list[Scored]:
        """Waits for the log-probabilities of a prompt's tokens, and returns them. Counts the tokens
        in the metrics.
        """
        found, end = list[Scored](), "left"
        try:
            async with contextlib.aclosing(self.items(submission)) as items:
                async for each in items:
                    found.append(each)
            self.metrics.prompt_tokens.inc(len(submission.job.ids))
            end = "scored"
        except ApiError:
            end = "failed"
            raise
        finally:
            self.metrics.ends.labels(end).inc()
        return found

    def timing(self, piece: Piece, last_s: float, position: int) -> dict[str, Any]:
        """Returns a token's fields of the extension `kccl`. token_s is the seconds that it took.
        bound_share is the least time in which the memory can deliver the token's weights, keys and
        values, divided by token_s. With drafts, several tokens read the weights once and have equal
        shares of their pass's time. So bound_share may exceed 1.

        Args:
            piece: The token.
            last_s: When the token before it came; for the first token, when the request came.
            position: The token's position in the sequence.
        """
        took = piece.time_s - last_s
        bound_s = self.engine.bytes_per_token(position) / self.settings.bandwidth
        # NaN: the caches hold the weights, so there is no bound.
        share = None if math.isnan(bound_s) or took <= 0 else round(bound_s / took, 4)
        return {"token_s": round(took, 7), "bound_share": share}


def finish_reason(end: str) -> str:
    """Converts Piece.end to OpenAI's finish_reason."""
    return _FINISH[end]


def clipped(logprob: float) -> float:
    """Returns a log-probability that JSON can represent."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def new_id(kind: str, between: str = "-") -> str:
    """Returns an id for an answer, as in "chatcmpl-..."."""
    return f"{kind}{between}{uuid.uuid4().hex}"


def usage(
    num_prompt: int,
    num_answer: int,
    num_cached: int,
    num_thoughts: int = 0,
    drafted: Sequence[Drafted] = (),
) -> dict[str, Any]:
    """Returns the object `usage`: the counts of tokens of an answer. OpenAI calls drafts
    predictions.
    """
    accepted = sum(each.accepted for each in drafted)
    rejected = sum(each.proposed for each in drafted) - accepted
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": max(num_cached, 0)},
        "completion_tokens_details": {
            "reasoning_tokens": num_thoughts,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }
