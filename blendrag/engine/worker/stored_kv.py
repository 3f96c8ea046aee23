"""A prompt's stored KV on its way into the prompt's pages: loaded, moved to its positions, written."""

from __future__ import annotations

import time
from collections.abc import Generator

from blendrag.engine.worker.indices import upload
from blendrag.engine.worker.prompt_forward import KV, PromptForward
from blendrag.load.layers import StoredLayer, StoredLayers


class StoredKV:
    """From a loader. Layers are asked for in ascending order; some may be left out."""

    def __init__(self, forward: PromptForward, layers: StoredLayers) -> None:
        self._forward, self._layers = forward, layers
        self._last: tuple[int, StoredLayer] | None = None
        self._positions = upload(forward.tokens.cached, forward.device)
        self._places = forward.pages.places(forward.tokens.cached)

    def begin(self, first_layer: int) -> None:
        """No layer below this one will be asked for. Called once, before any is."""
        if self._forward.tokens.cached.size:
            self._layers.fetch_kv(first_layer)

    def arrival(self, layer: int) -> Generator[None, None, None]:
        """Pause until the layer is here, where a pause is allowed: else whoever asks for it waits."""
        forward, held = self._forward, self._last is not None and self._last[0] == layer
        if forward.pace.rows is not None and not held and not self._ready(layer):
            yield from forward.pause(lambda: self._ready(layer))

    def _ready(self, layer: int) -> bool:
        return self._forward.pace.ranks.all(self._layers.ready(layer))

    def at(self, layer: int) -> KV:
        """As it is stored, K before RoPE, to be compared with."""
        if self._last is None or self._last[0] != layer:
            begin = time.perf_counter()
            with self._forward.trace.span("wait", f"layer {layer}"):
                self._last = layer, self._layers.synchronize(layer)
            self._forward.watch.load_s += time.perf_counter() - begin
        return self._last[1].of_all_heads()

    def write(self, layer: int) -> KV:
        """Write it to the pages; K moved to its positions, and V."""
        raw_key, value = self.at(layer)
        forward, begin = self._forward, time.perf_counter()
        key = raw_key.clone()  # a check compares the raw one
        key = forward.decoder.rotate_keys(layer, self._positions, key)
        forward.pages.write(layer, self._places, key, value)
        forward.watch.load_s += time.perf_counter() - begin
        return key, value
