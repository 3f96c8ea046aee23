"""The gate that every request to the server passes first: who it is from, what its key may do, how large it
is, and whether the server is about to end."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blendrag.server import Limits
from blendrag.server.keys import ADMIN, ASK, INGEST, RIGHTS, Key, Keys
from blendrag.server.page import routes as page

_EVERYBODY = Key("", RIGHTS)

# The routes of a server that has keys, each with the right it takes; None: any. All that reach the engine are
# planned and salted.
_COLLECTION = "/v1/kb/collections/{name}"
_ROUTES = {
    ("POST", "/v1/chat/completions"): ASK,
    ("POST", "/v1/completions"): ASK,
    ("POST", "/v1/messages"): ASK,
    ("POST", "/v1/responses"): ASK,
    ("POST", "/v1/kb/explain"): ASK,
    ("POST", "/v1/kb/prefetch"): ASK,
    ("GET", "/v1/kb/collections"): INGEST,
    ("PUT", _COLLECTION): INGEST,
    ("GET", _COLLECTION): INGEST,
    ("DELETE", _COLLECTION): INGEST,
    ("GET", "/v1/kb/prompts"): INGEST,
    ("POST", "/v1/kb/split"): INGEST,
    ("POST", "/v1/kb/tokens"): None,
    ("GET", "/v1/kb/model"): None,
    ("GET", "/v1/kb/stats"): None,
    ("GET", "/v1/models"): None,
    ("GET", "/version"): None,
    ("GET", "/docs"): None,
    ("GET", "/openapi.json"): None,
    ("GET", "/metrics"): ADMIN,
    ("GET", "/load"): ADMIN,
}
_OPEN = {("GET", path) for path in ("/health", *page.OPEN)}
_PATHS = tuple((method, compile_path(path)[0], right) for (method, path), right in _ROUTES.items())

_TOKENISED = "/tokenize"  # the route of vLLM's that takes texts longer than the model's window
_UPLOADS = "/v1/audio/"  # the routes of vLLM that take forms

_RETRY_S = "5"

_WITHIN_VALUES = bytes(set(range(256)) - set(b'"[{,'))
_NUMBERS = 16  # so many numbers count as one value


def key_of(request: Request) -> Key:
    """Return the key of a request; where the server has no keys, one for all namespaces of one tenant."""
    return request.state.key


def limits_of(request: Request) -> Limits:
    """Return the limits of a request."""
    return request.state.limits


class Requests:
    """Requests that are being answered. No more are let in once the server is about to end."""

    def __init__(self) -> None:
        self.under_way, self.ending = 0, False


class Gate:
    """ASGI middleware around all routes, those of plugins, documentation and metrics too.

    keys: None lets everybody in. A busy server's answers say when to ask again.
    """

    def __init__(self, app: ASGIApp, keys: Keys | None, limits: Limits, requests: Requests) -> None:
        self._app, self._keys, self._limits, self._requests = app, keys, limits, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        admitted = self._admitted(scope, headers)
        if not isinstance(admitted, Key):
            return await admitted(scope, receive, send)
        if self._requests.ending:
            refused = _refusal(503, "the server is about to end: ask again later, or another")
            return await refused(scope, receive, _hinting(send))
        scope.setdefault("state", {}).update(key=admitted, limits=self._limits)
        self._requests.under_way += 1
        try:
            await self._app(scope, self._limited(scope, headers, receive), _hinting(send))
        finally:
            self._requests.under_way -= 1

    def _admitted(self, scope: Scope, headers: Headers) -> Key | JSONResponse:
        """Return the request's key, or the refusal."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        route = scope.get("method", ""), path
        if self._keys is None or route in _OPEN:
            return _EVERYBODY
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            secret = headers.get("x-api-key", "")  # of Anthropic's clients
        key = self._keys.find(secret.strip().encode("latin-1"))
        if key is None:
            return _refusal(401, "this server needs a key: Authorization: Bearer KEY")
        for method, pattern, right in _PATHS:
            if method == route[0] and pattern.fullmatch(path):
                if right is None or right in key.rights:
                    return key
                return _refusal(403, f"this key has not the right {right!r}")
        return _refusal(404, "Not Found")  # as without keys

    def _limited(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Return a receiver that gives a body as a whole, once it is known that it can be read quickly."""
        limit, option = self._limits.body_mib, "--max-body-mib"
        if scope["path"].endswith(_TOKENISED):  # by vLLM, whatever it has of it
            limit, option = self._limits.text_mib, "--max-text-mib"
        declared, most = 0, limit << 20
        allowed = self._limits.values(scope.get("method", ""))
        upload = scope["path"].startswith(_UPLOADS)  # a form, whose bytes are no JSON
        with contextlib.suppress(ValueError):  # of what is no number, only what comes is counted
            declared = int(headers.get("content-length") or 0)

        async def limited() -> Message:
            parts, size, more = list[bytes](), 0, True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                more = message.get("more_body", False)
                if max(declared, size) > most:
                    # FastAPI lets no other exception out of its reading of a body.
                    raise HTTPException(
                        413, f"the body has more than {limit} MiB ({option}): send less at once"
                    )
            body = b"".join(parts)
            long = not upload and len(body) >= allowed
            if long and await asyncio.to_thread(has_more_values, body, allowed):
                raise HTTPException(
                    413,
                    f"the body has more than {allowed:,} values, as messages, documents and their fields are"
                    " (--max-items): send fewer at once",
                )
            return {"type": "http.request", "body": body, "more_body": False}

        return limited


def has_more_values(body: bytes, most: int) -> bool:
    """Return whether JSON holds more than so many strings, lists and objects, keys among them, and sixteenths
    of numbers: what takes long to read, whatever it means. Takes a moment itself."""
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _WITHIN_VALUES)
    if rest.count(b'"') > 2 * most:
        return True
    outside = b"".join(rest.split(b'"')[::2])
    others = outside.count(b"[") + outside.count(b"{")
    return rest.count(b'"') // 2 + others + outside.count(b",") // _NUMBERS > most


def _refusal(status: int, message: str) -> JSONResponse:
    """Return a refusal, as vLLM words its own."""
    error = {"message": message, "type": HTTPStatus(status).phrase, "param": None, "code": status}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status, headers)


def _hinting(send: Send) -> Send:
    async def hinting(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 503:
            MutableHeaders(scope=message).setdefault("retry-after", _RETRY_S)
        await send(message)

    return hinting
