"""The check of another vLLM's files finds what is missing from them, and nothing else."""

from __future__ import annotations

from pathlib import Path

import vllm

from imported_names import missing


def test_installed_vllm_has_every_name_that_is_imported() -> None:
    assert not missing(Path(vllm.__file__).parents[1])


def test_module_and_name_that_are_gone_are_found(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '9'\n")
    (package / "sampling_params.py").write_text("class RequestOutputKind: ...\n")
    lacking = "\n".join(missing(tmp_path))
    assert "vllm.sampling_params.StructuredOutputsParams" in lacking
    assert "vllm.v1.request.Request" in lacking
    assert "RequestOutputKind" not in lacking and "__version__" not in lacking


def test_name_that_moved_is_found_by_either_way(tmp_path: Path) -> None:
    module = tmp_path / "vllm" / "renderers" / "chat_utils.py"
    module.parent.mkdir(parents=True)
    module.write_text("MM_PARSER_MAP = {}\n")
    lacking = "\n".join(missing(tmp_path))
    assert "MM_PARSER_MAP" not in lacking
    assert "TEXT_PART_TYPES" in lacking
