"""Where rows on a CPU attend: by our kernel, or as the engine's own do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from blendrag.engine.compat.model import isa_of
from blendrag.engine.worker.selfcheck import mask_error, unfit_reason
from blendrag.lab.worker.selfcheck import scattered_by
from device import needs_cpu_kernel
from small_decoder import KV_HEADS, SIZE, small_model

LENGTH, HEADS = 700, 4


@needs_cpu_kernel
@torch.inference_mode()
@pytest.mark.parametrize("windowed", [(), (False, True)], ids=["plain", "windows"])
def test_scattered_rows_attend_by_the_kernel_and_those_behind_them_as_the_engines_do(
    windowed: tuple[bool, ...], tmp_path: Path
) -> None:
    model = small_model(tmp_path, 2, windowed=windowed, dtype=torch.bfloat16, block_size=32)
    cache = model.cache
    if isa_of(cache.attentions[0]) != "vec":
        pytest.skip("the backend has tiles of AMX on this processor, and keeps all rows")
    assert cache.has_kernel and "kernel of blendrag" in scattered_by(cache)
    pages, generator = cache.scratch([LENGTH]), torch.Generator().manual_seed(0)
    key, value = torch.randn(2, LENGTH, KV_HEADS, SIZE, generator=generator).bfloat16()
    scattered = np.sort(np.random.default_rng(0).permutation(640)[:90])
    positions = np.concatenate([scattered, np.arange(672, LENGTH)])
    query = torch.randn(len(positions), HEADS, SIZE, generator=generator).bfloat16()
    for layer in range(2):
        pages.write(layer, pages.places(np.arange(LENGTH)), key, value)
        by_both = pages.attend(layer, query, pages.addresses(positions, scattered=90))
        by_backend = pages.attend(layer, query, pages.addresses(positions))
        assert by_both[90:].equal(by_backend[90:])
        assert not by_both[:90].equal(by_backend[:90])  # or this would compare one kernel with itself
        torch.testing.assert_close(by_both, by_backend, atol=0.02, rtol=0.02)
        all_of_them = pages.attend(layer, query, pages.addresses(positions, scattered=len(positions)))
        assert all_of_them[:90].equal(by_both[:90])
    assert unfit_reason(model.decoder, cache) is None
    assert mask_error(model.decoder, cache, tokens=300, share=0.3) < 0.01


def test_float32_attends_by_the_backend(tmp_path: Path) -> None:
    cache = small_model(tmp_path, 2).cache
    assert not cache.has_kernel and scattered_by(cache) == "the engine's backend"
