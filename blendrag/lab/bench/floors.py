"""What the pieces of a layer cost at the least, and how far from that they are.

The floor of a piece is the longer of two times: its floating-point operations at the best rate of
multiplying that was measured on this machine, and the bytes it must at least read and write at the best
rate of copying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.lab.statistics import spread

CHECK_LAYER = 1
LAYER = ("rotate", "write_stored", "qkv", "write", "attention", "o_proj", "mlp")  # above the check layer
_FULL = ("qkv_all", "write_all", "attention_all", "o_proj_all", "mlp_all")


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations (a multiplication and an addition are two), and bytes read and written."""

    flops: float
    nbytes: float


def costs(shape: Mapping[str, int]) -> dict[str, Cost]:
    """The least that each piece costs, of a layer of hidden size H, with Q and KV numbers in a token's query
    and key, MLP width I, e bytes a number; m rows of n tokens, c of them cached, p pairs of a row and a key
    that it sees. Normalisation is counted as bytes only.

    qkv: 2m H(Q + 2KV) FLOPs; weights, residual stream in and out, Q, K and V out.
    attention: 4pQ FLOPs (scores, and their sum of V); Q in, out, K and V of n tokens in.
    o_proj: 2m QH FLOPs. mlp: 2m 3HI FLOPs (gate, up, down). Weights, rows in and out.
    write: K and V in and out, 4m KV e bytes; write_stored, fetch: the same of c tokens.
    rotate: K in and out, 2c KV e bytes. gather: 2m(Q + H)e bytes. select: 2c KV e bytes (fresh, stored V).
    metadata: nothing that would have to be.
    """
    h, q, kv, wide, e = (shape[name] for name in ("hidden", "query", "kv", "intermediate", "itemsize"))
    n, cached = shape["tokens"], shape["cached"]
    found: dict[str, Cost] = {
        "fetch": Cost(0, 4 * cached * kv * e),
        "rotate": Cost(0, 2 * cached * kv * e),
        "write_stored": Cost(0, 4 * cached * kv * e),
        "select": Cost(0, 2 * cached * kv * e),
        "gather": Cost(0, 2 * shape["rows"] * (q + h) * e),
        "metadata": Cost(0, 0),
    }
    for end, m, pairs in (("", shape["rows"], shape["pairs_rows"]), ("_all", n, shape["pairs_all"])):
        out = q + 2 * kv
        found["qkv" + end] = Cost(2 * m * h * out, e * (h * out + m * (3 * h + out)))
        found["write" + end] = Cost(0, 4 * m * kv * e)
        found["attention" + end] = Cost(4 * pairs * q, e * (2 * m * q + 2 * n * kv))
        found["o_proj" + end] = Cost(2 * m * q * h, e * (q * h + m * (q + h)))
        found["mlp" + end] = Cost(6 * m * h * wide, e * (3 * h * wide + 4 * m * h))
    return found


def counts(layers: int) -> dict[str, int]:
    """How often a blend does each piece: full layers below the check layer; at it, QKV for all rows and the
    rest for the selected ones; above it whole layers; of the last, what gives K and V. ``fetch`` is beside
    all that, in a thread of its own."""
    above = layers - CHECK_LAYER - 1
    times = {name: CHECK_LAYER for name in _FULL}
    for name in ("qkv_all", "write_all"):
        times[name] += 1
    times |= {"select": 1, "gather": 1, "metadata": 2}
    times |= dict.fromkeys(("rotate", "write_stored", "qkv", "write"), above)
    times |= dict.fromkeys(("attention", "o_proj", "mlp"), layers - 1 - CHECK_LAYER)
    return times


def analyse(measured: Mapping[str, Any], mask: str) -> dict[str, Any]:
    """From times to distances. ``measured``: what ``engine.kernel_times`` says; ``mask``: the one in use.

    rates: ``flops`` and ``bytes`` per second, the best of all sizes, with the size.
    pieces: per piece ``best_ms``, ``median_ms``, ``floor_ms``, ``bound`` (matmul, memory or none), ``ratio``
        (best by floor; None without a floor), ``mm_ms`` (torch.mm of the very shapes, best; None without),
        ``share`` (of a layer's median; None for what is not in every layer), ``count`` in a blend, and
        ``over_ms``: what its medians cost in a blend above its floor.
    blend: ``pieces_ms`` (all pieces' medians), ``floor_ms``; ``full_floor_ms``: of a full prefill.
    """
    shape, taken = measured["shape"], dict(measured["ms"])
    taken["attention"] = taken["attention_dense" if mask == "dense" else "attention_pages"]
    least, times = costs(shape), counts(shape["layers"])
    for name in ("attention_pages", "attention_dense"):
        least[name] = least["attention"]
    rates = _rates(measured)
    layer_ms = sum(spread(taken[name]).median for name in LAYER)
    pieces: dict[str, dict[str, Any]] = {}
    for name, cost in least.items():
        floor, bound = _floor(cost, rates)
        best, median = min(taken[name]), spread(taken[name]).median
        products = measured["products"].get(name)
        pieces[name] = {
            "best_ms": best,
            "median_ms": median,
            "floor_ms": floor,
            "bound": bound,
            "ratio": best / floor if floor else None,
            "mm_ms": _products_ms(measured, products) if products else None,
            "share": median / layer_ms if name in LAYER else None,
            "count": times.get(name, 0),
            "over_ms": times.get(name, 0) * (median - floor),
        }
    return {
        "rates": rates,
        "pieces": pieces,
        "layer": {
            "best_ms": min(taken["layer"]),
            "median_ms": spread(taken["layer"]).median,
            "floor_ms": sum(pieces[name]["floor_ms"] for name in LAYER),
        },
        "blend": {
            "pieces_ms": sum(piece["count"] * piece["median_ms"] for piece in pieces.values()),
            "floor_ms": sum(piece["count"] * piece["floor_ms"] for piece in pieces.values()),
            "full_floor_ms": shape["layers"] * sum(pieces[name]["floor_ms"] for name in _FULL),
        },
    }


def _rates(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Copying counts the bytes twice: read and written. The model's own products count, too: some are faster
    than torch.mm, and a floor is what nothing is below."""
    flops: dict[str, float] = {}
    for size, spent in measured["matmul"].items():
        m, k, n = map(int, size.split(","))
        flops[size] = 2e3 * m * k * n / min(spent)
    for name, sizes in measured["products"].items():
        own = sum(2e3 * m * k * n for m, k, n in sizes) / min(measured["ms"][name])
        flops[f"the model's {name}"] = own
    copied = {f"{int(n) >> 20} MiB": 2e3 * int(n) / min(spent) for n, spent in measured["copy"].items()}
    fastest, widest = max(flops, key=flops.__getitem__), max(copied, key=copied.__getitem__)
    return {
        "flops": flops[fastest],
        "flops_of": fastest,
        "bytes": copied[widest],
        "bytes_of": widest,
        "matmul": flops,
        "copy": copied,
    }


def _floor(cost: Cost, rates: Mapping[str, Any]) -> tuple[float, str]:
    multiply, copy = 1e3 * cost.flops / rates["flops"], 1e3 * cost.nbytes / rates["bytes"]
    if not (multiply or copy):
        return 0.0, "none"
    return max(multiply, copy), "matmul" if multiply >= copy else "memory"


def _products_ms(measured: Mapping[str, Any], sizes: Sequence[Sequence[int]]) -> float:
    return sum(min(measured["matmul"][",".join(map(str, size))]) for size in sizes)
