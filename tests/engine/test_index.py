"""Ingest and ask on real parts: vectors, catalogue, KV and answers agree whatever happens in between."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from workbench import Bench, real_texts

from blendrag import BlendIndex, Document
from blendrag.errors import (
    EmptyIndexError,
    PromptTooLongError,
    StoreFullError,
    StoreInUseError,
    StoreMismatchError,
)
from blendrag.index.answer import Answer, Evidence
from blendrag.index.progress import IngestProgress

pytestmark = pytest.mark.engine

QUESTION = "What is the package for?"
Open = Callable[..., BlendIndex]


@pytest.fixture
def open_index(engine_options: dict[str, Any], bench: Bench, tmp_path: Path) -> Iterator[Open]:
    """Opens indexes (by default always the same) that share the run's engine."""
    opened: list[BlendIndex] = []

    def open_one(name: str = "index", **options: Any) -> BlendIndex:
        small = {"chunk_tokens": 64, "min_cached_tokens": 16, "top_k": 4, "max_tokens": 8}
        index = BlendIndex.open(tmp_path / name, **{**engine_options, **small, **options})
        opened.append(index)
        return index

    yield open_one
    for index in opened:
        index.close()


@pytest.fixture(scope="session")
def texts(tokenizer: Any) -> list[str]:
    """Eight passages of about 160 tokens."""
    return [tokenizer.decode(ids) for ids in real_texts(tokenizer, tokens=160, per_package=1)][:8]


@pytest.fixture
def folder(tmp_path: Path, texts: list[str]) -> Path:
    """Five text files, of about three chunks each."""
    path = tmp_path / "documents"
    path.mkdir()
    for number, text in enumerate(texts[:5]):
        (path / f"{number}.txt").write_text(text)
    return path


def files(index: BlendIndex) -> set[str]:
    """Keys of the chunks whose KV is on disk."""
    return {path.stem for path in index.root.glob("kv/*/*.safetensors")}


def assert_consistent(index: BlendIndex) -> None:
    """Ledger, catalogue, vectors and KV speak of the same documents and chunks."""
    entries = index._catalogue.entries()
    assert {entry.key for entry in entries if entry.state == "ready"} == files(index)
    assert index._ledger.sources() == index._vectors.sources() == set(index._catalogue.owners())
    keys = {key for record in index._ledger.documents() for key in record.chunk_keys}
    assert keys == {entry.key for entry in entries}


def assert_adds_up(answer: Answer) -> None:
    evidence = answer.evidence
    assert evidence.reused + evidence.recomputed + evidence.fresh + evidence.prefix == evidence.prompt
    assert sum(row["tokens"] for row in evidence.documents if row["kind"] != "not found") == evidence.prompt


# -- ingest -----------------------------------------------------------------------------------------------


def test_a_second_ingest_does_only_what_has_changed(open_index: Open, folder: Path, texts: list[str]) -> None:
    index = open_index()
    first = index.ingest(folder)
    assert (first.added, first.unchanged, first.skipped) == (5, 0, [])
    assert first.chunks == index.stats()["chunks"]["ready"] >= 10
    kv = index._identity
    per_token = 4 * 2 * kv.num_layers * kv.num_kv_heads * kv.head_size  # float32, K and V
    assert first.nbytes == index.stats()["chunks"]["bytes"] == first.tokens * per_token
    assert_consistent(index)
    before = files(index)

    again = index.ingest(folder)
    assert (again.added, again.changed, again.unchanged, again.chunks) == (0, 0, 5, 0)
    assert files(index) == before

    (folder / "1.txt").write_text(texts[5])
    (folder / "2.txt").unlink()
    changed = index.ingest(folder)
    assert (changed.added, changed.changed, changed.unchanged, changed.removed) == (0, 1, 3, 1)
    assert 0 < changed.chunks <= 4
    assert_consistent(index)
    assert not {str(folder / "2.txt")} & index._vectors.sources()
    assert before - files(index), "the KV of what is gone is gone"


def test_a_chunk_of_two_documents_outlives_one_of_them(open_index: Open, texts: list[str]) -> None:
    index = open_index()
    index.ingest([Document(texts[0], "one"), Document(texts[0], "two")])
    before = files(index)
    index.delete("one")
    assert files(index) == before
    index.delete("two")
    assert files(index) == set()
    assert_consistent(index)


def test_deleting_while_no_engine_runs_removes_the_kv_when_it_does(
    open_index: Open, texts: list[str]
) -> None:
    with open_index() as index:
        index.ingest([Document(texts[0], "one"), Document(texts[1], "two")])
        before = files(index)
    with open_index() as index:
        index.delete("one")
        index.ask(QUESTION)
        assert files(index) < before
        assert_consistent(index)


