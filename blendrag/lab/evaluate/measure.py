"""Measuring: all arms are asked a question before the next one, so that noise is everybody's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import EngineError
from blendrag.lab.arms import TOP, Asked, check_blended, reset
from blendrag.lab.evaluate.arms import ArmSpec, Variant
from blendrag.lab.evaluate.formats import Format, Question
from blendrag.lab.evaluate.samples import AnswerSample, Lost, SampleLog
from blendrag.lab.experiment import in_turn
from blendrag.lab.prompts import PromptMaker
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.lab.statistics import next_token_kl
from blendrag.progress import Progress
from blendrag.prompt import encode_document
from blendrag.settings import Settings
from blendrag.store.contexts import Chunk, Ids

_CONTINUED = 32  # tokens that arms with a budget of KV are compared over


Documents = tuple[tuple[Ids, ...], ...]  # per document its chunks


def cut(tokenizer: Any, question: Question, format: Format, chunk_tokens: int) -> Documents:
    """Return every document's token ids in chunks, the last of them shorter. The user's own documents are cut
    into ``chunk_tokens`` tokens, as an index would cut them, those of public sets as the format says."""
    tokens = chunk_tokens if format.name == "jsonl" else format.cut
    whole = (encode_document(tokenizer, text) for text in question.documents)
    return tuple(
        tuple(ids[at : at + (tokens or len(ids))] for at in range(0, len(ids), tokens or len(ids)))
        for ids in whole
        if ids
    )


def unstored(documents: Documents) -> list[list[Chunk]]:
    """Return the documents' chunks for prompts of which nothing is stored."""
    return [[Chunk("", "", ids) for ids in each] for each in documents]


def stored(store: ScratchStore, documents: Documents, before: Sequence[Ids] = ()) -> list[list[Chunk]]:
    """Return the documents' chunks as they are, or will be, stored."""
    known = before or [()] * len(documents)
    return [store.document(each, ids) for each, ids in zip(documents, known, strict=True)]


@dataclass(frozen=True, slots=True)
class TokenizedQuestion:
    """A question in tokens: its documents in chunks, what stands before each of them, the whole prompt, and
    the answers that are forced."""

    question: Question
    documents: Documents
    before: tuple[Ids, ...]
    token_ids: Ids
    gold: Ids
    choices: dict[str, Ids]

    @property
    def id(self) -> str:
        return self.question.id


@dataclass(frozen=True, slots=True)
class ForcedAnswer:
    """An answer that was forced. each: -log p of every forced token, in nats. logprobs: per token {token id:
    log probability} of the likeliest. report: of the blend."""

    each: list[float]
    logprobs: list[dict[int, float]]
    ttft_ms: float
    report: BlendReport

    @property
    def nll(self) -> float:
        return float(np.mean(self.each))

    @property
    def nll_later(self) -> float | None:
        """The mean of ``each`` from the second token on; None where there is none."""
        return float(np.mean(self.each[1:])) if len(self.each) > 1 else None


async def force(engine: Engine, prompt: Asked, answer: Ids, again: bool = False) -> ForcedAnswer:
    """Measure how likely ``answer`` is. again: whether the prompt has been asked before.

    Raises EngineError if the prompt was not blended though it should be.
    """
    delta = await _generate(engine, prompt, Sampling(forced=answer, logprobs=TOP), again)
    if tuple(delta.token_ids) != answer:
        raise EngineError(f"{prompt.namespace}: the engine did not generate the answer that was forced")
    each = [-at[token] for at, token in zip(delta.logprobs, answer, strict=True)]
    return ForcedAnswer(each, delta.logprobs, 1e3 * delta.ttft_s, delta.report or BlendReport())


async def write(engine: Engine, prompt: Asked, max_tokens: int) -> str:
    """Return the model's own answer, greedily, to a prompt that has been asked before."""
    return (await _generate(engine, prompt, Sampling(max_tokens=max_tokens), again=True)).text


async def go_on(engine: Engine, prompt: Asked, tokens: int) -> Ids:
    """Return the first ``tokens`` that the model itself writes, greedily and beyond its answer's end."""
    endless = Sampling(max_tokens=tokens, other={"ignore_eos": True})
    return tuple((await _generate(engine, prompt, endless, again=True)).token_ids)


async def decide(engine: Engine, prompt: Asked, choices: Mapping[str, Ids]) -> str | None:
    """Return the likeliest of ``choices`` per token, to a prompt that was asked before."""
    forced = await asyncio.gather(*(force(engine, prompt, ids, again=True) for ids in choices.values()))
    return min(zip(choices, forced, strict=True), key=lambda pair: pair[1].nll)[0] if choices else None


