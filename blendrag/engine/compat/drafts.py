"""The model that drafts answers, where it keeps KV of its own (EAGLE, MTP, a smaller model)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from blendrag.engine.compat.groups import LayerGroup
from blendrag.engine.compat.layer_kv import layer_kv, stored_shape
from blendrag.engine.compat.model import (
    all_layers,
    cache_of,
    is_of_transformers,
    layer_context,
    scores_of,
    shares_kv,
    text_model,
)
from blendrag.models import weights_digest

# Of others, a token's KV is not made from that token's row alone, or their first pass is one of their own.
_METHODS = frozenset({"eagle", "eagle3", "mtp", "draft_model"})

LayerOutput = tuple[torch.Tensor, torch.Tensor | None]
"""What a layer gives on: the residual stream, in one part or in two."""


def attentions_of_drafts(runner: Any, names: Collection[str]) -> list[Any]:
    """Return those of the attention modules with these names that belong to the model which drafts, in its
    order; empty if there is none."""
    if runner.vllm_config.speculative_config is None:
        return []
    own = {id(module) for module in runner.get_model().modules()}
    context = runner.vllm_config.compilation_config.static_forward_context
    others = [one for name, one in context.items() if name in names and id(one) not in own]
    return [one for one in others if not shares_kv(one)]


def drafting_model(vllm_config: Any) -> Path | None:
    """Return the folder of the model of its own that drafts; None if there is none, as with heads that stand
    beside the model's weights."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return None
    return Path(draft.model)


class DraftingModel:
    """A model that drafts, whose layers' KV can be made apart from vLLM's own drafting.

    attentions: its attention modules, in its order. name: of it, by its weights. reads: the layers of the
    model it drafts for whose outputs it takes.
    """

    def __init__(self, module: Any, runner: Any, attentions: list[Any]) -> None:
        self._module, self._target, self.attentions = module, runner.get_model(), attentions
        self._vllm_config = runner.vllm_config
        speculative = self._vllm_config.speculative_config
        self._method = speculative.method
        folder = drafting_model(self._vllm_config)
        digest = weights_digest({}, folder.glob("*.safetensors")) if folder else ""
        self.name = f"{self._method} {digest}".strip()
        text, last = text_model(self._target).model, len(all_layers(self._target))
        behind = {last, *getattr(text, "aux_hidden_state_layers", ())} if self.reads_next else set()
        self.reads = frozenset(number - 1 for number in behind)

    @classmethod
    def of(cls, runner: Any, groups: Collection[LayerGroup], attentions: Collection[Any]) -> Self | None:
        """Return the model that drafts in a worker; None if there is none, or its KV is not kept in the same
        blocks as that of these attention modules, or it drafts in another way than these."""
        speculative = runner.vllm_config.speculative_config
        (group, *more) = groups
        if speculative is None or speculative.method not in _METHODS or more or group.window:
            return None
        if speculative.parallel_drafting or is_of_transformers(runner.get_model()):
            return None
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        module = getattr(drafter, "model", None)
        own, like = attentions_of_drafts(runner, group.layers), next(iter(attentions))
        kept = [layer_kv(each) for each in attentions]
        alike = bool(own) and all(
            cache_of(each).shape == cache_of(like).shape and scores_of(each) is not None for each in own
        )
        if module is None or not alike:
            return None
        if stored_shape([*kept, *map(layer_kv, own)]) != stored_shape(kept):
            return None
        found = cls(getattr(module, "unwrap", lambda: module)(), runner, own)
        return found if min(found.reads, default=0) >= 0 else None

    @property
    def reads_next(self) -> bool:
        """Return whether a row takes the token behind it, and the model's outputs of its own; else it takes
        its own token and nothing else."""
        return bool(self._method != "draft_model")

    def layer_of(self, attention: Any) -> Any:
        """Return the smallest module around an attention module with a rotary module in it, or else the whole
        model."""
        around = [one for one in self._module.modules() if any(each is attention for each in one.modules())]
        turning = [one for one in around if any(_turns(each) for each in one.modules())]
        return (turning or around)[-1]

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, outputs: Mapping[int, LayerOutput]
    ) -> None:
        """Run its own forward, not compiled, over [n] tokens. outputs: of the layers that it ``reads``."""
        given = {"hidden_states": self._states(token_ids, positions, outputs)} if self.reads_next else {}
        with layer_context(self._vllm_config, {}, {}, len(positions)):
            self._module(input_ids=token_ids, positions=positions, inputs_embeds=None, **given)

    def _states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, outputs: Mapping[int, LayerOutput]
    ) -> torch.Tensor:
        """Return what the model's own forward gives it, where its layers give these outputs: its last states,
        or those of several layers (EAGLE 3)."""
        layers = all_layers(self._target)
        last = outputs[len(layers) - 1]
        for number, layer in enumerate(layers):
            layer.forward = _giving(outputs.get(number, last))
        try:
            with layer_context(self._vllm_config, {}, {}, len(positions)):
                found = text_model(self._target).model.forward(token_ids, positions, None)
        finally:
            for layer in layers:
                del layer.forward
        states, parts = found if isinstance(found, tuple) else (found, ())
        if self._method == "eagle3":
            states = self._module.combine_hidden_states(torch.cat(parts, -1) if parts else states)
        return states


def _turns(module: Any) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def _giving(output: LayerOutput) -> Any:
    states, residual = output
    # Norms may overwrite them.
    parts = states.clone() if residual is None else (states.clone(), residual.clone())
    return lambda *_, **__: parts
