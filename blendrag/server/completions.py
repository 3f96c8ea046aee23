"""A completions route of vLLM's with blending before it and evidence behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Discriminator, Tag, ValidationError, create_model, model_validator

from blendrag.errors import BlendragError, ConfigError
from blendrag.server import LIMITS, Limits
from blendrag.server.blending import FIELD_NAME, Blended, BlendFields, Blending, blending_of, is_chat
from blendrag.server.gate import key_of
from blendrag.server.keys import Key
from blendrag.server.knowledge import status_of

HEADER = "x-blendrag"
_MOST_MISTAKES = 1000
_DATA = "data: "
_DONE = "data: [DONE]"
_HEAD = ("id", "object", "created", "model")

Endpoint = Callable[[Any, Request], Awaitable[Response]]
Evidence = Callable[[dict[str, Any]], Awaitable[tuple[dict[str, Any], dict[str, Any]]]]


def body_of(stock: Endpoint, limits: Limits = LIMITS) -> type[BaseModel]:
    """What ``stock`` takes, with a field that is ours."""
    model: type[BaseModel] = get_type_hints(stock)["request"]

    def understood(cls: type[BaseModel], body: Any, read: Callable[[Any], Any]) -> Any:
        return _understood(limits, cls, body, read)

    return create_model(
        f"Blended{model.__name__}",
        __base__=model,
        __validators__={"understood": model_validator(mode="wrap")(understood)},  # type: ignore[dict-item]
        blendrag=(BlendFields | None, None),
    )


def _understood(limits: Limits, cls: type[BaseModel], body: Any, read: Callable[[Any], Any]) -> Any:
    """vLLM's own checks stumble over kinds of values that they do not expect: no error of the server's. And
    contents that it would read later, once, are read here."""
    if isinstance(body, dict):
        _check_amount(body, limits)
    try:
        request = read(body)
    except ValidationError as error:
        if (mistakes := error.error_count()) > _MOST_MISTAKES:  # to list them takes long
            raise ValueError(f"{mistakes:,} mistakes, as in messages that have no role or content") from None
        raise
    except (AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"a value is of a wrong kind: {error}") from None
    for message in request.messages if is_chat(cls) else ():
        if isinstance(message, dict) and isinstance(message.get("content"), Iterator):
            message["content"] = list(message["content"])
    return request


def _check_amount(body: dict[str, Any], limits: Limits) -> None:
    """Raises ValueError."""
    ours = body.get(FIELD_NAME)
    named = ours.get("documents") if isinstance(ours, dict) else None
    for what, items in (("messages", body.get("messages")), ("documents", named)):
        if isinstance(items, list) and len(items) > limits.items:
            raise ValueError(f"{len(items):,} {what}: at most {limits.items:,} are taken (--max-items)")
    if isinstance(named, list):
        length = sum(len(text) for text in named if isinstance(text, str))
        if length > limits.text_mib << 20:
            raise ValueError(f"documents of more than {limits.text_mib} MiB (--max-text-mib): name fewer")


def blended(stock: Endpoint, body: type[BaseModel]) -> Endpoint:
    """``stock`` for prompts whose documents are blended, and for all others as it is."""

    async def endpoint(request: Any, raw_request: Request) -> Response:
        blending, fields = blending_of(raw_request), request.blendrag or BlendFields()
        try:
            prepared = await blending.prepare(request, fields, raw_request.app.state.online_renderer)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from None
        response = await stock(request, raw_request)
        evidence = partial(_evidence, blending, prepared, key_of(raw_request))
        return await _with_evidence(response, evidence, prepared, fields.evidence)

    endpoint.__doc__ = stock.__doc__
    return _taking(body, endpoint)


def explained(chat: type[BaseModel], completion: type[BaseModel]) -> Endpoint:
    """Takes the body of either route."""

    async def explain(request: Any, raw_request: Request) -> Response:
        """What would become of a request, which is not asked. `rows`: one per part of the prompt, then one
        per document that is not in it. `plain`: why nothing would be blended."""
        blending, fields = blending_of(raw_request), request.blendrag or BlendFields()
        try:
            found = await blending.explain(request, fields, raw_request.app.state.online_renderer)
        except BlendragError as error:
            raise HTTPException(status_of(error), str(error)) from None
        return JSONResponse(found | {"rows": key_of(raw_request).shown(found["rows"])})

    def kind(body: Any) -> str:
        return "chat" if isinstance(body, dict) and "messages" in body else "completion"

    either: Any = Annotated[chat, Tag("chat")] | Annotated[completion, Tag("completion")]
    return _taking(Annotated[either, Discriminator(kind)], explain)


def _taking(body: Any, endpoint: Endpoint) -> Endpoint:
    """An endpoint whose body FastAPI reads as ``body``, which is known when the server starts only."""
    endpoint.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter("request", Parameter.POSITIONAL_OR_KEYWORD, annotation=body),
            Parameter("raw_request", Parameter.POSITIONAL_OR_KEYWORD, annotation=Request),
        ]
    )
    return endpoint


async def _evidence(
    blending: Blending, about: Blended, key: Key, answer: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """As :meth:`Blending.evidence` has it, for the holder of this key."""
    counts, rows = await blending.evidence(about, answer)
    return counts, rows | ({"documents": key.shown(rows["documents"])} if "documents" in rows else {})


async def _with_evidence(response: Response, evidence: Evidence, about: Blended, wanted: bool) -> Response:
    if isinstance(response, StreamingResponse):
        response.headers[HEADER] = json.dumps(about.planned)
        response.body_iterator = _followed(response.body_iterator, evidence, wanted)
        return response
    if not isinstance(response, JSONResponse) or response.status_code != 200:
        return response
    answer = json.loads(bytes(response.body))
    counts, rows = await evidence(answer)
    answer.pop("kv_transfer_params", None)
    answer[FIELD_NAME] = counts | (rows if wanted else {})
    kept = {name: value for name, value in response.headers.items() if name != "content-length"}
    return JSONResponse(answer, headers=kept | {HEADER: json.dumps(counts)}, background=response.background)


async def _followed(chunks: AsyncIterable[Any], evidence: Evidence, wanted: bool) -> AsyncIterator[Any]:
    """The stream, with a chunk of evidence before the line that ends it, if that is wanted."""
    last = ""
    async for chunk in chunks:
        if isinstance(chunk, str) and chunk.startswith(_DONE):
            answer = _read(last)
            counts, rows = await evidence(answer)
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
