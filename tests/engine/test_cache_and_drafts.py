"""Engines whose KV cache has eight bits, or whose answers are drafted, blend as others do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

import blendrag.engine.client.engine as module
from blendrag import BlendIndex
from blendrag.engine.client.engine import Engine
from blendrag.errors import ConfigError
from blendrag.lab.doctor import run_doctor
from blendrag.lab.running import lab_engine
from blendrag.models import DEFAULT_MODEL, resolve_model
from blendrag.settings import Settings
from drafts import eagle_head
from places import EXAMPLES
from quantised_model import small_model
from stored_trees import tree_tiers
from waiting import until

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly]

CLOSED = "When is the office in Bergen closed?"
TRAVEL = "Who approves travel?"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM keeps KV in eight bits on CPUs with AVX-512 only"
)


def settings(model: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model), "max_model_len": 3072, "kv_cache_gib": 1, "dtype": "float32", **options}


@needs_avx512
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_cache_of_eight_bits_blends_to_its_own_full_prefill(model_dir: Path, kind: str) -> None:
    asked = Settings.load(**settings(model_dir, dtype="auto", engine_args={"kv_cache_dtype": kind}))
    report = run_doctor(asked)
    assert report.passed, [row for row in report.rows if not row.ok]


def answers(folder: Path, model: Path, **options: Any) -> list[str]:
    """Of one index, all of them blended; and the same, prefilled plainly."""
    with BlendIndex.open(folder, **settings(model, **options)) as index:
        index.ingest(EXAMPLES / "handbook", progress=False)
        found = []
        for question in (CLOSED, TRAVEL):
            blended = index.ask(question, max_tokens=24)
            assert blended.evidence.plain is None and blended.evidence.reused > 0
            found += [blended.text, index.ask(question, max_tokens=24, blend=False).text]
        return found


def test_drafts_change_no_blended_answer(model_dir: Path, tmp_path: Path) -> None:
    head = {"method": "eagle", "model": str(eagle_head(model_dir, tmp_path)), "num_speculative_tokens": 2}
    plain, by_ngram, by_head = (
        answers(tmp_path / str(number), model_dir, engine_args={"speculative_config": each} if each else {})
        for number, each in enumerate((None, NGRAM, head))
    )
    assert plain == by_ngram == by_head


def drafted_behind(
    asked: dict[str, Any], folder: Path, modes: Sequence[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, float]]:
    """How many tokens are drafted behind questions that are answered in these modes, and accepted."""
    in_full = module.engine_args
    monkeypatch.setattr(module, "engine_args", lambda *asked: in_full(*asked) | {"disable_log_stats": False})
    engine, counted = Engine.shared(Settings.load(**asked)), list[tuple[float, float]]()
    try:
        with BlendIndex.open(folder, **asked) as index:
            index.ingest(EXAMPLES / "handbook", progress=False)
            for mode, question in modes:
                if mode == "exact":
                    index.warm(question)
                until(engine.reset_prefix_cache)
                drafted, kept = accepted()
                asking: dict[str, Any] = {"max_tokens": 40, "similarity_top_k": 2, "blend": mode == "blended"}
                assert index.ask(question, **asking).evidence.mode == mode
                now = accepted()
                counted.append((now[0] - drafted, now[1] - kept))
    finally:
        engine.release()
    return counted


def test_blend_and_exact_prefix_come_with_the_kv_of_the_model_that_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its drafts, of the model itself here, are accepted as behind full prefill."""
    model = str(resolve_model(DEFAULT_MODEL, Settings.load().cache_dir))
    itself = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    asked = settings(Path(model), engine_args={"speculative_config": itself}, tiers=tree_tiers(disk=1 << 30))
    modes = ("plain", CLOSED), ("blended", CLOSED), ("blended", TRAVEL), ("exact", CLOSED)
    counted = drafted_behind(asked, tmp_path, modes, monkeypatch)
    assert counted == [counted[0]] * 4 and counted[0][0] == counted[0][1] > 20


@pytest.mark.nightly(part="ranks")
def test_drafts_are_accepted_behind_blends_on_two_ranks(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(small_model(tmp_path / "model", tokenizer))
    itself = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    two = {"tensor_parallel_size": 2, "speculative_config": itself}
    asked = settings(Path(model), max_model_len=2048, engine_args=two)
    modes = ("plain", CLOSED), ("blended", CLOSED)
    counted = drafted_behind(asked, tmp_path / "index", modes, monkeypatch)
    assert counted[0] == counted[1] and counted[0][0] == counted[0][1] > 20


def accepted() -> tuple[float, float]:
    """Tokens that were drafted in this process, and those of them that were accepted."""
    names = (f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    drafted, kept = (sum(one.value for one in samples if one.name == name) for name in names)
    return drafted, kept


def test_measuring_with_drafts_is_refused_in_one_line(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="measure without speculative_config"):
        lab_engine(Settings.load(**settings(model_dir, engine_args={"speculative_config": NGRAM})))


def test_budget_and_drafts_together_are_refused(model_dir: Path, tmp_path: Path) -> None:
    asked = settings(model_dir, kv_budget=256, engine_args={"speculative_config": NGRAM})
    with (
        BlendIndex.open(tmp_path / "index", **asked) as index,
        pytest.raises(ConfigError, match="with drafts is not decoded from a kv_budget"),
    ):
        index.ingest(EXAMPLES / "handbook", progress=False)
