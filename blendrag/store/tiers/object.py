"""Records in an object store (S3, GCS, Azure, a folder): one object each, read in pieces by ranged GETs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from blendrag.errors import ConfigError, needs
from blendrag.store.record import DamagedError, Layout, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import GoneError, Read, TierError, register_tier
from blendrag.store.tiers.remote import First, GarbageError, Place, RemoteTier, describe, public

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

_PIECE = 1 << 20  # bytes of an answer that are taken at once
_CONCURRENT = 32  # requests
_SCHEMES = ("s3://", "gs://", "az://", "file:///", "memory://")
# The ``options`` that are for the HTTP client. The others are for the store: its region, endpoint,
# credentials.
_CLIENT = {
    "allow_http",
    "allow_invalid_certificates",
    "default_headers",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
    "root_certificate",
    "user_agent",
}

T = TypeVar("T")


@register_tier("object")
class ObjectTier(RemoteTier):
    """A tier in an object store. ``{prefix}/{layout}/{first two digits of the key}/{key}.safetensors`` holds
    a record.

    The requests of a call run at the same time, in an event loop with a thread of its own. Rows are read from
    the version of the object that was opened, and from no other.
    """

    def __init__(self, spec: TierSpec, layout: Layout) -> None:
        """Set up the store. Raises ConfigError for a url or options that cannot be used."""
        super().__init__(spec, layout)
        self._store = _open_store(spec)
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(_CONCURRENT)
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()  # nobody waits for ever
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _path(self, key: str) -> str:
        return f"{self.layout.digest}/{key[:2]}/{key}.safetensors"

    def _first(self, wanted: Mapping[str, int]) -> Mapping[str, First | Exception]:
        found = self._all(lambda key: self._first_of(key, wanted[key]), wanted, sum(wanted.values()))
        return {key: first for key, first in zip(wanted, found, strict=True) if first is not None}

    async def _first_of(self, key: str, nbytes: int) -> First | Exception | None:
        from obstore.exceptions import GenericError

        into = bytearray(nbytes)
        try:
            got, size, version = await self._get(key, 0, memoryview(into), None)
        except FileNotFoundError:
            return None
        except (DamagedError, TierError) as error:
            return error
        except GenericError:
            # No range of an empty object can be had, and each store has its own words for that.
            if (await self._store.head_async(self._path(key)))["size"]:
                raise
            return DamagedError(f"{key}: empty")
        return First(bytes(into[:got]), size, version)

    def _rows(self, wanted: Sequence[Read]) -> None:
        self._all(self._rows_of, wanted, sum(one.into.numel() for one in wanted))

    async def _rows_of(self, one: Read) -> None:
        head, place = one.opened.head, one.opened.source
        assert isinstance(place, Place)
        into, begin = one.into.view(-1).numpy().data, place.begin + one.first * head.row_bytes
        try:
            got, _, _ = await self._get(head.key, begin, into, place.version)
        except FileNotFoundError:
            raise GoneError(f"{head.key}: gone since it was opened") from None
        if got < len(into):
            raise DamagedError(f"{head.key}: cut off")

    async def _get(
        self, key: str, begin: int, into: memoryview, version: str | None
    ) -> tuple[int, int, str | None]:
        """Fill ``into`` from an object. Returns how far it goes, the object's size and version."""
        from obstore.exceptions import PermissionDeniedError, PreconditionError

        options: dict[str, Any] = {"range": (begin, begin + len(into))}
        if version is not None:
            options["if_match"] = version
        try:
            answer = await self._store.get_async(self._path(key), options=options)  # type: ignore[arg-type]
        except PreconditionError:
            raise GoneError(f"{key}: replaced since it was opened") from None
        except PermissionDeniedError as error:
            raise TierError(f"{key}: {describe(error)}") from None
        got = 0
        async for piece in answer.stream(_PIECE):
            if got + len(piece) > len(into):
                raise GarbageError("more bytes than were asked for")
            into[got : got + len(piece)] = piece
            got += len(piece)
        if got != answer.range[1] - answer.range[0]:
            raise GarbageError("fewer bytes than were announced")
        return got, answer.meta["size"], answer.meta["e_tag"]

    def _put(self, record: Record) -> None:
        async def put(key: str) -> None:
            await self._store.put_async(self._path(key), data, use_multipart=False)

        data = record.bytes()
        self._all(put, [record.key], len(data))

    def _delete(self, keys: Sequence[str]) -> int:
        async def delete(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):  # another engine was faster
                await self._store.delete_async(self._path(key))

        there = self._has(keys)  # deleting what is not there is no error, and not counted
        self._all(delete, sorted(there), 0)
        return len(there)

    def _has(self, keys: Sequence[str]) -> set[str]:
        async def has(key: str) -> bool:
            try:
                await self._store.head_async(self._path(key))
            except FileNotFoundError:
                return False
            return True

        return {key for key, there in zip(keys, self._all(has, keys, 0), strict=True) if there}

    def _all(self, ask: Callable[[Any], Coroutine[Any, Any, T]], of: Iterable[Any], nbytes: int) -> list[T]:
        """Return the answers for each, in a call's time for so many bytes. The first error ends all."""

        async def limited(one: Any) -> T:
            async with self._slots:
                return await ask(one)

        async def together() -> list[T]:
            async with asyncio.timeout(self._seconds(nbytes)):
                tasks = [asyncio.ensure_future(limited(one)) for one in of]
                try:
                    return await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)  # nobody writes to ``into`` any more

        if self._loop.is_closed():
            raise TierError(f"{self.name}: closed")
        try:
            return asyncio.run_coroutine_threadsafe(together(), self._loop).result()
        except TimeoutError:
            raise TimeoutError(f"no answer in {self._seconds(nbytes):.1f} s") from None
        except BaseException as error:
            if _is_panic(error):
                raise GarbageError("the client library gave up") from None
            raise


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _is_panic(error: BaseException) -> bool:
    """Return whether obstore's native part failed unexpectedly: then its error is no Exception."""
    return type(error).__name__ == "PanicException"


def _open_store(spec: TierSpec) -> ObjectStore:
    with needs("blendrag[s3]"):
        from obstore.store import from_url

    url = spec.url or ""
    client: Any = {name: value for name, value in spec.options.items() if name in _CLIENT}
    client["timeout"] = timedelta(minutes=5)  # our own limit is shorter, and knows how much is moved
    config: Any = {name: value for name, value in spec.options.items() if name not in _CLIENT}
    try:
        if not url.startswith(_SCHEMES) or "@" in url:
            raise ValueError("no such scheme, or credentials, which belong into options")
        if url.startswith("memory"):
            return from_url(url)
        if url.startswith("file"):
            return from_url(url, mkdir=True, **config)
        return from_url(url, client_options=client, retry_config=_retry(spec), **config)
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        # The library's own message may repeat the url or an option's value.
        raise ConfigError(
            f"tiers: {public(url)!r} with the options {sorted(spec.options)} is no object store that can be"
            f" used ({type(error).__name__}); for example s3://bucket/prefix, gs://bucket/prefix,"
            " az://account/container/prefix or file:///folder"
        ) from None


def _retry(spec: TierSpec) -> RetryConfig:
    """Return the policy of retries: one, at once, for what failed at once: a busy server, a closed
    connection. None after a timeout."""
    pause = timedelta(milliseconds=10)
    return {
        "max_retries": 1,
        "retry_timeout": timedelta(seconds=spec.timeout_s / 2),
        "backoff": {"init_backoff": pause, "max_backoff": pause, "base": 2},
    }
