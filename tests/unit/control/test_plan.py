"""``blendrag plan`` on a machine whose times are known, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from blendrag.cli import plan as command
from blendrag.control.estimate import Estimator
from blendrag.control.plan import Corpus, make_plan
from blendrag.control.prices import Prices
from blendrag.machine import cpu, installed_vllm
from blendrag.store.identity import KVIdentity
from paper_machine import MACHINE, SPEEDS, make_profile

IDENTITY = KVIdentity("paper", "weights-1", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64)
CORPUS = Corpus(chunks=1_000_000, chunk_tokens=512, chunk_bytes=11_800_000, top_k=6)
Plan = Callable[..., Result]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Call as ``plan("--chunks", 1000)``: the command line, in an empty folder."""
    from blendrag.cli.app import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_profile_of", lambda settings: (make_profile(machine=MACHINE), IDENTITY))
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    return lambda *arguments: runner.invoke(app, ["plan", *map(str, arguments)])


def test_plan_does_not_contradict_the_controller() -> None:
    estimate = Estimator.of(make_profile())
    result = make_plan(estimate, CORPUS, 0.15, Prices())
    assert {tier.tier for tier in result.tiers} == set(SPEEDS)
    assert result.choice.tier == "disk"
    for tier in result.tiers:
        assert tier.auto.blend_s <= result.plain_s and tier.fixed.blend_s <= result.plain_s
        assert tier.ttft_s >= max(tier.load_s, tier.recompute_s)
        assert tier.cost == pytest.approx(11_800 * (Prices().of(tier.tier) or 0))
    ratios = {tier.tier: tier.ratio for tier in result.tiers}
    assert ratios["ram"] == 0.15 < ratios["object"]


def test_plan_does_not_hide_loading_behind_a_selector_that_waits_for_it() -> None:
    estimate = Estimator.of(make_profile(selector="query"))
    result = make_plan(estimate, CORPUS, 0.2, Prices())
    assert result.choice.tier is None
    for tier in result.tiers:
        assert tier.ttft_s >= tier.load_s + tier.recompute_s
        assert tier.ratio == 0.2 and tier.auto == tier.fixed


def test_tier_nobody_priced_has_no_cost() -> None:
    profile = make_profile(tiers={"tape": make_profile().tiers["disk"]})
    result = make_plan(Estimator.of(profile), CORPUS, 0.15, Prices())
    assert result.tiers[0].cost is None and result.choice.tier is None


def test_command_says_what_it_would_choose_and_why(plan: Plan) -> None:
    result = plan("--chunks", 1_000_000)
    assert result.exit_code == 0, result.output
    for said in ("GB of KV", "mode A", "mode B", "mode C", "plain prefill", "paper", *SPEEDS):
        assert said in result.stdout, said
    facts = json.loads(plan("--chunks", 1000, "--chunk-tokens", 256, "-k", 3, "--json").stdout)
    assert facts["corpus"]["chunk_tokens"] == 256 and facts["corpus"]["top_k"] == 3
    assert facts["checked"] == []


def measure_here(monkeypatch: pytest.MonkeyPatch, **other: str) -> None:
    """The profile is of this machine but for what is ``other``."""
    here = replace(MACHINE, **({"cpu": cpu(), "vllm": installed_vllm()} | other))
    monkeypatch.setattr(command, "_profile_of", lambda settings: (make_profile(machine=here), IDENTITY))


def test_times_of_another_selector_are_not_passed_off_as_this_ones(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_here(monkeypatch)
    said = "selector 'hkvd', not 'query': run blendrag profile again"
    assert said in plan("--chunks", 1000, "--json").stderr
    Path("blendrag.yaml").write_text("selector: hkvd\n")
    assert "run blendrag profile" not in plan("--chunks", 1000).stderr


def test_profile_of_a_selector_that_is_gone_is_not_a_remedy(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_profile(selector="gradual_query")
    monkeypatch.setattr(command, "_profile_of", lambda settings: (old, IDENTITY))
    result = plan("--chunks", 1000)
    assert result.exit_code == 1 and "error: the profile is of a selector" in result.stderr
    assert "run blendrag profile again" in " ".join(result.stderr.splitlines()[-1:])


@pytest.mark.parametrize("fact", ["cpu", "vllm"])
def test_times_of_another_machine_are_not_passed_off_as_this_ones(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    measure_here(monkeypatch, **{fact: "other"})
    said = f"of another machine (different: {fact}): run blendrag profile again"
    assert said in " ".join(plan("--chunks", 1000, "--json").stderr.split())


def test_ratio_and_prices_that_are_given_are_used(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("currency: EUR\ntiers: {disk: 9}\n")
    result = plan("--chunks", 1000, "--ratio", 1, "--prices", "prices.yaml")
    assert "EUR per month" in result.stdout and "recompute at 1" in result.stdout
    assert "(mode B): object" in result.stdout


def test_prices_in_the_settings_file_are_used(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "blendrag.yaml").write_text("prices: {currency: CHF}\n")
    assert "CHF per month" in plan("--chunks", 1000).stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--index"),
        (("--chunks", 5, "--index", "kb"), "not both"),
        (("--index", "kb"), "no index at 'kb'"),
        (("--chunks", 5, "--prices", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_one_line(plan: Plan, arguments: tuple[Any, ...], named: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 1
    assert named in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.output


def test_missing_profile_is_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blendrag.cli.app import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("blendrag.serving.identity.kv_identity", lambda settings, folder: IDENTITY)
    monkeypatch.setattr("blendrag.models.resolve_model", lambda *args, **kwargs: tmp_path)
    environment = {"BLENDRAG_CACHE_DIR": str(tmp_path)}
    result = CliRunner(env=environment).invoke(app, ["plan", "--chunks", "5"])
    assert result.exit_code == 1 and "blendrag profile" in " ".join(result.stderr.split())
