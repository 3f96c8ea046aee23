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

from blendrag.chat.tools import parameters_of
from blendrag.engine.worker.metrics import ROLES, count
from blendrag.errors import BlendragError, ConfigError
from blendrag.server import LIMITS, Limits
from blendrag.server.blending import FIELD_NAME, Blended, BlendFields, Blending, blending_of, is_chat
from blendrag.server.gate import key_of
from blendrag.server.keys import Key
from blendrag.server.knowledge import status_of
from blendrag.server.page.routes import html_of, wants_html
from blendrag.server.tracing import Evidence, Spans
from blendrag.strip import Strip
from blendrag.text import plain

HEADER = "x-blendrag"
_MOST_MISTAKES = 1000
_DATA = "data: "
_DONE = "data: [DONE]"
_LEAST_TEMPERATURE = 1e-5  # below, vLLM samples greedily
_MOST_ANSWERS = 128
_HEAD = ("id", "object", "created", "model")

Endpoint = Callable[[Any, Request], Awaitable[Response]]


def body_of(stock: Endpoint, limits: Limits = LIMITS) -> type[BaseModel]:
    """Return the body that ``stock`` takes, with a field that is ours."""
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
    """Read a body. vLLM's own checks stumble over kinds of values that they do not expect: no error of the
    server's. And contents that it would read later, once, are read here."""
    if isinstance(body, dict):
        _check_amount(body, limits)
    try:
        body = plain(body)
        if is_chat(cls) and isinstance(body, dict) and isinstance(body.get("messages"), list):
            body = {**body, "messages": [_readable(message) for message in body["messages"]]}
            if isinstance(tools := body.get("tools"), list):
                body["tools"] = [_with_parameters(tool) for tool in tools]
        request = read(body)
    except ConfigError as error:
        raise ValueError(str(error)) from None
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
    """Raise ValueError for more messages or documents than are taken."""
    ours = body.get(FIELD_NAME)
    named = ours.get("documents") if isinstance(ours, dict) else None
    for what, items in (("messages", body.get("messages")), ("documents", named)):
        if isinstance(items, list) and len(items) > limits.items:
            raise ValueError(f"{len(items):,} {what}: at most {limits.items:,} are taken (--max-items)")
    if isinstance(named, list):
        length = sum(len(text) for text in named if isinstance(text, str))
        if length > limits.text_mib << 20:
            raise ValueError(f"documents of more than {limits.text_mib} MiB (--max-text-mib): name fewer")


def _readable(message: Any) -> Any:
    """Return a message without parts of kinds that vLLM does not know: of these, their text. Histories come
    from other providers too, and one part would end every later turn of a conversation."""
    from blendrag.engine.compat.requests import content_parts

    if not isinstance(message, dict) or not isinstance(content := message.get("content"), list):
        return message
    known, media = content_parts()
    kept = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind in known or not media.isdisjoint(part):
            kept.append(part)
        elif text := _text_of(part):
            kept.append({"type": "text", "text": text})
    if left_out := len(content) - len(kept):
        role = message.get("role")
        count({"blendrag_parts_left_out": {role if role in ROLES else "other": left_out}})
    return {**message, "content": kept}


def _with_parameters(tool: Any) -> Any:
    """Return a tool that says what parameters it has, if it has none, too: some templates look into them."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or function.get("parameters"):
        return tool
    return {**tool, "function": {**function, "parameters": parameters_of(tool)}}


def _text_of(part: Any, depth: int = 2) -> str:
    """Return the text of a part, or of the parts that are its content, as search results and tools' results
    have them."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "\n".join(filter(None, (_text_of(one, depth) for one in part)))
    if not isinstance(part, dict) or not depth:
        return ""
    text = part.get("text")
    return text if isinstance(text, str) else _text_of(part.get("content"), depth - 1)


def blended(stock: Endpoint, body: type[BaseModel]) -> Endpoint:
    """Return a route that is ``stock`` with documents blended where there are any."""
    operation = "chat" if is_chat(body) else "text_completion"

    async def endpoint(request: Any, raw_request: Request) -> Response:
        blending, fields = blending_of(raw_request), request.blendrag or BlendFields()
        times = _once(request)
        with Spans.of(raw_request, operation, blending.name) as spans:
            try:
                renderer = raw_request.app.state.online_renderer
                prepared = await blending.prepare(request, spans.traced(fields), renderer)
            except ConfigError as error:
                raise HTTPException(400, str(error)) from None
            spans.planned()
            response = await stock(request, spans.inside(raw_request))
            spans.answered(response.status_code)
        evidence = spans.around(partial(_evidence, blending, prepared, key_of(raw_request)), fields)
        return await _with_evidence(response, evidence, prepared, fields.evidence, times)

    endpoint.__doc__ = stock.__doc__
    return _taking(body, endpoint)


