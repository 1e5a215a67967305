"""Counts requests and tokens, and writes them for /metrics in Prometheus's format."""

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..sessions import Sessions

_MODELS = "/v1/models/"
_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Counts the answers of one server."""

    def __init__(self, sessions: Callable[[], Sessions]) -> None:
        """Begins with all counts at 0.

        Args:
            sessions: Returns the queue whose length is reported.
        """
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by path and status", "path", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = self._counter(
            "cached_tokens", "Of these, tokens whose keys and values were kept"
        )
        self.answer_tokens = self._counter("answer_tokens", "Tokens of answers")
        self.drafts = self._counter("draft_tokens", "Drafts that were checked")
        self.accepted_drafts = self._counter("accepted_draft_tokens", "Of these, accepted ones")
        self.ends = self._counter("answers", "Answers by how they ended", "end")
        self.first_token = self._histogram(
            "first_token_seconds", "From the request to its first token", _FIRST_S
        )
        self.token = self._histogram("token_seconds", "From a token to the next", _TOKEN_S)
        waiting = Gauge("kccl_waiting_requests", "Requests in the queue", registry=self._registry)
        waiting.set_function(lambda: sessions().num_waiting)
        running = Gauge("kccl_running_requests", "Requests that run", registry=self._registry)
        running.set_function(lambda: sessions().num_running)

    def text(self) -> bytes:
        """Returns the text of /metrics."""
        return generate_latest(self._registry)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(f"kccl_{name}", told, labels, registry=self._registry)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kccl_{name}", told, buckets=buckets, registry=self._registry)


class Counting:
    """A middleware that counts all requests, including those that the guard refuses."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: Collection[str]) -> None:
        """Wraps an application.

        Args:
            app: The application.
            metrics: Counts the requests.
            paths: The paths that have counts of their own. All others are counted as "other".
        """
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.requests.labels(self._label(scope["path"]), str(status)).inc()

    def _label(self, path: str) -> str:
        if path.startswith(_MODELS):
            return _MODELS + "{name:path}"
        return path if path in self._paths else "other"
