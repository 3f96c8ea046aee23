"""Blending of requests to vLLM's server: planned over the text that vLLM renders of them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from threading import BoundedSemaphore, Lock
from typing import Any, Literal, TypeVar, cast

import xxhash
from fastapi import Request
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from blendrag.chat.request import RequestOptions, make_request
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.wire.recipe import FIELD, sealed
from blendrag.engine.wire.report import BlendReport
from blendrag.engine.worker.metrics import Unplanned, count
from blendrag.errors import ConfigError, EngineClosedError
from blendrag.names import closest
from blendrag.options import BlendKeywords, BlendOverrides, resolved
from blendrag.prompt import Messages, PromptPlan, decode
from blendrag.server.doors import Door, door_of
from blendrag.server.gate import key_of
from blendrag.serving.evidence import Evidence, PlannedPrompt
from blendrag.serving.library import Library
from blendrag.settings import RENAMED, Settings

_log = logging.getLogger(__name__)

FIELD_NAME = "blendrag"
"""The name of blendrag's field, in the body of a request."""

_COUNTS = ("prompt", "mode", "reused", "exact", "recomputed", "fresh", "prefix", "plain")
_CLIENTS = ("speculation", "resumed")  # facts that clients have for themselves

Work = Literal["plan", "read", "ask", "change", "ingest"]
_THREADS: dict[Work, int] = {"plan": 2, "read": 2, "ask": 2, "change": 1, "ingest": 1}
_MOST_INGESTS = 8  # ingests of a tenant, with the one that is being done

T = TypeVar("T")


class BlendFields(BlendOverrides):
    """Fields of blending in a request; all of them may be left out. What is not said here is as the embedded
    classes have it."""

    model_config = ConfigDict(extra="forbid")

    documents: list[str] = Field(default=[], description="Texts known to be in the prompt: looked for first.")
    conversation: str | None = Field(
        default=None, description="The caller's id of the conversation that the prompt belongs to."
    )
    trace: bool | None = Field(default=None, description="The evidence says what was loaded when.")
    evidence: bool = Field(
        default=False, description="What became of each document; in a stream, a last chunk that says it."
    )
    _marked: tuple[str, ...] = PrivateAttr(())

    @property
    def marked(self) -> tuple[str, ...]:
        """Texts of the prompt that the client has marked as documents."""
        return self._marked

    def marking(self, texts: Iterable[str]) -> BlendFields:
        """Return these fields with the texts marked."""
        marking = self.model_copy()
        marking._marked = tuple(texts)
        return marking

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                unknown = f"unknown field {name!r} in {FIELD_NAME}{closest(str(name), cls.model_fields)}"
                raise ValueError(RENAMED.get(name, unknown))
        return values

    @model_validator(mode="after")
    def _can_be_used(self) -> BlendFields:
        try:
            resolved(self.model_dump(include={*BlendKeywords.__annotations__}))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


@dataclass(frozen=True, slots=True)
class Blended:
    """A request with its prompt as it was planned. unplanned: what is counted if it was not; plain says why.
    sent, conversation: the client's. marked: texts that it has marked as documents. apart: it is kept from
    others of its tenant. begun: by ``time.monotonic``."""

    prompt: PlannedPrompt | None = None
    plain: str | None = None
    unplanned: Unplanned | None = None
    ticket: str = ""
    sent: Messages | str = ""
    conversation: str | None = None
    marked: tuple[str, ...] = ()
    apart: bool = False
    begun: float = field(default_factory=time.monotonic)

    @property
    def planned(self) -> dict[str, Any]:
        """Counts of the plan, for whoever sees the answer's beginning only."""
        if (prompt := self.prompt) is None:
            return {"plain": self.plain}
        tokens = {"prompt": len(prompt.plan.token_ids)}
        if prompt.path is not None and prompt.exact:
            return tokens | {"exact": prompt.path.held_end}
        return {"plain": prompt.plain} if prompt.recipe is None else tokens | {"cached": prompt.recipe.cached}


MOST_PROMPTS = 32
_MOST_BYTES = 1 << 20  # roughly, of all; the latest is kept whatever it takes
_ROW_BYTES = 400
_KEPT = ("kind", "source", "tokens", "reused", "reason", "start", "chunk_key")
_FACTS = ("computed_at", "missing", "decision", "prefill_s", "tiers", "ms")


