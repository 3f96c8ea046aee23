"""Which connector an engine starts with, by its model and arguments. No engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4TextConfig, Qwen3NextConfig

from blendrag.engine.compat import start
from blendrag.engine.compat.start import fitting_connector
from blendrag.errors import ConfigError
from blendrag.server.command import serve_command
from blendrag.settings import Settings
from stored_trees import tree_tiers

OURS = {"kv_connector": "BlendConnector", "kv_role": "kv_both"}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hybrid")
    Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], num_hidden_layers=4).save_pretrained(folder)
    return str(folder)


def test_blended_model_has_ours(model_dir: Path) -> None:
    assert fitting_connector({"model": str(model_dir)}, OURS) == (OURS, "")


def test_hybrid_has_the_one_with_states(hybrid: str) -> None:
    assert fitting_connector({"model": hybrid}, OURS) == (OURS | {"kv_connector": "StatesConnector"}, "")


@pytest.mark.parametrize("can_fail", [True, False])
def test_layers_of_two_shapes_that_share_kv_are_kept_in_groups_or_not_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_fail: bool
) -> None:
    """Also where there is to be a tree: in one group, vLLM does not start with them."""
    monkeypatch.setattr(start, "CAN_FAIL", can_fail)
    Gemma4TextConfig(architectures=["Gemma4ForCausalLM"], num_kv_shared_layers=20).save_pretrained(tmp_path)
    connector, why = fitting_connector({"model": str(tmp_path)}, OURS)
    if can_fail:
        assert (connector, why) == (OURS | {"kv_connector": "GroupsConnector"}, "")
    else:
        assert connector is None and "share KV of several shapes" in why


def test_server_of_a_hybrid_asks_for_a_tree(hybrid: str) -> None:
    with pytest.raises(ConfigError, match="tree_bytes"):
        serve_command(Settings.load(model=hybrid), {}, Path(hybrid), None, [])
    settings = Settings.load(model=hybrid, tiers=tree_tiers(disk=1 << 20))
    words = serve_command(settings, {}, Path(hybrid), None, []).words
    assert any('"StatesConnector"' in word for word in words)


@pytest.mark.parametrize("beside", [{"use_replayssm": True}, {"prefix_match_unit": 16}])
def test_hybrid_whose_blocks_are_others_has_none(hybrid: str, beside: dict[str, Any]) -> None:
    connector, why = fitting_connector({"model": hybrid, **beside}, OURS)
    assert connector is None and "state" in why
