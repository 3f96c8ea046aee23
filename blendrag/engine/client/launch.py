"""The start of vLLM: which settings need an engine of their own, the engine's environment and arguments, and
a start that does not run the user's script again."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from blendrag.adapter import adapter_for
from blendrag.engine.client import engine_log
from blendrag.engine.client.reasoning import engine_parser
from blendrag.engine.wire import start_error
from blendrag.errors import ConfigError, EngineBusyError
from blendrag.files.private import can_make
from blendrag.machine import must_not_compile
from blendrag.models import attention_heads, query_scaling
from blendrag.names import closest
from blendrag.settings import PREFIX_CACHING, Settings

# The settings that an engine is started with. All others may differ from request to request.
_ENGINE_SETTINGS = (
    "model", "lora", "dtype", "max_model_len", "kv_cache_gib", "engine_args",
    "reasoning_parser", "blend_share", "cache_dir",
)  # fmt: skip

READY = "VLLM_ENGINE_READY_TIMEOUT_S"
"""The environment variable that says how many seconds vLLM gives an engine to start."""

# Engine arguments of vLLM's that blendrag's settings have under another name.
_RENAMED = {
    "enable_lora": "lora",
    "served_model_name": "model",
}
_RENAMED_ON_CPU = {"kv_cache_memory_bytes": "kv_cache_gib"}
# Arguments whose defaults differ from vLLM's.
_DEFAULTED = frozenset(
    {
        "enable_prefix_caching", "enforce_eager", "language_model_only", "max_num_seqs",
        "tensor_parallel_size",
    }
)  # fmt: skip
# Arguments that would replace blendrag's connector.
_CONNECTORS = frozenset({"kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"})
# Arguments with which the same folder holds another model, whose KV would be taken for this one's, has
# another tokenizer than the client, or gives no answers.
_OTHER_MODEL = frozenset(
    {
        "config_format", "convert", "hf_config_path", "hf_overrides", "load_format", "model_class_overrides",
        "model_weights", "quantization", "quantization_config", "runner", "skip_tokenizer_init", "tokenizer",
        "tokenizer_mode", "tokenizer_revision",
    }
)  # fmt: skip

# Requests in one engine step on a CPU: vLLM's own choice is made for GPUs.
_CPU_SEQS = 32

# Tokens in a block on a CPU, the fewest that vLLM's kernels take: reuse and eviction work on whole blocks.
_CPU_BLOCK = 32

# vLLM keeps one core free for its own processes; on a small machine that halves the compute.
_SMALL_MACHINE_CORES = 4


@dataclass(frozen=True, slots=True)
class WorkerExtension:
    """The additions to an engine's worker, by qualified name: a class that is mixed into vLLM's, with
    operations for :meth:`Engine.call`, and logits processors."""

    worker: str = "blendrag.engine.worker.extension.BlendWorker"
    logits_processors: tuple[str, ...] = ()


SERVING = WorkerExtension()


def _of_engine(settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Return what settings must have in common to share an engine: by setting, what tells engines apart, and
    what the user has set."""
    values = {name: getattr(settings, name) for name in _ENGINE_SETTINGS}
    arguments = json.dumps(PREFIX_CACHING | settings.engine_args, sort_keys=True)
    return {name: (value, value) for name, value in values.items()} | {
        "engine_args": (arguments, settings.engine_args),
        "order": (settings.reorder_window, settings.order),
        "kv_budget": (settings.kv_budget is not None, settings.kv_budget),
    }


def engine_key(settings: Settings) -> tuple[Any, ...]:
    """Return the values that two settings must have in common to share an engine. A process has one engine
    for each."""
    return tuple(apart for apart, _ in _of_engine(settings).values())


def busy(running: Settings, wanted: Settings) -> EngineBusyError:
    """Return the error for an engine that is wanted while one with other settings has the device."""
    one, other = _of_engine(running), _of_engine(wanted)
    differing = [name for name in one if one[name][0] != other[name][0]]

    def shown(each: dict[str, tuple[Any, Any]]) -> str:
        return ", ".join(f"{name}={each[name][1]!r}" for name in differing)

    return EngineBusyError(
        f"an engine with {shown(one)} has this device, so none with {shown(other)} can start:"
        " close the first, or use its settings"
    )


