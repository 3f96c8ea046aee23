"""From settings to vLLM's engine arguments. No engine is started here."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from vllm.logger import _VllmLogRecordFactory

from blendrag import machine
from blendrag.engine.client import launch
from blendrag.engine.client.launch import SERVING, busy, engine_args, engine_key, server_environment
from blendrag.engine.compat import platform
from blendrag.engine.compat.start import argument_names
from blendrag.errors import ConfigError
from blendrag.settings import Settings


def arguments(**options: Any) -> dict[str, Any]:
    return engine_args(Settings.load(reasoning_parser="none", **options), Path("model"), SERVING)


def test_vllms_argument_reaches_it() -> None:
    given = {"gpu_memory_utilization": 0.5, "kv_cache_dtype": "fp8", "max_logprobs": 50}
    given |= {"enforce_eager": False, "enable_prefix_caching": False}
    assert arguments(engine_args=given).items() >= given.items()
    made = arguments(engine_args={"revision": "main", "max_num_seqs": None})
    assert "revision" not in made and made["max_num_seqs"] == 32, "the folder is of the revision"
    assert set(made) <= argument_names()


def test_misspelt_argument_is_named_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"'max_logprob': vLLM has no .*; did you mean max_logprobs\?"):
        arguments(engine_args={"max_logprob": 50})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("prefix_caching", "did you mean enable_prefix_caching"),
        ("max_model_len", "it is the setting max_model_len"),
        ("enable_lora", "it is the setting lora"),
        ("worker_extension_cls", "blendrag sets it itself"),
        ("kv_transfer_config", "blendrag sets it itself"),
        ("kv_offloading_size", "blendrag sets it itself"),
        ("kv_cache_memory_bytes", "it is the setting kv_cache_gib"),
        ("quantization", "convert those"),
        ("load_format", "convert those"),
    ],
)
def test_argument_that_is_set_elsewhere_is_refused_with_the_remedy(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}': .*{remedy}"):
        arguments(engine_args={name: 1})


def test_argument_of_ours_cannot_be_overruled() -> None:
    for name in arguments().keys() - {"block_size", *launch._DEFAULTED}:  # ours if they are nobody else's
        with pytest.raises(ConfigError, match=name):
            arguments(engine_args={name: 1})


def test_gpu_has_more_requests_in_a_step_than_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"max_num_seqs": 4}
    assert arguments()["max_num_seqs"] == 32 and arguments(engine_args=few)["max_num_seqs"] == 4
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    assert "max_num_seqs" not in arguments() and arguments(engine_args=few)["max_num_seqs"] == 4


def test_budget_without_a_choice_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for blocks, least in (({}, 64), ({"block_size": 128}, 256)):
        arguments(kv_budget=least, engine_args=blocks)
        with pytest.raises(ConfigError, match=f"kv_budget must be at least {least}, .* not {least - 1}"):
            arguments(kv_budget=least - 1, engine_args=blocks)
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    arguments(kv_budget=48)  # a GPU's blocks are known once it runs


def test_engines_of_other_arguments_are_told_apart() -> None:
    one, same, other = (
        Settings.load(engine_args=args) for args in ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": 1})
    )
    assert {engine_key(one): one}[engine_key(same)] is one
    assert engine_key(one) != engine_key(other)
    assert "engine_args" in str(busy(one, other))
    overtaken = Settings.load(engine_args={"a": 1}, order="tree:window=8")
    assert engine_key(other) != engine_key(overtaken)
    assert "with order='tree:window=8' can start" in str(busy(other, overtaken))


@pytest.mark.parametrize(
    ("cores", "ranks", "parts"),
    [
        ({0, 1}, 2, "0|1"),
        ({4, 5, 6, 7, 8}, 2, "4,5|6,7"),
        ({3}, 2, "3|3"),
        ({0, 1, 2, 3}, 1, None),
    ],
)
def test_ranks_of_a_cpu_compute_on_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], ranks: int, parts: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(launch, "_memory_nodes", lambda: 1)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    several = Settings.load(engine_args={"tensor_parallel_size": ranks})
    assert server_environment(several).get("VLLM_CPU_OMP_THREADS_BIND") == parts
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in server_environment(several), "the user has said it"
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    monkeypatch.setattr(launch, "_memory_nodes", lambda: 2)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in server_environment(several), "vLLM divides them by itself"


@pytest.mark.parametrize(
    ("compiler", "gpu", "eager", "disabled"),
    [
        ("no-such-compiler -O2", False, False, "1"),
        ("cat -A", False, True, "1"),
        ("cat -A", False, False, None),
        ("no-such-compiler", True, True, None),
    ],
)
def test_nothing_is_compiled_on_a_cpu_whose_engine_is_eager_or_without_a_compiler(
    compiler: str,
    gpu: bool,
    eager: bool,
    disabled: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path if gpu else tmp_path / "nothing")
    asked = Settings.load(engine_args={} if eager else {"enforce_eager": False})
    assert server_environment(asked).get("TORCH_COMPILE_DISABLE") == disabled


def test_caches_of_vllm_are_ours_where_its_own_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    settings = Settings.load(cache_dir=tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert not server_environment(settings).keys() & set(names)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    for cache_dir, inside in ((tmp_path, tmp_path), (Path("/dev/null/x"), Path(tempfile.gettempdir()))):
        found = server_environment(settings.model_copy(update={"cache_dir": cache_dir}))
        assert all(inside in Path(found[name]).parents for name in names)


def test_environment_is_the_programs_own_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever an import has put into it, which the next start gets again: an import does so once."""
    monkeypatch.setattr(launch, "_imported", {})
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setenv("THEIRS", "1")
    before, settings = dict(os.environ), Settings.load(cache_dir=tmp_path)
    with launch.engine_environment(settings, "sockets", None):
        assert os.environ["VLLM_RPC_BASE_PATH"] == "sockets"
        os.environ["LD_PRELOAD_OF_A_TEST"] = "a library"
        os.environ["THEIRS"] = "2"
        del os.environ["MINE"]
    assert dict(os.environ) == before
    with launch.engine_environment(settings, "sockets", None):
        assert os.environ["LD_PRELOAD_OF_A_TEST"] == "a library"
        assert os.environ["THEIRS"] == "1", "the program's own"
    assert dict(os.environ) == before


@pytest.mark.parametrize("log", [None, Path("engine.log")])
@pytest.mark.parametrize("meanwhile", [None, logging.makeLogRecord])
def test_log_records_are_the_programs_own_again_unless_vllm_logs_to_the_terminal(
    log: Path | None, meanwhile: Any
) -> None:
    """A program that logs all that a record has would find a name of vLLM's in each. meanwhile: what another
    thread has put there."""
    before = logging.getLogRecordFactory()
    theirs = _VllmLogRecordFactory(before)
    try:
        with launch.engine_environment(Settings.load(), "sockets", log):
            logging.setLogRecordFactory(meanwhile or theirs)
        assert logging.getLogRecordFactory() is (meanwhile or (before if log else theirs))
    finally:
        logging.setLogRecordFactory(before)


def test_random_numbers_of_the_program_are_what_they_would_be() -> None:
    script = (
        "import random; random.seed(7); before = random.getstate();"
        " from blendrag.models import import_rich; import_rich();"
        " import sys, vllm.v1.engine.async_llm; assert 'rich.style' in sys.modules;"
        " raise SystemExit(random.getstate() != before)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
