"""A purged document is nowhere in the index's folder, nor in other tiers; all others stay as they were."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chromadb.api.shared_system_client import SharedSystemClient

from blendrag.errors import SourceError, StoreError
from blendrag.index.index import BlendIndex
from blendrag.index.ingest import IngestReport
from blendrag.index.loaders import Document
from blendrag.index.purge import Purged, find_source
from blendrag.index.vectors import VectorStore
from blendrag.progress import SILENT
from blendrag.serving.owners import owner_of, repeat_of
from blendrag.store.record import Layout
from blendrag.store.tiers import DiskTier, TierError, TierSpec

SECRET = "The combination of the blue safe is ninety-nine, seven, forty-two."
OPEN = "Travel is approved by the head of the department."
BOTH = "Office hours are from nine to five."
LUNCH = "Lunch is at noon."


class Setting:
    """An open index with documents and records, and a second tier that has them too. No engine."""

    def __init__(self, root: Path, shared: Path, model_dir: Path) -> None:
        stack = ({"kind": "disk"}, {"kind": "disk", "path": str(shared)})
        self.root, self.shared_root = root, shared
        self.index = BlendIndex.open(root, model=str(model_dir), tiers=stack, chunk_tokens=16)
        documents = [
            Document(f"{SECRET} {BOTH}", "secret.txt"), Document(f"{OPEN} {BOTH}", "open.txt"),
            Document(LUNCH, "one.txt"), Document(LUNCH, "two.txt"),
        ]  # fmt: skip
        self.index._pipeline().take(documents, IngestReport(), SILENT)
        self.catalogue = self.index._library.catalogue
        self.catalogue.settle_dtype("bfloat16")
        self.layout = Layout(self.index._library.identity, "bfloat16")
        self.own = DiskTier(TierSpec(kind="disk"), self.layout, root / "kv")
        self.shared = DiskTier(TierSpec(kind="disk"), self.layout, shared / self.layout.digest)
        for entry in self.catalogue.entries():
            self.store(entry.key, entry.token_ids)

    def store(self, key: str, token_ids: Any) -> None:
        identity = self.index._library.identity
        shape = (identity.num_layers, 2, len(token_ids), identity.num_kv_heads, identity.head_size)
        record = self.layout.encode(key, token_ids, torch.zeros(shape, dtype=torch.bfloat16))
        for tier in (self.own, self.shared):
            tier.put(record)
        self.catalogue.mark_ready(key, record.head.nbytes)

    def keys(self, source: str) -> list[str]:
        return self.catalogue.owners(source).get(source, [])

    def holding(self, text: bytes) -> list[str]:
        """Files in which these bytes occur, anywhere."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        return [path.name for path in files if text in path.read_bytes()]


@pytest.fixture
def made(tmp_path: Path, model_dir: Path) -> Iterator[Setting]:
    setting = Setting(tmp_path / "index", tmp_path / "shared", model_dir)
    yield setting
    setting.index.close()


# -- after a purge ----------------------------------------------------------------------------------------


@dataclass
class After:
    """A setting in which ``secret.txt`` was purged, and what there was before."""

    setting: Setting
    keys: dict[str, list[str]]
    files: list[str]
    purged: Purged


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[After]:
    folder = tmp_path_factory.mktemp("purged")
    setting = Setting(folder / "index", folder / "shared", model_dir)
    keys, files = setting.catalogue.owners(), setting.holding(b"blue safe")
    yield After(setting, keys, files, setting.index.purge("secret.txt"))
    setting.index.close()


def test_text_of_a_purged_document_is_found_nowhere(after: After) -> None:
    assert {"catalogue.sqlite-wal", "chroma.sqlite3"} <= set(after.files)  # this test can see it
    setting, keys = after.setting, after.keys["secret.txt"]
    assert setting.holding(b"blue safe") == [] == setting.holding(b"secret.txt")
    assert setting.own.has(keys) == setting.shared.has(keys) == set()
    assert setting.catalogue.doomed() == [] and "secret.txt" not in setting.catalogue.owners()
    assert after.purged == Purged("secret.txt", len(keys), 0, len(keys), (f"disk {setting.shared_root}",))


def test_other_documents_are_not_touched_by_a_purge(after: After) -> None:
    setting, index = after.setting, after.setting.index
    for source, keys in setting.catalogue.owners().items():
        assert after.keys[source] == keys
        assert setting.own.has(keys) == setting.shared.has(keys) == setting.catalogue.ready(keys) == set(keys)
    assert (
        index._ledger.sources()
        == {row.source for row in index._vectors.rows()}
        == {"open.txt", "one.txt", "two.txt"}
    )
    assert index.retrieve("Who approves travel?", 3)[0].source == "open.txt"


def test_vectors_of_a_purged_index_can_be_opened_again(after: After) -> None:
    """Chroma's log, in which rows were overwritten, is read anew."""
    SharedSystemClient.clear_system_cache()
    vectors = VectorStore(after.setting.root, after.setting.index._vectors._embedder)
    assert vectors.search("Who approves travel?", 1)[0].source == "open.txt"
    assert {row.source for row in vectors.rows()} == {"open.txt", "one.txt", "two.txt"}


# -- what may come in between -----------------------------------------------------------------------------


def test_text_that_another_document_has_stays_with_that_one(made: Setting) -> None:
    keys = made.keys("one.txt")
    purged = made.index.purge("one.txt")
    assert (purged.chunks, purged.shared, purged.vectors) == (0, len(keys), len(keys))
    assert made.catalogue.ready(keys) == made.own.has(keys) == set(keys)
    made.own.quarantine(keys[0])  # a damaged record is made of the same text
    assert made.index.purge("two.txt").chunks == len(keys)
    assert made.catalogue.ready(keys) == made.own.has(keys) == set()
    assert list((made.root / "kv" / "quarantine").iterdir()) == [] == made.holding(b"Lunch")


