"""How often a blend has the host wait for the device: the worker's own code, on a device that counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from blendrag.attention.paged import PagedRows
from blendrag.attention.runs import dense_attention
from blendrag.attention.scores import Scores
from blendrag.engine.compat.layer_kv import LayerKV
from blendrag.engine.compat.model import key_value_of
from blendrag.engine.forward import paged
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.ingest.chunk_prefill import ChunkTokens, prefill_chunks
from blendrag.load import loader, slots
from blendrag.options import BlendOptions
from chunked_prompt import BLOCK_IDS, TOKENS, ChunkedPrompt
from small_decoder import small_model
from stand_in_device import Crossings, DeviceTensor, stand_in


def write(kv: LayerKV, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As the backends' kernel does."""
    views = key_value_of(kv.attention, cache)
    assert views is not None
    for view, tensor in zip(views, (key, value), strict=True):
        view[slots // cache.shape[2], slots % cache.shape[2]] = tensor


def attend(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: PagedRows, scores: Scores
) -> torch.Tensor:
    """As our kernel does, for one sequence."""
    key, value = (cache[rows.block_table[0].long()].flatten(0, 1) for cache in (key_cache, value_cache))
    return dense_attention(query, key, value, rows.positions, scores).contiguous()


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crossings]:
    """There are no kernels for that device: plain ones take their place."""
    monkeypatch.setattr(LayerKV, "write", write)
    monkeypatch.setattr(paged, "paged_attention", attend)
    monkeypatch.setattr(loader, "make_slots", slots.CudaSlots)
    with stand_in(monkeypatch) as counted:
        yield counted


@torch.inference_mode()
def model_there(folder: Path, layers: int) -> LoadedModel:
    model = small_model(folder, layers, DeviceTensor)
    for attention in model.decoder.attentions:
        attention.attn_backend = TritonAttentionBackend  # in its order, a cache can be read
    return model


@pytest.mark.parametrize(
    ("choices", "options"),
    [
        (1, BlendOptions(0.3, "hkvd")),
        (1, BlendOptions(0.3, "hkvd:metric=kv:threshold=0.2")),
        (2, BlendOptions(0.3, "hkvd:check_layers=1+2")),
        (1, BlendOptions(0.3, "query")),
        (0, BlendOptions(0.3, "first_k")),
        (0, BlendOptions(0.3, "all")),
        (0, BlendOptions(0.3, "none")),
    ],
    ids=["hkvd", "threshold", "twice", "query", "first_k", "all", "none"],
)
def test_host_waits_for_the_device_once_a_choice(
    tmp_path: Path, crossings: Crossings, choices: int, options: BlendOptions
) -> None:
    uploads = []
    for layers in (4, 8):
        folder = tmp_path / str(layers)
        model = model_there(folder, layers)
        assert model.decoder.unrotates  # learnt when a model is bound
        crossings.forget()
        report = ChunkedPrompt(layers).blend(model, folder / "kv", options, written=40)
        assert report.recomputed or options.selector == "none"
        assert len(crossings.waits) == choices, crossings.waits
        uploads.append(len(crossings.uploads))
    assert uploads[0] == uploads[1] < 25


@pytest.fixture
def computed(tmp_path: Path) -> torch.Tensor:
    """KV of the prompt without a device, [layers, 2, tokens, kv_heads, head_size]."""
    model = small_model(tmp_path / "here", 4)
    (kv,) = prefill_chunks(model.decoder, model.cache, [ChunkTokens("", tuple(ChunkedPrompt(4).ids))])
    return kv


def test_prompt_that_is_computed_there_has_the_kv_of_here(
    tmp_path: Path, computed: torch.Tensor, crossings: Crossings
) -> None:
    """Else the counts would be of something else."""
    model = model_there(tmp_path / "there", 4)
    report = ChunkedPrompt(4).blend(model, tmp_path / "kv", BlendOptions(1.0))
    assert report.recomputed == report.cached >= sum(TOKENS[:2])
    for attention, (_, expected) in zip(model.decoder.attentions, computed, strict=True):
        views = key_value_of(attention, attention.kv_cache.held[BLOCK_IDS])
        assert views is not None
        found = views[1].flatten(0, 1)[: len(expected)]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
