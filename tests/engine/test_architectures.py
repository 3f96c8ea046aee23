"""Other structures than the default model's, on real engines: the table of docs/models.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from blendrag.lab.doctor import REUSE, run_doctor
from blendrag.lab.running import lab_engine
from model_shapes import SHAPES
from models_page import check_page
from small_model import Shape, provide_torchvision

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly]

ALL = [
    pytest.param(each, id=str(each), marks=[] if each.always else pytest.mark.nightly(part="models"))
    for each in SHAPES
]
FOUR = Sampling(max_tokens=4, other={"ignore_eos": True})


@pytest.mark.parametrize("shape", ALL)
def test_structure_is_blended_rightly_or_refused_with_its_reason(
    shape: Shape, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_torchvision(monkeypatch)
    settings = shape.settings(tmp_path, tokenizer)
    engine = lab_engine(settings)
    try:
        report = run_doctor(settings)
        if shape.answers:
            assert len(engine.generate(range(100, 140), FOUR).token_ids) == 4
    finally:
        engine.release()
    if shape.reason is None:
        assert report.passed, [row for row in report.rows if not row.ok]
        (repaired,) = (float(row.value) for row in report.rows if row.check == REUSE)
        assert repaired > 0.05, "too blunt: ratio 1 is held to 0.02"
    else:
        assert shape.reason in (report.unsupported or "")
    check_page(shape, report)


@pytest.mark.nightly(part="models")
def test_answers_behind_the_first_window_are_those_of_transformers(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ministral 3 scales Q by its position; vLLM does so only where it is told."""
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
