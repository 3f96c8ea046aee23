"""What every request to the server passes first: who it is from, what its key may do, how large it is."""

from __future__ import annotations

import contextlib

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blendrag.server.keys import ADMIN, ASK, INGEST, RIGHTS, Key, Keys

_EVERYBODY = Key("", RIGHTS)

# Where a server has keys, these are its routes: all that reach the engine are planned and salted. With which
# right; None: any.
_COLLECTION = "/v1/kb/collections/{name}"
_ROUTES = {
    ("POST", "/v1/chat/completions"): ASK,
    ("POST", "/v1/completions"): ASK,
    ("POST", "/v1/kb/explain"): ASK,
    ("POST", "/v1/kb/prefetch"): ASK,
    ("PUT", _COLLECTION): INGEST,
    ("GET", _COLLECTION): INGEST,
    ("DELETE", _COLLECTION): INGEST,
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
_OPEN = ("GET", "/health")
_PATHS = tuple((method, compile_path(path)[0], right) for (method, path), right in _ROUTES.items())

_RETRY_S = "5"


def key_of(request: Request) -> Key:
    """Whose request it is; of all namespaces of one tenant, where the server has no keys."""
    key: Key = request.state.key
    return key


class Gate:
    """ASGI middleware around all routes, those of plugins, documentation and metrics too.

    keys: None lets everybody in. most_bytes: of a request's body. A busy server's answers say when to ask
    again.
    """

    def __init__(self, app: ASGIApp, keys: Keys | None, most_bytes: int) -> None:
        self._app, self._keys, self._most = app, keys, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        admitted = self._admitted(scope, headers)
        if not isinstance(admitted, Key):
            return await admitted(scope, receive, send)
        scope.setdefault("state", {})["key"] = admitted
        await self._app(scope, self._limited(headers, receive), _hinting(send))

    def _admitted(self, scope: Scope, headers: Headers) -> Key | JSONResponse:
        """The request's key, or the refusal."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        route = scope.get("method", ""), path
        if self._keys is None or route == _OPEN:
            return _EVERYBODY
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        key = self._keys.find(secret.encode("latin-1")) if scheme.lower() == "bearer" else None
        if key is None:
            return _refusal(401, "this server needs a key: Authorization: Bearer KEY")
        for method, pattern, right in _PATHS:
            if method == route[0] and pattern.fullmatch(path):
                if right is None or right in key.rights:
                    return key
                return _refusal(403, f"this key has not the right {right!r}")
        return _refusal(404, "there is no such route for holders of keys")

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        declared = read = 0
        with contextlib.suppress(ValueError):  # of what is no number, only what comes is counted
            declared = int(headers.get("content-length") or 0)

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if max(declared, read) > self._most:
                # FastAPI lets no other exception out of its reading of a body.
                raise HTTPException(413, f"the body has more than {self._most >> 20} MiB: send less at once")
            return message

        return limited


def _refusal(status: int, message: str) -> JSONResponse:
    """As vLLM words its own."""
    kinds = {401: "Unauthorized", 403: "Forbidden", 404: "Not Found"}
    error = {"message": message, "type": kinds[status], "param": None, "code": status}
    return JSONResponse(
        {"error": error}, status, headers={"WWW-Authenticate": "Bearer"} if status == 401 else None
    )


def _hinting(send: Send) -> Send:
    async def hinting(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 503:
            MutableHeaders(scope=message).setdefault("retry-after", _RETRY_S)
        await send(message)

    return hinting
