"""What a codec costs, on KV made up here."""

from __future__ import annotations

import torch

from blendrag.lab.bench.codecs import measure_codec
from blendrag.store.codec import CODECS, make_codec


def test_measuring_a_codec_leaves_torch_its_threads_and_finds_no_error_in_raw() -> None:
    records = [torch.randn(2, 2, 40, 2, 32).to(torch.bfloat16) for _ in range(2)]
    before = torch.get_num_threads()
    found = {name: measure_codec(make_codec(name, 2, 32, torch.bfloat16), records) for name in sorted(CODECS)}
    assert torch.get_num_threads() == before
    assert (found["raw"].k_error, found["raw"].v_error) == (0, 0)
    assert found["raw"].bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert 0 < found["int8"].k_error < found["fp8"].k_error < found["int4"].k_error < 0.2
    assert all(each.encode_gb_s > 0 < each.decode_gb_s for each in found.values())
