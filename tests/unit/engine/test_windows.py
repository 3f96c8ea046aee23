"""Layers of whose KV vLLM keeps only the last window: what is blended is what it would be with all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from blendrag.control.guard import LoadGuard
from blendrag.engine.blend.blending import Choices
from blendrag.engine.compat.groups import LayerGroup
from blendrag.engine.compat.model import cache_of
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.wire.report import BlendReport
from blendrag.options import BlendOptions
from blendrag.store.tiers import Tier
from chunked_prompt import ChunkedPrompt
from connector_halves import needs_groups
from small_decoder import BLOCKS, WINDOW, small_model

pytestmark = needs_groups

BLOCK = 32
TABLES = [[7, 3, 12, 15, 9, 30, 1, 5], [2, 4, 6, 8, 10, 11, 13, 14]]  # a request's blocks, by group
LAYERS = (True, False, True, True, False)  # whether they have windows
GARBAGE = 5e3  # no NaN: a kernel multiplies what is behind the last token by 0
SELECTORS = ["query", "query:shift=no", "hkvd:check_layers=1+3", "gradual", "none", "all", "random"]


def behind(length: int) -> int:
    """How many blocks vLLM has given up."""
    return (length + 1 - WINDOW) // BLOCK


class Rig:
    """A model of each kind of layer, or with windows in all of them."""

    def __init__(self, root: Path, model: LoadedModel, windowed: Sequence[bool]) -> None:
        self.root, self.model, self.windowed = root, model, windowed
        self.prompt = ChunkedPrompt(len(windowed))
        assert [bool(group.window) for group in model.cache.groups] == list(dict.fromkeys(windowed))
        self.tables = TABLES[: len(self.model.cache.groups)]
        self.blends = 0

    @property
    def given_up(self) -> list[list[int]]:
        """The request's blocks as vLLM has them: of its windows, the last."""
        gone = behind(len(self.prompt.ids))
        assert gone > 3, "several windows long"
        pairs = zip(self.tables, self.model.cache.groups, strict=True)
        return [[0] * gone + ids[gone:] if group.window else ids for ids, group in pairs]

    def blend(
        self, tables: Sequence[list[int]], options: BlendOptions, written: int = 0, idle: bool = True,
        choices: Choices | None = None, guard: LoadGuard | None = None,
    ) -> BlendReport:  # fmt: skip
        self.blends += 1
        root = self.root / str(self.blends)
        return self.prompt.blend(self.model, root, options, written, choices, idle, tables, guard)

    def pages(self, tables: Sequence[list[int]]) -> Iterator[torch.Tensor]:
        """What the engine has in its blocks, of each layer."""
        for attention, group in zip(self.model.cache.attentions, self.model.cache.group, strict=True):
            yield cache_of(attention)[[block for block in tables[group] if block]].clone()

    def empty(self) -> None:
        for attention in self.model.cache.attentions:
            cache_of(attention).fill_(GARBAGE)


@pytest.fixture(scope="module", params=[LAYERS, (True,) * 3], ids=["some", "all"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, Sequence[bool]]:
    folder, windowed = tmp_path_factory.mktemp("model"), request.param
    return small_model(folder, len(windowed), block_size=BLOCK, windowed=windowed), windowed


@pytest.fixture
def rig(model: tuple[LoadedModel, Sequence[bool]], tmp_path: Path) -> Rig:
    return Rig(tmp_path, *model)


@pytest.mark.parametrize("idle", [True, False], ids=["whole", "in pieces"])
@pytest.mark.parametrize("selector", SELECTORS)
@torch.inference_mode()
def test_last_window_has_the_kv_of_a_blend_with_all_blocks(rig: Rig, selector: str, idle: bool) -> None:
    options = BlendOptions(0.3, selector)
    rig.empty()
    whole = rig.blend(rig.tables, options, idle=idle)
    expected = list(rig.pages(rig.given_up))
    rig.empty()
    report = rig.blend(rig.given_up, options, idle=idle)
    assert (report.cached, report.fresh, report.recomputed) == (whole.cached, whole.fresh, whole.recomputed)
    assert report.computed_at == whole.computed_at
    to_the_bit = {"rtol": 0.0, "atol": 0.0} if idle else {}  # else the clock says what a piece is
    for found, wanted in zip(rig.pages(rig.given_up), expected, strict=True):
        torch.testing.assert_close(found, wanted, **to_the_bit)


@pytest.mark.parametrize("selector", ["query", "none"])
@torch.inference_mode()
def test_nobodys_blocks_are_written(rig: Rig, selector: str) -> None:
    rig.empty()
    rig.blend(rig.given_up, BlendOptions(0.3, selector))
    for attention, group in zip(rig.model.cache.attentions, rig.model.cache.group, strict=True):
        others = sorted(set(range(BLOCKS)) - {block for block in rig.given_up[group] if block})
        assert cache_of(attention)[others].eq(GARBAGE).all()


class Asked(LoadGuard):
    """A guard that keeps what it is asked."""

    def refuses(self, loads: Mapping[Tier, int], tokens: int) -> str | None:
        self.read = sum(loads.values())
        return super().refuses(loads, tokens)


@torch.inference_mode()
def test_guard_is_told_that_layers_with_windows_are_loaded_twice_where_the_question_is_read(rig: Rig) -> None:
    tokens, share = (
        sum(len(chunk.token_ids) for chunk in rig.prompt.chunks),
        sum(rig.windowed) / len(rig.windowed),
    )
    guard, query = Asked(), BlendOptions(0.3, "query")
    for tables, options, reads in [
        (rig.given_up, query, 1 + share),
        (rig.given_up, BlendOptions(0.3, "none"), 1),
        (rig.tables, query, 1),
    ]:
        rig.blend(tables, options, guard=guard)
        assert guard.read == pytest.approx(reads * tokens, abs=len(rig.prompt.chunks))


@pytest.mark.parametrize("written", [BLOCK, 4 * BLOCK, 7 * BLOCK])
@pytest.mark.parametrize("selector", ["query", "none", "all"])
@torch.inference_mode()
def test_rest_behind_a_hit_is_blended_to_what_it_was(rig: Rig, selector: str, written: int) -> None:
    """Though what rows behind the hit read in layers with windows is gone, which garbage stands for."""
    options, choices = BlendOptions(0.3, selector), Choices()
    rig.empty()
    rig.blend(rig.given_up, options, choices=choices)
    whole = list(rig.pages(rig.given_up))
    lost = [[0] * (written // BLOCK) + ids[written // BLOCK :] for ids in rig.given_up]
    for attention, group in zip(rig.model.cache.attentions, rig.model.cache.group, strict=True):
        cache_of(attention)[[block for block in lost[group] if block]] = GARBAGE
    report = rig.blend(rig.given_up, options, written, choices=choices)
    assert report.prefix == 0, "it begins anew"
    for found, wanted in zip(rig.pages(rig.given_up), whole, strict=True):
        torch.testing.assert_close(found, wanted)


@torch.inference_mode()
def test_prompt_within_its_windows_goes_on_behind_a_hit(rig: Rig) -> None:
    report = rig.blend(rig.tables, BlendOptions(0.3, "query"), written=2 * BLOCK)
    assert report.prefix == 2 * BLOCK


def test_group_gives_up_blocks_as_vllm_does() -> None:
    group = LayerGroup(BLOCK, WINDOW)
    assert not any(LayerGroup(BLOCK).gives_up(tokens) for tokens in (1, 1000))
    for tokens in range(1, 300):
        assert group.gives_up(tokens) == (max(0, tokens - WINDOW + 1) // BLOCK > 0)
