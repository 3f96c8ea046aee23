"""HTTP with a server: one place for addresses, keys, and what a refusal means."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from blendrag.errors import (
    BlendragError,
    ConfigError,
    PromptTooLongError,
    ServerBusyError,
    ServerError,
    ServerNotFoundError,
    ServerRefusalError,
    StoreFullError,
)
from blendrag.remote import API_KEY
from blendrag.serving.collection import NO_COLLECTION
from blendrag.text import plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_CONNECT_S = 10.0
_BUSY = (429, 502, 503, 504)  # of the server, or of what stands before it


Made = TypeVar("Made", bound="DataclassInstance")


class NoCollectionError(ConfigError):
    """The server's collection has no documents."""


class Server:
    """A server at one address. Connects when it is first used, in every process and event loop anew: it may
    be copied, pickled and forked. Thread-safe.

    All methods raise ServerError, and what the server's own error stands for.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        client: httpx2.Client | None = None,
        async_client: httpx2.AsyncClient | None = None,
    ) -> None:
        """Connect to nothing yet. base_url: with ``/v1`` at its end, as OpenAI's clients have it, or without.
        timeout_s: how long it may be silent. headers, query: sent with every request. client, async_client:
        what requests go through, with limits, timeouts, proxies and certificates of their own; they stay
        their owner's to close. Raises ConfigError for what is no URL, no client, or in no header."""
        for given, kind in ((client, httpx2.Client), (async_client, httpx2.AsyncClient)):
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"requests go through an httpx2.{kind.__name__}, not {given!r}")
        self._given, self._given_async = client, async_client
        self._headers, self._query = dict(headers or {}), dict(query or {})
        self._key = (api_key or os.environ.get(API_KEY) or "").strip() or None  # files end with a new line
        for value in (self._key or "", *self._headers.values()):
            if isinstance(value, str) and not (value.isascii() and value.isprintable()):
                raise ConfigError("api_key, or a header, has characters that no header takes")
        self._url = _address(base_url)
        if self._key:  # else user and password of the URL would stand where the key does
            self._url = self._url.copy_with(username=None, password=None)
        self._timeout_s = timeout_s
        self._connect()

    def _connect(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._client: httpx2.Client | None = None
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_process", "_client", "_clients")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    def __str__(self) -> str:
        return without_password(self._url)

    def close(self) -> None:
        """End the connections. The next use makes others."""
        with self._lock:
            if self._process == os.getpid():
                if self._client is not None:
                    self._client.close()
                for loop, client in self._clients.items():
                    if loop.is_running():
                        asyncio.run_coroutine_threadsafe(client.aclose(), loop)
            self._connect()

    def call(self, method: str, path: str, json: Any = None, **params: Any) -> Any:
        """Return the JSON that the server answers."""
        with self.answer(method, path, json, **params) as response:
            response.read()
            try:
                return response.json()
            except ValueError:
                raise _no_server(self) from None

    @contextlib.contextmanager
    def answer(self, method: str, path: str, json: Any = None, **more: Any) -> Iterator[httpx2.Response]:
        """Open a response whose status is 200, to be read inside. more: ``params``, ``timeout``."""
        with self._errors(), self._sync().stream(method, **self._asked(path, json=json, **more)) as response:
            if response.status_code != 200:
                response.read()
                raise self._refusal(response)
            yield response

    @contextlib.asynccontextmanager
    async def aanswer(
        self, method: str, path: str, json: Any = None, **more: Any
    ) -> AsyncIterator[httpx2.Response]:
        """Do as ``answer`` in an event loop."""
        with self._errors():
            async with self._async().stream(method, **self._asked(path, json=json, **more)) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refusal(response)
                yield response

    # -- connections --------------------------------------------------------------------------------------

    def _asked(self, path: str, **more: Any) -> dict[str, Any]:
        """Return what any HTTP client is told of one request."""
        headers = httpx2.Headers({"authorization": f"Bearer {self._key}"} if self._key else {})
        headers.update(self._headers)
        if "opentelemetry.trace" in sys.modules:  # else the caller is in no span
            from opentelemetry.propagate import inject

            inject(headers)
        more["json"] = _finite(plain(more.get("json")))
        more["params"] = {**self._query, **more.get("params", {})} or None
        return {"url": self._url.join(path), "headers": headers, **more}

    @property
    def _options(self) -> dict[str, Any]:
        timeout = httpx2.Timeout(self._timeout_s, connect=_CONNECT_S)
        # Whoever asks at once is queued by the server, which knows how much it can take.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
        return {"timeout": timeout, "limits": limits}

    def _sync(self) -> httpx2.Client:
        if self._given is not None:
            return self._given
        with self._mine():
            if self._client is None:
                self._client = httpx2.Client(**self._options)
            return self._client

    def _async(self) -> httpx2.AsyncClient:
        if self._given_async is not None:
            return self._given_async
        loop = asyncio.get_running_loop()
        with self._mine():
            for ended in [other for other in self._clients if other.is_closed()]:
                del self._clients[ended]
            if loop not in self._clients:
                self._clients[loop] = httpx2.AsyncClient(**self._options)
            return self._clients[loop]

    def _mine(self) -> threading.Lock:
        if self._process != os.getpid():  # forked: the connections are the parent's
            self._connect()
        return self._lock

    # -- errors -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol) as error:
            raise ServerNotFoundError(
                f"no server answers at {self}: {error or 'it takes too long'}"
            ) from error
        except httpx2.ReadTimeout as error:
            raise ServerError(f"{self} has said nothing for too long: allow more time") from error
        except httpx2.TransportError as error:
            raise ServerBusyError(f"{self} broke off: {error or type(error).__name__}") from error
        except httpx2.RequestError as error:
            raise ServerError(f"{self} cannot be understood: {error or type(error).__name__}") from error

    def _refusal(self, response: httpx2.Response) -> BlendragError:
        status, (reason, kind) = response.status_code, _refusal(response)
        match status:
            case 401:
                how = "wrong" if self._key else f"missing: give api_key, or set {API_KEY}"
                return ServerRefusalError(f"{self} refuses this: the key is {how}")
            case 403:
                return ServerRefusalError(
                    f"{self} refuses this to the key: {reason or 'it has no right to it'}"
                )
            case 404 if reason is None or reason == "Not Found":
                return _no_server(self)
            case 413:
                return ServerRefusalError(
                    f"{self} takes no request as large as this: {reason or 'give it less at once'}"
                )
            case 404:
                missing = NoCollectionError if kind == NO_COLLECTION else ConfigError
                return missing(f"{self} refuses this: {reason}")
            case 400 | 422:
                return refusal(f"{self} refuses this: {reason or _gateways_words(response)}")
            case 507:
                return StoreFullError(f"{self} has no room: {reason}")
            case _ if status in _BUSY:
                seconds = _seconds(response.headers.get("retry-after", ""))
                later = f"in {seconds:g} s" if seconds is not None else "later"
                about = f" ({reason})" if reason else ""
                return ServerBusyError(
                    f"{self} takes no more requests now{about}: ask again {later}", seconds
                )
            case _ if 300 <= status < 400:
                return ServerNotFoundError(
                    f"{self} sends to {response.headers.get('location')}: use that URL"
                )
        return ServerError(f"{self} failed: {reason or f'status {status}'}")


def without_password(url: str | httpx2.URL) -> str:
    """Return the URL without user, password and query, as it may be shown."""
    return str(httpx2.URL(url).copy_with(username=None, password=None, query=None))


def refusal(reason: str) -> PromptTooLongError | ConfigError:
    """Return the error that a refusal in vLLM's words stands for."""
    return (PromptTooLongError if "maximum context length" in reason else ConfigError)(reason)


def _address(base_url: str) -> httpx2.URL:
    try:
        url = httpx2.URL(str(base_url).strip())
    except (httpx2.InvalidURL, TypeError) as error:
        raise ConfigError(f"base_url is no URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError("base_url (--server) is no URL as in http://localhost:8000")
    path = re.sub(r"(/v1)?((/chat)?/completions)?$", "", url.path.rstrip("/"))
    return url.copy_with(path=path + "/", query=None, fragment=None)


def _no_server(server: Server) -> ServerNotFoundError:
    return ServerNotFoundError(
        f"{server} is no server of blendrag: correct the URL, or start the server with `blendrag serve`"
    )


def _refusal(response: httpx2.Response) -> tuple[str | None, str | None]:
    """Return the server's own words, in one line, and the error's type."""
    try:
        found = response.json()
    except ValueError:
        return None, None
    error = found.get("error", found.get("detail")) if isinstance(found, Mapping) else None
    about = error if isinstance(error, Mapping) else {"message": error}
    message = about.get("message")
    return " ".join(str(message).split()) if message else None, about.get("type")


def _gateways_words(response: httpx2.Response) -> str:
    """Return what refuses in the server's place in one line: of its JSON, its page, or its status."""
    try:
        found = response.json()
    except ValueError:
        found = re.sub(r"<[^>]*>", "\n", response.text)
    if isinstance(found, Mapping):
        found = found.get("message") or found.get("errors")
    if isinstance(found, list):
        found = found[0] if found else None
    if isinstance(found, Mapping):
        found = found.get("message")
    return next(filter(None, map(str.strip, str(found or "").splitlines())), response.reason_phrase)


def _seconds(after: str) -> float | None:
    """Return in how many seconds a Retry-After is, which is a number or a date; None if it is neither."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(after))
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, round(parsedate_to_datetime(after).timestamp() - time.time()))
    return None


def _finite(body: Any) -> Any:
    """Return a request's body. Raises ConfigError for a number in it that JSON has not."""
    for name, value in body.items() if body else ():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ConfigError(f"{name} has a number that JSON has not: it must be finite") from None
    return body


@contextlib.contextmanager
def understood(server: object) -> Iterator[None]:
    """Raise ServerError if what is read inside is not what was asked for."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ServerError(
            f"{server} cannot be understood ({type(error).__name__}: {error}): is it of another version?"
        ) from error


def made(kind: type[Made], values: Mapping[str, Any]) -> Made:
    """Make an object of a server's words; a newer server says more."""
    return kind(**{name: value for name, value in values.items() if name in kind.__dataclass_fields__})


def require_blendrag(server: Server, response: httpx2.Response) -> None:
    """Raise ServerNotFoundError for an answer of a server without blendrag."""
    if "x-blendrag" not in response.headers:
        raise _no_server(server)
