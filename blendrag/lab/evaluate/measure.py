"""Every row asked by all its arms, before the next row: what disturbs the machine disturbs all arms."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blendrag.engine.client.engine import Engine
from blendrag.lab.arms import reset
from blendrag.lab.evaluate.arms import ArmSpec, Variant
from blendrag.lab.evaluate.asking import Forced, Ids, Request, decide, force, write
from blendrag.lab.evaluate.chunks import ChunkStore, Documents, chunk_store, cut, unstored
from blendrag.lab.evaluate.formats import Format
from blendrag.lab.evaluate.map_arms import MapArms
from blendrag.lab.evaluate.rows import Row
from blendrag.lab.evaluate.samples import Sample
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import PromptMaker
from blendrag.prompt import encode_document
from blendrag.settings import Settings


class Kept(Protocol):
    """Where samples go, and those that are there already."""

    samples: list[Sample]

    def append(self, sample: Sample) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row in tokens: its documents in chunks, the whole prompt, and the answers that are forced."""

    row: Row
    documents: Documents
    token_ids: Ids
    gold: Ids
    choices: dict[str, Ids]


class Measuring:
    """All that is asked on a running engine. max_tokens: of a free answer."""

    def __init__(self, engine: Engine, settings: Settings, max_tokens: int, progress: BenchProgress) -> None:
        from transformers import AutoTokenizer

        self._engine, self._settings, self._progress = engine, settings, progress
        self._max_tokens = max_tokens
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
        system, separator = settings.system_prompt, settings.separator
        self._maker = PromptMaker(self._tokenizer, system_prompt=system, separator=separator)
        self._maps = MapArms(
            engine, self._tokenizer, system=system, separator=separator, max_tokens=max_tokens
        )
        self._stores: dict[Variant, ChunkStore] = {}

    def prepare(self, row: Row, format: Format) -> Prepared:
        documents = cut(self._tokenizer, row, format, self._settings.chunk_tokens)
        prompt = self._maker.make_of(unstored(documents), row.question)
        choices = {choice: self._encode(choice) for choice in row.choices}
        return Prepared(row, documents, prompt.token_ids, self._encode(row.answers[0]), choices)

    def fits(self, asked: Prepared) -> bool:
        """Whether the prompt and any of its answers fit the model's window."""
        longest = max(self._max_tokens, len(asked.gold), *map(len, asked.choices.values()))
        return len(asked.token_ids) + longest <= self._engine.max_model_len

    def run(self, rows: Sequence[Prepared], arms: Sequence[ArmSpec], kept: Kept) -> None:
        """Ask what has not been asked yet; a row's samples are kept as soon as it has all of them."""
        done = {(sample.row, sample.arm) for sample in kept.samples}
        open_arms = [[arm for arm in arms if (asked.row.id, arm.name) not in done] for asked in rows]
        todo = [(asked, own) for asked, own in zip(rows, open_arms, strict=True) if own]
        self._progress.total(sum(len(own) for _, own in todo))
        with contextlib.ExitStack() as exits:
            for variant in {variant for _, own in todo for variant in self._variants(own)}:
                users = [(one.row, one.documents) for one, own in todo if variant in self._variants(own)]
                self._stores[variant] = exits.enter_context(self._store(variant, users))
            for number, (asked, own) in enumerate(todo):
                where = f"row {number + 1} of {len(todo)}"
                self._progress.note(f"{where}: ingest")
                stores = [self._stores[variant] for variant in self._variants(own)]
                for store in stores:
                    store.fill(asked.documents)
                if number == 0:
                    asyncio.run(self._warm_up(asked, own))
                reset(self._engine)
                shift = number % len(own)
                for sample in asyncio.run(self._ask(asked, [*own[shift:], *own[:shift]], where)):
                    kept.append(sample)
                for store in stores:
                    store.release(asked.row)

    def _store(
        self, variant: Variant, users: Sequence[tuple[Row, Documents]]
    ) -> contextlib.AbstractContextManager[ChunkStore]:
        codec, shared = variant
        own = self._settings.model_copy(update={"codec": codec, "shared_prefix": shared})
        return chunk_store(self._engine, own, self._tokenizer, users)

    def _variants(self, arms: Sequence[ArmSpec]) -> set[Variant]:
        return {arm.variant(self._settings) for arm in arms if arm.kind == "stored"}

    async def _warm_up(self, asked: Prepared, arms: Sequence[ArmSpec]) -> None:
        """What the first request of its kind takes longer is nothing that arms differ in."""
        measured = (arm for arm in arms if arm.kind in ("full", "stored"))
        kinds = {(arm.kind, arm.variant(self._settings)): arm for arm in measured}
        for arm in kinds.values():
            await force(self._engine, await self._request(arm, asked), asked.gold)

    async def _ask(self, asked: Prepared, arms: Sequence[ArmSpec], where: str) -> list[Sample]:
        """First the requests whose time is taken, one by one; then all others at once."""
        requests: list[Request] = []
        forced: list[Forced] = []
        for arm in arms:
            self._progress.note(f"{where}: {arm.name}")
            requests.append(await self._request(arm, asked))
            forced.append(await force(self._engine, requests[-1], asked.gold))
            self._progress.step()
        self._progress.note(f"{where}: free answers")
        texts = await asyncio.gather(*(write(self._engine, each, self._max_tokens) for each in requests))
        decided = await asyncio.gather(*(decide(self._engine, each, asked.choices) for each in requests))
        return [
            Sample(
                row=asked.row.id,
                arm=request.arm,
                nll=own.nll,
                gold_tokens=own.tokens,
                first_token=own.first_token,
                logprobs=own.logprobs,
                text=text,
                decision=decision,
                ttft_ms=own.ttft_ms,
                cached=own.report.cached,
                recomputed=own.report.recomputed,
                split_ms=own.report.ms,
            )
            for request, own, text, decision in zip(requests, forced, texts, decided, strict=True)
        ]

    async def _request(self, arm: ArmSpec, asked: Prepared) -> Request:
        match arm.kind:
            case "full":
                return Request(arm.name, asked.token_ids)
            case "map_reduce":
                return await self._maps.map_reduce(asked.documents, asked.row.question)
            case "map_rerank":
                return await self._maps.map_rerank(asked.documents, asked.row.question)
        store = self._stores[arm.variant(self._settings)]
        prompt = self._maker.make_of(store.chunks(asked.documents), asked.row.question)
        return Request(arm.name, prompt.token_ids, arm.recipe(self._settings, store.id, prompt.spans))

    def _encode(self, text: str) -> Ids:
        return encode_document(self._tokenizer, text)
