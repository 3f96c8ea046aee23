"""One settings object, filled from keyword arguments, ``BLENDRAG_*`` variables and a YAML file.

Priority, highest first: keyword arguments, environment, the YAML file named by ``BLENDRAG_CONFIG``
(else ``blendrag.yaml`` in the working folder), defaults.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]  # comes with pydantic-settings[yaml]
from platformdirs import user_cache_path
from pydantic import Field, JsonValue, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from blendrag.errors import ConfigError
from blendrag.models import DEFAULT_EMBEDDER, DEFAULT_MODEL
from blendrag.names import closest
from blendrag.options import DEFAULTS, BlendOptions, Metric, Quality, step_of
from blendrag.store.stack import DEFAULT_POLICY, TierSpec
from blendrag.text import encodable

SharedPrefix = Literal["none", "start", "system"]

# What `reasoning_parser` and `tool_parser` may be besides vLLM's names.
AUTO_PARSER, NO_PARSER = "auto", "none"

# What was called otherwise, and the sentence for whoever writes it still.
RENAMED = {
    "prices": "prices has gone with `blendrag plan`: `blendrag profile` says which tier adds no delay",
    "mode": "mode is called blend now: blend=False instead of mode='off'",
    "hints": "hints is called documents now",
    "mask": "mask is gone: scattered tokens are always masked in runs",
    "claim": "claim is gone: a request is never blended inside the step that needs it",
    "top_k": "how many chunks are retrieved is called similarity_top_k now: top_k is of sampling",
    "prefix_forecasts": "prefix_forecasts is gone: vLLM's prefix cache keeps its own order now",
}

DEFAULT_SYSTEM_PROMPT = "Answer the question from the documents. If they do not contain the answer, say so."


class Settings(BaseSettings):
    """All options. Sizes are in bytes unless the name says otherwise."""

    model_config = SettingsConfigDict(env_prefix="BLENDRAG_", extra="forbid", frozen=True)

    # Model and engine
    model: str = Field(DEFAULT_MODEL, description="Packaged default, a local folder, or a hub id.")
    revision: str | None = Field(None, description="Hub revision of the model.")
    lora: str | None = Field(
        None, description="Folder or hub id of a LoRA adapter that is merged into the model's weights."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(None, ge=16, description="Context window in tokens.")
    kv_cache_gib: int = Field(2, ge=1, description="vLLM's paged KV cache on CPU, in GiB.")
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto", description="What vLLM's paged KV cache holds; with fp8, nothing is blended."
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0.0, le=1.0, description="Share of a GPU's memory that the engine takes."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs, or parts of a CPU, that share the model.")
    max_num_seqs: int | None = Field(
        None, ge=1, description="Requests in one engine step; None: 32 on CPU, vLLM's choice on GPUs."
    )
    max_num_batched_tokens: int | None = Field(None, ge=16)
    prefix_caching: bool = True
    enforce_eager: bool | None = Field(
        None, description="Skip torch.compile; None: eager on CPU (it starts faster), compiled on CUDA."
    )
    engine_args: dict[str, JsonValue] = Field(
        {}, description="More of vLLM's engine arguments, by vLLM's names."
    )
    reasoning_parser: str = Field(
        AUTO_PARSER,
        description="How thinking is told from answers: a reasoning parser of vLLM's, `none`, or `auto`,"
        " which knows `<think>` where the model has it.",
    )
    tool_parser: str = Field(
        AUTO_PARSER,
        description="How tool calls are told from answers: a tool parser of vLLM's, `none`, or `auto`, which"
        " goes by the model's chat template.",
    )
    start_timeout_s: float = Field(900.0, gt=0, description="Seconds the engine may take to start.")
    call_timeout_s: float = Field(
        600.0, gt=0, description="Seconds the engine may take for one batch of an ingest, or to open a store."
    )
    cache_dir: Path = Field(default_factory=lambda: _cache_path())

    # Blending: BlendOptions, which a request may have otherwise; then what holds for all of them
    # (ratio and check layer: CacheBlend, sections 4.3 and 7.2; selector and prefix: docs/results.md)
    blend: bool = Field(DEFAULTS.blend, description="False serves every prompt by plain prefill.")
    quality: Quality = Field(
        "balanced",
        description="`fast`, `balanced` or `close` to full prefill: a selector and a ratio, where those are"
        " not given.",
    )
    selector: str = Field(DEFAULTS.selector, description="Which cached tokens are recomputed.")
    recompute_ratio: float = Field(
        DEFAULTS.recompute_ratio, ge=0.0, le=1.0, description="Share of cached tokens."
    )
    metric: Metric = Field(DEFAULTS.metric, description="What HKVD compares.")
    check_layers: tuple[int, ...] = Field(DEFAULTS.check_layers, description="Layers at which HKVD compares.")
    threshold: float | None = Field(
        DEFAULTS.threshold,
        ge=0.0,
        description="Recompute only tokens deviating by more than this; ratio is the cap.",
    )
    auto_ratio: bool = Field(
        DEFAULTS.auto_ratio,
        description="Recompute more than the ratio where loading leaves time for it; needs a profile.",
    )
    min_cached_tokens: int = Field(
        DEFAULTS.min_cached_tokens,
        ge=0,
        description="Below this many cached tokens a prompt is prefilled plainly.",
    )
    kv_budget: int | None = Field(
        DEFAULTS.kv_budget,
        ge=1,
        description="Tokens of a blended prompt's KV that its answer is decoded from, on average of a head;"
        " the rest is given back. None: all of it.",
    )
    kv_allocator: str = Field(DEFAULTS.kv_allocator, description="How heads share the budget.")
    kv_scorer: str = Field(DEFAULTS.kv_scorer, description="Which tokens a head keeps.")
    kv_alpha: float = Field(
        DEFAULTS.kv_alpha, ge=0.0, le=1.0, description="Share of a head's budget that is the uniform one."
    )
    kv_window: int = Field(
        DEFAULTS.kv_window, ge=1, description="The prompt's last tokens, which score the others and stay."
    )
    trace: bool = Field(
        DEFAULTS.trace, description="Have the evidence say what was loaded and computed when."
    )
    controller: bool = Field(
        True, description="Load only what is sooner loaded than computed; needs `blendrag profile`."
    )
    blend_share: float = Field(
        0.4, gt=0.0, le=1.0, description="Share of a step for blending while others decode; 1: no limit."
    )
    layers_in_flight: int = Field(
        8, ge=2, description="Layers of stored KV that are loaded and not yet used, at most."
    )

    # Ingest
    chunk_tokens: int = Field(512, ge=8, description="Chunk size in the model's own tokens.")
    chunk_overlap: int = Field(0, ge=0)
    embedder: str = Field(DEFAULT_EMBEDDER, description="Packaged default or a sentence-transformers model.")
    shared_prefix: SharedPrefix = Field(
        "start",
        description="What chunks are prefilled behind: nothing; `start`, the markup every chat begins with;"
        " `system`, the rendered system prompt.",
    )
    context_tokens: int = Field(
        256,
        ge=0,
        description="Chunks are prefilled behind up to so many tokens of the text before them in their"
        " document; 0: behind none.",
    )
    ingest_batch_tokens: int = Field(
        512, ge=16, description="Tokens prefilled per worker call, which goes on by slices beside answers."
    )

    # Store
    tiers: tuple[TierSpec, ...] = Field(
        (), description="Where KV is kept, fastest first; empty: RAM over disk with the two limits below."
    )
    ram_bytes: int = Field(2 << 30, ge=0, description="Limit of the RAM tier.")
    disk_bytes: int | None = Field(None, ge=0, description="Limit of the disk tier; None: no limit.")
    eviction: str = Field(DEFAULT_POLICY, description="Policy of the default tiers: which chunk leaves.")
    tree_ram_bytes: int = Field(
        0, ge=0, description="Memory for exact prefixes of prompts that come again, beside chunks; 0: none."
    )
    tree_disk_bytes: int = Field(0, ge=0, description="Disk for them, which outlives the engine; 0: none.")
    order: Literal["retrieved", "tree"] = Field(
        "retrieved",
        description="Of retrieved documents in a prompt: as they come, or those first whose exact prefix is"
        " in the tree.",
    )
    reorder_window: int = Field(
        0,
        ge=0,
        description="Waiting prompts that are not blended begin in the order of what is cached of them; so"
        " often one is overtaken at most; 0: never.",
    )
    outcome_log: bool = Field(
        False, description="Keep what became of conversations and chunks, to learn from and to replay."
    )
    codec: str = Field("raw", description="How KV is stored: raw, fp8, int8, int4.")
    namespace: str = Field(
        "", pattern=r"^[\w.-]*$", description="Tenant: KV is shared within a namespace only."
    )

    # Asking
    similarity_top_k: int = Field(6, ge=1, description="Chunks put into the prompt.")
    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    separator: str = Field("\n\n", description="Text between documents in the prompt.")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Variables of the model's chat template, such as `enable_thinking`."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Longest answer, thinking included; None: the rest of the window."
    )
    temperature: float = Field(0.0, ge=0.0)

    @field_validator("*")
    @classmethod
    def _texts_are_encodable(cls, value: Any) -> Any:
        return encodable(value) if isinstance(value, str) else value

    @field_validator("check_layers")
    @classmethod
    def _check_layers_ascend(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1 or list(value) != sorted(set(value)):
            raise ValueError("must be ascending layer numbers from 1 (layer 0 never deviates)")
        return value

    @field_validator("eviction")
    @classmethod
    def _policy_is_known(cls, value: str) -> str:
        if value != DEFAULT_POLICY:  # most processes need no other, nor what these import
            from blendrag.eviction import POLICIES

            if value not in POLICIES:
                raise ValueError(POLICIES.unknown(value))
        return value

    @field_validator("tiers")
    @classmethod
    def _policies_are_known(cls, value: tuple[TierSpec, ...]) -> tuple[TierSpec, ...]:
        for spec in value:
            cls._policy_is_known(spec.policy)
        return value

    @property
    def blending(self) -> BlendOptions:
        """How prompts are blended, unless a request says otherwise."""
        return BlendOptions(**{field.name: getattr(self, field.name) for field in fields(BlendOptions)})

    @property
    def stack(self) -> tuple[TierSpec, ...]:
        """The tiers, fastest first."""
        return self.tiers or (
            TierSpec(kind="ram", bytes=self.ram_bytes, policy=self.eviction),
            TierSpec(kind="disk", bytes=self.disk_bytes, policy=self.eviction),
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        given = InitSettingsSource(settings_cls, init_kwargs=_with_step(init_settings.init_kwargs))
        file = InitSettingsSource(settings_cls, init_kwargs=_with_step(_read(_config_file())))
        return given, _Variables(settings_cls), file

    @classmethod
    def load(cls, **options: Any) -> Settings:
        """Build settings; ``None`` values mean "not given". Raises ConfigError, naming the option."""
        given = {name: value for name, value in options.items() if value is not None}
        _refuse_unknown_variables()
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None


def _cache_path() -> Path:
    try:
        return user_cache_path("blendrag")
    except RuntimeError:  # a user without a home folder: as containers have it, whose home is /
        return Path("/.cache/blendrag")


def _with_step(values: dict[str, Any]) -> dict[str, Any]:
    """What a quality stands for, where the same source does not say it more exactly."""
    return step_of(values["quality"])._asdict() | values if "quality" in values else values


class _Variables(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        return _with_step(super().__call__())

    def prepare_field_value(
        self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool
    ) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError:  # its value is not shown: there may be a password in it
            raise ConfigError(f"the variable BLENDRAG_{field_name.upper()} is not JSON") from None


def _read(file: Path) -> dict[str, Any]:
    """Options by name; none if there is no such file. What is in it is not shown, as of a variable."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"{file} is not YAML{f' (line {mark.line + 1})' if mark else ''}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{file} must have one option per line, as in 'similarity_top_k: 6'")
    return found


def _config_file() -> Path:
    named = os.environ.get("BLENDRAG_CONFIG")
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"BLENDRAG_CONFIG names {named}, which is not a file")
        return Path(named)
    return Path("blendrag.yaml")


def _refuse_unknown_variables() -> None:
    known = {f"BLENDRAG_{name.upper()}" for name in Settings.model_fields} | {"BLENDRAG_CONFIG"}
    for name in os.environ:
        if name.startswith("BLENDRAG_") and name not in known and not name.startswith("BLENDRAG__"):
            renamed = RENAMED.get(name.removeprefix("BLENDRAG_").lower())
            raise ConfigError(renamed or f"unknown variable {name}{closest(name, known)}")


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            unknown = f"unknown setting {name!r}{closest(name, Settings.model_fields)}"
            lines.append(RENAMED.get(name, unknown))
        else:
            # These are not shown: there may be a password in them.
            got = "" if name.startswith(("tiers", "engine_args")) else f" (got {problem['input']!r})"
            lines.append(f"setting {name!r}: {problem['msg']}{got}")
    return "; ".join(lines)
