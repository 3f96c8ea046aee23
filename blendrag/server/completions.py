"""A completions route of vLLM's with blending before it and evidence behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from inspect import Parameter, Signature
from typing import Any, get_type_hints

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, create_model

from blendrag.errors import BlendragError
from blendrag.server.blending import FIELD_NAME, Blended, BlendFields, Blending

HEADER = "x-blendrag"
_DATA = "data: "
_DONE = "data: [DONE]"
_HEAD = ("id", "object", "created", "model")

Endpoint = Callable[[Any, Request], Awaitable[Response]]


def blended(stock: Endpoint) -> Endpoint:
    """``stock`` for prompts whose documents are blended, and for all others as it is."""
    model: type[BaseModel] = get_type_hints(stock)["request"]
    body = create_model(f"Blended{model.__name__}", __base__=model, blendrag=(BlendFields | None, None))

    async def endpoint(request: Any, raw_request: Request) -> Response:
        blending: Blending = raw_request.app.state.blendrag
        fields = request.blendrag or BlendFields()
        try:
            prepared = await blending.prepare(request, fields, raw_request.app.state.online_renderer)
        except BlendragError as error:
            raise HTTPException(400, str(error)) from None
        return await _with_evidence(await stock(request, raw_request), blending, prepared, fields.evidence)

    endpoint.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter("request", Parameter.POSITIONAL_OR_KEYWORD, annotation=body),
            Parameter("raw_request", Parameter.POSITIONAL_OR_KEYWORD, annotation=Request),
        ]
    )
    endpoint.__doc__ = stock.__doc__
    return endpoint


async def _with_evidence(response: Response, blending: Blending, about: Blended, wanted: bool) -> Response:
    if isinstance(response, StreamingResponse):
        response.headers[HEADER] = json.dumps(about.planned)
        response.body_iterator = _followed(response.body_iterator, blending, about, wanted)
        return response
    if not isinstance(response, JSONResponse) or response.status_code != 200:
        return response
    answer = json.loads(bytes(response.body))
    counts, rows = await blending.evidence(about, answer)
    answer.pop("kv_transfer_params", None)
    answer[FIELD_NAME] = counts | (rows if wanted else {})
    kept = {name: value for name, value in response.headers.items() if name != "content-length"}
    return JSONResponse(answer, headers=kept | {HEADER: json.dumps(counts)}, background=response.background)


async def _followed(
    chunks: AsyncIterable[Any], blending: Blending, about: Blended, wanted: bool
) -> AsyncIterator[Any]:
    """The stream, with a chunk of evidence before the line that ends it, if that is wanted."""
    last = ""
    async for chunk in chunks:
        if isinstance(chunk, str) and chunk.startswith(_DONE):
            answer = _read(last)
            counts, rows = await blending.evidence(about, answer)
            if wanted:
                head = {name: answer[name] for name in _HEAD if name in answer}
                yield f"data: {json.dumps({**head, 'choices': [], FIELD_NAME: counts | rows})}\n\n"
        elif isinstance(chunk, str) and chunk.startswith(_DATA):
            last = chunk
        yield chunk


def _read(chunk: str) -> dict[str, Any]:
    """What is in a chunk of a stream: of the last one, perhaps usage."""
    try:
        found = json.loads(chunk.removeprefix(_DATA))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
