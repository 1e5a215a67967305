"""Answers requests to /v1/completions."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...text.pieces import Piece
from ..jobs import Score, Scored
from .answers import CLIENT_LEFT, Choice, answer, check_number, submit, with_client
from .bodies import Completion
from .errors import wrong_value
from .prompts import gap_of, ids_of_text
from .service import Service, clipped, finish_reason, new_id, usage
from .structured import grammar_of
from .tokens import named

# The default of max_tokens, as in OpenAI's API.
_MAX_TOKENS = 16


async def completions(service: Service, request: Request) -> Response:
    """Answers a request: continues each of its prompts, which are texts or ids."""
    body = await service.body(request, Completion)
    service.check_model(body.model)
    if body.best_of not in (None, body.n or 1):
        raise wrong_value("best_of", body.best_of, f"n, {body.n or 1}")
    most = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise wrong_value("max_tokens", 0, "at least 1 if echo is not true")
    if body.echo and body.stream:
        raise wrong_value("stream", True, "false if echo is true")
    asked = body.prompts()
    check_number(service, body, len(asked))
    stop_ids: list[int] = []
    prompts = []
    for prompt in asked:
        if body.suffix:
            gap = await gap_of(service, body, prompt)
            ids, stop_ids = gap.ids, gap.stop_ids
        else:
            ids = await ids_of_text(service, prompt)
        prompts.append(service.checked(ids, "prompt", room=1 if most else 0))
    head = {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or service.settings.names[0],
    }
    echoed: list[Logprobs] = []

    async def echo() -> None:
        for ids in prompts:
            echoed.append(await _echo(service, body, ids))

    if body.echo and not await with_client(request, echo()):
        return Response(status_code=CLIENT_LEFT)
    if most == 0:
        told = [
            {"index": i, "text": each.text, "logprobs": each.told, "finish_reason": "length"}
            for i, each in enumerate(echoed)
        ]
        counts = usage(sum(map(len, prompts)), 0, 0)
        return JSONResponse(head | {"choices": told, "usage": counts})
    given: dict[str, Any] = {"max_tokens": most}
    given |= {"logprobs": body.logprobs is not None, "top_logprobs": body.logprobs or 0}
    if stop_ids:
        given["stop_ids"] = [*service.engine.params_for().stop_ids, *stop_ids]
    given |= await grammar_of(service.engine, body)
    choices = submit(service, body, prompts, given)

    def chunk(choice: Choice, piece: Piece | None) -> list[dict[str, Any]]:
        assert piece is not None
        told = None
        if body.logprobs is not None:
            told = Logprobs(service, len(choice.text) - len(piece.text))
            told.add_piece(piece)
        made = {
            "index": choice.index,
            "text": piece.text,
            "logprobs": told and told.told,
            "finish_reason": finish_reason(piece.end) if piece.end else None,
        }
        return [made]

    def whole(choice: Choice) -> dict[str, Any]:
        each = echoed[choice.index // (body.n or 1)] if echoed else Logprobs(service)
        text = each.text + choice.text
        # The choices of a prompt share its echo, so each adds its tokens to a copy.
        each = each.copy()
        for piece in choice.pieces:
            each.add_piece(piece)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": each.told if body.logprobs is not None else None,
            "finish_reason": finish_reason(choice.end),
        }

    return await answer(
        service,
        request,
        body,
        choices,
        head,
        kind="text_completion",
        chunk=chunk,
        whole=whole,
    )


class Logprobs:
    """The log-probabilities of a text's tokens, in the form of OpenAI's API of completions.

    Attributes:
        text: The echoed text of the prompt.
        told: The object `logprobs` of an answer's JSON.
    """

    def __init__(self, service: Service, offset: int = 0) -> None:
        """Begins without tokens.

        Args:
            service: The engine.
            offset: The number of characters in front of the first token.
        """
        self.text = ""
        self._service, self._offset = service, offset
        self.told: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def copy(self) -> "Logprobs":
        """Returns a copy. Tokens that are added to the copy are not added to this object."""
        found = Logprobs(self._service, self._offset)
        found.told = {name: list(values) for name, values in self.told.items()}
        return found

    def add(self, token: int, text: str, logprob: float | None, others: Any) -> None:
        """Adds a token of the prompt or of the answer.

        Args:
            token: The token's id.
            text: The text that the token adds.
            logprob: Its log-probability. None for a prompt's first token, which has none.
            others: The alternatives: (id, log-probability) pairs.
        """
        tokenizer, told = self._service.engine.tokenizer, self.told
        told["tokens"].append(named(tokenizer, token))
        told["token_logprobs"].append(None if logprob is None else clipped(logprob))
        told["text_offset"].append(self._offset)
        self._offset += len(text)
        top = None
        if logprob is not None:
            # If the token is not among the likeliest, it is added to them, as in OpenAI's API.
            top = {named(tokenizer, each): clipped(value) for each, value in others}
            top.setdefault(named(tokenizer, token), clipped(logprob))
        told["top_logprobs"].append(top)

    def add_piece(self, piece: Piece) -> None:
        """Adds a token of an answer."""
        self.add(piece.id, piece.text, piece.logprob, piece.alternatives)


async def _echo(service: Service, body: Completion, ids: list[int]) -> Logprobs:
    """Returns the part of an answer that repeats the prompt: its text, and its tokens'
    log-probabilities by the model if the request asks for them.
    """
    found = Logprobs(service)
    scored: list[Scored] = []
    if body.logprobs is not None:
        submission = service.submit(Score(ids, body.logprobs))
        scored = await service.scores(submission)
    stream = service.engine.tokenizer.stream()
    texts = [stream.push(token) for token in ids]
    texts[-1] += stream.flush()
    found.text = "".join(texts)
    for index, (token, text) in enumerate(zip(ids, texts, strict=True)):
        if body.logprobs is None:
            break
        each = scored[index - 1] if index else None
        found.add(token, text, each and each.logprob, each.alternatives if each else ())
    found._offset = len(found.text)
    return found
