"""A prompt's stored KV on its way into the prompt's pages: loaded, moved to its positions, written."""

from __future__ import annotations

import time
from collections.abc import Container, Generator, Sequence
from functools import cached_property, partial

import torch

from blendrag.engine.compat.layer_kv import KV
from blendrag.engine.forward.indices import upload
from blendrag.engine.forward.paged import Places
from blendrag.engine.forward.prompt_forward import PromptForward
from blendrag.load.loader import StoredLayers


class StoredKV:
    """The stored KV of one prompt, which a loader reads. Layers are asked for in ascending order; some may be
    left out. again: those that :meth:`second` brings."""

    def __init__(self, forward: PromptForward, layers: StoredLayers, again: Sequence[int] = ()) -> None:
        self._forward, self._layers, self._again = forward, layers, again
        self._brought: Container[int] = range(layers.num_layers)
        self._begun = False
        self._last: tuple[int, KV] | None = None

    @cached_property
    def _positions(self) -> torch.Tensor:
        return upload(self._forward.tokens.cached, self._forward.device)

    @cached_property
    def _places(self) -> Places:
        return self._forward.pages.places(self._forward.tokens.cached)

    def second(self, forward: PromptForward) -> StoredKV:
        """Return what comes a second time, for another forward over as many of the cached tokens."""
        second = StoredKV(forward, self._layers)
        second._brought, second._begun = self._again, True
        return second

    def brings(self, layer: int) -> bool:
        """Return whether the layer may be asked for. Of others, what is stored is in the pages."""
        return layer in self._brought

    def begin(self, first_layer: int) -> None:
        """Begin loading; called first. No layer below ``first_layer`` will be asked for."""
        if self._forward.tokens.cached.size and not self._begun:
            self._layers.fetch_kv(first_layer, self._again)
            self._begun = True

    def arrival(self, layer: int) -> Generator[None, None, None]:
        """Pause until the layer is here."""
        forward = self._forward
        while True:
            begin = time.perf_counter()
            with forward.trace.span("wait", f"layer {layer}"):
                there = forward.pace.arrived(partial(self._layers.ready, layer))
            forward.watch.load_s += time.perf_counter() - begin
            if there:
                break
            yield from forward.pause()
        self._last = layer, self._layers.synchronize(layer)

    def at(self, layer: int) -> KV:
        """Return the layer as it is stored, K before RoPE, to compare with. It has to have arrived."""
        assert self._last is not None and self._last[0] == layer
        stored = (part[: len(self._positions)] for part in self._last[1])
        layers, number = self._forward.among(layer)
        return layers.kv[number].loaded(*stored)

    def write(self, layer: int, compared: bool = False) -> KV:
        """Write the layer to the pages, and return its K, moved to its positions, and V. compared: whether
        :meth:`at` is asked for it later."""
        key, value = self.at(layer)
        forward, begin = self._forward, time.perf_counter()
        if compared:
            key = key.clone()
        layers, number = forward.among(layer)
        key = layers.rotate_keys(number, self._positions, key)
        forward.pages.write(layer, self._places, key, value)
        forward.watch.load_s += time.perf_counter() - begin
        return key, value

    def write_drafts(self) -> Generator[None, None, None]:
        """Write the layers of the model that drafts, if they come. Behind all others."""
        for layer in range(self._forward.decoder.num_layers, self._layers.num_layers):
            if self._begun and self.brings(layer):
                yield from self.arrival(layer)
                self.write(layer)
