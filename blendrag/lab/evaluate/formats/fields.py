"""Fields of questions, answers and documents, in all the ways that the public sets write them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank")
    return text


def _document(value: Any) -> Any:
    """A text; an object with a text and perhaps a title; HotpotQA's pair of a title and its sentences."""
    match value:
        case {"text": str(text), **rest} | {"paragraph_text": str(text), **rest}:
            title = rest.get("title")
        case [str(title), [*sentences]]:
            text = "".join(map(str, sentences))
        case _:
            return value
    return f"{title}\n{text}" if title else text


def _answer(value: Any) -> Any:
    """A text, or SQuAD's object with a text and the place where it begins."""
    return value["text"] if isinstance(value, dict) and "text" in value else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_not_blank)]
Document = Annotated[Text, BeforeValidator(_document)]
Documents = Annotated[tuple[Document, ...], Field(min_length=1)]
Answer = Annotated[Text, BeforeValidator(_answer)]
Answers = Annotated[tuple[Answer, ...], Field(min_length=1), BeforeValidator(_listed)]


class Asked(BaseModel):
    """A record of one question. ``number``: its place in the file, the id of one that has none."""

    number: int = 0
    id: str | int | None = None
    question: Text

    @property
    def row_id(self) -> str:
        return str(self.number if self.id is None else self.id)
