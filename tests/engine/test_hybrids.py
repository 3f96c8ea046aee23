"""Exact prefixes of a hybrid model, with the states behind them, on an engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.options import BlendOptions
from blendrag.progress import SILENT
from blendrag.prompt import PromptPlan
from blendrag.serving.evidence import PlannedPrompt
from blendrag.serving.library import Library
from blendrag.serving.prefill import PrefillReport
from blendrag.serving.prefixes import Prefixes
from blendrag.settings import Settings
from drafts import add_mtp
from model_shapes import SHAPES
from stored_trees import tree_tiers
from waiting import until

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly]

STEP = 512  # tokens that a step computes at most: no more than a block of states stands for
SHOWN = Sampling(max_tokens=6, logprobs=20, other={"ignore_eos": True})
WORDS = ("river", "stone", "market", "winter", "engine", "paper", "light", "letter", "bridge", "window")
SYSTEM = "You answer briefly."


# vLLM's CPU build drafts for hybrids without prefix caching only.
DRAFTED = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "enable_prefix_caching": False,
}


@pytest.fixture(
    scope="module",
    params=[
        {},
        DRAFTED,
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.nightly(part="ranks")),
    ],
    ids=["alone", "beside drafts", "two ranks"],
)
def settings(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, request: Any) -> Settings:
    (shape,) = (each for each in SHAPES if each.title == "Qwen 3 Next")
    folder = tmp_path_factory.mktemp("hybrid")
    made = shape.settings(folder, tokenizer)
    if request.param is DRAFTED:
        add_mtp(folder)
    return Settings.load(
        model=made.model,
        max_model_len=2048,
        kv_cache_gib=1,
        system_prompt=SYSTEM,
        engine_args={"max_num_batched_tokens": STEP, **request.param},
        tiers=tree_tiers(disk=1 << 30),
    )


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Iterator[Engine]:
    held = Engine.shared(settings)
    yield held
    held.release()


class Rig:
    """A library of documents, one token a word, of which the first one ends where a step does."""

    def __init__(self, root: Path, settings: Settings, engine: Engine) -> None:
        self.library, self.engine = Library(root, settings), engine
        self.library.start()
        some = " ".join(WORDS)
        self.library.texts.register({"some": [some]})
        before = self.plan(some).spans[0][1]
        lengths = (STEP - before, 200, 1130)
        self.documents = [" ".join(("the", *random.Random(n).choices(WORDS, k=n - 1))) for n in lengths]
        self.library.texts.register({str(n): [text] for n, text in zip(lengths, self.documents, strict=True)})
        assert [length for _, _, length in self.plan(*self.documents).spans] == list(lengths)

    @property
    def prefixes(self) -> Prefixes:
        assert self.library.sidecars.prefixes is not None
        return self.library.sidecars.prefixes

    def plan(self, *documents: str, question: str = "where is the river?") -> PromptPlan:
        user = "\n\n".join((*documents, question))
        return self.library.plan(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}], documents
        )

    def ask(self, plan: PromptPlan, *, exact: bool = True) -> tuple[Delta, PlannedPrompt]:
        """Without what vLLM's prefix cache has."""
        planned = self.library.prepare(plan, BlendOptions(), exact=exact)
        until(self.engine.reset_prefix_cache)
        return self.engine.generate(plan.token_ids, replace(SHOWN, path=planned.path)), planned


@pytest.fixture
def rig(tmp_path: Path, settings: Settings, engine: Engine) -> Iterator[Rig]:
    made = Rig(tmp_path, settings, engine)
    yield made
    made.library.close()


def test_answer_is_to_the_last_digit_that_of_a_prefill_which_is_cut_there(rig: Rig) -> None:
    document = rig.documents[0]
    assert rig.prefixes.grow(rig.plan(document)) == 2
    plan = rig.plan(document, question="who plays music in the garden?")
    full, _ = rig.ask(plan, exact=False)
    found, planned = rig.ask(plan)
    assert found.report is not None and (found.report.prefix, found.report.exact) == (0, STEP)
    assert planned.evidence(found.report, 0).mode == "exact"
    assert (found.token_ids, found.logprobs) == (full.token_ids, full.logprobs)


