"""The model that an index is opened with. No engine is started here."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from blendrag.errors import ModelNotFoundError, StoreMismatchError
from blendrag.index.index import BlendIndex
from blendrag.models import DEFAULT_MODEL
from blendrag.serving import identity
from blendrag.serving.library import Library
from blendrag.settings import Settings


def test_index_is_opened_with_its_own_model_unless_one_is_named(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is opened: a folder's name is kept as a whole path."""
    monkeypatch.chdir(model_dir.parent)
    made = BlendIndex.open(tmp_path / "kb", model_dir.name, max_model_len=512)
    made.close()
    monkeypatch.chdir(tmp_path)
    with BlendIndex.open("kb", max_model_len=512) as index:
        assert index.settings.model == str(model_dir)
    monkeypatch.setenv("BLENDRAG_MODEL", DEFAULT_MODEL)
    with pytest.raises(StoreMismatchError, match=f"made with model '{model_dir}', not '{DEFAULT_MODEL}'"):
        BlendIndex.open("kb", max_model_len=512)


def test_index_with_an_adapter_is_opened_with_its_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the adapter is named; without it, the error says that it was made with one."""
    monkeypatch.setattr(identity, "adapter_for", lambda model, name: Mock(digest="d"))
    Library(tmp_path / "kb", Settings.load(lora="ad", max_model_len=512)).close()
    with BlendIndex.open(tmp_path / "kb", lora=str(tmp_path / "ad"), max_model_len=512) as index:
        assert index.settings.model == DEFAULT_MODEL
    with pytest.raises(StoreMismatchError, match=f"made with model '{DEFAULT_MODEL} with ad'"):
        BlendIndex.open(tmp_path / "kb", max_model_len=512)


def test_index_made_by_a_link_to_its_model_is_opened_by_that_link(tmp_path: Path, model_dir: Path) -> None:
    current = tmp_path / "current"
    current.symlink_to(model_dir)
    BlendIndex.open(tmp_path / "kb", str(current), max_model_len=512).close()
    with BlendIndex.open(tmp_path / "kb", max_model_len=512) as index:
        assert index.settings.model == str(current)
    current.unlink()
    with pytest.raises(ModelNotFoundError, match="which is not there any more: name where that model is now"):
        BlendIndex.open(tmp_path / "kb", max_model_len=512)
    BlendIndex.open(tmp_path / "kb", str(model_dir), max_model_len=512).close()
