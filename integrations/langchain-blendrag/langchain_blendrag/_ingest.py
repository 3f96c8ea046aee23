"""Split, store, warm: a batch at a time, so that an interrupt loses one batch at most."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from langchain_core.documents import Document

from blendrag.errors import ConfigError
from blendrag.progress import Progress, progress_bar
from blendrag.serving.prefill import PrefillReport

if TYPE_CHECKING:
    from langchain_text_splitters import TextSplitter

    from langchain_blendrag._warming import WarmingStore

_BATCH = 32  # chunks


@dataclass(slots=True, kw_only=True)
class IngestReport(PrefillReport):
    """What one ``ingest`` did: chunks stored, chunks that were stored before, and what was prefilled."""

    added: int = 0
    skipped: int = 0

    def count(self, prefilled: PrefillReport | None) -> None:
        """Add what one batch took."""
        if prefilled is None:
            return
        self.chunks += prefilled.chunks
        self.tokens += prefilled.tokens
        self.nbytes += prefilled.nbytes
        self.prefill_s += prefilled.prefill_s
        # Each batch counts all that are too long, those of earlier batches again.
        self.too_long = max(self.too_long, prefilled.too_long)
        self.not_blended = prefilled.not_blended or self.not_blended


def ingest(
    store: WarmingStore, documents: Iterable[Document], splitter: TextSplitter | None, show_progress: bool
) -> IngestReport:
    """What ``WarmingStore.ingest`` promises."""
    chunks = _identified((splitter or _splitter_of(store)).split_documents(documents))
    report = IngestReport()
    with progress_bar(show_progress) as bar:
        bar.note("ingest")
        bar.total(len(chunks))
        for batch in (chunks[at : at + _BATCH] for at in range(0, len(chunks), _BATCH)):
            present = store._present(chunk_id for chunk_id, _ in batch) or set()
            missing = [(chunk_id, chunk) for chunk_id, chunk in batch if chunk_id not in present]
            if missing:
                with store._quietly():
                    store.add_documents([chunk for _, chunk in missing], ids=[id for id, _ in missing])
            report.added += len(missing)
            report.skipped += len(batch) - len(missing)
            # Those present too: an earlier run may have ended between storing and warming.
            report.count(
                store._warm({chunk_id: chunk.page_content for chunk_id, chunk in batch}, _Notes(bar))
            )
            bar.advance(len(batch))
    return report


class _Notes(Progress):
    """What the engine is doing with a batch, beside a bar that counts chunks."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def note(self, what: str) -> None:
        self._bar.note(f"ingest: {what}")


def _identified(chunks: Iterable[Document]) -> list[tuple[str, Document]]:
    """Chunks with ids by source and text; the same text again in one source has an id of its own."""

    def identify() -> Iterator[tuple[str, Document]]:
        seen: Counter[tuple[str, str]] = Counter()
        for chunk in chunks:
            named = str(chunk.metadata.get("source", "")), chunk.page_content
            content = json.dumps([*named, seen[named]]).encode()
            seen[named] += 1
            yield hashlib.sha256(content).hexdigest()[:32], chunk

    return list(identify())


def _splitter_of(store: WarmingStore) -> TextSplitter:
    """Chunks of as many tokens as blendrag's own have."""
    if store.llm is None:
        raise ConfigError("ingest() measures chunks in the model's tokens: give llm=, or text_splitter=")
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    library, settings = store.llm.chat.library, store.llm.chat.settings
    return RecursiveCharacterTextSplitter(
        chunk_size=settings.chunk_tokens,
        chunk_overlap=settings.chunk_overlap,
        length_function=lambda text: len(library.tokenizer.encode(text, add_special_tokens=False)),
    )
