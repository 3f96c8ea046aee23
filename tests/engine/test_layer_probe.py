"""What reuse does to each layer, on the engine that the other tests use."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from blendrag.errors import StoreError
from blendrag.lab.evaluate.layers import spearman
from workbench import Bench, Prompt

pytestmark = pytest.mark.engine

RATIOS = [0.0, 0.15, 0.5, 1.0]


def probe(bench: Bench, prompt: Prompt) -> dict[str, Any]:
    arguments = (list(prompt.token_ids), list(prompt.spans), RATIOS, 6)
    return bench.engine.call("probe_layers", bench.store, *arguments)


@pytest.fixture(scope="module")
def probed(bench: Bench) -> dict[str, Any]:
    """Of a prompt of five chunks."""
    return probe(bench, bench.prompt(bench.pieces[:5]))


def test_layer_0_deviates_although_it_depends_on_the_token_alone(
    bench: Bench, probed: dict[str, Any]
) -> None:
    for metric in ("k", "v"):
        layers = np.array(probed["deviation"][metric])
        assert layers.shape == (bench.engine.facts["num_layers"], 5 * len(bench.pieces[0].token_ids))
        assert layers[0].max() < 1e-8
        assert layers[1:].mean(1).min() > 1e-4, "nothing deviates: the comparison is blind"


def test_chunk_that_stands_as_it_was_stored_deviates(bench: Bench) -> None:
    prompt = Prompt().cached(bench.pieces[0]).fresh(bench.encode("\n\nIn short,"))
    found = probe(bench, prompt)
    for metric in ("k", "v"):
        assert np.max(found["deviation"][metric]) < 1e-6
    for curve in found["attention"].values():
        assert np.max(curve) < 1e-3


def test_attention_does_not_come_back_with_what_is_recomputed(probed: dict[str, Any]) -> None:
    curves = {name: np.array(curve).mean(1) for name, curve in probed["attention"].items()}
    assert set(curves) == {"hkvd", "hkvd_each", "first_k", "random"}
    for name, (none, some, half, every) in curves.items():
        assert none == pytest.approx(curves["random"][0]) and none > 0.01, name
        assert every == 0 and half < none, name
        assert some <= none * 1.05, name
    assert curves["hkvd_each"][1] < curves["random"][1], "the tokens that deviate most are the wrong ones"


def test_neighbouring_layers_rank_tokens_by_chance(probed: dict[str, Any]) -> None:
    layers = probed["deviation"]["v"][1:]
    assert np.mean([spearman(one, above) for one, above in itertools.pairwise(layers)]) > 0.3


def test_missing_chunk_is_compared_as_if_it_were_there(bench: Bench) -> None:
    with pytest.raises(StoreError, match="missing"):
        probe(bench, bench.prompt([bench.pieces[0], bench.piece("Nobody has stored this sentence.")]))


def test_command_reads_no_questions_or_leaves_its_store(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"question": f"Who is {n}?", "answers": ["Ada"], "documents": [f"Ada is {n}. " * 9, "Bo is 7."]}
        for n in range(3)
    ]
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stores = tmp_path / "stores"
    stores.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(stores))
    arguments = ["--data", str(data), "--prompts", "2", "--json", "-"]
    found = json.loads(command("bench", "layers", *arguments).stdout)
    assert len(found["config"]["prompt_tokens"]) == 2 and found["layer0"] < 1e-8
    assert found["attention"]["first_k"]["1"]["median"] == 0 < found["attention"]["first_k"]["0"]["median"]
    assert not list(stores.iterdir())
