"""What a codec costs, on KV made up here."""

from __future__ import annotations

import torch

from blendrag.lab.bench.ttft import measure_codec
from blendrag.store.codec import CODECS, make_codec


def test_codec_with_fewer_bits_has_a_larger_error_and_raw_has_none() -> None:
    records = [torch.randn(2, 2, 40, 2, 32).to(torch.bfloat16) for _ in range(2)]
    found = {name: measure_codec(make_codec(name, 2, 32, torch.bfloat16), records) for name in sorted(CODECS)}
    assert (found["raw"].k_error, found["raw"].v_error) == (0, 0)
    assert found["raw"].bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert 0 < found["int8"].k_error < found["fp8"].k_error < found["int4"].k_error < 0.2
