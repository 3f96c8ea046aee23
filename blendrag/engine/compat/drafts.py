"""The model that drafts answers, where it keeps KV of its own (EAGLE, MTP, a smaller model)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
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
    shares_kv,
    text_model,
)
from blendrag.engine.compat.unsupported import unsupported_layer
from blendrag.errors import ModelNotSupportedError
from blendrag.models import weights_digest

# Methods whose model makes a token's KV of that token's row and those before it.
_METHODS = frozenset({"eagle", "eagle3", "mtp", "draft_model"})

LayerOutput = tuple[torch.Tensor, torch.Tensor | None]
"""The residual stream as a layer gives it on, in one part or in two."""


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

    attentions: its attention modules, in its order. layers: of each, the smallest module with its RoPE, too.
    name: of it, by its weights. reads: the layers of the model it drafts for whose outputs it takes.
    """

    def __init__(self, runner: Any, module: Any, attentions: list[Any]) -> None:
        self._module, self._target, self.attentions = module, runner.get_model(), attentions
        self._vllm_config = runner.vllm_config
        self._method = self._vllm_config.speculative_config.method
        self.layers = [_around(module, attention) for attention in attentions]
        folder = drafting_model(self._vllm_config)
        digest = weights_digest({}, folder.glob("*.safetensors")) if folder else ""
        self.name = f"{self._method} {folder.name if folder else ''} {digest}".strip()
        behind = {0}
        if self.reads_outputs:
            text = text_model(self._target).model
            behind = {len(all_layers(self._target)), *getattr(text, "aux_hidden_state_layers", ())}
        self.reads = frozenset(number - 1 for number in behind)

    @classmethod
    def of(cls, runner: Any, groups: Sequence[LayerGroup], attentions: Sequence[Any]) -> Self | None:
        """Return the model that drafts in a worker; None if there is none that keeps KV.

        attentions: of the model that it drafts for, in whose blocks its KV has to be. Raises
        ModelNotSupportedError, with the reason why its KV cannot be made apart.
        """
        find = getattr(runner, "get_draft_model", lambda: None)
        names = frozenset().union(*(group.layers for group in groups))
        if not (own := attentions_of_drafts(runner, names)) or (module := find()) is None:
            return None
        if reason := _unlike(runner, groups, attentions, own):
            raise ModelNotSupportedError(reason)
        found = cls(runner, module, own)
        for layer in found.layers:
            if reason := unsupported_layer(layer):
                raise ModelNotSupportedError(reason)
        if found.reads_outputs and min(found.reads) < 0:
            raise ModelNotSupportedError("it reads what goes into the first layer")
        return found

    @property
    def reads_outputs(self) -> bool:
        """Return whether a row takes the token behind it, and the model's outputs of its own; else it takes
        its own token and nothing else."""
        return bool(self._method != "draft_model")

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, outputs: Mapping[int, LayerOutput]
    ) -> None:
        """Run its own forward, not compiled, over [n] tokens. outputs: of the layers that it ``reads``."""
        given = {"hidden_states": self._states(token_ids, positions, outputs)} if self.reads_outputs else {}
        with layer_context(self._vllm_config, len(positions)):
            self._module(input_ids=token_ids, positions=positions, inputs_embeds=None, **given)

    def _states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, outputs: Mapping[int, LayerOutput]
    ) -> torch.Tensor:
        """Return what the model's own forward gives it, where its layers give these outputs: its last states,
        or those of several layers (EAGLE 3)."""
        layers = all_layers(self._target)
        last = outputs[len(layers) - 1]
        for number, layer in enumerate(layers):
            layer.forward = _giving(layer, outputs.get(number, last))
        try:
            with layer_context(self._vllm_config, len(positions)):
                found = text_model(self._target)(token_ids, positions)
        finally:
            for layer in layers:
                del layer.forward
        states, parts = found if isinstance(found, tuple) else (found, ())
        if self._method == "eagle3":
            return self._module.combine_hidden_states(torch.cat(parts, -1) if parts else states)
        return states


def _unlike(
    runner: Any, groups: Sequence[LayerGroup], attentions: Sequence[Any], own: Sequence[Any]
) -> str | None:
    """Return why the KV of a model that drafts is not like that of the model it drafts for."""
    config = runner.vllm_config
    speculative, model = config.speculative_config, config.model_config
    draft = speculative.draft_model_config
    if speculative.method not in _METHODS or speculative.parallel_drafting:
        return f"how {speculative.method} drafts is not known"
    if speculative.method != "draft_model" and is_of_transformers(runner.get_model()):
        return "the model's layers are those of transformers"
    if hasattr(runner.get_model(), "get_mtp_target_hidden_states"):
        return "it reads other states than the model gives"
    if speculative.use_heterogeneous_vocab:
        return "its tokens are others than the model's"
    if hasattr(runner, "speculator") and speculative.use_multi_module_mtp():
        return "each of its modules reads a prompt"
    if len(groups) > 1 or groups[0].window:
        return "layers are in several groups, or have windows"
    if draft.max_model_len < model.max_model_len:
        return f"its window ends at {draft.max_model_len} tokens"
    if len(own) > len(attentions):
        return "it has more layers than the model"
    kept = [layer_kv(attention) for attention in attentions]
    like = cache_of(attentions[0])
    shapes = {(cache_of(each).shape, cache_of(each).dtype) for each in own}
    alike = stored_shape([*kept, *map(layer_kv, own)]) == stored_shape(kept)
    heads = draft.get_total_num_kv_heads() == model.get_total_num_kv_heads()
    if shapes != {(like.shape, like.dtype)} or not alike or not heads:
        return "its KV has another shape or type than the model's"
    return None


def _around(module: Any, attention: Any) -> Any:
    """Return the smallest module around an attention module with a rotary module in it, or else the smallest
    of all."""
    around = [one for one in module.modules() if one is not attention and attention in one.modules()]
    turning = [one for one in around if any(_turns(each) for each in one.modules())]
    return (turning or around)[-1]


def _turns(module: Any) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def _giving(layer: Any, output: LayerOutput) -> Callable[..., Any]:
    """Return a forward that gives this output as the layer does. Norms may overwrite what they are given."""
    states, residual = output
    if residual is not None:
        return lambda *_, **__: (states.clone(), residual.clone())
    if "residual" in signature(layer.forward).parameters:
        return lambda *_, **__: (states.clone(), None)
    return lambda *_, **__: states.clone()
