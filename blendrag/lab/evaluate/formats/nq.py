"""Natural Questions with the passage that has the answer, as in "Lost in the Middle"."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from pydantic import Field

from blendrag.lab.evaluate.formats.fields import Answers, Asked, Documents
from blendrag.lab.evaluate.formats.format import Format, Row, register_format

_TRIES = 10  # passages looked at for each that is wanted; few name another question's answer


class _Record(Asked):
    answers: Answers
    documents: Documents = Field(validation_alias="ctxs")


def _rows(records: Sequence[_Record], seed: int, count: int) -> Iterable[list[Row]]:
    passages = list(dict.fromkeys(text for each in records for text in each.documents))
    for each in records:
        rng = random.Random(f"{seed}:{each.row_id}")
        documents = list(each.documents)
        if len(documents) == 1:
            documents += _distractors(each, passages, rng, count - 1)
            rng.shuffle(documents)
        yield [Row(each.row_id, each.question, each.answers, tuple(documents))]


def _distractors(record: _Record, passages: list[str], rng: random.Random, count: int) -> list[str]:
    """Passages of other questions in which none of the answers occurs."""
    answers = [answer.lower() for answer in record.answers]
    drawn = rng.sample(passages, min(len(passages), _TRIES * count))
    wrong = [text for text in drawn if not any(answer in text.lower() for answer in answers)]
    return [text for text in wrong if text not in record.documents][:count]


register_format(Format("nq", _Record, _rows, documents=6))
