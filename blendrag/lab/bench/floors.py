"""What the pieces of a layer cost at the least, and how far from that they are.

The floor of a piece is the longer of two times: its floating-point operations at the best rate of
multiplying that was measured on this machine, and the bytes it must at least read and write at the best
rate of copying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blendrag.lab.statistics import spread
from blendrag.lab.worker.operations import LayerShape, PieceTimes

CHECK_LAYER = 1
LAYER = ("rotate", "write_stored", "qkv", "write", "attention", "o_proj", "mlp")  # above the check layer
_FULL = ("qkv_all", "write_all", "attention_all", "o_proj_all", "mlp_all")
_PRODUCTS = ("qkv", "o_proj", "mlp")  # pieces that multiply matrices, and little else


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations (a multiplication and an addition are two), and bytes read and written."""

    flops: float
    nbytes: float


def costs(shape: LayerShape) -> dict[str, Cost]:
    """The least that each piece costs, of a layer of hidden size H, with Q and KV numbers in a token's query
    and key, MLP width I, e bytes a number; m rows of n tokens, c of them cached, p pairs of a row and a key
    that it sees. Normalisation is counted as bytes only.

    qkv: 2m H(Q + 2KV) FLOPs; weights, residual stream in and out, Q, K and V out.
    attention: 4pQ FLOPs (scores, and their sum of V); Q in, out, K and V of n tokens in.
    o_proj: 2m QH FLOPs. mlp: 2m 3HI FLOPs (gate, up, down). Weights, rows in and out.
    write: K and V in and out, 4m KV e bytes; write_stored: the same of c tokens.
    rotate: K in and out, 2c KV e bytes. gather: 2m(Q + H)e bytes. select: 2c KV e bytes (fresh, stored V).
    metadata: nothing that would have to be.
    """
    h, q, kv, wide, e = shape.hidden, shape.query, shape.kv, shape.intermediate, shape.itemsize
    n, cached = shape.tokens, shape.cached
    found: dict[str, Cost] = {
        "rotate": Cost(0, 2 * cached * kv * e),
        "write_stored": Cost(0, 4 * cached * kv * e),
        "select": Cost(0, 2 * cached * kv * e),
        "gather": Cost(0, 2 * shape.rows * (q + h) * e),
        "metadata": Cost(0, 0),
    }
    for end, m, pairs in (("", shape.rows, shape.pairs_rows), ("_all", n, shape.pairs_all)):
        out = q + 2 * kv
        found["qkv" + end] = Cost(2 * m * h * out, e * (h * out + m * (3 * h + out)))
        found["write" + end] = Cost(0, 4 * m * kv * e)
        found["attention" + end] = Cost(4 * pairs * q, e * (2 * m * q + 2 * n * kv))
        found["o_proj" + end] = Cost(2 * m * q * h, e * (q * h + m * (q + h)))
        found["mlp" + end] = Cost(6 * m * h * wide, e * (3 * h * wide + 4 * m * h))
    return found


def counts(layers: int) -> dict[str, int]:
    """How often a blend does each piece: full layers below the check layer; at it, QKV for all rows and the
    rest for the selected ones; above it whole layers; of the last, what gives K and V."""
    above = layers - CHECK_LAYER - 1
    times = {name: CHECK_LAYER for name in _FULL}
    for name in ("qkv_all", "write_all"):
        times[name] += 1
    times |= {"select": 1, "gather": 1, "metadata": 2}
    times |= dict.fromkeys(("rotate", "write_stored", "qkv", "write"), above)
    times |= dict.fromkeys(("attention", "o_proj", "mlp"), layers - 1 - CHECK_LAYER)
    return times


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does a second, at most: floating-point operations and bytes, each with what did most.
    matmul, copy: by the size of what was multiplied or copied."""

    flops: float
    flops_of: str
    bytes: float
    bytes_of: str
    matmul: dict[str, float]
    copy: dict[str, float]


@dataclass(frozen=True, slots=True)
class PieceFloor:
    """floor_ms: 0 where nothing would have to be done; bound: what the floor goes by. count: in a blend."""

    best_ms: float
    median_ms: float
    floor_ms: float
    bound: Literal["matmul", "memory", "none"]
    count: int

    @property
    def ratio(self) -> float | None:
        return self.best_ms / self.floor_ms if self.floor_ms else None

    @property
    def over_ms(self) -> float:
        """What its medians cost in a blend above its floor."""
        return self.count * (self.median_ms - self.floor_ms)


@dataclass(frozen=True, slots=True)
class Floors:
    """Times and floors by piece, and their sums in a blend."""

    shape: LayerShape
    rates: Rates
    pieces: dict[str, PieceFloor]

    @property
    def pieces_ms(self) -> float:
        """A blend's: of all pieces' medians."""
        return sum(piece.count * piece.median_ms for piece in self.pieces.values())

    @property
    def floor_ms(self) -> float:
        """A blend's."""
        return sum(piece.count * piece.floor_ms for piece in self.pieces.values())

    @property
    def full_floor_ms(self) -> float:
        """A full prefill's."""
        return self.shape.layers * sum(self.pieces[name].floor_ms for name in _FULL)


def analyse(measured: PieceTimes) -> Floors:
    """From times to distances."""
    least, times, rates = costs(measured.shape), counts(measured.shape.layers), _rates(measured)
    pieces = {}
    for name, cost in least.items():
        spent = measured.ms[name]
        floor_ms, bound = _floor(cost, rates)
        pieces[name] = PieceFloor(min(spent), spread(spent).median, floor_ms, bound, times[name])
    return Floors(measured.shape, rates, pieces)


def _rates(measured: PieceTimes) -> Rates:
    """Copying counts the bytes twice: read and written. The model's own products count, too: some are faster
    than torch.mm, and a floor is what nothing is below."""
    flops = {f"{n} x {n}": 2e3 * int(n) ** 3 / min(spent) for n, spent in measured.matmul.items()}
    for name, cost in costs(measured.shape).items():
        if name.removesuffix("_all") in _PRODUCTS:
            flops[f"the model's {name}"] = 1e3 * cost.flops / min(measured.ms[name])
    copied = {f"{int(n) >> 20} MiB": 2e3 * int(n) / min(spent) for n, spent in measured.copy.items()}
    fastest, widest = max(flops, key=flops.__getitem__), max(copied, key=copied.__getitem__)
    return Rates(flops[fastest], fastest, copied[widest], widest, flops, copied)


def _floor(cost: Cost, rates: Rates) -> tuple[float, Literal["matmul", "memory", "none"]]:
    multiply, copy = 1e3 * cost.flops / rates.flops, 1e3 * cost.nbytes / rates.bytes
    if not (multiply or copy):
        return 0.0, "none"
    return max(multiply, copy), "matmul" if multiply >= copy else "memory"
