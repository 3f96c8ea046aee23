"""Our connector beside others, under vLLM's ``MultiConnector``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig

from blendrag.engine.client.launch import connector_args
from blendrag.engine.compat import connector as compat
from blendrag.engine.compat.connector import least_rows
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.worker.connector import BlendConnector
from blendrag.settings import Settings
from tests.helpers.connector_halves import request_of


def test_connector_among_others_is_bound_to_its_model(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.load(blend_share=0.3)
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [other, connector_args(settings)]},
    )
    config = EngineArgs(str(model_dir), max_model_len=512, kv_transfer_config=transfer).create_engine_config()
    both: dict[KVConnectorRole, Any] = {
        role: MultiConnector(config, role, KVCacheConfig(8, [], [])) for role in KVConnectorRole
    }
    assert compat.own_connector(BlendConnector) is None, "there is none yet"
    monkeypatch.setattr(compat, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(compat, "get_kv_transfer_group", lambda: both[KVConnectorRole.WORKER])
    ours = compat.own_connector(BlendConnector)
    assert ours is not None
    assert ours.options["blend_share"] == 0.3

    request = request_of(Recipe("store", (("key", 0, 8),)).transfer_params("t"), 64)
    assert both[KVConnectorRole.SCHEDULER].get_num_new_matched_tokens(request, 0)[0] == 64 - least_rows()
