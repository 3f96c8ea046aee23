"""Former names of settings: taken for one version more, with a warning that says what to write now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from blendrag.choice import Choice, written
from blendrag.errors import BlendragWarning, ConfigError
from blendrag.options import DEFAULTS

Move = Callable[[dict[str, Any], Any], None]
"""A function that puts a former setting's value where it belongs now, among all that are given."""


@dataclass(frozen=True, slots=True)
class Former:
    """A setting of the version before. kind: the type of its values. now: what is written instead.
    of_blending: whether requests had it, too. unless: a setting of now that takes its place where it is
    given."""

    now: str
    kind: Any = JsonValue
    move: Move = lambda values, value: None
    of_blending: bool = False
    unless: str = ""


ENGINE_ARGUMENTS = {
    "enforce_eager": bool | None,
    "gpu_memory_utilization": float | None,
    "kv_cache_dtype": str,
    "max_num_batched_tokens": int | None,
    "max_num_seqs": int | None,
    "revision": str | None,
    "tensor_parallel_size": int,
}
"""The types of vLLM's arguments that were settings."""


def _engine_argument(former: str, kind: Any, name: str = "") -> Former:
    name = name or former

    def move(values: dict[str, Any], value: Any) -> None:
        values["engine_args"] = {**values.get("engine_args", {}), name: value}

    return Former(f"{former} is one of vLLM's arguments: engine_args={{{name!r}: ...}}", kind, move)


def _of_selector(argument: str, kind: Any, example: str) -> Former:
    def move(values: dict[str, Any], value: Any) -> None:
        from blendrag.select import SELECTORS  # imports torch

        choice = Choice.read(values.get("selector") or DEFAULTS.selector)
        known = choice.name in SELECTORS and argument in SELECTORS[choice.name].arguments
        own_layers = choice.name == "gradual" and argument == "check_layers" and len(value) == 1
        if known and not own_layers and value is not None and value is not False:
            values["selector"] = str(_with(choice, argument, value))

    return Former(f"{argument} is an argument of the selector now: selector={example!r}", kind, move, True)


def _of_budget(former: str, kind: Any, argument: str = "") -> Former:
    def move(values: dict[str, Any], value: Any) -> None:
        if (budget := values.get("kv_budget")) is not None:
            choice = Choice.read(str(budget))
            word = replace(choice, words=(*choice.words, str(value)))
            values["kv_budget"] = str(_with(choice, argument, value) if argument else word)

    example = f"512:{argument}=..." if argument else "512:ada:window"
    return Former(f"{former} is a part of the budget now: kv_budget={example!r}", kind, move, True)


def _of_default_tiers(former: str, kinds: tuple[str, ...], name: str, wanted: Any) -> Former:
    def move(values: dict[str, Any], value: Any) -> None:
        values["tiers"] = _tiers(values)
        for tier in values["tiers"]:
            if tier["kind"] in kinds:
                tier[name] = value

    return Former(_said_by_tiers(former, kinds[0], name), wanted, move, unless="tiers")


def _of_tree(former: str, kind: str) -> Former:
    def move(values: dict[str, Any], value: Any) -> None:
        tiers = values["tiers"] = _tiers(values)
        tier = next((tier for tier in tiers if tier.get("kind") == kind), None)
        if tier is None:
            tiers.append(tier := {"kind": kind, "bytes": 0, "write": "never"})
        tier["tree_bytes"] = value

    return Former(_said_by_tiers(former, kind, "tree_bytes"), int | None, move)


def _tiers(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = values.get("tiers") or ({"kind": "ram", "bytes": 2 << 30}, {"kind": "disk"})
    return [dict(tier) for tier in given]


def _said_by_tiers(former: str, kind: str, name: str) -> str:
    return f"{former} is said by tiers now: tiers=[{{'kind': {kind!r}, {name!r}: ...}}]"


def _order(values: dict[str, Any], window: int) -> None:
    if window:
        values["order"] = str(_with(Choice.read(values.get("order", "retrieved")), "window", window))


FORMER = {
    **{name: _engine_argument(name, kind) for name, kind in ENGINE_ARGUMENTS.items()},
    "prefix_caching": _engine_argument("prefix_caching", bool, "enable_prefix_caching"),
    "metric": _of_selector("metric", str, "hkvd:metric=k"),
    "check_layers": _of_selector("check_layers", tuple[int, ...], "gradual:check_layers=1+4"),
    "threshold": _of_selector("threshold", float | None, "hkvd:threshold=0.2"),
    "auto_ratio": _of_selector("auto_ratio", bool, "hkvd@0.15:auto_ratio=yes"),
    "kv_allocator": _of_budget("kv_allocator", str),
    "kv_scorer": _of_budget("kv_scorer", str),
    "kv_alpha": _of_budget("kv_alpha", float, "alpha"),
    "kv_window": _of_budget("kv_window", int, "window"),
    "ram_bytes": _of_default_tiers("ram_bytes", ("ram",), "bytes", int | None),
    "disk_bytes": _of_default_tiers("disk_bytes", ("disk",), "bytes", int | None),
    "eviction": _of_default_tiers("eviction", ("ram", "disk"), "policy", str),
    "tree_ram_bytes": _of_tree("tree_ram_bytes", "ram"),
    "tree_disk_bytes": _of_tree("tree_disk_bytes", "disk"),
    "reorder_window": Former("reorder_window is said by order now: order='retrieved:window=8'", int, _order),
    "trace": Former("trace is an option of single requests now, and no setting", bool),
    "controller": Former("controller is no setting now: without a profile, it is off", bool),
    "claim": Former("claim is no setting now: a request is never blended inside the step that needs it"),
    "mask": Former("mask is no setting now: scattered tokens are masked in runs"),
    "prefix_forecasts": Former("prefix_forecasts is no setting now: vLLM's prefix cache keeps its own order"),
    "prices": Former("prices is no setting now: `blendrag profile` says which tier adds no delay"),
    "layers_in_flight": Former("layers_in_flight is no setting now: it is 8"),
    "ingest_batch_tokens": Former("ingest_batch_tokens is no setting now: it is 512"),
    "call_timeout_s": Former("call_timeout_s is no setting now: it is 600 seconds"),
    "start_timeout_s": Former("start_timeout_s is vLLM's variable VLLM_ENGINE_READY_TIMEOUT_S now"),
}
"""Former settings, by the name that they had."""


def up_to_date(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings by their present names. Warns of each that had another; raises ConfigError for a value
    that it could not have."""
    current = {name: value for name, value in values.items() if name not in FORMER}
    for name, former in FORMER.items():
        if name not in values:
            continue
        warnings.warn(former.now, BlendragWarning, stacklevel=2)
        try:
            value = TypeAdapter(former.kind).validate_python(values[name])
            if not values.get(former.unless):
                former.move(current, value)
        except ValidationError as error:
            raise ConfigError(f"setting {name!r}: {error.errors()[0]['msg']}") from None
        except (AttributeError, TypeError, ValueError):  # of what is given beside it
            raise ConfigError(
                f"setting {name!r} cannot be put into what else is given: {former.now}"
            ) from None
    return current


def _with(choice: Choice, argument: str, value: Any) -> Choice:
    match value:
        case bool():
            text = "yes" if value else "no"
        case int() | float():
            text = written(value)
        case tuple():
            text = "+".join(map(str, value))
        case _:
            text = str(value)
    return replace(choice, arguments={**choice.arguments, argument: text})
