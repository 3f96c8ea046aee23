"""Where tests of tensors run: on a GPU if there is one. Triton's kernels run there, or by its interpreter,
which has to be chosen before Triton is imported, as `make nightly PART=kernel` does it."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from blendrag.machine import has_bf16_products, has_compiler

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

_missing = find_spec("triton") is None
_INTERPRETER = "Triton's interpreter (`make nightly PART=kernel`)"
needs_interpreter = pytest.mark.skipif(_missing or not INTERPRETED, reason=f"needs {_INTERPRETER}")
needs_cpu_kernel = pytest.mark.skipif(
    not (has_bf16_products() and has_compiler()),
    reason="needs a processor that multiplies bfloat16 (AVX512_BF16), and g++",
)
needs_kernels = pytest.mark.skipif(
    _missing or (DEVICE == "cpu" and not INTERPRETED), reason=f"needs a GPU, or {_INTERPRETER}"
)
