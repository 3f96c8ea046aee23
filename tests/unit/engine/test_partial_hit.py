"""Of a prompt that comes again, a part may be in the prefix cache still: what is blended behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blendrag.engine.blend.blending import Choices
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.options import BlendOptions
from chunked_prompt import BLOCK_IDS, ChunkedPrompt
from small_decoder import small_model

BLOCK = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return small_model(tmp_path_factory.mktemp("model"), 4, block_size=BLOCK)


# Inside each of the chunks, early and late, and behind them.
@pytest.mark.parametrize("written", [BLOCK, 3 * BLOCK, 5 * BLOCK, 6 * BLOCK, 7 * BLOCK])
@pytest.mark.parametrize("selector", ["query", "query:shift=no", "none", "all"])
@pytest.mark.parametrize("head", [0, BLOCK])
@torch.inference_mode()
def test_rest_behind_a_hit_is_blended_to_what_it_was(
    model: LoadedModel, tmp_path: Path, head: int, selector: str, written: int
) -> None:
    """The same tokens are chosen, whatever is there: else the answer would hang on who asked before. head:
    tokens of an exact prefix."""
    options, choices = BlendOptions(0.3, selector), Choices()
    ChunkedPrompt(4).blend(model, tmp_path / "exact", BlendOptions(1.0))
    first = ChunkedPrompt(4).blend(model, tmp_path / "one", options, head, choices, head=head)
    whole = model.cache.read_blocks(BLOCK_IDS)
    lost = BLOCK_IDS[written // BLOCK :]
    model.cache.write_blocks(lost, torch.zeros_like(model.cache.read_blocks(lost)))
    rest = ChunkedPrompt(4).blend(model, tmp_path / "two", options, written, choices, head=head)
    assert rest.recomputed <= first.recomputed
    found = model.cache.read_blocks(BLOCK_IDS)
    torch.testing.assert_close(found.view(torch.float32), whole.view(torch.float32))


@torch.inference_mode()
def test_chunk_that_is_there_again_is_repaired_behind_a_hit(model: LoadedModel, tmp_path: Path) -> None:
    options, choices = BlendOptions(0.3), Choices()
    without = ChunkedPrompt(4).blend(model, tmp_path / "one", options, choices=choices, stored=1)
    assert without.missing
    again = ChunkedPrompt(4).blend(model, tmp_path / "two", options, 3 * BLOCK, choices)
    anew = ChunkedPrompt(4).blend(model, tmp_path / "three", options, 3 * BLOCK)
    assert again.recomputed == anew.recomputed > 0 and not again.missing


@pytest.mark.parametrize("block", [32, 64, 128])
def test_cached_tokens_of_the_last_block_are_recomputed(tmp_path: Path, block: int) -> None:
    """As they are by the engine when the prompt comes again: the prefix cache holds whole blocks."""
    prompt, model = ChunkedPrompt(4), small_model(tmp_path / "model", 4, block_size=block)
    report = prompt.blend(model, tmp_path / "kv", BlendOptions(0.0, "none"))
    end = sum(prompt.spans[-1][1:]) // block * block
    used = [(start, n) for _, start, n in prompt.spans if start < end]  # the others are not even looked for
    assert report.recomputed == sum(max(0, start + n - end) for start, n in used)
    assert report.cached == sum(n for _, n in used)
    assert report.fresh == len(prompt.ids) - report.cached
