"""Measure what a tree saves for questions that come again, alone and beside blending (RAGCache 7)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace

from rich.table import Table

from blendrag.engine.client.engine import Engine
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import ConfigError
from blendrag.eviction import make_policy
from blendrag.lab.arms import Asked, recipe_of, reset
from blendrag.lab.bench.open_loop import (
    Alone,
    LoadArm,
    Loaded,
    OpenLoop,
    Run,
    arrival_times,
    load_tables,
    slowest,
)
from blendrag.lab.bench.timed import Timed
from blendrag.lab.bootstrap import Interval, ratio
from blendrag.lab.eviction.replay import replay
from blendrag.lab.eviction.trace import Request, RequestTrace
from blendrag.lab.options import TreeOptions
from blendrag.lab.prompts import Prompt, PromptMaker, check_prompts
from blendrag.lab.questions import (
    RetrievedQuestion,
    embedded,
    question_stream,
    read_azure,
    read_questions,
    retrieved,
)
from blendrag.lab.results import Setup, where
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, ram_of, scratch_store, scratch_tree
from blendrag.progress import Progress
from blendrag.prompt import PromptPlan, encode_document
from blendrag.prompt.plan import Segment
from blendrag.serving.prefixes import Prefixes
from blendrag.settings import PREFIX_CACHING, Settings
from blendrag.store.stack import TierSpec
from blendrag.tables import table_with
from blendrag.tree import Nodes, path_of

BLOCK = 128  # tokens: what vLLM has on a CPU
# Lowest rate, as a share of what full prefill answers without load; factor to the next rate.
_LEAST, _STEP = 0.6, 1.6
_BLOCKS = 2  # blocks of questions one after another: each arm has one turn in each

AGAINST = {"tree": "prefix", "unmixed": "blended", "both": "blended"}
MakePrompt = Callable[[RetrievedQuestion], Prompt]
_OWN_TREE = ("tree", "unmixed", "both")


@dataclass(frozen=True, slots=True)
class Compared:
    """An arm's mean TTFT by another's, question by question. rate: None one after another."""

    arm: str
    against: str
    rate: float | None
    ttft: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeResults(Loaded[TreeOptions]):
    """Results of ``bench tree``. documents: how many, and their tokens."""

    compared: list[Compared]
    documents: tuple[int, int]

    def parts(self) -> Iterator[Table | str]:
        """Yield what arms took for a first token, did at each rate and sustain, and how they compare."""
        setup, options = self.setup, self.setup.options
        prompt = sum(setup.prompt_tokens) / len(setup.prompt_tokens)
        found = table_with("arm", "rate/s", "requests", "not computed", "of it exact")
        for name, arm in self.arms.items():
            for run in arm.runs:
                exact = "" if name == "full" else f"{run.exact_tokens / prompt:.0%}"
                reused = f"{run.reused_tokens / prompt:.0%}"
                found.add_row(name, f"{run.rate:.2f}", f"{run.requests}", reused, exact)
        compared = table_with("mean TTFT", "rate/s", "ratio", "95 %")
        for one in self.compared:
            rate = "alone" if one.rate is None else f"{one.rate:.2f}"
            range_ = f"{one.ttft.low:.2f}-{one.ttft.high:.2f}"
            compared.add_row(f"{one.arm} / {one.against}", rate, f"{one.ttft.mean:.2f}x", range_)
        yield from (*load_tables(self.arms, self.bound_ms), found, compared)
        count, tokens = self.documents
        drawn = "each once" if options.zipf is None else f"drawn with popularity rank**-{options.zipf:g}"
        yield (
            f"Sustained: the most answers a second while p95 of TTFT is {self.bound_ms:,.0f} ms at most"
            " (> marks more; such an arm is asked at no higher rate). TTFT: from when a request was due."
            f" alone: {options.alone} requests one after another. Questions of {options.data.name}, {drawn},"
            f" with {options.top_k} of {count} documents ({tokens:,} tokens): {setup.prompt_tokens[0]:,} to"
            f" {setup.prompt_tokens[-1]:,} tokens, answers of {options.max_tokens}. vLLM's prefix cache has"
            f" room for {options.pool:,} tokens, a tree for {options.tree:,}. {where(setup.machine)}."
        )


def run_tree(settings: Settings, options: TreeOptions, progress: Progress) -> TreeResults:
    """Measure all arms. They have the same small prefix cache of vLLM's, are asked the same questions, at one
    rate at the same times, and begin as the earlier questions would have left them.

    Raises ConfigError, SourceError, ModelError, PromptTooLongError, StoreError, EngineError.
    """
    progress.note(f"reading {options.data}")
    recorded = read_azure(options.arrivals) if options.arrivals else None
    questions = read_questions(options.data, options.articles)
    if len(questions.paragraphs) < options.top_k:
        raise ConfigError(
            f"--top-k {options.top_k}: {options.data} has {len(questions.paragraphs)} paragraphs there"
        )
    corpus = embedded(questions, settings.embedder)
    texts = itertools.chain.from_iterable(questions.asked)
    found = retrieved(corpus, options.top_k).tolist()
    asked = [RetrievedQuestion(text, tuple(own)) for text, own in zip(texts, found, strict=True)]
    each = 2 * options.requests  # more than any rate's arrivals
    count = options.alone + options.tries * each
    earlier = options.earlier if options.zipf is not None else len(asked) - count
    stream = question_stream(asked, corpus.article, max(0, earlier) + count, options.zipf, options.seed)
    with blending_engine(_small_pool(settings, options.pool), progress) as engine, ExitStack() as exits:
        maker = PromptMaker.of(engine, settings)
        ids = [
            tuple(encode_document(maker.tokenizer, text)[: options.chunk_tokens])
            for text in questions.paragraphs
        ]
        progress.note("ingest")
        store = exits.enter_context(scratch_store(engine, settings, tier=TierSpec(kind="ram")))
        chunks = [store.document([own])[0] for own in ids]
        store.catalogue.register("documents", chunks)
        store.fill(chunks)

        def make(question: RetrievedQuestion) -> Prompt:
            return maker.make([chunks[number] for number in question.documents], question.text)

        check_prompts(map(make, stream[:200]), engine.max_model_len, options.max_tokens)
        trees = {
            arm: exits.enter_context(_tree(engine, settings, store, options.tree))
            for arm in options.arms
            if arm in _OWN_TREE
        }
        progress.note("earlier questions")
        recipe = recipe_of(settings, store.id)
        first = len(stream) - count
        _leave(stream[:first], make, trees, options.tree, ram_of(settings).policy, recipe)
        load = _TreeLoad(
            engine, progress, options.max_tokens, make, trees, recipe, stream, first, recorded, options
        )
        arms, bound_ms = asyncio.run(load.measure(options.arms, _BLOCKS, options.tries, past=False))
        return TreeResults(
            arms=arms,
            bound_ms=bound_ms,
            compared=list(_compare(arms)),
            documents=(len(chunks), sum(len(chunk.token_ids) for chunk in chunks)),
            setup=Setup.of(engine, settings, options, map(make, stream[first:])),
        )


def _small_pool(settings: Settings, tokens: int) -> Settings:
    """Return settings with a prefix cache of so many tokens: vLLM keeps one block for itself."""
    blocks = {"block_size": BLOCK, "num_gpu_blocks_override": tokens // BLOCK + 1}
    window = min(settings.max_model_len or tokens, tokens // BLOCK * BLOCK)
    return settings.model_copy(
        update={"engine_args": settings.engine_args | blocks | PREFIX_CACHING, "max_model_len": window}
    )


def plan_of(prompt: Prompt) -> PromptPlan:
    """Return the plan of a prompt, as serving has it."""
    segments, at = [], 0
    for key, start, length in prompt.spans:
        segments.append(Segment("", prompt.token_ids[at:start]))
        segments.append(Segment("", prompt.token_ids[start : start + length], key))
        at = start + length
    segments.append(Segment("", prompt.token_ids[at:]))
    return PromptPlan(tuple(segment for segment in segments if segment.token_ids))


# -- what earlier questions leave -------------------------------------------------------------------------


@contextmanager
def _tree(engine: Engine, settings: Settings, store: ScratchStore, tokens: int) -> Iterator[Prefixes]:
    with scratch_tree(engine, settings, tokens // engine.facts.block_size) as scratch:
        prefixes = Prefixes(scratch.tree, scratch.client, store.catalogue, sliced=True)
        with closing(prefixes.growth):
            yield prefixes


def held_nodes(paths: Iterable[Nodes], tokens: int, policy: str, block: int) -> set[str]:
    """Return the keys of the nodes that a tree of so many tokens holds after prompts with these paths: a node
    takes whole blocks."""
    requests = [
        Request(
            float(at),
            tuple(node.key for node in nodes),
            tuple(block * (-(-node.end // block) - node.start // block) for node in nodes),
        )
        for at, nodes in enumerate(paths)
    ]
    trace = RequestTrace("earlier", requests, prefix=True, unit="tokens", tree=True)
    return replay(trace, make_policy(policy), tokens).held


def _leave(
    earlier: Sequence[RetrievedQuestion],
    make: MakePrompt,
    trees: Mapping[str, Prefixes],
    tokens: int,
    policy: str,
    recipe: Recipe,
) -> None:
    """Have the trees hold what they would after these questions, which are replayed, not asked."""
    if not trees:
        return
    some = next(iter(trees.values()))
    made = {question.documents: make(question) for question in earlier}
    paths = {
        documents: path_of(some.tree.identity, prompt.token_ids, prompt.spans)
        for documents, prompt in made.items()
    }
    block = some.client.engine.facts.block_size
    held = held_nodes((paths[question.documents] for question in earlier), tokens, policy, block)
    grown: set[str] = set()
    for documents, prompt in made.items():
        nodes = [node for node in paths[documents] if node.key in held]
        if nodes and nodes[-1].key not in grown:
            grown.update(node.key for node in nodes)
            spans = tuple(span for span in prompt.spans if span[1] < nodes[-1].end)
            plan = plan_of(Prompt(prompt.token_ids[: nodes[-1].end], spans))
            for prefixes in trees.values():  # the second finds in vLLM's prefix cache what the first computed
                prefixes.grow(plan)
    for question in earlier:
        for prefixes in trees.values():
            prefixes.path(plan_of(made[question.documents]), recipe)  # it has been seen
    for prefixes in trees.values():
        prefixes.growth.finish()


# -- the runs ---------------------------------------------------------------------------------------------


@dataclass
class _TreeLoad(OpenLoop[RetrievedQuestion]):
    """The loop over questions. first: number of the first one: those before were earlier."""

    make: MakePrompt
    trees: Mapping[str, Prefixes]
    recipe: Recipe
    stream: Sequence[RetrievedQuestion]
    first: int
    recorded: Sequence[float] | None
    options: TreeOptions
    full: Iterator[int] = field(default_factory=itertools.count)

    def asked(self, arm: str, question: RetrievedQuestion) -> Asked:
        """Return how a prompt is asked; with exact prefixes, as serving decides."""
        prompt = self.make(question)
        recipe = replace(self.recipe, spans=prompt.spans) if arm in ("blended", "unmixed", "both") else None
        if arm not in self.trees:
            return Asked(prompt.token_ids, recipe, f"alone-{next(self.full)}" if arm == "full" else "")
        prefixes = self.trees[arm]
        path, recipe = prefixes.path(plan_of(prompt), recipe)
        if recipe is not None and arm == "unmixed":
            recipe = replace(recipe, tree="", head=())
        return Asked(prompt.token_ids, recipe, prefixes.tree.identity.namespace, path)

    async def one_by_one(self, arm: str, block: int) -> list[Timed]:
        """Ask questions one by one, with time to grow in between."""
        count = self.options.alone // _BLOCKS
        first = self.first + block * count
        await self._prepare(arm, first)
        found = []
        for question in self.stream[first : first + count]:
            found.append(await self.ask(arm, question))
            if arm in self.trees:
                await asyncio.to_thread(self.trees[arm].growth.wait)
        return found

    async def at_rate(self, arm: str, number: int, alone: Mapping[str, Alone], bound_ms: float) -> Run:
        options = self.options
        rate = _LEAST * _STEP**number * 1e3 / slowest(alone).total_ms
        seconds = options.requests / rate
        times = arrival_times(rate, seconds, options.seed, self.recorded)
        first = self.first + options.alone + number * 2 * options.requests
        await self._prepare(arm, first)
        run = await self.send(arm, rate, self.stream[first:], times, seconds, bound_ms)
        if arm in self.trees:  # or it would grow beside another arm
            await asyncio.to_thread(self.trees[arm].growth.finish)
        return run

    async def _prepare(self, arm: str, first: int) -> None:
        """Leave vLLM's prefix cache as earlier questions would have left it, where an arm goes by it."""
        reset(self.engine)
        room = self.options.pool // self.options.chunk_tokens  # documents
        before = -(-room // self.options.top_k) if arm == "prefix" else 1
        for question in self.stream[max(0, first - before) : first]:
            await self.ask(arm, question)


def _compare(arms: Mapping[str, LoadArm]) -> Iterator[Compared]:
    for arm, other in AGAINST.items():
        if arm in arms and other in arms:
            one, against = arms[arm], arms[other]
            yield Compared(arm, other, None, ratio(one.alone.each_ms, against.alone.each_ms))
            for run, beside in zip(one.runs, against.runs, strict=False):
                if len(run.each_ms) == len(beside.each_ms):
                    yield Compared(arm, other, run.rate, ratio(run.each_ms, beside.each_ms))