def test_purge_that_fails_can_be_repeated(made: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """First a tier cannot be reached, then somebody interrupts."""

    def unreachable(self: DiskTier, keys: Any) -> int:
        raise TierError("gone")

    def interrupt(source: str) -> int:
        raise KeyboardInterrupt

    keys = made.keys("secret.txt")
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "delete", unreachable)
        with pytest.raises(StoreError, match=r"nothing was purged here, because disk .*shared cannot"):
            made.index.purge("secret.txt")
    assert made.keys("secret.txt") == keys and "secret.txt" in {
        row.source for row in made.index._vectors.rows()
    }
    assert made.catalogue.ready(keys) == made.own.has(keys) == made.shared.has(keys) == set(keys)
    with monkeypatch.context() as patch:
        patch.setattr(made.index._vectors, "purge", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.index.purge("secret.txt")
    assert made.index.purge("secret.txt").chunks == len(keys)
    assert made.holding(b"blue safe") == []


@pytest.mark.parametrize("how", ["not mounted", "read-only"])
def test_purge_does_not_pass_over_a_folder_that_keeps_its_files(made: Setting, how: str) -> None:
    keys, away = made.keys("secret.txt"), made.shared_root.with_name("away")
    file = made.shared.path(keys[0])
    if how == "not mounted":
        made.shared_root.rename(away)
    else:
        data = file.read_bytes()
        file.unlink()
        file.mkdir()  # which no more can be unlinked than what is read-only
    with pytest.raises(StoreError, match=r"nothing was purged here, because disk .*shared cannot"):
        made.index.purge("secret.txt")
    assert made.keys("secret.txt") == keys and made.catalogue.ready(keys) == set(keys)
    if how == "not mounted":
        away.rename(made.shared_root)
    else:
        file.rmdir()
        file.write_bytes(data)
    made.index.purge("secret.txt")
    assert made.holding(b"blue safe") == [] and not made.shared.has(keys)


@pytest.mark.parametrize("how", ["delete", "purge", "changed"])
def test_text_that_prompts_have_repeated_goes_with_its_document(made: Setting, how: str) -> None:
    """A server of this index has kept it, too: alone, and so behind no other text."""
    texts = {entry.text for entry in made.catalogue.chunks_of("secret.txt")}
    repeats = {repeat_of(text): [text] for text in texts}
    made.index._library.texts.register(repeats | {repeat_of(OPEN): [OPEN]})
    assert made.catalogue.owned(repeats) == repeats.keys()
    if how == "changed":
        document = Document("It is sold.", "secret.txt")
        made.index._library.texts.drop(made.index._pipeline().take(document, IngestReport(), SILENT))
    else:
        getattr(made.index, how)("secret.txt")
    left = {entry.text for entry in made.catalogue.entries()}
    assert not any("blue safe" in text for text in left) and OPEN in left
    assert repeat_of(OPEN) in made.catalogue.owners()
    if how == "purge":
        assert made.holding(b"blue safe") == []


# -- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "right"), [("secrets.txt", "secret.txt"), ("./opn.txt", "open.txt")])
def test_unknown_document_is_corrected(wrong: str, right: str) -> None:
    with pytest.raises(SourceError, match=f"did you mean '{right}'"):
        find_source(wrong, {"secret.txt", "open.txt"})


def test_file_is_found_by_its_path_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handbook").mkdir()
    monkeypatch.chdir(tmp_path)
    sources = {str(tmp_path / "handbook" / "a.md"), "b"}
    assert find_source("handbook/a.md", sources) == find_source("./handbook/../handbook/a.md", sources)
    assert find_source("b", sources) == "b"
    (tmp_path / "link").symlink_to("handbook")
    assert find_source("link/a.md", sources) == find_source("handbook/a.md", sources)
    by_link = str(tmp_path / "link" / "a.md")
    for path in ("link/a.md", str(tmp_path / "handbook" / "a.md")):
        assert find_source(path, {by_link, "b"}) == by_link
    monkeypatch.chdir(tmp_path / "link")
    assert find_source("a.md", {by_link, "b"}) == by_link
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"did you mean 'handbook/a\.md'"):
        find_source("handbok/a.md", sources)


def test_document_of_a_collection_is_found_by_its_name_alone_where_that_is_one_documents() -> None:
    sources = {owner_of("hr", "leave"), owner_of("hr", "travel"), owner_of("it", "travel"), "travel.md"}
    assert find_source("leave", sources) == find_source("hr/leave", sources) == owner_of("hr", "leave")
    assert find_source("it/travel", sources) == owner_of("it", "travel")
    several = "several collections have 'travel': hr/travel, it/travel: name one of them"
    with pytest.raises(SourceError, match=several):
        find_source("travel", sources)
    assert find_source("hr/travel", sources | {owner_of("eu", "hr/travel")}) == owner_of("hr", "travel")
    alike = {owner_of("a", "b/c"), owner_of("a/b", "c")}
    with pytest.raises(SourceError, match=re.escape(r"have 'a/b/c': 'a/b\x1fc', 'a\x1fb/c': name")):
        find_source("a/b/c", alike)
    assert find_source(owner_of("a", "b/c"), alike) == owner_of("a", "b/c")
    with pytest.raises(SourceError, match="did you mean 'hr/leave'"):
        find_source("hr/leaf", sources)
