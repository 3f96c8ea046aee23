"""Ministral 3 scales Q by its position; vLLM does so only where it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from model_shapes import SHAPES, provide_torchvision

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly(part="models")]


def test_answers_behind_the_first_window_are_those_of_transformers(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_torchvision(monkeypatch)
    (shape,) = (each for each in SHAPES if each.title == "Ministral 3")
    settings = shape.settings(tmp_path, tokenizer)
    settings = settings.model_copy(update={"dtype": "float32"})
    prompt = torch.randint(100, 40000, (800,), generator=torch.Generator().manual_seed(1)).tolist()
    from transformers import AutoModelForImageTextToText

    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    expected = whole[0, len(prompt) :].tolist()
    engine = Engine.shared(settings)
    try:
        found = engine.generate(prompt, Sampling(max_tokens=8, other={"ignore_eos": True}))
    finally:
        engine.release()
    assert list(found.token_ids) == expected
