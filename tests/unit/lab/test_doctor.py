"""What doctor calls passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blendrag.lab.doctor import Check, DoctorReport, _Check, linked_data, stored_as
from blendrag.lab.prompts import Prompt
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec


def test_report_without_checks_does_not_pass() -> None:
    assert not DoctorReport("m", "A", ()).passed
    assert DoctorReport("m", "A", (Check("c", "0", "0", True),)).passed
    assert not DoctorReport("m", "A", (Check("c", "0", "0", True), Check("d", "1", "0", False))).passed


def test_report_says_how_kv_is_kept() -> None:
    assert stored_as(Settings.load(codec="int8")).startswith("int8, in ram of ")
    disk = TierSpec(kind="disk", path=Path("/kv"))
    assert stored_as(Settings.load(codec="raw", tiers=[disk])) == f"raw, in {disk.label}"


def test_hard_links_that_llama_index_would_refuse_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk.data  # noqa: F401  (it keeps what the variable says when it is first imported)

    file = tmp_path / "corpora" / "stopwords"
    file.parent.mkdir()
    file.write_text("the")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    assert linked_data() is None
    (tmp_path / "again").hardlink_to(file)
    assert "--link-mode copy" in str(linked_data())


def test_first_token_waits_until_the_prefix_cache_is_empty() -> None:
    class Busy:
        held = 3  # looks until a request that has ended lets go of the cache

        def reset_prefix_cache(self) -> bool:
            self.held -= 1
            return not self.held

        def generate(self, *_: Any) -> int:
            return self.held

    check: Any = _Check.__new__(_Check)
    check.engine = Busy()
    assert check._first_token(Prompt((1,), ()), None) == 0
