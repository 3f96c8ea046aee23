"""``bench recognition``, on a few prompts."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from blendrag.errors import ConfigError
from blendrag.lab.bench.recognition import run_recognition
from blendrag.lab.bench.shapes import SHAPES
from blendrag.lab.options import RecognitionOptions
from blendrag.progress import SILENT
from blendrag.settings import Settings


def test_documents_are_known_from_their_third_sight_on_in_every_shape(model_dir: Path) -> None:
    options = RecognitionOptions(prompts=12, documents=8, top_k=3, chunks=300)
    results = run_recognition(Settings.load(model=str(model_dir)), options, SILENT)
    assert list(results.shapes) == list(SHAPES) and results.searched is not None
    for name, shape in results.shapes.items():
        assert shape.later > 0.85 and shape.second < 0.1, name
        assert shape.kv > 0 and shape.tokens > 3 * 64
    console = Console(file=StringIO(), width=120)
    results.show(console)
    assert results.to_dict()["machine"]["model"] == str(model_dir)


def test_more_documents_in_a_prompt_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are 3 documents"):
        RecognitionOptions(documents=3, top_k=4)
