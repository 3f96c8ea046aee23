"""How often a blend has the host wait for the device, and what it launches there: the worker's own code, on a
device that counts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from blendrag.attention.paged import PagedRows
from blendrag.attention.question import question_attention
from blendrag.attention.runs import dense_attention
from blendrag.attention.scores import Scores
from blendrag.engine.blend.question_pass import QuestionPass
from blendrag.engine.blend.shift import Shift
from blendrag.engine.blend.stored_kv import StoredKV
from blendrag.engine.compat.layer_kv import LayerKV
from blendrag.engine.compat.model import key_value_of
from blendrag.engine.forward import paged
from blendrag.engine.forward.paged import Pages
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.ingest.chunk_prefill import ChunkTokens, prefill_chunks
from blendrag.lab.bench.model import COUNTED
from blendrag.load import loader, slots
from blendrag.options import BlendOptions
from chunked_prompt import BLOCK_IDS, TOKENS, ChunkedPrompt
from small_decoder import KV_HEADS, SIZE, small_model
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


def one_kernel(crossings: Crossings, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """As ``work``, which a device does in one launch that reads and writes as much as ``work`` is given."""

    def done(*args: Any) -> Any:
        launches, nbytes = len(crossings.launches), crossings.nbytes
        out = work(*args)
        del crossings.launches[launches:]
        crossings.nbytes = nbytes
        rows = [each for each in args if isinstance(each, DeviceTensor) and each.dtype.is_floating_point]
        crossings.note(name, rows[:2], rows[:2] if out is None else [out])
        return out

    return done


Work = Callable[..., Any]


def counted_in(crossings: Crossings, spent: dict[str, list[int]], name: str, work: Work) -> Work:
    """As ``work``, a function or a generator, whose launches and bytes are added to ``spent[name]``."""

    def add(before: tuple[int, int]) -> None:
        for at, (now, then) in enumerate(
            zip((len(crossings.launches), crossings.nbytes), before, strict=True)
        ):
            spent.setdefault(name, [0, 0])[at] += now - then

    def counted(*args: Any) -> Any:
        before = len(crossings.launches), crossings.nbytes
        out = work(*args)
        if not isinstance(out, Generator):
            add(before)
            return out

        def through() -> Generator[None, None, Any]:
            result = yield from out
            add(before)
            return result

        return through()

    return counted


def test_blend_launches_what_the_model_of_its_time_counts(
    tmp_path: Path, crossings: Crossings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As callers of RoPE's module have it in vLLM's compiled engines: plain operations."""
    spent: dict[str, list[int]] = {}
    for kind, name, part in (
        (QuestionPass, "run", "question"),
        (StoredKV, "write", "written"),
        (Shift, "move", "shift"),
    ):
        monkeypatch.setattr(kind, name, counted_in(crossings, spent, part, getattr(kind, name)))
    reader = Pages.reader
    monkeypatch.setattr(
        Pages, "reader", lambda pages, at: counted_in(crossings, spent, "shift", reader(pages, at))
    )
    monkeypatch.setattr(LayerKV, "write", one_kernel(crossings, "write", write))
    monkeypatch.setattr(paged, "paged_attention", one_kernel(crossings, "attend", attend))
    counts = []
    for layers in (4, 8):
        model = model_there(tmp_path / str(layers), layers)
        for rotary in model.decoder.rotaries:
            rotary._forward_method = rotary.forward_native
        assert model.decoder.unrotates
        crossings.forget()
        spent.clear()
        ChunkedPrompt(layers).blend(model, tmp_path / str(layers) / "kv", BlendOptions(0.3, "query"))
        counts.append({"all": [len(crossings.launches), crossings.nbytes], **spent})
    launches, nbytes = (
        {name: (counts[1][name][at] - counts[0][name][at]) / 4 for name in spent | {"all": 0}}
        for at in (0, 1)
    )
    kv = sum(TOKENS) * KV_HEADS * SIZE * 2 * 4
    assert launches["question"] == COUNTED.question, launches
    assert launches["shift"] == COUNTED.shift, launches
    assert launches["all"] == COUNTED.question + COUNTED.repair + COUNTED.shift, launches
    assert nbytes["written"] / kv == pytest.approx(COUNTED.written, rel=0.05), nbytes["written"] / kv
    assert nbytes["shift"] / kv == pytest.approx(COUNTED.shifted, rel=0.05), nbytes["shift"] / kv
    assert len(crossings.waits) == COUNTED.waits, crossings.waits


def test_question_moves_as_many_bytes_a_score_as_the_model_counts(crossings: Crossings) -> None:
    keys, asking = torch.ones(2000, 2, 32, dtype=torch.bfloat16), torch.ones(64, 4, 32, dtype=torch.bfloat16)
    at = torch.arange(2064)
    given = asking, at[2000:], keys, at[:2000], keys[:64], at[2000:]
    crossings.forget()
    question_attention(*(DeviceTensor(each) for each in given), Scores(1.0))
    assert crossings.nbytes / (64 * 4 * 2064) == pytest.approx(COUNTED.scored, rel=0.05)
