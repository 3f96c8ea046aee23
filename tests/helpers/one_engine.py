"""Settings with which every test that needs an engine shares one, in whichever package it is.

A module and not only fixtures, because classes of LangChain's suites name their settings outside of tests.

float32: what has to be equal is equal to many digits, and greedy texts do not hang on ties. Few tokens per
step: prompts of usual length are prefilled in several chunks.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

ENGINE = {"dtype": "float32", "max_model_len": 4096, "kv_cache_gib": 1, "max_num_batched_tokens": 512}


@cache
def kv_dir() -> Path:
    """One folder of KV for a run's chat models."""
    folder = Path(tempfile.mkdtemp(prefix="blendrag-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
