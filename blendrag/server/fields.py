"""The field ``blendrag`` in the body of a request."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blendrag.options import Quality
from blendrag.settings import RENAMED, closest

NAME = "blendrag"


class BlendFields(BaseModel):
    """What a request says of blending; all of it may be left out. What is not said here is as the embedded
    classes have it."""

    model_config = ConfigDict(extra="forbid")

    documents: list[str] = Field(default=[], description="Texts known to be in the prompt: looked for first.")
    blend: bool | None = Field(default=None, description="False prefills the prompt plainly.")
    quality: Quality | None = None
    recompute_ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    selector: str | None = None
    evidence: bool = Field(
        default=False, description="What became of each document; in a stream, a last chunk that says it."
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                unknown = f"unknown field {name!r} in {NAME}{closest(str(name), cls.model_fields)}"
                raise ValueError(RENAMED.get(name, unknown))
        return values
