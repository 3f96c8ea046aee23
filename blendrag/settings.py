"""The settings object, filled from keyword arguments, ``BLENDRAG_*`` variables and a YAML file.

Priority, highest first: keyword arguments, environment, the YAML file named by ``BLENDRAG_CONFIG``
(else ``blendrag.yaml`` in the working folder), defaults.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml  # type: ignore[import-untyped]  # comes with pydantic-settings[yaml]
from platformdirs import user_cache_path
from pydantic import BeforeValidator, Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from blendrag.choice import Choice, count
from blendrag.errors import ConfigError
from blendrag.former import FORMER, up_to_date
from blendrag.machine import codec_for_kv, memory_for_kv
from blendrag.models import DEFAULT_EMBEDDER, DEFAULT_MODEL
from blendrag.names import closest
from blendrag.options import BlendOptions, BlendOverrides, resolved, spelled_out
from blendrag.store.stack import DEFAULT_POLICY, TierSpec
from blendrag.text import encodable

T = TypeVar("T")
SharedPrefix = Literal["none", "start", "system"]
ModelName = Annotated[
    str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)
]
"""The type of a field for a model's name or folder; a path object becomes its text."""

# What `reasoning_parser` and `tool_parser` may be besides vLLM's names.
AUTO_PARSER, NO_PARSER = "auto", "none"

AUTO_CODEC = "auto"

# Former names of settings, each with the sentence for whoever still writes it.
RENAMED = {
    "mode": "mode is called blend now: blend=False instead of mode='off'",
    "hints": "hints is called documents now",
    "top_k": "how many chunks are retrieved is called similarity_top_k now: top_k is of sampling",
    **{name: former.now for name, former in FORMER.items() if former.of_blending},
}

# What Kubernetes puts into every pod about services, of which one may be called blendrag, or blendrag-router.
_SERVICE_LINK = re.compile(r"(?:^|_)(?:SERVICE_(?:HOST|PORT\w*)=|PORT_\d+_(?:TCP|UDP|SCTP)\w*=|PORT=\w+://)")

# Settings of which an empty variable says something: that of others is not given, as Compose files have it.
_MAY_BE_EMPTY = ("namespace", "separator", "system_prompt")

PREFIX_CACHING: dict[str, JsonValue] = {"enable_prefix_caching": True}
"""vLLM's arguments that switch its own prefix cache on, for commands that compare with it."""

DEFAULT_SYSTEM_PROMPT = "Answer the question from the documents. If they do not contain the answer, say so."


