"""Two who sync a collection at once, as two API servers do. No engine is started here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from blendrag.serving.collection import Collection
from blendrag.serving.library import Library
from blendrag.settings import Settings

SETTINGS = Settings.load(max_model_len=512)
ROUNDS = 200
DOCUMENTS = 6


def unblended(*_: Any) -> Any:
    """An engine whose model keeps no KV: what is registered stays as it is."""
    facts = SimpleNamespace(reason="it is a stand-in")
    return SimpleNamespace(alive=True, blends=False, facts=facts, release=lambda: None)


def test_two_syncs_at_once_end_as_one_of_the_two(tmp_path: Path, model_dir: Path) -> None:
    servers = [Library(tmp_path / "kv", SETTINGS, unblended, shared=True) for _ in range(2)]
    together = threading.Barrier(2)

    def sync(who: int, number: int) -> set[str]:
        # Some ids are in both, with other texts: a mixture would show in the texts, too.
        wanted = {f"{number}-{n if n % 2 else (n, who)}": [f"Text {n} of {who}."] for n in range(DOCUMENTS)}
        together.wait(60)
        Collection(servers[who], "cities").sync(wanted)
        return {f"{id}: {text}" for id, (text,) in wanted.items()}

    try:
        with ThreadPoolExecutor(2) as pool:
            for number in range(ROUNDS):
                wanted = list(pool.map(sync, (0, 1), (number, number)))
                kept = Collection(servers[0], "cities")
                texts = servers[0].catalogue.texts_of
                found = {f"{id}: {text}" for id in kept.ids() for text in texts(kept._owner(id))}
                assert found in wanted, f"round {number}"
    finally:
        for server in servers:
            server.close()