async def _generate(engine: Engine, prompt: Asked, sampling: Sampling, again: bool) -> Delta:
    """Generate an answer. again: the prefix cache may have its KV, with nothing to report."""
    delta = await engine.agenerate(prompt.token_ids, sampling, prompt.recipe, prompt.namespace)
    found = again and delta.prefix_tokens and delta.report is None
    if prompt.recipe is not None and not found:
        check_blended(prompt.namespace, delta.report)
    return delta


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
        before = tuple(map(self._encode, question.before))
        return TokenizedQuestion(question, documents, before, prompt.token_ids, gold, choices)

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
                settings = self._settings.model_copy(update=variant._asdict())
                store = self._stores[variant] = exits.enter_context(scratch_store(self._engine, settings))
                for asked in users:
                    store.catalogue.register(asked.id, chain(*stored(store, asked.documents, asked.before)))
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

    def _variants(self, arms: Iterable[ArmSpec]) -> set[Variant]:
        return {arm.variant(self._settings) for arm in arms if arm.kind == "stored"}

    async def _warm_up(self, asked: TokenizedQuestion, arms: Iterable[ArmSpec]) -> None:
        """Warm up: what the first request of its kind takes longer is nothing that arms differ in."""
        measured = (arm for arm in arms if arm.kind in ("full", "stored"))
        kinds = {(arm.kind, arm.variant(self._settings)): arm for arm in measured}
        for arm in kinds.values():
            await force(self._engine, self._prompt(arm, asked), asked.gold)

    async def _ask(self, asked: TokenizedQuestion, arms: Iterable[ArmSpec]) -> list[AnswerSample]:
        """Ask a question: first what is timed, one by one; then all other answers at once."""
        arms = tuple(arms)
        prompts: list[Asked] = []
        forced: list[ForcedAnswer] = []
        for arm in arms:
            prompts.append(self._prompt(arm, asked))
            forced.append(await force(self._engine, prompts[-1], asked.gold))
        self._progress.note("free answers")
        texts = await asyncio.gather(*(write(self._engine, each, self._max_tokens) for each in prompts))
        decided = await asyncio.gather(*(decide(self._engine, each, asked.choices) for each in prompts))
        lost = await self._evicted(asked, arms, prompts)
        return [
            AnswerSample(
                question=asked.id,
                arm=prompt.namespace,
                nll=own.nll,
                logprobs=own.logprobs,
                text=text,
                decision=decision,
                ttft_ms=own.ttft_ms,
                cached=own.report.cached,
                recomputed=own.report.recomputed,
                split_ms=own.report.ms,
                nll_later=own.nll_later,
                evicted=lost.get(prompt.namespace),
            )
            for prompt, own, text, decision in zip(prompts, forced, texts, decided, strict=True)
        ]

    async def _evicted(
        self, asked: TokenizedQuestion, arms: Sequence[ArmSpec], prompts: Sequence[Asked]
    ) -> dict[str, Lost]:
        """Return by name what the arms with a budget of KV lose behind the first token."""
        found: dict[str, Lost] = {}
        budgeted = [pair for pair in zip(arms, prompts, strict=True) if pair[0].budget is not None]
        for whole in dict.fromkeys(arm.whole for arm, _ in budgeted):
            own = [pair for pair in budgeted if pair[0].whole == whole]
            base = self._prompt(whole, asked)
            ids = await go_on(self._engine, base, _CONTINUED)
            reference = (await force(self._engine, base, ids, again=True)).logprobs[1:]
            for arm, prompt in own:
                forced = await force(self._engine, prompt, ids, again=True)
                pairs = zip(reference, forced.logprobs[1:], strict=True)
                kl = float(np.mean([next_token_kl(there, here) for there, here in pairs]))
                found[arm.name] = Lost(kl, forced.report.kv_kept)
        return found

    def _prompt(self, arm: ArmSpec, asked: TokenizedQuestion) -> Asked:
        """Return a prompt as the arm asks it. Arms are apart in the prefix cache; an arm's later requests
        find its own KV there, blended as it is, up to the last block."""
        match arm.kind:
            case "full":
                return Asked(asked.token_ids, namespace=arm.name)
            case "reordered":
                other = unstored(tuple(sorted(asked.documents)))
                ids = self._maker.make_of(other, asked.question.text).token_ids
                return Asked(ids, namespace=arm.name)
        store = self._stores[arm.variant(self._settings)]
        prompt = self._maker.make_of(stored(store, asked.documents, asked.before), asked.question.text)
        return Asked(prompt.token_ids, arm.recipe(self._settings, store.id, prompt.spans), arm.name)

    def _encode(self, text: str) -> Ids:
        return encode_document(self._tokenizer, text)