class Settings(BlendOverrides, BaseSettings):
    """All settings, from keyword arguments, environment variables and a YAML file.

    Those of blending are inherited, and None unless given: :attr:`blending` knows them all.
    Sizes are in bytes unless the name says otherwise.
    """

    model_config = SettingsConfigDict(env_prefix="BLENDRAG_", extra="forbid", frozen=True)

    # Model and engine
    model: ModelName = Field(
        DEFAULT_MODEL,
        description="Model: the packaged default, a folder, or a hub id; for an index, its own unless given.",
    )
    lora: ModelName | None = Field(
        None, description="Folder or hub id of a LoRA adapter that is merged into the model's weights."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of the numbers that the model computes with; `auto`: its own."
    )
    max_model_len: int | None = Field(None, ge=16, description="Context window in tokens.")
    kv_cache_gib: int = Field(2, ge=1, description="vLLM's paged KV cache on CPU, in GiB.")
    engine_args: dict[str, JsonValue] = Field({}, description="vLLM's engine arguments, by vLLM's names.")
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
    cache_dir: Path = Field(
        default_factory=lambda: _cache_path(),
        description="Folder of the unpacked default model, of KV without an index, and of the engine's log.",
    )

    # Blending, for all requests
    blend_share: float = Field(
        0.4, gt=0.0, le=1.0, description="Share of the time for blending beside running answers; 1: no limit."
    )

    # Ingest
    chunk_tokens: int = Field(512, ge=8, description="Chunk size in the model's own tokens.")
    chunk_overlap: int = Field(0, ge=0, description="Tokens that neighbouring chunks share.")
    embedder: ModelName = Field(
        DEFAULT_EMBEDDER,
        description="Model that texts are searched by: the packaged default, or of sentence-transformers.",
    )
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

    # Store
    tiers: tuple[TierSpec, ...] = Field(
        (), description="Where KV is kept, fastest first; empty: RAM over the index's folder."
    )
    order: str = Field(
        "retrieved",
        description="Order of documents in a prompt: as they are `retrieved`, or `tree`, those first whose"
        " exact prefix is in the tree. With `:window=8`, waiting requests that are not blended begin in the"
        " order of what is cached of them, and each is overtaken 8 times at most.",
    )
    outcome_log: bool = Field(
        False, description="Keep what became of conversations and chunks, to learn from and to replay."
    )
    codec: str = Field(
        AUTO_CODEC,
        description="How KV is stored: raw, fp8, int8, int4; `auto`: as the index has it, a new one as int8"
        " beside an NVIDIA GPU, else raw.",
    )
    namespace: str = Field(
        "", pattern=r"^[\w.-]*$", description="Tenant: KV is shared within a namespace only."
    )

    # Asking
    similarity_top_k: int = Field(6, ge=1, description="Chunks put into the prompt.")
    system_prompt: str = Field(DEFAULT_SYSTEM_PROMPT, description="The system message.")
    separator: str = Field("\n\n", description="Text between documents in the prompt.")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Variables of the model's chat template, such as `enable_thinking`."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Longest answer, thinking included; None: the rest of the window."
    )
    temperature: float = Field(0.0, ge=0.0, description="Randomness of sampling; 0 is greedy.")

    @field_validator("*")
    @classmethod
    def _texts_are_encodable(cls, value: Any) -> Any:
        return encodable(value) if isinstance(value, str) else value

    @field_validator("cache_dir", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return _cache_path() if value == "" else value  # not the folder where one is

    @field_validator("tiers")
    @classmethod
    def _policies_are_known(cls, value: tuple[TierSpec, ...]) -> tuple[TierSpec, ...]:
        for spec in value:
            if spec.policy != DEFAULT_POLICY:  # most processes need no other, nor what these import
                from blendrag.eviction import POLICIES

                if spec.policy not in POLICIES:
                    raise ValueError(POLICIES.unknown(spec.policy))
        return value

    @model_validator(mode="before")
    @classmethod
    def _as_they_are_called_now(cls, values: Any) -> Any:
        return up_to_date(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _can_be_used(self) -> Settings:
        _ = self.blending, self.documents_first, self.revision, self.tensor_parallel_size, self.prefix_caching
        return self

    @property
    def blending(self) -> BlendOptions:
        """The options by which prompts are blended, unless a request says otherwise."""
        return resolved({name: getattr(self, name) for name in BlendOverrides.model_fields})

    @property
    def stack(self) -> tuple[TierSpec, ...]:
        """The tiers, fastest first."""
        return self.tiers or (TierSpec(kind="ram", bytes=memory_for_kv()), TierSpec(kind="disk"))

    @property
    def new_codec(self) -> str:
        """The codec of what is stored in a new place."""
        return codec_for_kv() if self.codec == AUTO_CODEC else self.codec

    @property
    def tree(self) -> tuple[TierSpec, ...]:
        """The tiers of exact prefixes; none if there is no tree."""
        return tuple(
            TierSpec(kind=spec.kind, bytes=spec.tree_bytes, policy=spec.policy)
            for spec in self.stack
            if spec.tree_bytes
        )

    @property
    def tree_stays(self) -> bool:
        """Return whether the tree outlives the engine."""
        return any(spec.kind == "disk" for spec in self.tree)

    @property
    def documents_first(self) -> bool:
        """Return whether documents go first into a prompt whose exact prefix is in the tree."""
        return self._order[0] == "tree"

    @property
    def reorder_window(self) -> int:
        """Return how often a waiting request may be overtaken by one of which more is cached; 0: never."""
        return self._order[1]

    @property
    def _order(self) -> tuple[str, int]:
        choice = Choice.read(self.order)
        if choice.name not in ("retrieved", "tree") or choice.words or choice.at is not None:
            raise ConfigError(f"order must be retrieved or tree, as in tree:window=32, not {self.order!r}")
        (arguments,) = choice.read_arguments("order", {"window": count})
        return choice.name, arguments.get("window", 0)

    @property
    def revision(self) -> str | None:
        """Return the revision of the model on the hub, if one is named."""
        return self._engine_argument("revision", str, None)

    @property
    def tensor_parallel_size(self) -> int:
        """Return how many GPUs, or parts of a CPU, share the model."""
        return self._engine_argument("tensor_parallel_size", int, 1) or 1

    @property
    def prefix_caching(self) -> bool:
        """Return whether vLLM's own prefix cache is on."""
        return bool(self._engine_argument("enable_prefix_caching", bool, True))

    def _engine_argument(self, name: str, kind: type[T], default: T | None) -> T | None:
        value = self.engine_args.get(name, default)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"engine_args: {name} must be of type {kind.__name__}, not {value!r}")
        return value

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
        given = InitSettingsSource(settings_cls, init_kwargs=spelled_out(init_settings.init_kwargs))
        file = InitSettingsSource(settings_cls, init_kwargs=spelled_out(_read(_config_file())))
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


class _Variables(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        former = {name: os.environ.get(f"BLENDRAG_{name.upper()}") for name in FORMER}
        given = {name: json_or_text(text) for name, text in former.items() if text}
        return spelled_out(super().__call__() | given)

    def prepare_field_value(
        self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool
    ) -> Any:
        if value == "" and field_name not in _MAY_BE_EMPTY:
            return None
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError:  # its value is not shown: there may be a password in it
            raise ConfigError(f"the variable BLENDRAG_{field_name.upper()} is not JSON") from None


def json_or_text(text: str) -> Any:
    """Return what a text says as JSON; the text, if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read(file: Path) -> dict[str, Any]:
    """Return options by name; none if there is no such file. What is in it is not shown, as of a variable."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"{file} is not YAML{f' (line {mark.line + 1})' if mark else ''}") from None
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{file} must have one option per line, as in 'similarity_top_k: 6'")
    settings = Settings.model_fields
    return {name: found[name] for name in found if found[name] is not None or name.lower() not in settings}


def _config_file() -> Path:
    named = os.path.expanduser(os.environ.get("BLENDRAG_CONFIG", ""))  # Path's would fail without a home
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"BLENDRAG_CONFIG names {named}, which is not a file")
        return Path(named)
    return Path("blendrag.yaml")


def _refuse_unknown_variables() -> None:
    known = {name.upper() for name in (*Settings.model_fields, "config", "_api_key")}
    former = {name.upper() for name in FORMER}
    for variable, text in os.environ.items():
        name = variable.removeprefix("BLENDRAG_")
        if name not in known | former | {variable} and not name.startswith("_"):
            if _SERVICE_LINK.search(f"{name}={text}"):
                continue
            renamed = RENAMED.get(name.lower())
            raise ConfigError(renamed or f"unknown variable {variable}{closest(name, known, 'BLENDRAG_')}")


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            meant = closest(name.lower().removeprefix("blendrag_"), Settings.model_fields)
            unknown = f"unknown setting {name!r}{meant or ': an argument of vLLM goes into engine_args'}"
            lines.append(RENAMED.get(name, unknown))
        else:
            # These are not shown: there may be a password in them.
            got = "" if name.startswith(("tiers", "engine_args")) else f" (got {problem['input']!r})"
            lines.append(f"setting {name!r}: {problem['msg']}{got}")
    return "; ".join(lines)
