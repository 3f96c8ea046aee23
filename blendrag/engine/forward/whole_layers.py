"""The decoder for models whose layers run whole, with their attention in our hands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from blendrag.engine.compat.model import ForwardEnded, layer_context, own_forward
from blendrag.engine.forward.decoder import Attention, Decoder, Rows
from blendrag.engine.forward.indices import Indices
from blendrag.engine.forward.kv_layers import Projected
from blendrag.errors import ModelNotSupportedError


class WholeLayerDecoder(Decoder):
    """The decoder for any model of vLLM's: each layer runs whole, its attention tapped. Dropped rows leave
    after it.

    How layers are called, and with which arguments, is learnt from the model's own calls of them.
    """

    def embed(self, token_ids: torch.Tensor, positions: Indices) -> Rows:
        """Return what the model's own forward passes to its layers: embeddings may be scaled, for example."""
        calls = self.calls(token_ids, positions.device)
        more, self._others = [], []
        for call in calls:
            by_row = self._by_row(call, positions.device)
            more.append(by_row)
            self._others.append({n: v for n, v in call.items() if n not in self._given | by_row.keys()})
        states: torch.Tensor = calls[0][self._states_name]
        return Rows(positions, states.flatten(0, -2), None, tuple(more) if any(more) else ())

    def calls(self, token_ids: torch.Tensor, positions: torch.Tensor) -> list[dict[str, Any]]:
        """Return what the model's own forward gives each layer, by name. No layer is computed."""
        pairs = "residual" in inspect.signature(self.layers[0].forward).parameters
        try:
            found = self._recorded(token_ids, positions, pairs)
        except (TypeError, ValueError):  # StableLM returns two parts of the residual stream, and takes one
            found = self._recorded(token_ids, positions, not pairs)
        self._learn(found[0], positions)
        return found

    def _recorded(
        self, token_ids: torch.Tensor, positions: torch.Tensor, pairs: bool
    ) -> list[dict[str, Any]]:
        """Record the calls. pairs: whether a layer returns the residual stream in two parts."""
        found: list[dict[str, Any]] = []

        def recorder(layer: Any) -> Callable[..., Any]:
            signature = inspect.signature(layer.forward)

            def record(*args: Any, **kwargs: Any) -> Any:
                arguments = signature.bind(*args, **kwargs).arguments
                others = arguments.pop(_var_keyword(signature), {})
                found.append({**arguments, **others})
                if len(found) == self.num_layers:
                    raise ForwardEnded
                states = next(filter(_is_float, found[-1].values()))
                return (states, states) if pairs else states

            return record

        for layer in self.layers:
            layer.forward = recorder(layer)
        try:
            with layer_context(self.vllm_config, positions.numel()):
                own_forward(self.model, token_ids, positions)
        finally:
            for layer in self.layers:
                del layer.forward
        if len(found) != self.num_layers:
            raise ModelNotSupportedError("its forward does not run all of its layers")
        return found

    def _learn(self, call: Mapping[str, Any], positions: torch.Tensor) -> None:
        """Learn which arguments change with the rows: the others are as they were in the model's own call."""
        at = [name for name, value in call.items() if value is positions]
        states = [name for name, value in call.items() if _is_float(value) and name != "residual"]
        if len(at) != 1 or not states:
            raise ModelNotSupportedError(f"its layers take {', '.join(call)}")
        if (shape := call[states[0]].shape)[:1] != positions.shape:  # AltUp: several streams of rows
            raise ModelNotSupportedError(f"its layers pass on {(*shape,)} of {positions.numel()} tokens")
        self._positions_name, self._states_name = at[0], states[0]
        self._given = {at[0], states[0], "residual"}
        self._takes_residual = "residual" in call

    def _by_row(self, call: Mapping[str, Any], positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the further arguments of a call that have a row for each of these positions."""
        return {
            name: value
            for name, value in call.items()
            if name not in self._given and _is_float(value) and value.shape[:1] == positions.shape
        }

    def prefill_layer(self, layer: int, rows: Rows, attention: Attention, raw_keys: bool = False) -> Rows:
        kept: list[Indices | None] = []

        def for_all_rows(projected: Projected) -> torch.Tensor:
            done = attention(projected)
            kept.append(done.kept)
            if done.output is not None and done.kept is None:
                return done.output
            # What is dropped goes through the layer unused.
            every = projected.query.new_zeros(*projected.query.shape[:2], self.kv[layer].value[1])
            if done.output is None or done.kept is None:
                return every
            every[done.kept.device] = done.output
            return every

        with (
            self.tapped(layer, rows, for_all_rows),
            layer_context(self.vllm_config, len(rows)),
        ):
            states, residual = self._run(layer, rows)
        return Rows(rows.positions, states, residual, rows.more).at(kept[0])

    def _run(self, layer: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        arguments = {
            self._positions_name: rows.positions.device,
            self._states_name: rows.states,
            **self._others[layer],
            **(rows.more[layer] if rows.more else {}),
        }
        if self._takes_residual:
            arguments["residual"] = rows.residual
        out = self.layers[layer](**arguments)
        return (out[0], out[1]) if isinstance(out, tuple) else (out, None)

    @contextmanager
    def tapped(self, layer: int, rows: Rows, attend: Callable[[Projected], torch.Tensor]) -> Iterator[None]:
        """Have ``attend`` compute a layer's attention over these rows, [rows, heads, size of V]."""
        with self.attending([layer], lambda _, projected: attend(projected)):
            yield


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _var_keyword(signature: inspect.Signature) -> str:
    """Return the name of a function's ``**kwargs``; empty if it has none."""
    kinds = {each.kind: each.name for each in signature.parameters.values()}
    return kinds.get(inspect.Parameter.VAR_KEYWORD, "")
