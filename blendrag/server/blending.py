"""From a request of vLLM's server to a blended one: planned over the text that vLLM renders of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from blendrag.chat.request import RequestOptions, make_request
from blendrag.engine.client.generation import Delta
from blendrag.engine.recipe import FIELD, Recipe, sealed
from blendrag.engine.report import BlendReport
from blendrag.errors import BlendragError, ConfigError
from blendrag.prompt import PromptPlan, decode
from blendrag.server.engine import ServedEngine
from blendrag.server.fields import BlendFields
from blendrag.serving.evidence import Evidence, evidence_of
from blendrag.serving.library import Library
from blendrag.settings import Settings

_log = logging.getLogger(__name__)

_COUNTS = ("prompt", "reused", "recomputed", "fresh", "prefix", "plain")
_ROWS = ("documents", "missing", "ms", "tiers", "decision")


@dataclass(frozen=True, slots=True)
class Blended:
    """What was planned of a request. recipe: None if it is prefilled plainly; plain says why."""

    plan: PromptPlan | None = None
    recipe: Recipe | None = None
    plain: str | None = None
    ticket: str = ""

    @property
    def planned(self) -> dict[str, Any]:
        """For whoever sees the answer's beginning only."""
        if self.plan is None or self.recipe is None:
            return {"plain": self.plain}
        cached = sum(length for _, _, length in self.recipe.spans)
        return {"prompt": len(self.plan.token_ids), "cached": cached}


class Blending:
    """Of one server. Used in its event loop; what takes longer than a moment runs in threads."""

    def __init__(self, library: Library, settings: Settings, engine: ServedEngine, seal: str) -> None:
        """seal: the secret that the connector knows recipes of ours by."""
        self.library, self.settings = library, settings
        self._engine, self._seal = engine, seal
        self._tickets = itertools.count()
        self.finish: asyncio.Task[None] | None = None
        """Prefills what was left undone when the server started."""

    async def prepare(self, request: Any, fields: BlendFields, renderer: Any) -> Blended:
        """Make of vLLM's ``request`` one that is blended, if there is something to blend. Whatever goes wrong
        with planning, it stays the plain request that it was.

        Raises ConfigError for an option that cannot be used, and for fields that are the server's to set.
        """
        if request.kv_transfer_params:
            raise ConfigError("kv_transfer_params are set by the server: see the field `blendrag`")
        namespace = self._namespace(request.cache_salt)
        request.cache_salt = f"{namespace}:" if namespace else None
        options: RequestOptions = {
            "blend": fields.blend,
            "quality": fields.quality,
            "recompute_ratio": fields.recompute_ratio,
            "selector": fields.selector,
            "documents": fields.documents,
        }
        wanted = make_request(self.settings, "", options)
        if reason := _unplanned(request):
            return Blended(plain=reason)
        try:
            if (ids := await _rendered(request, renderer)) is None:
                return Blended(plain="vLLM refuses the request")
            plan = await asyncio.to_thread(self._plan, ids, wanted.documents)
            if plan is None:
                return Blended(plain="the documents cannot be tokenised apart")
            recipe, reason = await asyncio.to_thread(
                self.library.recipe, plan, wanted.options or self.settings.blending
            )
        except ConfigError:
            raise
        except Exception as error:
            _log.exception("a prompt could not be planned, and is prefilled plainly")
            return Blended(plain=f"planning failed: {error}")
        ticket = f"served-{next(self._tickets)}"
        if plan.cached_segments:  # plain too: for a comparison, the same prompt
            params: dict[str, Any] = {}
            if recipe is not None:
                request.cache_salt = self._engine.turns.salt(namespace, recipe, plan.token_ids)
                params = sealed(recipe.transfer_params(ticket), request.cache_salt, self._seal)
            _set_prompt(request, list(plan.token_ids), params)
        return Blended(plan, recipe, reason, ticket)

    def _namespace(self, salt: str | None) -> str:
        """The tenant's, apart from others' with another salt."""
        own = self.library.identity.namespace
        return f"{own}.{xxhash.xxh3_64_hexdigest(salt.encode())}" if salt else own

    def _plan(self, ids: Sequence[int], documents: Sequence[str]) -> PromptPlan | None:
        """None if its ids would be another text than vLLM's."""
        text = decode(self.library.tokenizer, ids)
        plan = self.library.plan(text, documents)
        return plan if decode(self.library.tokenizer, plan.token_ids) == text else None

    async def evidence(self, about: Blended, answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Counts of tokens, and what became of the documents. answer: vLLM's; empty for a stream's. KV that
        was found damaged is prefilled again."""
        if about.plan is None:
            return {"plain": about.plain}, {}
        found = await self._report(about, answer)
        evidence = evidence_of(about.plan, about.recipe, about.plain, found)
        if evidence.missing:
            await asyncio.to_thread(self._repair, evidence)
        facts = asdict(evidence)
        return {name: facts[name] for name in _COUNTS}, {name: facts[name] for name in _ROWS}

    async def _report(self, about: Blended, answer: dict[str, Any]) -> Delta:
        """What the engine said of the prompt, as embedded engines have it in an answer's last piece."""
        plain = (answer.get("kv_transfer_params") or {}).get(FIELD)
        if about.recipe is not None and plain is None:
            plain = await self._engine.acall("report", about.ticket)
        usage = answer.get("usage") or {}
        prefix = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if about.recipe is not None and plain is None:  # the prefix cache has held all that is cached
            prefix = prefix or about.recipe.cached_end
        return Delta("", [], 0.0, "stop", prefix, BlendReport.from_plain(plain))

    def _repair(self, evidence: Evidence) -> None:
        try:
            self.library.repair(evidence.missing)
        except BlendragError as error:
            _log.warning("KV that was missing could not be prefilled again: %s", error)


def _unplanned(request: Any) -> str | None:
    """Why a request goes to vLLM as it is."""
    if (request.n or 1) != 1 or getattr(request, "use_beam_search", False):
        return "several answers to a prompt are prefilled plainly"
    for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens", "prompt_embeds", "suffix"):
        if getattr(request, name, None) not in (None, False):
            return f"prompts with {name} are prefilled plainly"
    messages = getattr(request, "messages", None)
    if messages is None and not isinstance(request.prompt, str):
        return "prompts of token ids, and several at once, are prefilled plainly"
    if any(_part_kinds(message) - {"text"} for message in messages or ()):
        return "prompts with other than text are prefilled plainly"
    return None


def _part_kinds(message: Any) -> set[str]:
    content = message.get("content") if isinstance(message, dict) else getattr(message, "content", None)
    parts = content if isinstance(content, list) else ()
    return {str(part.get("type", "text")) for part in parts if isinstance(part, dict)}


async def _rendered(request: Any, renderer: Any) -> list[int] | None:
    """The token ids that vLLM makes of the request; None if it refuses it, which it then says itself."""
    copy = request.model_copy(deep=True)
    if hasattr(request, "messages"):
        rendered = await renderer.render_chat(copy)
        prompts = rendered[1] if isinstance(rendered, tuple) else None
    else:
        prompts = await renderer.render_completion(copy)
    if not isinstance(prompts, list) or len(prompts) != 1:
        return None
    return list(prompts[0]["prompt_token_ids"])


def _set_prompt(request: Any, ids: list[int], params: dict[str, Any]) -> None:
    """Have vLLM take these token ids for the request's prompt."""
    if hasattr(request, "messages"):
        params = {**params, "prompt_token_ids": ids}
    else:
        request.prompt = ids
    request.kv_transfer_params = params or None
