"""The decoder for models that vLLM runs by transformers' own code (its "Transformers modeling backend")."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from blendrag.engine.compat.model import layer_context
from blendrag.engine.forward.decoder import Rows
from blendrag.engine.forward.kv_layers import Projected
from blendrag.engine.forward.whole_layers import WholeLayerDecoder
from blendrag.errors import ModelNotSupportedError

_STATES, _ANGLES, _MASK = "hidden_states", "position_embeddings", "attention_mask"
_PIECE = 1024  # positions whose angles are read at once
_APPLY = "apply_rotary_pos_emb"  # the name of the function in transformers' files that applies RoPE


@dataclass(frozen=True, slots=True, eq=False)
class TransformersRotary:
    """RoPE as a model's file in transformers applies it, called as vLLM's modules are.

    cos, sin: [positions, size], as the model's own module gives them. apply: the file's own function.
    head_size: numbers of a head, of which the first ``size`` are turned.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    head_size: int

    def __call__(
        self, positions: torch.Tensor, heads: torch.Tensor, _: None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [n, heads * head_size] at these positions."""
        every = heads.view(len(heads), -1, self.head_size)
        size = self.cos.shape[-1]
        part = every[..., :size].transpose(0, 1)[None]
        turned = self.apply(part, part, self.cos[positions][None], self.sin[positions][None])[0]
        whole = torch.cat([turned[0].transpose(0, 1).to(heads.dtype), every[..., size:]], -1)
        return whole.reshape(heads.shape), None


class TransformersDecoder(WholeLayerDecoder):
    """The decoder for layers of transformers' code. They are run with angles of zero, so that Q and K reach
    their attention before RoPE, whichever numbers of a head it turns; RoPE is applied there."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self.rotaries = self._read_rotaries()

    def _learn(self, call: Mapping[str, Any], positions: torch.Tensor) -> None:
        if _STATES not in call or _ANGLES not in call:
            raise ModelNotSupportedError(f"its layers take {', '.join(call)}")
        self._states_name, self._given = _STATES, {_STATES, "position_ids", _ANGLES, _MASK}

    @torch.inference_mode()
    def _read_rotaries(self) -> list[Any | None]:
        """Return each layer's RoPE, at all positions of the window; None of one that ignores its angles."""
        device = next(self.model.parameters()).device
        longest = self.vllm_config.model_config.max_model_len
        read: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for begin in range(0, longest, _PIECE):
            at = torch.arange(begin, min(begin + _PIECE, longest), device=device)
            read.append([call[_ANGLES] for call in self.calls(torch.zeros_like(at), at)])
        shared: dict[tuple[int, ...], TransformersRotary] = {}
        found: list[Any | None] = []
        two = torch.tensor([5, 9], device=device)
        calls = self.calls(torch.zeros_like(two), two)
        self._turned: int = calls[0][_ANGLES][0].shape[-1]
        for layer, (call, *pieces) in enumerate(zip(calls, *read, strict=True)):
            if not self._reads_angles(layer, call):
                found.append(None)
                continue
            key = tuple(id(cos) for cos, _ in pieces)  # layers of one kind are given the same tensors
            if key not in shared:
                apply = vars(sys.modules[type(self._parent(layer)).__module__]).get(_APPLY)
                if apply is None:
                    raise ModelNotSupportedError(f"layer {layer}: its file in transformers has no {_APPLY}")
                cos, sin = (torch.cat([angles[part][0] for angles in pieces]) for part in (0, 1))
                shared[key] = TransformersRotary(cos, sin, apply, self.kv[layer].key[1])
            found.append(shared[key])
        return found

    def _parent(self, layer: int) -> Any:
        """Return the module of transformers' that a layer's attention stands in."""
        modules, attention = self.layers[layer].modules(), self.attentions[layer]
        return next(module for module in modules if any(child is attention for child in module.children()))

    def _reads_angles(self, layer: int, call: Mapping[str, Any]) -> bool:
        """Return whether a layer's K depends on the angles of this call."""
        keys: list[torch.Tensor] = []

        def catch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys.append(key)
            return query

        states = torch.linspace(-1, 1, call[_STATES].numel()).view(call[_STATES].shape).to(call[_STATES])
        with self.kv[layer].attending(catch), layer_context(self.vllm_config, 2):
            cos, sin = call[_ANGLES]
            for angles in ((cos, sin), (torch.ones_like(cos), torch.zeros_like(sin))):
                self.layers[layer](**{**call, _STATES: states, _ANGLES: angles})
        return not torch.equal(*keys)

    def _run(self, layer: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (1, len(rows), self._turned)
        out = self.layers[layer](
            **self._others[layer],
            **(rows.more[layer] if rows.more else {}),
            **{
                _STATES: rows.states[None],
                "position_ids": rows.positions.device[None],
                _ANGLES: (rows.states.new_ones(shape), rows.states.new_zeros(shape)),
                _MASK: None,
            },
        )
        return (out[0] if isinstance(out, tuple) else out)[0], None

    @contextmanager
    def tapped(self, layer: int, rows: Rows, attend: Callable[[Projected], torch.Tensor]) -> Iterator[None]:
        """Have ``attend`` compute a layer's attention over these rows, [rows, heads, head_size]."""

        def project(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            positions = rows.positions.device
            rotated, key_there = (self.rotate_keys(layer, positions, each) for each in (query, key))
            return attend(Projected(rotated, key_there, value, key))

        with self.kv[layer].attending(project):
            yield
