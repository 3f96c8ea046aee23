"""The exact causal mask for scattered tokens on a CPU, by a kernel compiled when it is first asked for.

A backend reads the keys of each run of rows for that run alone, with products in float32; here rows share
what they read, with products of bfloat16 (design decision D7).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from blendrag.attention.scores import Scores
from blendrag.files.private import make_folder
from blendrag.machine import cxx_compiler, has_bf16_products

_SOURCE = Path(__file__).with_suffix(".cpp")
_SETS = tuple(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl", "bf16"))
_FLAGS = ("-O3", *_SETS, "-mfma", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_LANES, _PACKED = 16, 64  # as the source has them
_POINTERS = ("query", "cache", "positions", "table", "order", "key", "value", "out")
_NUMBERS = ("rows", "heads", "kv_heads", "size", "block", "stride", "window")
_EVERY = 1 << 40  # keys; more than there are


class _Call(ctypes.Structure):
    """The arguments of the kernel (scattered.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_float),
    )


class Room:
    """Memory for K and V of one layer in the kernel's own order, which layers and pieces of rows share."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0, dtype=torch.bfloat16)

    def of(self, count: int) -> torch.Tensor:
        """Return so many numbers."""
        if self._numbers.numel() < count:
            self._numbers = torch.empty(count, dtype=torch.bfloat16)
        return self._numbers[:count]


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredRows:
    """Rows of one sequence that attend to it, on a CPU.

    positions: [m] int64, of the last key that each row sees. Any order is right, ascending is fast. blocks:
    [blocks] int32, those of the sequence. order: [2, block_size, head_size] int32, the place of each number
    of K and V in a page.
    """

    positions: torch.Tensor
    blocks: torch.Tensor
    order: torch.Tensor
    room: Room


def takes(size: int, dtype: torch.dtype, scores: Scores | None) -> bool:
    """Return whether the kernel computes attention of heads of this size, with these scores."""
    return scores is not None and scores.bare and dtype == torch.bfloat16 and size % _LANES == 0


def scattered_attention(
    query: torch.Tensor, cache: torch.Tensor, rows: ScatteredRows, scores: Scores
) -> torch.Tensor:
    """Return the attention of ``query``, [m, heads, d], over the keys that ``rows`` see, all of them in the
    cache. Same shape, same type; sums are in float32, weights in bfloat16.

    cache: [blocks, kv_heads, block_size, 2 * d]. A row's result does not depend on the other rows. To be
    called where :func:`why_not` returns None and :func:`takes` True.
    """
    (count, heads, size), (_, kv_heads, block, _) = query.shape, cache.shape
    assert cache[0].is_contiguous() and len(rows.positions) == count, "pages are read as lines"
    query, out = query.contiguous(), torch.empty(query.shape, dtype=query.dtype)
    keys = int(rows.positions.max()) + 1
    key, value = rows.room.of(2 * kv_heads * -(-keys // _PACKED) * _PACKED * size).chunk(2)
    tensors = query, cache, rows.positions, rows.blocks, rows.order, key, value, out
    call = _Call(
        *(tensor.data_ptr() for tensor in tensors),
        *(count, heads, kv_heads, size, block, cache.stride(0), scores.window or _EVERY),
        scores.scale,
    )
    _kernel()(ctypes.byref(call))
    return out


@cache
def why_not() -> str | None:
    """Return why this machine does not run the kernel; None if it does. Compiles it the first time."""
    if not has_bf16_products():
        return "this processor has no products of bfloat16 (AVX512_BF16)"
    try:
        _kernel()
    except subprocess.CalledProcessError as error:
        return next((line for line in error.stderr.splitlines() if "error" in line), str(error))
    except (OSError, RuntimeError) as error:  # no compiler; no home
        return str(error)
    return None


@cache
def _kernel() -> Callable[[Any], None]:
    # Threads are those of torch: its OpenMP library is there already, and has the symbols' names.
    function = ctypes.CDLL(str(_built())).scattered_attention
    function.restype = None
    return function


def _built() -> Path:
    """Return the compiled kernel, from the user's cache if it is there.

    Raises OSError if others may write there.
    """
    command = [*cxx_compiler(), *_FLAGS]
    name = hashlib.sha256("\n".join([_SOURCE.read_text(), *command]).encode()).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blendrag"
    make_folder(home)
    about = home.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise OSError(f"others may write to {home}, where the kernel would be")
    built = home / f"scattered-{name[:16]}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=home) as folder:
            made = Path(folder) / built.name
            subprocess.run(
                [*command, str(_SOURCE), "-o", str(made)], check=True, capture_output=True, text=True
            )
            made.replace(built)  # at once, for others who look for it
    return built
