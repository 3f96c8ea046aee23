"""Texts whose KV is kept. No engine is started here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import BlendragWarning, ConfigError, StoreError, StoreMismatchError
from blendrag.options import BlendOptions
from blendrag.serving.lease import default_kv_dir
from blendrag.serving.library import Library
from blendrag.settings import Settings

SETTINGS = Settings.load(max_model_len=512)
LONG = "The warranty of the battery lasts for eight years or 160,000 kilometres. " * 4


@pytest.fixture
def library(tmp_path: Path, model_dir: Path) -> Iterator[Library]:
    opened = Library(tmp_path / "kv", SETTINGS)
    yield opened
    opened.close()


def texts(library: Library) -> list[str]:
    return [entry.text for entry in library.catalogue.entries()]


def test_text_is_kept_with_the_blanks_around_it(library: Library) -> None:
    library.register({"a": ["  a text \n"], "b": ["a text"], "c": [" \n "]})
    assert texts(library) == ["a text"]


def test_text_of_two_owners_goes_with_the_first_of_them(library: Library) -> None:
    library.register({"a": ["shared", "own"], "b": ["shared"]})
    library.release(["a", "nobody"])
    assert texts(library) == ["shared"]
    library.register({"b": ["other"]})
    assert texts(library) == ["other"]


def test_prompt_is_planned_over_texts_of_yesterday(library: Library) -> None:
    def reused(content: str) -> int:
        return library.plan([{"role": "user", "content": content}]).cached_tokens

    assert reused(LONG) == 0  # the texts are read from the catalogue here
    library.register({"a": [LONG]})
    assert reused(LONG) == len(library.catalogue.entries()[0].token_ids)
    library.release(["a"])
    assert reused(LONG) == 0


def test_removed_kv_is_noticed_by_nobody(library: Library) -> None:
    library.register({"a": [LONG]})
    with pytest.warns(BlendragWarning, match=r"1 of 2 documents .* sync\(\)"):
        library.prefetch([LONG, "Never registered."])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.prefetch(["Never registered."])  # once is enough
        library.prefetch([f" {LONG}", "  "])


def test_typing_error_in_the_selector_is_a_slow_answer(library: Library) -> None:
    plan = library.plan([{"role": "user", "content": "Hello."}])
    with pytest.raises(ConfigError, match="hkvdd"):
        library.recipe(plan, BlendOptions(selector="hkvdd"))


def test_path_that_cannot_be_a_folder_is_no_clear_error(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        Library(tmp_path / "file" / "kv", SETTINGS)


def test_broken_catalogue_is_no_clear_error(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "catalogue.sqlite").write_text("no database")
    with pytest.raises(StoreError, match="catalogue"):
        Library(tmp_path, SETTINGS)


def test_folder_is_left_by_a_codec_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'zip'; there are fp8, int4, int8, raw"):
        Library(tmp_path / "kv", Settings.load(codec="zip"))
    assert not (tmp_path / "kv").exists()


def test_texts_behind_another_system_prompt_are_not_taken_for_the_same(tmp_path: Path) -> None:
    def opened(name: str, **options: Any) -> Library:
        return Library(tmp_path / name, Settings.load(max_model_len=512, **options))

    keys = []
    for at, options in enumerate(({}, {"system_prompt": "Be brief."})):
        for shared in ("none", "system"):
            library = opened(f"{at}-{shared}", shared_prefix=shared, **options)
            keys.append(library.keys_of([LONG]))
            library.close()
    alone, behind, still_alone, behind_another = keys
    assert alone == still_alone
    assert not behind & alone and not behind & behind_another
    with pytest.raises(StoreMismatchError, match="shared_prefix='none', not shared_prefix='system'"):
        opened("0-none", shared_prefix="system")


def test_default_folder_is_not_shared_by_two_prefixes(model_dir: Path) -> None:
    folders = [
        default_kv_dir(Settings.load(shared_prefix=shared, system_prompt=prompt))
        for shared in ("none", "system")
        for prompt in ("Be brief.", "Be kind.")
    ]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3
