"""Records in Valkey or Redis: one string each, read in pieces by GETRANGE."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.errors import ConfigError, StoreFullError, needs
from blendrag.store.record import DamagedError, Layout, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import GoneError, Read, TierError, register_tier
from blendrag.store.tiers.remote import First, GarbageError, Place, RemoteTier, describe, public

if TYPE_CHECKING:
    from redis import ConnectionPool

_PER_REPLY = 1024  # bytes of a reply that are not its payload; more in an error's text
_READ_SIZE = 256 << 10  # bytes that are taken from the socket at once
_SCHEMES = ("redis://", "rediss://", "unix://")

Command = tuple[str | bytes | int, ...]


@register_tier("redis")
class RedisTier(RemoteTier):
    """A tier in Valkey or Redis. ``blendrag:{layout}:{key}`` holds a record.

    A record that is there is not written again: the content is the same, and somebody may be reading it.
    Every call is one round trip on one connection of a pool, without retries. The first call connects.
    """

    def __init__(self, spec: TierSpec, layout: Layout) -> None:
        """Make the pool of connections. Raises ConfigError for a url that is none."""
        super().__init__(spec, layout)
        assert spec.url is not None
        self._limits = _Limits()
        self._pool = _pool(spec, self._limits)

    def close(self) -> None:
        self._pool.disconnect()

    def _name(self, key: str) -> str:
        return f"blendrag:{self.layout.digest}:{key}"

    def _first(self, wanted: Mapping[str, int]) -> Mapping[str, First | Exception]:
        commands: list[Command] = []
        for key, nbytes in wanted.items():
            commands += ("STRLEN", self._name(key)), ("GETRANGE", self._name(key), 0, nbytes - 1)
        replies = iter(self._ask(commands, sum(wanted.values())))
        found: dict[str, First | Exception] = {}
        for key, size, data in zip(wanted, replies, replies, strict=True):
            if error := next((one for one in (size, data) if isinstance(one, Exception)), None):
                found[key] = _refusal(key, error)
            elif not isinstance(size, int) or not isinstance(data, bytes):
                raise GarbageError(f"{type(size).__name__} and {type(data).__name__} for a record")
            elif size:
                found[key] = First(data, size)
        return found

    def _rows(self, wanted: Sequence[Read]) -> None:
        commands: list[Command] = []
        for one in wanted:
            place, row = one.opened.source, one.opened.head.row_bytes
            assert isinstance(place, Place)
            begin, end = place.begin + one.first * row, place.begin + one.last * row
            commands.append(("GETRANGE", self._name(one.opened.head.key), begin, end - 1))
        replies = self._ask(commands, sum(one.into.numel() for one in wanted))
        for one, data in zip(wanted, replies, strict=True):
            key = one.opened.head.key
            if isinstance(data, Exception):
                raise _refusal(key, data)
            if not isinstance(data, bytes) or len(data) > one.into.numel():
                raise GarbageError(f"{type(data).__name__} for rows")
            if not data:
                raise GoneError(f"{key}: gone since it was opened")
            if len(data) < one.into.numel():
                raise DamagedError(f"{key}: cut off")
            one.into.numpy()[:] = np.frombuffer(data, np.uint8).reshape(one.into.shape)

    def _put(self, record: Record) -> None:
        from redis.exceptions import OutOfMemoryError

        name, data = self._name(record.key), record.bytes()
        commands: list[Command] = [("SET", name, data, "NX")]
        if (seconds := self.spec.expire_s) is not None:
            commands = [("SET", name, data, "NX", "EX", seconds), ("EXPIRE", name, seconds)]
        for reply in self._ask(commands, 0, sent=len(data)):
            if isinstance(reply, OutOfMemoryError):
                raise StoreFullError(f"{public(self.spec.url or '')} has reached its maxmemory")
            if isinstance(reply, Exception):
                raise _refusal(record.key, reply)

    def _delete(self, keys: Sequence[str]) -> int:
        return sum(self._numbers([("DEL", self._name(key)) for key in keys]))

    def _has(self, keys: Sequence[str]) -> set[str]:
        there = self._numbers([("EXISTS", self._name(key)) for key in keys])
        return {key for key, count in zip(keys, there, strict=True) if count}

    def _numbers(self, commands: Sequence[Command]) -> list[int]:
        numbers = []
        for reply in self._ask(commands, 0):
            if isinstance(reply, Exception):
                raise _refusal("keys", reply)
            if not isinstance(reply, int):
                raise GarbageError(f"{type(reply).__name__} for a number")
            numbers.append(reply)
        return numbers

    def _ask(self, commands: Sequence[Command], payload: int, sent: int = 0) -> list[Any]:
        """Return replies, or errors, to commands; the replies carry at most ``payload`` bytes."""
        from redis.exceptions import ResponseError

        self._limits.begin(self._seconds(payload + sent), payload + _PER_REPLY * (len(commands) + 1))
        connection = self._pool.get_connection()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            replies = []
            for _ in commands:
                try:
                    replies.append(connection.read_response(disable_decoding=True))
                except ResponseError as error:
                    replies.append(error)
        except BaseException:
            connection.disconnect()  # the rest of the replies would be taken for the next commands'
            raise
        finally:
            self._pool.release(connection)
        return replies


def _refusal(key: str, error: Exception) -> Exception:
    """Return the exception for an error that the server gave as its answer."""
    if str(error).startswith("WRONGTYPE"):
        return DamagedError(f"{key}: not a string")
    return TierError(f"{key}: {describe(error)}")


def _pool(spec: TierSpec, limits: _Limits) -> ConnectionPool:
    with needs("blendrag[redis]"):
        from redis import ConnectionPool
        from redis.backoff import NoBackoff
        from redis.retry import Retry

    class Guarded:
        """A mixin for a connection: its socket keeps to the limits of the call that uses it."""

        def _connect(self) -> _Socket:
            return _Socket(super()._connect(), limits)  # type: ignore[misc]

    url = spec.url or ""
    try:
        if not url.startswith(_SCHEMES):
            raise ValueError("no such scheme")
        pool = ConnectionPool.from_url(
            url,
            protocol=2,  # Valkey, and Redis of any age, speak it; it is all that strings need
            socket_timeout=spec.timeout_s,
            socket_connect_timeout=spec.timeout_s,
            socket_read_size=_READ_SIZE,
            retry=Retry(NoBackoff(), 0),
            lib_name=None,
            lib_version=None,
        )
        pool.connection_class = type("GuardedConnection", (Guarded, pool.connection_class), {})
        pool.make_connection()  # refuses options that do not exist; connects to nothing
        pool.reset()
    except Exception:  # its message may repeat parts of the url
        raise ConfigError(
            f"tiers: {public(url)!r} is no url of a Redis or Valkey server;"
            " for example redis://:password@host:6379/0"
        ) from None
    return pool


class _Limits(threading.local):
    """The limits of the call that a thread is making: time, and bytes received."""

    until = 0.0
    left = 0

    def begin(self, seconds: float, nbytes: int) -> None:
        self.until, self.left = time.monotonic() + seconds, nbytes

    def seconds(self) -> float:
        if (left := self.until - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        return left

    def received(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise ConnectionError("more bytes than were asked for")


class _Socket:
    """A socket that keeps to the limits. redis-py's own timeout begins anew with every byte, and its buffer
    takes whatever a server cares to send."""

    def __init__(self, inner: socket.socket, limits: _Limits) -> None:
        self._inner, self._limits = inner, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _wait(self) -> None:
        if self._inner.gettimeout() != 0:  # 0: only looking whether there is something to read
            self._inner.settimeout(self._limits.seconds())

    def recv(self, nbytes: int) -> bytes:
        self._wait()
        data = self._inner.recv(nbytes)
        self._limits.received(len(data))
        return data

    def recv_into(self, buffer: Any, *rest: int) -> int:
        self._wait()
        nbytes = self._inner.recv_into(buffer, *rest)
        self._limits.received(nbytes)
        return nbytes

    def sendall(self, data: bytes) -> None:
        self._wait()
        self._inner.sendall(data)
