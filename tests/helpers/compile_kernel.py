"""Compile our kernels for GPUs that are not here: a line each of target, what was compiled and bytes of
shared memory; of the kernel for layers without windows, caps and sinks, bytes spilled and instructions of its
main loop, too. Run as a script: Triton's interpreter, once chosen in a process, compiles nothing."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
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


def source(dtype: str, itemsize: int, size: int, **given: Any) -> ASTSource:
    """With everything that a layer may have: a window, a cap, sinks; or what is ``given``."""
    tile = Tile.of(GROUP, size, itemsize)
    fixed: dict[str, Any] = {
        "WINDOW": 128, "SOFT_CAP": 50.0, "BLOCK_SIZE": 16, "HEAD_SIZE": size, "GROUP": GROUP,
        "ROWS": tile.rows, "LANES": tile.lanes, "KEYS": tile.keys, "WIDTH": tile.width,
    } | given  # fmt: skip

    def type_of(name: str) -> str:
        if name in fixed:
            return "constexpr"
        if name == "row_count" or name.endswith("stride"):
            return "i32"
        return "fp32" if name == "scale" else "*i32" if name in INTEGERS else f"*{dtype}"

    at = {name: (number,) for number, name in enumerate(attend.arg_names)}
    others = {*fixed, "row_count", "table_stride", "scale"}
    aligned = {at[name]: [["tt.divisibility", 16]] for name in at if name not in others}
    types = {name: type_of(name) for name in at}
    return ASTSource(attend, types, {at[name]: value for name, value in fixed.items()}, aligned)


def decoding(codec: str) -> ASTSource:
    fixed = {"CODEC": codec, "HEADS": 8, "OWN": 8, "SIZE": 128, "WIDTH": 128, "TOKENS": 16}
    types = {"rows": "*u8", "table": "*i64", "numbers": "*bf16", "layers": "i32"}
    types |= dict.fromkeys(("layer_stride", "part_stride"), "i64")
    at = {name: (number,) for number, name in enumerate(decode.arg_names)}
    return ASTSource(
        decode,
        types | dict.fromkeys(fixed, "constexpr"),
        {at[name]: value for name, value in fixed.items()},
        {at["rows"]: [["tt.divisibility", 16]]},
    )


def instructions(made: Any) -> str:
    """Of a kernel for NVIDIA's: bytes that it spills, and instructions of its shortest loop of products, as
    the tools beside Triton's compiler show them; empty without them."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if made.metadata.target.backend != "cuda" or not (tools / "nvdisasm").exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage, listing = (
            subprocess.run(
                [tools / tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    labels, code, loops = dict[str, int](), list[str](), list[list[str]]()
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(found[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", found[1])
            if back and back[1] in labels:
                loops.append(code[labels[back[1]] :])
    products = [len(loop) for loop in loops if any("MMA" in each for each in loop)]
    (spilled,) = re.findall(r"LOCAL:(\d+)", usage)
    return f"{spilled} {min(products)}"


for target in TARGETS:
    for codec in sorted(CODECS):
        print(target.arch, "decode", codec, triton.compile(decoding(codec), target).metadata.shared)
    for dtype, itemsize, size in SHAPES:
        options = Tile.of(GROUP, size, itemsize).options
        made = triton.compile(source(dtype, itemsize, size), target, options)
        print(target.arch, dtype, size, made.metadata.shared)
    bare = {"WINDOW": 0, "SOFT_CAP": 0.0, "sinks": None}
    made = triton.compile(source("bf16", 2, 128, **bare), target, Tile.of(GROUP, 128, 2).options)
    print(target.arch, "bare", 128, made.metadata.shared, instructions(made))
