"""Compile our kernels for GPUs that are not here: a line each of target, what was compiled and bytes of
shared memory. Run as a script: Triton's interpreter, once chosen in a process, compiles nothing."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blendrag.attention.paged_kernel import Tile, attend
from blendrag.load.decode_kernel import decode
from blendrag.store.codec import CODECS

TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)]
SHAPES = [("bf16", 2, 128), ("bf16", 2, 256)]
INTEGERS = ("positions", "sequences", "block_table")
GROUP = 4


def source(dtype: str, itemsize: int, size: int) -> ASTSource:
    """With everything that a layer may have: a window, a cap, sinks."""
    tile = Tile.of(GROUP, size, itemsize)
    fixed: dict[str, Any] = {
        "WINDOW": 128, "SOFT_CAP": 50.0, "BLOCK_SIZE": 16, "HEAD_SIZE": size, "GROUP": GROUP,
        "ROWS": tile.rows, "LANES": tile.lanes, "KEYS": tile.keys, "WIDTH": tile.width,
    }  # fmt: skip

    def type_of(name: str) -> str:
        if name in fixed:
            return "constexpr"
        if name == "row_count" or name.endswith("stride"):
            return "i32"
        return "fp32" if name == "scale" else "*i32" if name in INTEGERS else f"*{dtype}"

    at = {name: (number,) for number, name in enumerate(attend.arg_names)}
    strides = (name for name in at if name.endswith("stride") and name != "table_stride")
    aligned = {at[name]: [["tt.divisibility", 16]] for name in strides}
    types = {name: type_of(name) for name in at}
    return ASTSource(attend, types, {at[name]: value for name, value in fixed.items()}, aligned)


def decoding(codec: str) -> ASTSource:
    fixed = {"CODEC": codec, "HEADS": 8, "OWN": 8, "SIZE": 128, "WIDTH": 128, "TOKENS": 16}
    types = {"rows": "*u8", "table": "*i64", "numbers": "*bf16", "part_stride": "i64"}
    at = {name: (number,) for number, name in enumerate(decode.arg_names)}
    return ASTSource(
        decode,
        types | dict.fromkeys(fixed, "constexpr"),
        {at[name]: value for name, value in fixed.items()},
        {at["rows"]: [["tt.divisibility", 16]]},
    )


for target in TARGETS:
    for codec in sorted(CODECS):
        print(target.arch, "decode", codec, triton.compile(decoding(codec), target).metadata.shared)
    for dtype, itemsize, size in SHAPES:
        made = triton.compile(source(dtype, itemsize, size), target, {"num_stages": 2})
        print(target.arch, dtype, size, made.metadata.shared)