def server_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of vLLM and its processes, embedded or as a server, without what the user has
    set."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would have our threads' locks and no watchdog
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if must_not_compile(eager=settings.engine_args.get("enforce_eager") is not False):
        defaults["TORCH_COMPILE_DISABLE"] = "1"
    if len(os.sched_getaffinity(0)) <= _SMALL_MACHINE_CORES:
        defaults["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    if _memory_nodes() < settings.tensor_parallel_size:  # vLLM would want one for each rank
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(_cores_of_ranks(settings.tensor_parallel_size))
    defaults |= _caches(settings.cache_dir)
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _caches(cache_dir: Path) -> dict[str, str]:
    """Return folders for the caches of vLLM and torch, where they cannot write to their own."""
    try:
        own = user_cache_path()
    except RuntimeError:  # a user without a home folder
        own = Path("/.cache")
    if can_make(own / "vllm"):
        return {}
    folder = cache_dir.expanduser().absolute()
    if not can_make(folder):
        folder = Path(tempfile.mkdtemp(prefix="blendrag-"))
    names = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton"}
    return {variable: str(folder / name) for variable, name in names.items()}


def _memory_nodes() -> int:
    """Return the number of this machine's NUMA nodes."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def _cores_of_ranks(ranks: int) -> list[str]:
    """Divide this process's cores among the ranks. Ranks share cores where there are fewer cores than
    ranks."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    parts = [cores[rank * each : (rank + 1) * each] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return [",".join(map(str, part)) for part in parts]


_imported: dict[str, str] = {}


@contextmanager
def engine_environment(settings: Settings, sockets: str, log: Path | None) -> Iterator[None]:
    """Set what vLLM and its processes read while they start, except what the user has set. Afterwards the
    environment is the program's own again, whatever vLLM, torch and what they import have put into it; so are
    its log records, unless vLLM logs to the terminal.

    ``sockets``: folder for the sockets between them, which vLLM does not remove, and for a worker's error.
    ``log``: the file that they print to; None: the terminal.
    """
    defaults = server_environment(settings) | {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_RPC_BASE_PATH": sockets,
        start_error.VARIABLE: str(start_error.file_in(sockets)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_LOGS": "-all",
        "PYTHONWARNINGS": "ignore",
        **({} if log is None else {engine_log.VARIABLE: str(log)}),
    }
    before, records = dict(os.environ), logging.getLogRecordFactory()
    ours = {name: value for name, value in (_imported | defaults).items() if name not in before}
    os.environ.update(ours)
    try:
        yield
    finally:
        if log is not None and getattr(logging.getLogRecordFactory(), "_factory", None) is records:
            logging.setLogRecordFactory(records)
        # An import changes it only once, and later engines have to start like the first.
        new = {name: value for name, value in os.environ.items() if before.get(name) != value}
        _imported.update({name: value for name, value in new.items() if name not in ours})
        for name in new.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def engine_args(
    settings: Settings, model: Path, extension: WorkerExtension, on_cpu: bool | None = None
) -> dict[str, Any]:
    """Return keyword arguments for vLLM's ``AsyncEngineArgs``, without the connector's. on_cpu: whether the
    engine's machine has no GPU; None: look at this one.

    Raises ConfigError for one of ``settings.engine_args`` that vLLM does not have, or that blendrag sets
    itself; a reasoning parser that does not exist, or not for this model; ranks that cannot share its heads
    equally; a budget of KV that leaves no choice.
    ModelError for an adapter of another model.
    """
    from blendrag.compress import check_budget
    from blendrag.engine.compat.platform import is_cpu
    from blendrag.engine.compat.start import argument_names
    from blendrag.engine.compat.weights import merging_loader

    ranks = settings.tensor_parallel_size
    if ranks > 1 and (heads := attention_heads(model) or 0) % ranks:
        raise ConfigError(
            f"tensor_parallel_size {ranks} does not divide the {heads} attention heads of {settings.model}"
        )
    on_cpu = is_cpu() if on_cpu is None else on_cpu
    args: dict[str, Any] = {
        "model": str(model),
        "served_model_name": settings.model,
        "dtype": settings.dtype,
        "enforce_eager": on_cpu,  # it starts faster
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": 1,
        "max_num_seqs": _CPU_SEQS if on_cpu else None,
        "enable_prefix_caching": True,
        "disable_log_stats": False,  # the metrics need them; the log itself begins at level INFO
        "use_tqdm_on_load": False,
        "language_model_only": True,  # no part for images is loaded, nor what reads them
        # The one of vLLM's backends that supports most of JSON schema. It allows no white space in objects.
        "structured_outputs_config": {
            "backend": "guidance",
            "disable_any_whitespace": True,
            "reasoning_parser": engine_parser(settings.reasoning_parser, model),
        },
        "worker_extension_cls": extension.worker,
        "logits_processors": list(extension.logits_processors),
    }
    if on_cpu and "block_size" not in settings.engine_args:
        args["block_size"] = _CPU_BLOCK
    check_budget(settings.blending, args.get("block_size", settings.engine_args.get("block_size")))
    if settings.kv_budget is not None and settings.engine_args.get("speculative_config"):
        raise ConfigError("an answer with drafts is not decoded from a kv_budget: leave one of them out")
    if (model / "config.json").is_file() and (scaling := query_scaling(model)):
        args["hf_overrides"] = scaling
    if settings.lora is not None:
        args |= merging_loader(adapter_for(model, settings.lora))
    renamed = _RENAMED | (_RENAMED_ON_CPU if on_cpu else {})
    theirs = {name: value for name, value in settings.engine_args.items() if value is not None}
    for name in theirs:
        _refuse(name, renamed.get(name, name), args.keys() - _DEFAULTED, argument_names())
    args |= {name: theirs[name] for name in _DEFAULTED & theirs.keys()}
    theirs.pop("revision", None)  # the folder holds that revision already
    return theirs | {name: value for name, value in args.items() if value is not None}


def _refuse(name: str, setting: str, ours: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError if ``engine_args`` cannot have an argument of this name. setting: the setting of
    blendrag's that may stand for it."""
    if setting in Settings.model_fields:
        reason = f"it is the setting {setting}"
    elif name in ours or name in _CONNECTORS:
        reason = "blendrag sets it itself"
    elif name in _OTHER_MODEL:
        reason = "model and tokenizer are as they are in the folder: convert those"
    elif name not in known:
        reason = f"vLLM has no such engine argument{closest(name, known)}"
    else:
        return
    raise ConfigError(f"engine_args cannot have {name!r}: {reason}")


def changes_kv(name: str) -> bool:
    """Return whether this argument of vLLM's changes the KV of the same model, or replaces blendrag's
    connector."""
    return name in _OTHER_MODEL | _CONNECTORS | {"enable_lora", "lora_modules"}


def connector_args(settings: Settings, *, sealed: bool = False) -> dict[str, Any]:
    """Return keyword arguments for vLLM's ``KVTransferConfig``. sealed: whether recipes have to be sealed
    with a secret."""
    return {
        # Nodes of a tree have the blocks of all layers, in one group.
        "kv_connector": "BlendConnector" if settings.tree else "GroupsConnector",
        "kv_connector_module_path": "blendrag.engine.worker.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "blend_share": settings.blend_share,
            "evicts": settings.kv_budget is not None,
            "reorder_window": settings.reorder_window,
            "sealed": sealed,
        },
    }


@contextmanager
def spawning() -> Iterator[None]:
    """Let spawned processes, and those they spawn, begin with the watchdog instead of the user's script; and
    let a daemonic process, such as a worker of a pool, spawn them.

    They do not need the script, and one that asks its question at the top level would otherwise start an
    engine inside the engine.
    """
    main, process = sys.modules["__main__"], multiprocessing.current_process()
    former, daemon = main.__spec__, process.daemon
    main.__spec__ = ModuleSpec("blendrag.engine.client.watchdog", None)  # only its name is read
    process.daemon = False
    try:
        yield
    finally:
        main.__spec__, process.daemon = former, daemon
