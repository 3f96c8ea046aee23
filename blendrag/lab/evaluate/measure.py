"""Measuring: every question is asked by all its arms, before the next one: what disturbs the machine disturbs
all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np

from blendrag.engine.client.engine import Engine
from blendrag.lab.arms import reset
from blendrag.lab.evaluate.arms import ArmSpec, Variant
from blendrag.lab.evaluate.asking import ArmPrompt, ForcedAnswer, decide, force, go_on, write
from blendrag.lab.evaluate.chunks import Documents, before, cut, stored, unstored
from blendrag.lab.evaluate.formats import Format, Question
from blendrag.lab.evaluate.samples import AnswerSample, Lost, SampleLog
from blendrag.lab.experiment import in_turn
from blendrag.lab.prompts import PromptMaker
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.lab.statistics import next_token_kl
from blendrag.progress import Progress
from blendrag.prompt import encode_document
from blendrag.settings import Settings
from blendrag.store.contexts import Ids

_CONTINUED = 32  # tokens that arms with a budget of KV are compared over


@dataclass(frozen=True, slots=True)
class TokenizedQuestion:
    """A question in tokens: its documents in chunks, the whole prompt, and the answers that are forced."""

    question: Question
    documents: Documents
    before: tuple[Ids, ...]
    token_ids: Ids
    gold: Ids
    choices: dict[str, Ids]

    @property
    def id(self) -> str:
        return self.question.id


class Measuring:
    """The measuring of all questions on a running engine. max_tokens: of a free answer."""

    def __init__(self, engine: Engine, settings: Settings, max_tokens: int, progress: Progress) -> None:
        self._engine, self._settings, self._progress = engine, settings, progress
        self._max_tokens = max_tokens
        self._maker = PromptMaker.of(engine, settings)
        self._tokenizer = self._maker.tokenizer
        self._stores: dict[Variant, ScratchStore] = {}

    def tokenize(self, question: Question, format: Format) -> TokenizedQuestion:
        documents = cut(self._tokenizer, question, format, self._settings.chunk_tokens)
        prompt = self._maker.make_of(unstored(documents), question.text)
        choices = {choice: self._encode(choice) for choice in question.choices}
        gold = self._encode(question.answers[0])
        known = before(self._tokenizer, question)
        return TokenizedQuestion(question, documents, known, prompt.token_ids, gold, choices)

    def fits(self, asked: TokenizedQuestion) -> bool:
        """Return whether the prompt and any of its answers fit the model's window."""
        longest = max(self._max_tokens, _CONTINUED, len(asked.gold), *map(len, asked.choices.values()))
        return len(asked.token_ids) + longest <= self._engine.max_model_len

    def run(self, questions: Sequence[TokenizedQuestion], arms: Sequence[ArmSpec], log: SampleLog) -> None:
        """Ask what has not been asked yet; a question's samples are kept as soon as it has all of them."""
        done = {(sample.question, sample.arm) for sample in log.samples}
        left = {one.id: [arm for arm in arms if (one.id, arm.name) not in done] for one in questions}
        variants = {id: self._variants(own) for id, own in left.items()}
        turns = in_turn(
            {arm.name: arm for arm in arms},
            questions,
            self._progress,
            warm_up=0,
            done=lambda asked, name: (asked.id, name) in done,
        )
        with contextlib.ExitStack() as exits:
            for variant in set[Variant]().union(*variants.values()):
                users = [asked for asked in questions if variant in variants[asked.id]]
                store = self._stores[variant] = exits.enter_context(self._store(variant))
                for asked in users:
                    store.register(asked.id, chain(*stored(store, asked.documents, asked.before)))
            for number, (asked, own) in enumerate(groupby(turns, key=lambda turn: turn.trial)):
                stores = [self._stores[variant] for variant in variants[asked.id]]
                for store in stores:
                    store.fill(chain(*stored(store, asked.documents, asked.before)))
                if number == 0:
                    asyncio.run(self._warm_up(asked, left[asked.id]))
                reset(self._engine)
                for sample in asyncio.run(self._ask(asked, (turn.arm for turn in own))):
                    log.append(sample)
                for store in stores:
                    store.release(asked.id)  # long documents would fill the disk

    def _store(self, variant: Variant) -> contextlib.AbstractContextManager[ScratchStore]:
        codec, shared, context = variant
        update = {"codec": codec, "shared_prefix": shared, "context_tokens": context}
        own = self._settings.model_copy(update=update)
        return scratch_store(self._engine, own)

    def _variants(self, arms: Iterable[ArmSpec]) -> set[Variant]:
        return {arm.variant(self._settings) for arm in arms if arm.kind == "stored"}

    async def _warm_up(self, asked: TokenizedQuestion, arms: Iterable[ArmSpec]) -> None:
        """Warm up: what the first request of its kind takes longer is nothing that arms differ in."""
        measured = (arm for arm in arms if arm.kind in ("full", "stored"))
        kinds = {(arm.kind, arm.variant(self._settings)): arm for arm in measured}
        for arm in kinds.values():
            await force(self._engine, await self._prompt(arm, asked), asked.gold)

    async def _ask(self, asked: TokenizedQuestion, arms: Iterable[ArmSpec]) -> list[AnswerSample]:
        """Ask a question: first the prompts whose time is taken, one by one; then all other answers at
        once."""
        arms = tuple(arms)
        prompts: list[ArmPrompt] = []
        forced: list[ForcedAnswer] = []
        for arm in arms:
            prompts.append(await self._prompt(arm, asked))
            forced.append(await force(self._engine, prompts[-1], asked.gold))
        self._progress.note("free answers")
        texts = await asyncio.gather(*(write(self._engine, each, self._max_tokens) for each in prompts))
        decided = await asyncio.gather(*(decide(self._engine, each, asked.choices) for each in prompts))
        lost = await self._evicted(asked, arms, prompts)
        return [
            AnswerSample(
                question=asked.id,
                arm=prompt.arm,
                nll=own.nll,
                logprobs=own.logprobs,
                text=text,
                decision=decision,
                ttft_ms=own.ttft_ms,
                cached=own.report.cached,
                recomputed=own.report.recomputed,
                split_ms=own.report.ms,
                nll_later=own.nll_later,
                evicted=lost.get(prompt.arm),
            )
            for prompt, own, text, decision in zip(prompts, forced, texts, decided, strict=True)
        ]

    async def _evicted(
        self, asked: TokenizedQuestion, arms: Sequence[ArmSpec], prompts: Sequence[ArmPrompt]
    ) -> dict[str, Lost]:
        """Return by name what the arms with a budget of KV lose behind the first token."""
        found: dict[str, Lost] = {}
        budgeted = [pair for pair in zip(arms, prompts, strict=True) if pair[0].budget is not None]
        for whole in dict.fromkeys(arm.whole for arm, _ in budgeted):
            own = [pair for pair in budgeted if pair[0].whole == whole]
            base = await self._prompt(whole, asked)
            ids = await go_on(self._engine, base, _CONTINUED)
            reference = (await force(self._engine, base, ids, again=True)).logprobs[1:]
            for arm, prompt in own:
                forced = await force(self._engine, prompt, ids, again=True)
                pairs = zip(reference, forced.logprobs[1:], strict=True)
                kl = float(np.mean([next_token_kl(there, here) for there, here in pairs]))
                found[arm.name] = Lost(kl, forced.report.kv_kept)
        return found

    async def _prompt(self, arm: ArmSpec, asked: TokenizedQuestion) -> ArmPrompt:
        match arm.kind:
            case "full":
                return ArmPrompt(arm.name, asked.token_ids)
            case "reordered":
                other = unstored(tuple(sorted(asked.documents)))
                return ArmPrompt(arm.name, self._maker.make_of(other, asked.question.text).token_ids)
        store = self._stores[arm.variant(self._settings)]
        prompt = self._maker.make_of(stored(store, asked.documents, asked.before), asked.question.text)
        return ArmPrompt(arm.name, prompt.token_ids, arm.recipe(self._settings, store.id, prompt.spans))

    def _encode(self, text: str) -> Ids:
        return encode_document(self._tokenizer, text)
