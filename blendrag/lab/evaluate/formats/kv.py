"""Key-value retrieval ("Lost in the Middle"): copying, which models too small to reason can do as well."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Self

from pydantic import BaseModel, Field, model_validator

from blendrag.lab.evaluate.formats.format import Format, Row, register_format

_SYSTEM = (
    "Each document has a key and its value. Find the key that is asked for. Give its value, and nothing else."
)


class _Record(BaseModel):
    number: int = 0
    pairs: list[tuple[str, str]] = Field(validation_alias="ordered_kv_records")
    key: str
    value: str

    @model_validator(mode="after")
    def _has_the_pair(self) -> Self:
        if (self.key, self.value) not in self.pairs:
            raise ValueError("'key' and 'value' are none of the pairs")
        return self


def _rows(records: Sequence[_Record], seed: int, count: int) -> Iterable[list[Row]]:
    """A document per pair. Those left of the file's pairs keep its order, as the answer's place is random."""
    for each in records:
        rng = random.Random(f"{seed}:{each.number}")
        others = [pair for pair in each.pairs if pair[0] != each.key]
        kept = {each.key, *(key for key, _ in rng.sample(others, min(count - 1, len(others))))}
        documents = tuple(f"Key: {key}\nValue: {value}" for key, value in each.pairs if key in kept)
        yield [Row(str(each.number), f"What is the value of the key {each.key}?", (each.value,), documents)]


register_format(Format("kv", _Record, _rows, _SYSTEM, documents=12))
