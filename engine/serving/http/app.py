"""Makes the server's application: routes of paths to functions, and middleware."""

import logging
import math
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

import kccl

from ...api import Engine
from .chat import chat
from .completions import completions
from .errors import ApiError
from .guard import Guard
from .metrics import Counting
from .responses import responses
from .service import Service, Settings
from .tokens import detokenize, tokenize, tokenizer_info

Endpoint = Callable[[Service, Request], Awaitable[Response]]

_PAGE = Path(__file__).parents[1] / "page"
# Path -> (the page's file, its media type).
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/markdown-it.js": ("vendor/markdown-it.min.js", "text/javascript; charset=utf-8"),
}
# The page's Content-Security-Policy. It may run scripts only from this server, and may send
# requests only to this server and to that of --compare.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self' {compare}; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_LOG = logging.getLogger(__name__)


def application(
    engine: Engine,
    settings: Settings,
    *,
    hosts: Collection[str] = (),
    origins: Collection[str] = (),
    keys: Collection[str] = (),
) -> Starlette:
    """Makes the application of an engine. Its `state.service` is the Service.

    Args:
        engine: The engine. The caller must close it.
        settings: How the server is set up.
        hosts, origins, keys: See Guard.
    """
    service = Service(engine, settings)

    def route(path: str, endpoint: Endpoint, *methods: str) -> Route:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(service, request)
            except ApiError as error:
                return error.response()

        return Route(path, answer, methods=list(methods))

    guard = Middleware(Guard, hosts=hosts, origins=origins, keys=keys, page=tuple(FILES))
    middleware = [guard]
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            # OpenAI's client for browsers sends headers of its own, so any header is allowed.
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
        # In front of the guard, because a browser sends preflight requests without a key.
        middleware.insert(0, cors)
    routes = [
        route("/v1/chat/completions", chat, "POST"),
        route("/v1/completions", completions, "POST"),
        route("/v1/responses", responses, "POST"),
        route("/v1/models", _models, "GET"),
        route("/v1/models/{name:path}", _model, "GET"),
        route("/tokenize", tokenize, "POST"),
        route("/detokenize", detokenize, "POST"),
        route("/tokenizer_info", tokenizer_info, "GET"),
        route("/health", _health, "GET"),
        route("/metrics", _metrics, "GET"),
        route("/kccl/info", _info, "GET"),
        *(route(path, _file, "GET") for path in FILES),
    ]
    paths = [each.path for each in routes]
    middleware.insert(0, Middleware(Counting, metrics=service.metrics, paths=paths))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _not_found, Exception: _failed},
    )
    app.state.service = service
    return app


def _model_object(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "kccl",
        "max_model_len": service.engine.context,
    }


async def _models(service: Service, request: Request) -> Response:
    data = [_model_object(service, name) for name in service.settings.names]
    return JSONResponse({"object": "list", "data": data})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.check_model(name)
    return JSONResponse(_model_object(service, name))


async def _health(service: Service, request: Request) -> Response:
    sessions = service.engine.sessions
    counts = {"waiting": sessions.num_waiting, "running": sessions.num_running}
    if sessions.failure is not None:
        status = "restarting" if service.restarts else "failed"
        return JSONResponse({"status": status, "error": str(sessions.failure)} | counts, 503)
    return JSONResponse({"status": "ok"} | counts)


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _info(service: Service, request: Request) -> Response:
    """Returns the facts about the engine that the page shows."""
    engine, bandwidth = service.engine, service.settings.bandwidth
    return JSONResponse(
        {
            "model": service.settings.names[0],
            "models": service.settings.names,
            "compare": service.settings.compare or None,
            # JSON has no NaN, so null stands for it.
            "bandwidth": None if math.isnan(bandwidth) else bandwidth,
            "ranks": engine.world_size,
            "backend": engine.backend,
            "context": engine.context,
            "slots": engine.slots,
            "version": kccl.__version__,
            "chats": engine.tokenizer.has_chat_template,
            "sampling": {name: value for name, value in engine.sampling.items() if name != "stop"},
        }
    )


async def _file(service: Service, request: Request) -> Response:
    name, kind = FILES[request.url.path]
    policy = _POLICY.format(compare=service.settings.compare).replace(" ;", ";")
    headers = {"Content-Security-Policy": policy} | _PAGE_HEADERS
    return FileResponse(_PAGE / name, media_type=kind, headers=headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {404: f"there is no {request.url.path!r:.200} here"}
    told[405] = f"{request.method} is not allowed for {request.url.path!r:.200}"
    message = told.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _failed(request: Request, error: Exception) -> Response:
    _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}").response()
