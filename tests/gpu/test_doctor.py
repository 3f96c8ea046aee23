"""`blendrag doctor`, eager and with graphs, on every attention backend that starts."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.errors import BlendragError, EngineError
from blendrag.lab.doctor import Check, run_doctor
from blendrag.lab.running import lab_engine
from blendrag.settings import Settings
from device import DEVICE
from tables import Tables

if DEVICE == "cuda":  # an engine for each
    BACKENDS, EAGER, ENGINE = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"), (True, False), "own_engine"
else:
    BACKENDS, EAGER, ENGINE = ("CPU_ATTN",), (True,), "engine"

pytestmark = [pytest.mark.gpu, getattr(pytest.mark, ENGINE)]


def settings_of(backend: str, eager: bool, engine_options: dict[str, Any]) -> Settings:
    if DEVICE == "cpu":
        return Settings.load(**engine_options)
    return Settings.load(engine_args={"enforce_eager": eager, "attention_backend": backend})


def checked(settings: Settings) -> tuple[bool, list[Check]]:
    """Whether an engine starts with these settings; what was checked, or why it did not."""
    try:
        engine = lab_engine(settings)
    except EngineError as error:
        return False, [Check("starts", str(error), "", False)]
    try:
        return True, list(run_doctor(settings).rows)
    except BlendragError as error:
        return True, [Check("ends", str(error), "", False)]
    finally:
        engine.release()


@pytest.mark.parametrize("eager", EAGER, ids=lambda eager: "eager" if eager else "graphs")
def test_backend_that_starts_can_be_trusted(
    eager: bool, engine_options: dict[str, Any], tables: Tables
) -> None:
    verdicts: list[bool] = []
    for backend in BACKENDS:
        started, rows = checked(settings_of(backend, eager, engine_options))
        verdicts += [row.ok for row in rows if started]
        for row in rows:
            tables.add(
                backend=backend,
                mode="eager" if eager else "graphs",
                check=row.check,
                value=row.value,
                limit=row.limit,
                ok=str(row.ok),
            )
    assert verdicts and all(verdicts)
