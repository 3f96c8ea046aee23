"""LoRA adapters in PEFT's format. They are merged into a model's weights while those are read, so that no
layer knows of them: what is computed is what a fine-tuned model computes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from blendrag.errors import ModelError
from blendrag.models import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    quantisation,
    read_json,
    resolve_adapter,
    weight_files,
    weights_digest,
)

if TYPE_CHECKING:
    import torch

_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
_FLOATS = frozenset({"F32", "F16", "BF16"})

# Options of PEFT with which an adapter is more than the product of its factors, scaled alike everywhere.
_MORE = (
    "alora_invocation_tokens", "alpha_pattern", "fan_in_fan_out", "layer_replication", "rank_pattern",
    "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
# Its ways to begin that change the weights below, too.
_OTHER_BASES = ("corda", "loftq", "olora", "pissa")


class Adapter:
    """A LoRA adapter that can be merged: each weight is W + scale * B A, with A [rank, in] and B [out, rank].

    digest: of what it changes weights by, 32 hex digits. Raises ModelNotFoundError if the folder holds none,
    ModelError if it is another kind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / ADAPTER_WEIGHTS
        config = read_json(folder / ADAPTER_CONFIG)
        rank = config.get("r") or 1
        alpha = config.get("lora_alpha") or rank
        self._scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        self.digest = weights_digest({"scale": self._scale}, [self._file])
        with safe_open(self._file, "np") as factors:
            names = {name: _FACTOR.fullmatch(name) for name in sorted(factors.keys())}
            if more := [*_more(config), *(name for name, match in names.items() if match is None)]:
                raise ModelError(
                    f"the adapter {str(folder)!r} is more than LoRA ({more[0]}): merge it with PEFT"
                    " (merge_and_unload), and name the new model's folder"
                )
            weights = {f"{match[1]}.weight" for match in names.values() if match}
            self._shapes = {name: _shape(factors, name) for name in sorted(weights)}

    def check(self, model: Path) -> None:
        """Raise ModelError if the adapter is not for the model in this folder, or cannot be merged."""
        shapes, types = {}, set()
        for file in weight_files(model):
            with safe_open(file, "np") as weights:
                for name in self._shapes.keys() & weights.keys():
                    weight = weights.get_slice(name)
                    shapes[name] = weight.get_shape()
                    types.add(weight.get_dtype())
        if quantisation(model) or types - _FLOATS:
            raise ModelError(
                f"the weights of {str(model)!r} are quantised, and no adapter is merged into such: merge it"
                " into those that they were made of, and quantise the result"
            )
        for name, (rows, columns) in self._shapes.items():
            if shapes.get(name) != [rows, columns]:
                raise ModelError(
                    f"the adapter {str(self.folder)!r} was made for another model than {str(model)!r},"
                    f" which has no {name} of {rows} x {columns}"
                )

    def merged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's weights by name, as they come; those that the adapter changes are float32. Raises
        ModelError if one of these does not come."""
        left = set(self._shapes)
        with safe_open(self._file, "pt") as factors:
            for name, weight in weights:
                if name in left:
                    left.remove(name)
                    a, b = (factors.get_tensor(factor).float() for factor in _factors(name))
                    weight = weight.float() + self._scale * (b @ a)
                yield name, weight
        if left:  # as where vLLM reads the weights under the names of another format
            raise ModelError(f"the adapter {str(self.folder)!r} is not merged: no {min(left)} was read")


def adapter_for(model: Path, name: str) -> Adapter:
    """Return the adapter that ``name`` stands for, a folder or a hub id, for the model in folder ``model``.
    Raises ModelNotFoundError or ModelError."""
    try:
        adapter = Adapter(resolve_adapter(name))
        adapter.check(model)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"cannot read the adapter {name!r}: {error}") from error
    return adapter


def _more(config: dict[str, Any]) -> list[str]:
    """Return the options of an adapter that its factors do not show."""
    more = [f"{name}={config[name]!r}" for name in _MORE if config.get(name)]
    begun = config.get("init_lora_weights")
    if str(begun).lower().startswith(_OTHER_BASES):
        more.append(f"init_lora_weights={begun!r}")
    if config.get("peft_type") != "LORA":
        more.append(f"peft_type={config.get('peft_type')!r}")
    return more


def _factors(weight: str) -> tuple[str, str]:
    """Return the names that A and B of a weight have in an adapter's file."""
    module = weight.removesuffix(".weight")
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _shape(factors: Any, weight: str) -> tuple[int, int]:
    """Return the shape [out, in] of the weight that two factors change."""
    a, b = (factors.get_slice(name).get_shape() for name in _factors(weight))
    return b[0], a[1]
