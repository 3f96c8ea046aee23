"""How long the pieces of a layer take, in turn with this machine's rates of multiplying and copying.

Only times are measured here; what they could be at best is arithmetic on the shape, in ``bench.floors``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blendrag.lab.worker.kernels import LayerPieces, Step
from blendrag.lab.worker.operations import PieceTimes

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import DataPlane

_SQUARES = (512, 1024, 2048)  # of the matrices whose product gives the machine's rate
_COPIES = (1 << 20, 1 << 23, 1 << 26)  # bytes


@torch.inference_mode()
def time_pieces(
    data_plane: DataPlane, tokens: int, spans: Sequence[tuple[int, int]], ratio: float, repeats: int
) -> PieceTimes:
    """Everything in turn, ``repeats`` times; each round is another layer's, so that weights are as cold as in
    a forward. The first round is a warm-up. Arguments as :class:`LayerPieces` has them."""
    pieces = LayerPieces(data_plane.model, tokens, spans, ratio)
    shape, device = pieces.shape(), pieces.device
    taken = PieceTimes(shape, {}, {}, {})
    work = [(taken.ms, name, step) for name, step in pieces.steps().items()]
    work += [(taken.matmul, str(n), _product(n, device, pieces.dtype)) for n in _SQUARES]
    work += [(taken.copy, str(nbytes), _copy(nbytes, device)) for nbytes in _COPIES]
    for number in range(repeats + 1):
        for times, name, step in work:
            spent = _milliseconds(step, number % shape.layers, device)
            if number:
                times.setdefault(name, []).append(spent)
    return taken


def _product(rows: int, device: torch.device, dtype: torch.dtype) -> Step:
    left, weight, out = (torch.randn(rows, rows).to(device, dtype) for _ in range(3))
    return lambda _: torch.mm(left, weight.t(), out=out)


def _copy(nbytes: int, device: torch.device) -> Step:
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda _: target.copy_(source)


def _milliseconds(step: Step, layer: int, device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    step(layer)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)