class LatestPrompts:
    """The latest prompts, in this process. Thread-safe."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MOST_PROMPTS)
        self._lock = Lock()

    def add(self, counts: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Note a prompt by its evidence, as ``Blending.evidence`` has it.

        Kept are counts, positions and the names of documents that it holds; no text of it, of its answer or
        of its documents.
        """
        rows = [
            {name: row[name] for name in _KEPT}
            for row in facts.get("documents", ())
            if row["kind"] != "fresh" or row["chunk_key"] is not None  # or it is about no document
        ]
        for row in rows:
            if row["start"] is None:
                row["source"] = None  # a document's first words, where it has no name
        kept = {name: facts[name] for name in _FACTS if name in facts}
        at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        size = len(rows) * _ROW_BYTES + len(kept.get("computed_at", ""))
        with self._lock:
            self._prompts.append((size, {"at": at, **counts, **kept, "documents": rows}))
            while len(self._prompts) > 1 and sum(size for size, _ in self._prompts) > _MOST_BYTES:
                self._prompts.popleft()

    def all(self) -> list[dict[str, Any]]:
        """Return them, latest first."""
        with self._lock:
            return [prompt for _, prompt in reversed(self._prompts)]


class Blending:
    """The blending of a tenant, used in the server's loop; what takes long runs in threads."""

    def __init__(
        self,
        library: Library,
        settings: Settings,
        engine: RunningEngine,
        name: str,
        seal: str,
        tool_parser: str = "",
    ) -> None:
        """Begin for a tenant. name: what clients may call the model. seal: the secret that the connector
        knows recipes of ours by. tool_parser: vLLM's name of the one that reads calls; empty for none."""
        self.library, self.settings, self.name, self.tool_parser = library, settings, name, tool_parser
        self.latest = LatestPrompts()
        self.engine, self._seal = engine, seal
        self._threads = {
            work: ThreadPoolExecutor(count, thread_name_prefix=f"blendrag-{work}")
            for work, count in _THREADS.items()
        }
        self._room = BoundedSemaphore(_MOST_INGESTS)
        self._ending = False

    def end(self) -> None:
        """Have ingest stop behind what is being prefilled, and begin no other."""
        self._ending = True
        self.library.texts.stop_ingest()

    def check_going_on(self) -> None:
        """Raise EngineClosedError after :meth:`end`."""
        if self._ending:
            raise EngineClosedError("the server is about to end: put these documents again")

    def close(self) -> None:
        """Close before the engine ends, and write down what was noted of prompts."""
        self.library.sidecars.stop()

    async def prepare(self, request: Any, fields: BlendFields, state: Any) -> Blended:
        """Make of vLLM's ``request`` one that is blended, if there is something to blend. Whatever goes wrong
        with planning, it stays the plain request that it was. state: that of vLLM's app.

        Raises ConfigError for an option that cannot be used, and for fields that are the server's to set.
        """
        door = door_of(type(request))
        own, salt = self.library.identity.namespace, request.cache_salt
        namespace = f"{own}~{xxhash.xxh3_64_hexdigest(salt.encode())}" if salt else own  # it has no tilde
        request.cache_salt = f"{namespace}:" if namespace else None
        door.keep_apart(request, own)
        try:
            about = await self._planned(door, request, fields, state, exact=not salt)
        except ConfigError:
            raise
        except Exception as error:
            _log.exception("a prompt could not be planned, and is prefilled plainly")
            about = Blended(plain=f"planning failed: {error}", unplanned="error")
        if about.unplanned is not None:
            count({"blendrag_unplanned": {about.unplanned: 1}})
        if (prompt := about.prompt) and prompt.plan.spans:  # plain too: for a comparison, the same prompt
            params, ids = dict[str, Any](), prompt.plan.token_ids
            if prompt.recipe is not None:
                request.cache_salt = self.engine.turns.salt(namespace, prompt.recipe, ids)
            if (what := prompt.recipe or prompt.path) is not None:
                params = sealed(what.transfer_params(about.ticket), request.cache_salt, self._seal)
            door.put(request, list(ids), params)
        return about

    async def explain(self, request: Any, fields: BlendFields, state: Any) -> dict[str, Any]:
        """Return what would become of vLLM's ``request``: text and tokens of the prompt, how many of these
        are stored, and rows as the embedded classes' ``explain()`` has them; plain: why nothing would be
        blended. Raises ConfigError as :meth:`prepare` does."""
        door = door_of(type(request))
        door.keep_apart(request, self.library.identity.namespace)
        about = await self._planned(door, request, fields, state, exact=False)
        if (prompt := about.prompt) is None:
            return {"plain": about.plain, "text": None, "tokens": None, "cached": 0, "rows": []}
        return {
            "plain": prompt.plain,
            "text": prompt.plan.text,
            "tokens": len(prompt.plan.token_ids),
            "cached": 0 if prompt.recipe is None else prompt.recipe.cached,
            "rows": await self.run(lambda: self.library.explain(prompt.plan)),
        }

    async def _planned(
        self, door: Door, request: Any, fields: BlendFields, state: Any, *, exact: bool
    ) -> Blended:
        """Plan the prompt. exact: as :meth:`Library.prepare` has it."""
        begun, others = time.monotonic(), request.vllm_xargs or {}
        if request.kv_transfer_params or "kv_transfer_params" in others:
            raise ConfigError("kv_transfer_params are set by the server: see the field `blendrag`")
        given = fields.model_dump(exclude={"conversation", "evidence"})
        given["documents"] += fields.marked
        wanted = make_request(self.settings, "", cast(RequestOptions, given))
        try:
            asked = await door.asked(request, state)
        except Exception as error:  # its own route says it
            return Blended(plain=f"vLLM refuses the request: {error}", unplanned="refused")
        if self.library.identity.namespace and any("uuid" in part for part in asked.parts()):
            raise ConfigError("leave out the uuid of images: it names one in a cache that all tenants share")
        if asked.plain is not None:
            return Blended(plain=asked.plain, unplanned="request")
        try:
            ids = await asked.render()
        except Exception as error:
            return Blended(plain=f"vLLM refuses the request: {error}", unplanned="refused")
        plan = await self.run(lambda: self._plan(ids, wanted.documents))
        if plan is None:
            return Blended(plain="the documents cannot be tokenised apart", unplanned="text")
        more = len(plan.token_ids) - len(ids)
        if more > 0 and len(plan.token_ids) + (asked.most or 1) > self.engine.max_model_len:
            reason = f"tokenised apart, the documents take {more} tokens too many"
            return Blended(plain=reason, unplanned="window")
        options = wanted.options or self.settings.blending
        prompt = await self.run(lambda: self.library.prepare(plan, options, exact=exact))
        return Blended(
            prompt,
            ticket=f"served-{secrets.token_hex(8)}",
            sent=asked.sent,
            conversation=fields.conversation,
            marked=fields.marked,
            apart=not exact,
            begun=begun,
        )

    async def run(self, do: Callable[[], T], work: Work = "plan") -> T:
        """Run in a thread. plan: what takes longer than a moment, and waits for nothing. read: what may take
        seconds, of many texts; what vLLM does when the server is told to end does not wait for it. ask: what
        waits for the engine. change: what waits for its turn at changing the catalogue. None waits behind
        work of another kind."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[work], do)

    def ingest(self, work: Callable[[], None]) -> bool:
        """Run in a thread what waits for prefills, after all that was given before; no request waits behind
        it. Returns False, and nothing is done, if too much is waiting."""
        if not self._room.acquire(blocking=False):
            return False
        self._threads["ingest"].submit(work).add_done_callback(lambda _: self._room.release())
        return True

    def _plan(self, ids: Sequence[int], documents: Sequence[str]) -> PromptPlan | None:
        """Plan a prompt; None if its ids would be another text than vLLM's."""
        text = decode(self.library.tokenizer, ids)
        plan = self.library.plan(text, documents)
        return plan if decode(self.library.tokenizer, plan.token_ids) == text else None

    async def evidence(self, about: Blended, answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return counts of tokens, and what became of the documents. answer: what is known of vLLM's, as a
        chat completion has it. KV that was found damaged is prefilled again. An answer is given whatever
        becomes of this."""
        counts, facts = await self._told(about, answer)
        if not about.apart:
            self.latest.add(counts, facts)
        return counts, facts

    async def _told(self, about: Blended, answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if (prompt := about.prompt) is None:
            return {"plain": about.plain}, {}
        try:
            evidence = await self._evidence(prompt, about.ticket, answer)
            library, stored = self.library, 0
            if evidence.missing or prompt.plan.forms or library.sidecars.forecaster or library.repeats:
                whose = evidence, about.sent, about.conversation, time.monotonic() - about.begun
                behind = partial(
                    library.answered, prompt.plan, *whose, apart=about.apart, marked=about.marked
                )
                stored = await self.run(behind, "ask")
        except Exception as error:
            _log.exception("what became of a prompt is not known")
            return {"plain": f"not known: {error}"}, {}
        facts = {name: fact for name, fact in asdict(evidence).items() if name not in _CLIENTS}
        return {name: facts.pop(name) for name in _COUNTS}, facts | {"stored": stored}

    async def _evidence(self, prompt: PlannedPrompt, ticket: str, answer: dict[str, Any]) -> Evidence:
        plain = (answer.get("kv_transfer_params") or {}).get(FIELD)
        if plain is None and (prompt.recipe is not None or prompt.exact):
            plain = await self.engine.acall("report", ticket)
        usage = answer.get("usage") or {}  # none in a stream whose client did not ask for it
        prefix = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if prompt.recipe is not None and plain is None and not usage:
            prefix = prompt.recipe.cached_end  # the prefix cache has held at least what is cached
        return prompt.evidence(BlendReport.from_plain(plain), prefix)


def blending_of(request: Request, namespace: str | None = None) -> Blending:
    """Return the blending of the request's tenant, or of another. Raises KeyError."""
    tenants: dict[str, Blending] = request.app.state.blendrag
    return tenants[key_of(request).namespace if namespace is None else namespace]