def test_an_interrupted_ingest_resumes_with_what_is_left(
    open_index: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = open_index(ingest_batch_tokens=128)

    def interrupt(self: IngestProgress, tokens: int, *_: object) -> None:
        if tokens > 256:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(IngestProgress, "prefill", interrupt)
        index.ingest(folder)
    left = len(index._catalogue.pending())
    assert left and files(index)
    assert_consistent(index)
    assert index.ask(QUESTION).text  # what is there can be asked already
    index.close()

    index = open_index()
    resumed = index.ingest(folder)
    assert (resumed.unchanged, resumed.chunks) == (5, left)
    assert index._catalogue.pending() == []
    assert_consistent(index)


def test_an_ingest_interrupted_between_documents_takes_the_rest_later(
    open_index: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, seen = open_index(), []

    def interrupt(self: IngestProgress, name: str) -> None:
        seen.append(name)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(IngestProgress, "document", interrupt)
        index.ingest(folder)
    resumed = index.ingest(folder)
    assert (resumed.unchanged, resumed.added) == (2, 3)
    assert index._catalogue.pending() == []
    assert_consistent(index)


def test_over_the_disk_limit_chunks_leave_and_questions_are_still_answered(
    open_index: Open, folder: Path
) -> None:
    limit = 16 << 20
    index = open_index(disk_bytes=limit)
    index.ingest(folder)
    chunks = index.stats()["chunks"]
    assert chunks["evicted"] > 0 and chunks["pending"] == 0 and chunks["ready"] > 0
    assert sum(path.stat().st_size for path in index.root.glob("kv/*/*")) <= limit
    answer = index.ask(QUESTION, top_k=10)
    assert_adds_up(answer)
    rows = index.explain(QUESTION, top_k=10)
    assert any("not stored" in row["reason"] for row in rows if row["source"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of its own, of as many MiB as are asked for; asked again, it grows."""
    path = tmp_path / "disk"
    path.mkdir()

    def size(mib: int) -> Path:
        again = "remount," if os.path.ismount(path) else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{again}size={mib}m", "none", str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        return path

    yield size
    if os.path.ismount(path):
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_stops_ingest_cleanly_and_the_rest_comes_later(
    open_index: Open, folder: Path, small_disk: Callable[[int], Path]
) -> None:
    root = small_disk(16) / "kb"
    index = open_index(str(root), ingest_batch_tokens=128)
    with pytest.raises(StoreFullError, match="ingest again"):
        index.ingest(folder)
    left = len(index._catalogue.pending())
    assert left and files(index)
    assert not list(root.glob("kv/*/*.tmp"))
    assert_consistent(index)

    small_disk(200)
    resumed = index.ingest(folder)
    assert (resumed.unchanged, resumed.chunks) == (5, left)
    assert index._catalogue.pending() == []
    assert_consistent(index)


# -- opening ----------------------------------------------------------------------------------------------


def test_an_index_made_with_another_model_is_refused_by_both_names(
    open_index: Open, texts: list[str], model_dir: Path, tmp_path: Path
) -> None:
    with open_index() as index:
        index.ingest(Document(texts[0], "one"))
    other = tmp_path / "other-model"
    other.mkdir()
    for file in model_dir.iterdir():
        (other / file.name).symlink_to(file)
    config = (model_dir / "config.json").read_text()
    (other / "config.json").unlink()
    (other / "config.json").write_text(config.replace('"rms_norm_eps"', '"note": 1, "rms_norm_eps"'))
    with pytest.raises(StoreMismatchError, match=r"smollm2-135m-instruct.*other-model"):
        open_index(model=str(other))
    with open_index() as index:  # the refusal left no lock and no change
        assert index.ask(QUESTION).text


def test_an_index_open_in_another_process_is_refused_by_its_number(
    open_index: Open, texts: list[str], engine_options: dict[str, Any]
) -> None:
    index = open_index()
    index.ingest(Document(texts[0], "one"))
    script = f"from blendrag import BlendIndex; BlendIndex.open({str(index.root)!r}, **{engine_options!r})"
    other = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert StoreInUseError.__name__ in other.stderr
    assert f"process {os.getpid()}" in other.stderr
    assert index.ask(QUESTION).text


def test_an_empty_index_says_so(open_index: Open) -> None:
    index = open_index()
    with pytest.raises(EmptyIndexError, match="ingest some first"):
        index.ask(QUESTION)


# -- questions --------------------------------------------------------------------------------------------


@pytest.fixture
def filled(open_index: Open, folder: Path) -> BlendIndex:
    index = open_index()
    index.ingest(folder)
    return index


def test_an_answers_evidence_adds_up_blended_cached_and_plain(filled: BlendIndex, bench: Bench) -> None:
    bench.reset()
    blended = filled.ask(QUESTION)
    assert blended.text and len(blended.sources) == 4
    assert blended.evidence.plain is None and blended.evidence.missing == {}
    assert blended.evidence.reused > blended.evidence.recomputed > 0
    assert_adds_up(blended)

    again = filled.ask(QUESTION)
    assert again.evidence.prefix > 0
    assert_adds_up(again)

    bench.reset()
    plain = filled.ask(QUESTION, blend=False)
    assert plain.evidence.plain and plain.evidence.fresh == plain.evidence.prompt
    assert_adds_up(plain)


def test_ratio_1_answers_as_plain_prefill_does(open_index: Open, folder: Path, bench: Bench) -> None:
    index = open_index(recompute_ratio=1.0, max_tokens=16)
    index.ingest(folder)
    bench.reset()
    blended = index.ask(QUESTION)
    assert blended.evidence.plain is None and blended.evidence.reused == 0
    bench.reset()
    assert index.ask(QUESTION, blend=False).text == blended.text


def test_every_way_of_asking_gives_the_same_answer(filled: BlendIndex, bench: Bench) -> None:
    def alone(ask: Callable[[], Answer | None]) -> Answer | None:
        bench.reset()
        return ask()

    def streamed() -> Answer | None:
        stream = filled.stream(QUESTION)
        assert "".join(stream) == getattr(stream.answer, "text", None)
        return stream.answer

    answers = [
        alone(lambda: filled.ask(QUESTION)),
        alone(streamed),
        alone(lambda: asyncio.run(filled.aask(QUESTION))),
    ]
    texts = {answer.text for answer in answers if answer}
    assert len(texts) == 1 and None not in answers


def test_a_stopped_answer_frees_its_request(filled: BlendIndex, bench: Bench) -> None:
    stream = filled.stream(QUESTION, max_tokens=2000)
    next(iter(stream))
    stream.close()
    assert stream.answer is None
    bench.reset()


def test_explain_tells_of_every_token_and_agrees_with_the_answer(filled: BlendIndex, bench: Bench) -> None:
    rows = filled.explain(QUESTION)
    bench.reset()
    evidence = filled.ask(QUESTION).evidence
    cached = [row for row in rows if row["kind"] == "cached"]
    assert len(cached) == 4 and all(row["source"].endswith(".txt") for row in cached)
    assert sum(row["tokens"] for row in rows) == evidence.prompt
    assert sum(row["reused"] for row in cached) == evidence.reused + evidence.recomputed


def test_a_damaged_chunk_is_reported_and_repaired_behind_the_answer(
    filled: BlendIndex, open_index: Open, bench: Bench
) -> None:
    hit = filled.retrieve(QUESTION)[0]
    filled.close()
    (file,) = filled.root.glob(f"kv/*/{hit.key}.safetensors")
    record = bytearray(file.read_bytes())
    record[-100] ^= 1
    file.write_bytes(record)
    bench.reset()
    with open_index() as index:
        hurt = index.ask(QUESTION)
        assert hurt.text and hurt.evidence.missing == {hit.key: "damaged"}
        assert_adds_up(hurt)
    bench.reset()
    with open_index() as index:
        assert_consistent(index)
        assert index.ask(QUESTION).evidence.missing == {}


def test_documents_that_do_not_fit_the_window_are_left_out_and_named(filled: BlendIndex) -> None:
    window = filled.start().max_model_len
    question = filled.tokenizer.decode(filled.tokenizer.encode("why? " * window)[: window - 250])
    rows = filled.explain(question)
    inside = [row for row in rows if row["kind"] == "cached"]
    left_out = [row for row in rows if row["kind"] == "not found"]
    assert 0 < len(inside) < 4 and len(inside) + len(left_out) == 4
    assert all("no room" in row["reason"] for row in left_out)
    assert window - 100 < sum(row["tokens"] for row in rows if row["kind"] != "not found") < window


def test_a_prompt_of_ones_own_reuses_the_documents_in_it(
    filled: BlendIndex, texts: list[str], bench: Bench
) -> None:
    def evidence(text: str) -> Evidence:
        bench.reset()
        answer = filled.ask([{"role": "user", "content": f"{text}\n\nIn short?"}])
        assert_adds_up(answer)
        return answer.evidence

    known, unknown = evidence(texts[0]), evidence(texts[6])
    tokens = {entry.key: len(entry.token_ids) for entry in filled._catalogue.entries()}
    owned = next(keys for source, keys in filled._catalogue.owners().items() if source.endswith("0.txt"))
    assert known.reused + known.recomputed == sum(tokens[key] for key in owned)
    assert unknown.plain and unknown.reused == 0
    filled.ingest(Document(texts[6], "late"))
    assert evidence(texts[6]).reused > 0
    filled.delete("late")
    assert evidence(texts[6]).reused == 0


def test_a_question_longer_than_the_window_is_refused(filled: BlendIndex) -> None:
    with pytest.raises(PromptTooLongError, match="no room"):
        filled.ask("why? " * 5000)
