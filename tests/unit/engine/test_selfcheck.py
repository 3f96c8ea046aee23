"""The check at every start sees positions that come in where no tap looks, and layers without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from blendrag.engine.compat.model import name_of
from blendrag.engine.forward.decoder import Decoder
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.forward.whole_layers import WholeLayerDecoder
from blendrag.engine.worker.selfcheck import forward_errors, unfit_reason
from small_decoder import small_model


class NoPositions(torch.nn.Module):
    def forward(self, positions: Any, query: Any, key: Any) -> tuple[Any, Any]:
        return query, key


def whole_layers(model: Any) -> Decoder:
    return WholeLayerDecoder(model.decoder.model, model.decoder.vllm_config)


def test_rope_that_the_taps_do_not_see_is_refused(tmp_path: Path) -> None:
    model = small_model(tmp_path, 3)
    decoder = whole_layers(model)
    assert max(forward_errors(decoder, model.cache)) < 1e-4
    decoder.rotaries = [None] * 3
    error, error_of_shift = forward_errors(decoder, model.cache)
    assert error < 1e-4 < 0.5 < error_of_shift
    assert "depends on positions by more than RoPE" in (unfit_reason(decoder, model.cache) or "")


def test_layer_without_positions_is_run_whether_it_has_a_rotary_module_or_not(tmp_path: Path) -> None:
    model = small_model(tmp_path, 4)
    layers: Any = model.decoder.layers
    layers[1].unused, layers[1].self_attn.rotary_emb = layers[1].self_attn.rotary_emb, NoPositions()
    layers[3].self_attn.rotary_emb = NoPositions()
    decoder = whole_layers(model)
    assert [rotary is None for rotary in decoder.rotaries] == [False, False, False, True]
    assert unfit_reason(decoder, model.cache) is None
    assert [rotary is None for rotary in decoder.rotaries] == [False, True, False, True]
    assert decoder.unrotates
    key, positions = torch.randn(2, *decoder.stored_shape), torch.tensor([7, 600])
    assert decoder.rotate_keys(1, positions, key.clone()).equal(key)
    assert decoder.unrotation(3, positions)(key).equal(key)


def test_layers_at_the_end_that_read_the_kv_of_others_are_not_run(tmp_path: Path) -> None:
    model = small_model(tmp_path, 4)
    for attention in model.decoder.attentions[2:]:
        attention.kv_sharing_target_layer_name = name_of(model.decoder.attentions[1])
        attention.forward = None
    decoder = whole_layers(model)
    assert decoder.num_layers == len(decoder.attentions) == 2
    cache = PagedCache(decoder.attentions, model.cache.runner, model.cache.groups)
    assert unfit_reason(decoder, cache) is None


def test_layers_that_pass_on_more_than_a_row_for_each_token_are_refused(tmp_path: Path) -> None:
    model = small_model(tmp_path, 2)
    inner: Any = model.decoder.model.model
    embed = inner.embed_input_ids
    inner.embed_input_ids = lambda ids: torch.stack([embed(ids)] * 3)
    assert "pass on (3, 48, 128) of 48 tokens" in (unfit_reason(whole_layers(model), model.cache) or "")


def test_probe_fits_a_short_window(tmp_path: Path) -> None:
    model = small_model(tmp_path, 2)
    model.decoder.vllm_config.model_config.max_model_len = 64
    assert max(forward_errors(model.decoder, model.cache)) < 1e-4