def test_prompt_that_goes_on_behind_a_state_grows_from_there(rig: Rig) -> None:
    first, second, third = rig.documents
    for documents in ((first,), (first, second), (first, second, third)):
        plan = rig.plan(*documents)
        rig.prefixes.grow(plan)
        found, _ = rig.ask(plan)
        assert found.report is not None and not found.report.fallback
        assert found.report.exact == plan.spans[-1][1] + plan.spans[-1][2]
    rows = [row for row in rig.prefixes.tree.rows() if row.node.end > row.node.start]
    assert [row.node.start for row in rows] == [0, *(row.node.end for row in rows[:-1])]
    other, _ = rig.ask(rig.plan(first, third))
    assert other.report is not None and other.report.exact == STEP, "it parts from them behind the first"


def test_part_that_vllms_own_cache_has_is_not_loaded_again(rig: Rig) -> None:
    if not rig.engine.facts.prefix_caching:
        pytest.skip("vLLM drafts for hybrid models without prefix caching only, on CPUs")
    third = rig.documents[2]
    plan, block = rig.plan(third), rig.engine.facts.block_size
    rig.prefixes.grow(plan)
    full, planned = rig.ask(plan)
    until(rig.engine.reset_prefix_cache)
    rig.engine.generate(plan.token_ids[: block + 9], Sampling(max_tokens=1))
    found = rig.engine.generate(plan.token_ids, replace(SHOWN, path=planned.path))
    assert planned.path is not None and found.report is not None
    assert (found.report.prefix, found.report.exact) == (block, planned.path.held_end - block)
    assert (found.token_ids, found.logprobs) == (full.token_ids, full.logprobs)


def test_damaged_state_gives_full_prefills_answer(rig: Rig, tmp_path: Path) -> None:
    plan = rig.plan(rig.documents[0])
    rig.prefixes.grow(plan)
    full, _ = rig.ask(plan, exact=False)
    nodes = rig.prefixes.tree.path(plan.token_ids, plan.spans)
    (file,) = tmp_path.rglob(f"{rig.prefixes.tree.state(nodes)}.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    found, planned = rig.ask(plan)
    assert planned.path is not None and found.report is not None and "state" not in found.text
    assert found.report.fallback and (found.token_ids, found.logprobs) == (full.token_ids, full.logprobs)
    assert rig.ask(plan)[1].path is None, "its node has nothing to go on from"


def test_documents_are_kept_in_first_place_as_they_are_ingested(rig: Rig) -> None:
    report = PrefillReport()
    rig.library.texts.prefill(report, SILENT)
    assert report.not_blended and report.nbytes
    assert report.chunks == len(rig.documents), "not the one that is too short to be loaded"
    for document in rig.documents:
        found, _ = rig.ask(rig.plan(document))
        assert found.report is not None and found.report.exact == sum(rig.plan(document).spans[0][1:])
    again = PrefillReport()
    rig.library.texts.prefill(again, SILENT)
    assert again.chunks == 0


def test_many_at_once_and_cancelled_ones_leave_nothing_behind(rig: Rig) -> None:
    """Beside growth."""
    plans = [rig.plan(document, question=f"{at} rivers?") for at in (1, 2) for document in rig.documents]
    for plan in plans[:2]:
        rig.prefixes.grow(plan)
    planned = [rig.library.prepare(plan, BlendOptions()) for plan in plans * 2]
    rig.engine.reset_prefix_cache()

    async def ask(one: PlannedPrompt) -> Delta:
        return await rig.engine.agenerate(one.plan.token_ids, replace(SHOWN, path=one.path))

    async def all_of_them() -> list[Delta]:
        return await asyncio.gather(*map(ask, planned))

    answers = asyncio.run(all_of_them())
    assert all(len(answer.token_ids) == 6 for answer in answers)
    assert not any(answer.report and answer.report.fallback for answer in answers)
    pieces = rig.engine.stream(plans[0].token_ids, replace(SHOWN, max_tokens=200, path=planned[0].path))
    next(pieces)
    pieces.close()
    rig.prefixes.growth.wait()
    until(rig.engine.reset_prefix_cache, said="requests that ended still hold blocks")


def test_states_outlive_the_process_of_their_library(rig: Rig, tmp_path: Path, settings: Settings) -> None:
    plan = rig.plan(rig.documents[0])
    rig.prefixes.grow(plan)
    before, _ = rig.ask(plan)
    rig.library.close()
    again = Library(tmp_path, settings)
    again.start()
    planned = again.prepare(plan, BlendOptions())
    rig.engine.reset_prefix_cache()
    found = rig.engine.generate(plan.token_ids, replace(SHOWN, path=planned.path))
    assert found.report is not None and found.report.exact == STEP
    assert (found.token_ids, found.logprobs) == (before.token_ids, before.logprobs)
    again.close()