def explained(chat: type[BaseModel], completion: type[BaseModel]) -> Endpoint:
    """Return the route that says what would become of a request; it takes the body of either route."""

    async def explain(request: Any, raw_request: Request) -> Response:
        """Say what would become of a request, which is not asked. `rows`: one per part of the prompt, then
        one per document that is not in it. `plain`: why nothing would be blended. A strip of it, where HTML
        is accepted."""
        blending, fields = blending_of(raw_request), request.blendrag or BlendFields()
        _once(request)
        try:
            found = await blending.explain(request, fields, raw_request.app.state.online_renderer)
        except BlendragError as error:
            raise HTTPException(status_of(error), str(error)) from None
        found["rows"] = key_of(raw_request).shown(found["rows"])
        if wants_html(raw_request):
            facts = {"documents": found["rows"], "plain": found["plain"], "prompt": found["tokens"]}
            return await html_of(Strip(facts).html)
        return JSONResponse(found)

    def kind(body: Any) -> str:
        return "chat" if isinstance(body, dict) and "messages" in body else "completion"

    either: Any = Annotated[chat, Tag("chat")] | Annotated[completion, Tag("completion")]
    return _taking(Annotated[either, Discriminator(kind)], explain)


def _taking(body: Any, endpoint: Endpoint) -> Endpoint:
    """Return an endpoint whose body FastAPI reads as ``body``, which is known when the server starts only."""
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
    """Return the evidence as :meth:`Blending.evidence` has it, for the holder of this key."""
    counts, rows = await blending.evidence(about, answer)
    return counts, rows | ({"documents": key.shown(rows["documents"])} if "documents" in rows else {})


def _once(request: Any) -> int:
    """Return how often an answer is to be given. vLLM refuses to make several at temperature 0: they would be
    equal, so one is made."""
    times = request.n or 1
    greedy = request.temperature is not None and request.temperature < _LEAST_TEMPERATURE
    if not (greedy and 1 < times <= _MOST_ANSWERS) or request.use_beam_search:
        return 1
    request.n = 1
    return int(times)


def _repeated(answer: dict[str, Any], times: int) -> dict[str, Any]:
    """Repeat vLLM's answer, or a chunk of one, so often."""
    choices = [
        {**choice, "index": choice["index"] * times + copy}
        for choice in answer.get("choices") or ()
        for copy in range(times)
    ]
    usage = answer.get("usage")
    if usage:
        more = (times - 1) * (usage.get("completion_tokens") or 0)
        usage = {
            **usage,
            "completion_tokens": (usage.get("completion_tokens") or 0) + more,
            "total_tokens": usage["total_tokens"] + more,
        }
    return {**answer, "choices": choices, **({"usage": usage} if usage else {})}


async def _with_evidence(
    response: Response, evidence: Evidence, about: Blended, wanted: bool, times: int
) -> Response:
    if isinstance(response, StreamingResponse):
        response.headers[HEADER] = json.dumps(about.planned)
        response.body_iterator = _followed(response.body_iterator, evidence, wanted, times)
        return response
    if not isinstance(response, JSONResponse) or response.status_code != 200:
        return response
    answer = json.loads(bytes(response.body))
    counts, rows = await evidence(answer)
    answer.pop("kv_transfer_params", None)
    answer = _repeated(answer, times)
    answer[FIELD_NAME] = counts | (rows if wanted else {})
    kept = {name: value for name, value in response.headers.items() if name != "content-length"}
    return JSONResponse(answer, headers=kept | {HEADER: json.dumps(counts)}, background=response.background)


async def _followed(
    chunks: AsyncIterable[Any], evidence: Evidence, wanted: bool, times: int
) -> AsyncIterator[Any]:
    """Yield the stream, with a chunk of evidence before the line that ends it, if that is wanted."""
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
            if times > 1 and "error" not in (read := _read(chunk)):
                several = _repeated(read, times)
                for choice in several["choices"]:
                    yield f"data: {json.dumps({**several, 'choices': [choice]})}\n\n"
                if several["choices"]:
                    continue
                chunk = f"data: {json.dumps(several)}\n\n"
        yield chunk


def _read(chunk: str) -> dict[str, Any]:
    """Return what is in a chunk of a stream: of the last one, perhaps usage."""
    try:
        found = json.loads(chunk.removeprefix(_DATA))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
