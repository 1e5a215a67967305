"""The middleware in front of all endpoints, which decides whether a request is permitted."""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

# The most headers of a request. Proxies add some, but never a hundred.
_MOST_HEADERS = 100
# The paths that need no key.
_WITHOUT_KEY = frozenset({"/", "/health"})


class Guard:
    """Refuses requests from web pages of other sites, requests without a key, and requests with too
    many headers.

    A page of another site can make a browser send requests to this server. But it cannot choose the
    headers Host and Origin, which the guard checks. Host also protects against DNS rebinding: if
    the site's name resolves to this machine, Host still has that name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        origins: Collection[str],
        keys: Collection[str],
        page: Collection[str],
    ) -> None:
        """Wraps an application.

        Args:
            app: The application.
            hosts: Names that Host may have, besides this machine's names and any IP address.
            origins: Other origins whose pages may send requests, as in "https://example.com".
            keys: The keys, of which a request must have one. Empty: requests need no key.
            page: The paths of the page's files, which need no key.
        """
        self._app = app
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}
        self._origins = frozenset(origins)
        self._keys = [_digest(key) for key in keys]
        self._open = _WITHOUT_KEY | frozenset(page)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), scope["path"])
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, path: str) -> None:
        if len(headers.raw) > _MOST_HEADERS:
            raise ApiError(
                431,
                f"the request has {len(headers.raw)} headers, must have {_MOST_HEADERS} or less",
            )
        host = headers.get("host", "")
        if not self._is_own(host):
            raise ApiError(
                403,
                f"Host is {host!r:.100}, must be an address or name of this machine: start the "
                "server with --allow-host",
            )
        origin = headers.get("origin")
        own = (None, f"http://{host}", f"https://{host}")
        if origin not in own and origin not in self._origins:
            raise ApiError(
                403,
                f"Origin is {origin!r:.100}, must be this server's: start it with --allow-origin",
            )
        if self._keys and path not in self._open:
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self._is_key(key.strip()):
                raise ApiError(
                    401,
                    "the key is missing or wrong: give one as in Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name.lower() in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return True

    def _is_key(self, key: str) -> bool:
        # Compares with all keys, each in constant time, so that the time reveals nothing about
        # them.
        given = _digest(key)
        return any([hmac.compare_digest(given, known) for known in self._keys])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
