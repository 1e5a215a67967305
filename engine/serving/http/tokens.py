"""Answers requests to /tokenize, /detokenize and /tokenizer_info. Converts tokens for JSON."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...text.tokenizer import Tokenizer
from .bodies import Detokenize, Tokenize
from .errors import ApiError, wrong_value
from .prompts import ids_of_chat, ids_of_text
from .service import Service

# The most ids that /detokenize takes.
_MOST_IDS = 1 << 17


def spelt(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """Returns a token's text and bytes. For a control token these are its name and b""."""
    raw = tokenizer.bytes_of(token)
    return (raw.decode(errors="replace") if raw else tokenizer.name_of(token)), raw


def named(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token's text as a key of a JSON object. If the bytes are no UTF-8, it shows them,
    so that tokens with different bytes have different keys.
    """
    text, raw = spelt(tokenizer, token)
    if not raw or "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def tokenize(service: Service, request: Request) -> Response:
    """Returns the ids of a text, or of a conversation."""
    body = await service.body(request, Tokenize)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt and messages: one of them must be given", param="prompt")
    if body.messages is not None:
        generates = body.add_generation_prompt
        ids = await ids_of_chat(service, body.messages, {}, add_generation_prompt=generates)
    else:
        ids = await ids_of_text(service, body.prompt or "", add_bos=body.add_special_tokens)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": service.engine.context})


async def detokenize(service: Service, request: Request) -> Response:
    """Returns the text of ids."""
    body = await service.body(request, Detokenize)
    size = service.engine.config.vocab_size
    if len(body.tokens) > _MOST_IDS:
        raise ApiError(
            400, f"tokens has {len(body.tokens)} ids, must have at most {_MOST_IDS}", param="tokens"
        )
    for token in body.tokens:
        if token >= size:
            raise wrong_value("tokens", token, f"ids from 0 to {size - 1}")
    text = await asyncio.to_thread(service.engine.tokenizer.decode, body.tokens)
    return JSONResponse({"prompt": text})


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Returns the names of special tokens. lm-eval asks for them, to use /tokenize as tokenizer."""
    tokenizer = service.engine.tokenizer
    ids = {"bos": tokenizer.bos_id, "eos": next(iter(tokenizer.eos_ids), None)}
    ids["pad"] = tokenizer.pad_id
    names = {
        f"{name}_token": None if token is None else tokenizer.name_of(token)
        for name, token in ids.items()
    }
    return JSONResponse(names | {"max_model_len": service.engine.context})
