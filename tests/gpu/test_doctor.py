"""`blendrag doctor`, eager and with graphs, on every attention backend that starts."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.errors import EngineError
from blendrag.lab.doctor import run_doctor
from blendrag.settings import Settings
from device import DEVICE
from tables import Tables

if DEVICE == "cuda":  # each is an engine of its own
    BACKENDS, EAGER, ENGINE = (
        ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"),
        (True, False),
        pytest.mark.own_engine,
    )
else:
    BACKENDS, EAGER, ENGINE = ("CPU_ATTN",), (True,), pytest.mark.engine

pytestmark = [pytest.mark.gpu, pytest.mark.slow, ENGINE]


@pytest.mark.parametrize("eager", EAGER, ids=lambda eager: "eager" if eager else "graphs")
def test_backend_starts_and_cannot_be_trusted(
    eager: bool, engine_options: dict[str, Any], tables: Tables
) -> None:
    started, failed = [], []
    for backend in BACKENDS:
        options = (
            {"enforce_eager": eager, "engine_args": {"attention_backend": backend}}
            if DEVICE == "cuda"
            else {}
        )
        try:
            report = run_doctor(Settings.load(**engine_options, **options))
        except EngineError as error:
            tables.add(
                backend=backend, graphs=str(not eager), check="start", value=str(error), limit="", ok=""
            )
            continue
        started.append(backend)
        failed += [(backend, row) for row in report.rows if not row.ok]
        for row in report.rows:
            tables.add(
                backend=backend, graphs=str(not eager), check=row.check, value=row.value, limit=row.limit,
                ok="ok" if row.ok else "FAILED",
            )  # fmt: skip
    assert started and not failed
