"""Tokens that are not repaired move by what the repaired ones of their chunk have moved, near ones most."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from blendrag.engine.blend.blending import Choices, LoadedModel
from blendrag.engine.blend.shift import Shift, _near, _weights
from blendrag.engine.compat.layer_kv import LayerKV
from blendrag.engine.forward.indices import Ints
from blendrag.engine.forward.prompt_forward import CachedSpan, PromptTokens
from blendrag.engine.forward.rotation import Unrotation
from blendrag.engine.wire.recipe import BlendOrder
from blendrag.options import BlendOptions
from chunked_prompt import BLOCK_IDS, ChunkedPrompt
from small_decoder import small_model

ROPES = {
    "halves": {},
    "neighbours": {"is_neox_style": False},
    "a part": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "scaled": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        }
    },
    "two kinds of angles": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "longrope",
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
            "original_max_position_embeddings": 2048,
        }
    },
}


class Noting(Choices):
    chosen: Ints = np.zeros(0, np.int64)

    def keep(self, order: BlendOrder, chosen: Ints) -> None:
        self.chosen = chosen
        super().keep(order, chosen)


def blended(model: LoadedModel, root: Path, options: BlendOptions) -> tuple[list[Any], Ints]:
    """K and V of all cached tokens in every layer, and the positions that were repaired."""
    prompt, choices = ChunkedPrompt(model.decoder.num_layers), Noting()
    prompt.blend(model, root, options, choices=choices)
    at = np.concatenate([np.arange(start, start + n) for _, start, n in prompt.spans])
    pages = model.cache.pages(BLOCK_IDS)
    read = pages.reader(at)
    return [read(layer) for layer in range(model.decoder.num_layers)], choices.chosen


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_k_is_turned_back_whatever_the_rope(
    rope: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=8192)
    with set_current_vllm_config(config):
        module = get_rope(
            64, max_position=8192, dtype=dtype, **({"rope_parameters": {"rope_theta": 1e4}} | rope)
        )
    positions, key = torch.tensor([0, 5, 77, 4000]), torch.randn(4, 3, 64).to(dtype)
    rotate = partial(LayerKV(None).rotate, module)
    turned = rotate(positions, key.flatten(1).clone()).view(key.shape)
    back = Unrotation.of(rotate, 64, dtype, positions.device).at(positions)(turned)
    torch.testing.assert_close(back, key, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_layer_moves_as_its_repaired_tokens_say(tmp_path: Path) -> None:
    """Against the sum over all pairs, in the first layer that moves: what comes before it is the same."""
    model = small_model(tmp_path / "model", 4, block_size=32)
    still, chosen = blended(model, tmp_path / "still", BlendOptions(0.2, "query:shift=no"))
    stored, _ = blended(model, tmp_path / "stored", BlendOptions(0.0, "none"))
    moved, same = blended(model, tmp_path / "moved", BlendOptions(0.2, "query"))
    assert np.array_equal(chosen, same) and chosen.size > 5
    for kept, read in zip(still[0], moved[0], strict=True):
        torch.testing.assert_close(kept, read)  # nothing moves where tokens have seen only themselves
    far: list[float] = []
    at, end = 0, reused_end(model)
    for _, start, n in ChunkedPrompt(4).spans:
        places = np.arange(start, start + n)
        inside = np.flatnonzero(np.isin(places, chosen))
        inside = inside[inside >= 16]
        rest = np.flatnonzero(~np.isin(places, chosen) & (places < end))
        near = np.exp(-np.abs(rest[:, None] - inside) / 32)
        weights = torch.from_numpy(0.8 * near / (near.sum(1, keepdims=True) + 0.5)).float()
        (old_key, old_value), (key, value), (new_key, new_value) = (
            (of[1][0][at : at + n], of[1][1][at : at + n]) for of in (stored, still, moved)
        )
        unturned = model.decoder.unrotation(1, torch.from_numpy(places[inside]))
        by = torch.einsum("tr,rhd->thd", weights, unturned(key[inside] - old_key[inside]))
        expected = old_key[rest] + model.decoder.rotate_keys(1, torch.from_numpy(places[rest]), by)
        torch.testing.assert_close(new_key[rest], expected, atol=2e-3, rtol=0)
        by = torch.einsum("tr,rhd->thd", weights, value[inside] - old_value[inside])
        torch.testing.assert_close(new_value[rest], old_value[rest] + by, atol=2e-3, rtol=0)
        far.append((new_value - value)[rest].abs().max().item() if rest.size and inside.size else 0.0)
        at += n
    assert max(far) > 0.01


def reused_end(model: LoadedModel) -> int:
    _, start, n = ChunkedPrompt(4).spans[-1]
    return (start + n) // model.cache.block_size * model.cache.block_size


@torch.inference_mode()
def test_small_pieces_move_alike(tmp_path: Path) -> None:
    """Beside answers a layer is computed in pieces, and a chunk's repaired rows stay in one of them."""
    model, options = small_model(tmp_path / "model", 4, block_size=32), BlendOptions(0.4, "query")
    ChunkedPrompt(4).blend(model, tmp_path / "one", options)
    whole = model.cache.read_blocks(BLOCK_IDS).view(torch.float32)
    ChunkedPrompt(4).blend(model, tmp_path / "two", options, idle=False)
    torch.testing.assert_close(model.cache.read_blocks(BLOCK_IDS).view(torch.float32), whole)


def shifted(chunks: Ints, sources: Ints, tells: Any) -> tuple[Ints, Any]:
    """Which sources are near each tile, and their weights, which a device finds, too."""
    parts = _near(chunks, sources, tells)
    weights = _weights(*parts)
    torch.testing.assert_close(_weights(*map(torch.from_numpy, parts)).numpy(), weights)
    return parts[0][0], weights


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.floats(0.01, 0.5)), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_weights_are_of_the_repaired_tokens_of_the_chunk(chunks: list[tuple[int, float]], seed: int) -> None:
    """In chunks of any length; those of far ones, which are left out, are small beside the others."""
    rng = np.random.default_rng(seed)
    repaired = np.concatenate([rng.random(n) < share for n, share in chunks])
    repaired[rng.integers(len(repaired))] = True
    chunk_of, sources = np.repeat(np.arange(len(chunks)), [n for n, _ in chunks]), np.flatnonzero(repaired)
    tells = rng.random(len(sources)) < 0.9
    near, weights = shifted(chunk_of, sources, tells)
    moved = rng.random(len(sources))
    found = (weights @ moved[near][:, :, None]).reshape(-1)[: len(chunk_of)]
    at = np.arange(len(chunk_of))[:, None]
    every = np.exp(-np.abs(at - sources) / 32) * (chunk_of[:, None] == chunk_of[sources]) * tells
    total = every.sum(1)
    np.testing.assert_allclose(found, 0.8 * (every @ moved) / (total + 0.5) * (total >= 0.02), atol=0.04)


def test_weights_of_a_long_chunk_are_linear_in_its_length() -> None:
    sources = np.arange(0, 1 << 15, 16)
    near, weights = shifted(np.zeros(1 << 15, np.int64), sources, np.ones(len(sources), bool))
    assert weights.shape[2] == near.shape[1] == 24


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_pieces_end_between_chunks(lengths: list[int], data: st.DataObject) -> None:
    spans, at = [], 3
    for length in lengths:
        spans.append(CachedSpan(at, length))
        at += length + data.draw(st.integers(0, 3))
    tokens = PromptTokens.of(range(at + 5), spans)
    count = len(tokens.cached)
    repaired = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    rows = tokens.computed(repaired)
    ends = Shift(SimpleNamespace(tokens=tokens), repaired).ends(rows)  # type: ignore[arg-type]
    assert ends[-1] == len(rows) and (np.diff(ends) > 0).all()
    for end in ends[:-1]:
        beside = rows[end - 1 : end + 1]
        assert not any(all(s.start <= at < s.start + s.length for at in beside) for s in spans)
