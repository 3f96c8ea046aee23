"""A completions route of vLLM's with blending before it and evidence behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from inspect import Parameter, Signature
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, create_model, model_validator

from blendrag.chat.request import AUTO
from blendrag.chat.tools import parameters_of
from blendrag.errors import BlendragError, ConfigError
from blendrag.server import LIMITS, Limits
from blendrag.server.blending import FIELD_NAME, Blended, BlendFields, Blending, blending_of
from blendrag.server.doors import Completions, Door, door_of
from blendrag.server.gate import key_of
from blendrag.server.keys import Key
from blendrag.server.knowledge import status_of
from blendrag.server.page.routes import html_of, wants_html
from blendrag.server.parts import documents, within
from blendrag.server.tracing import Evidence, Spans, Told
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

    items = {"input": _until_the_first_mistake(model, "input")} if "input" in model.model_fields else {}
    return create_model(
        f"Blended{model.__name__}",
        __base__=model,
        __validators__={"understood": model_validator(mode="wrap")(understood)},  # type: ignore[dict-item]
        blendrag=(BlendFields | None, None),
        **items,
    )


def _until_the_first_mistake(model: type[BaseModel], name: str) -> Any:
    """Return a field whose list is read up to its first mistake: an item of a response may be of any of some
    forty kinds, and what is wrong for each of them is listed for each."""
    annotation = model.model_fields[name].annotation
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    quick: list[Any] = [
        Annotated[kind, Field(fail_fast=True)] if get_origin(kind) is list else kind for kind in kinds
    ]
    return reduce(or_, quick), ...


def _understood(limits: Limits, cls: type[BaseModel], body: Any, read: Callable[[Any], Any]) -> Any:
    """Read a body. vLLM's own checks stumble over kinds of values that they do not expect: no error of the
    server's. And contents that it would read later, once, are read here."""
    door = door_of(cls)
    if isinstance(body, dict):
        _check_amount(body, door, limits)
    marked: list[str] = []
    try:
        body = plain(body)
        if isinstance(body, dict):
            marked = within(documents(body), limits)
            body = door.readable(body)
            match body.get("tools"):
                case []:  # as clients without tools send it, which always send a list
                    del body["tools"]
                    if body.get("tool_choice") in (AUTO, {"type": AUTO}):
                        del body["tool_choice"]
                case [*tools]:
                    body["tools"] = [_with_parameters(tool) for tool in tools]
        request = read(body)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    except ValidationError as error:
        if (mistakes := error.error_count()) > _MOST_MISTAKES:  # to list them takes long
            raise ValueError(f"{mistakes:,} mistakes, as in messages that have no role or content") from None
        raise
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"a value is of a wrong kind: {error}") from None
    if marked:
        request.blendrag = (request.blendrag or BlendFields()).marking(marked)
    items = getattr(request, door.holds, None)
    for item in items if isinstance(items, list) else ():
        for name in ("content", "output") if isinstance(item, dict) else ():
            if isinstance(item.get(name), Iterator):
                item[name] = list(item[name])
    return request


def _check_amount(body: dict[str, Any], door: Door, limits: Limits) -> None:
    """Raise ValueError for more messages or documents than are taken."""
    ours = body.get(FIELD_NAME)
    named = ours.get("documents") if isinstance(ours, dict) else None
    several = {door.holds: body.get(door.holds)} if door.holds in ("messages", "input") else {}
    for what, items in {**several, "documents": named}.items():
        if isinstance(items, list) and len(items) > limits.items:
            raise ValueError(f"{len(items):,} {what}: at most {limits.items:,} are taken (--max-items)")
    if isinstance(named, list):
        length = sum(len(text) for text in named if isinstance(text, str))
        if length > limits.text_mib << 20:
            raise ValueError(f"documents of more than {limits.text_mib} MiB (--max-text-mib): name fewer")


def _with_parameters(tool: Any) -> Any:
    """Return a tool that says what parameters it has, if it has none, too: some templates look into them."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return tool
    function = tool.get("function", tool)  # a response's has all by itself
    if not isinstance(function, dict) or function.get("parameters"):
        return tool
    function = {**function, "parameters": parameters_of({"function": function})}
    return {**tool, "function": function} if "function" in tool else function


def blended(stock: Endpoint, body: type[BaseModel]) -> Endpoint:
    """Return a route that is ``stock`` with documents blended where there are any."""

    async def endpoint(request: Any, raw_request: Request) -> Response:
        blending, fields = blending_of(raw_request), request.blendrag or BlendFields()
        times = _once(request)
        door = door_of(type(request))
        with Spans.of(raw_request, door.operation, blending.name) as spans:
            try:
                prepared = await blending.prepare(request, spans.traced(fields), raw_request.app.state)
            except ConfigError as error:
                raise HTTPException(400, str(error)) from None
            spans.planned()
            response = await stock(request, spans.inside(raw_request))
            if response is None:  # the client has gone away
                spans.answered(499)
                return response
            spans.answered(response.status_code)
        evidence = spans.around(partial(_evidence, blending, prepared, key_of(raw_request)), fields)
        told = await _Answers(door, evidence, fields.evidence, times).told(response, prepared)
        if isinstance(told, StreamingResponse):
            told.body_iterator = spans.closing(told.body_iterator)
        else:
            spans.end()
        return told

    endpoint.__doc__ = stock.__doc__
    return _taking(body, endpoint)


def explained(*bodies: type[BaseModel]) -> Endpoint:
    """Return the route that says what would become of a request. It takes the body of any of these, which it
    tells by what holds the prompt, and by what no other has: else the first of those with messages."""

    async def explain(request: Any, raw_request: Request) -> Response:
        """Say what would become of a request, which is not asked. `rows`: one per part of the prompt, then
        one per document that is not in it. `plain`: why nothing would be blended. A strip of it, where HTML
        is accepted."""
        blending, fields = blending_of(raw_request), request.blendrag or BlendFields()
        _once(request)
        try:
            found = await blending.explain(request, fields, raw_request.app.state)
        except BlendragError as error:
            raise HTTPException(status_of(error), str(error)) from None
        found["rows"] = key_of(raw_request).shown(found["rows"])
        if wants_html(raw_request):
            facts = {"documents": found["rows"], "plain": found["plain"], "prompt": found["tokens"]}
            return await html_of(Strip(facts).html)
        return JSONResponse(found)

    kinds = {door_of(body): body for body in bodies}

    def kind(body: Any) -> str:
        given = body.keys() if isinstance(body, dict) else ()
        found = [door.takes for door in kinds if door.holds in given]
        return next((door.takes for door in kinds if door.own in given), [*found, Completions.takes][0])

    tagged: list[Any] = [Annotated[body, Tag(door.takes)] for door, body in kinds.items()]
    return _taking(Annotated[reduce(or_, tagged), Discriminator(kind)], explain)


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
    if not key.names:
        about = replace(about, marked=())
    counts, rows = await blending.evidence(about, answer)
    return counts, rows | ({"documents": key.shown(rows["documents"])} if "documents" in rows else {})


def _once(request: Any) -> int:
    """Return how often an answer is to be given. vLLM refuses to make several at temperature 0: they would be
    equal, so one is made."""
    if not isinstance(times := getattr(request, "n", None), int) or "n" not in type(request).model_fields:
        return 1
    greedy = request.temperature is not None and request.temperature < _LEAST_TEMPERATURE
    if not (greedy and 1 < times <= _MOST_ANSWERS) or request.use_beam_search:
        return 1
    request.n = 1
    return int(times)


def _repeated(answer: dict[str, Any], times: int) -> dict[str, Any]:
    """Repeat vLLM's answer, or a chunk of one, so often."""
    if times == 1:
        return answer
    choices = [
        {**choice, "index": choice["index"] * times + copy}
        for choice in answer.get("choices") or ()
        for copy in range(times)
    ]
    repeated = {**answer, "choices": choices}
    if usage := answer.get("usage"):
        once = usage.get("completion_tokens") or 0
        total = usage["total_tokens"] + (times - 1) * once
        repeated["usage"] = {**usage, "completion_tokens": times * once, "total_tokens": total}
    return repeated


@dataclass(frozen=True, slots=True)
class _Answers:
    """vLLM's answers to one request, with the tokens counted that were not computed, and the evidence.

    evidence: gives it, for what vLLM says. wanted: whether all of it is told. times: how often an answer is
    given.
    """

    door: Door
    evidence: Evidence
    wanted: bool
    times: int

    async def told(self, response: Response, about: Blended) -> Response:
        """Return vLLM's response with the evidence; before anything is computed, with the plan."""
        if isinstance(response, StreamingResponse):
            response.headers[HEADER] = json.dumps(about.planned)
            response.body_iterator = self._followed(response.body_iterator)
            return response
        if not isinstance(response, JSONResponse) or response.status_code != 200:
            return response
        answer = json.loads(bytes(response.body))
        counts, rows = await self._counted(answer) if answer.get("usage") else (about.planned, {})
        answer = _repeated(answer, self.times)
        answer[FIELD_NAME] = counts | (rows if self.wanted else {})
        kept = {name: value for name, value in response.headers.items() if name != "content-length"}
        headers = kept | {HEADER: json.dumps(counts)}
        return JSONResponse(answer, headers=headers, background=response.background)

    async def _counted(self, answer: dict[str, Any]) -> Told:
        """Return the evidence of an answer, or of the event of a stream that counts its tokens, and have it
        count as computed what was."""
        told: dict[str, Any] = {"kv_transfer_params": answer.pop("kv_transfer_params", None)}
        if usage := answer.get("usage"):
            told["usage"] = {
                "completion_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
                "prompt_tokens_details": {"cached_tokens": self.door.cached(answer)},
            }
        counts, rows = await self.evidence(told)
        if "reused" in counts:
            self.door.count(answer, counts["reused"] + counts["prefix"])
        return counts, rows

    async def _followed(self, chunks: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Yield the stream, with the evidence, if that is wanted: in the event that counts tokens, or of
        completions in a chunk before the line that ends it."""
        last, came = "", 0
        told: Told | None = None
        begun = False

        async def counted(answer: dict[str, Any]) -> Told:
            nonlocal begun
            begun = True
            return await asyncio.shield(self._counted(answer))  # once, and whole, if it is broken off here

        try:
            async for chunk in chunks:
                if not isinstance(chunk, str):
                    yield chunk
                    continue
                if chunk.startswith(_DONE) and "error" not in (answer := _read(last)):
                    counts, rows = told = told or await counted(answer)
                    if self.wanted:
                        head = {name: answer[name] for name in _HEAD if name in answer}
                        yield f"data: {json.dumps({**head, 'choices': [], FIELD_NAME: counts | rows})}\n\n"
                    yield chunk
                    continue
                last, came = chunk, came + 1
                event = _read(chunk) if self.times > 1 or self.door.counting in chunk else {}
                if answer_in := self.door.answer_in(event):
                    told = counts, rows = await counted(answer_in)
                    if self.wanted and self.door.tells:
                        answer_in[FIELD_NAME] = counts | rows
                elif self.times == 1 or not event or "error" in event:
                    yield chunk
                    continue
                several = _repeated(event, self.times)
                for choice in several.get("choices") or (None,):
                    one = several if choice is None else {**several, "choices": [choice]}
                    yield f"{chunk.partition(_DATA)[0]}{_DATA}{json.dumps(one)}\n\n"
        except (GeneratorExit, asyncio.CancelledError):  # broken off by the client
            if not begun and came > self.door.ahead:
                await counted({})
            raise


def _read(chunk: str) -> dict[str, Any]:
    """Return what is in a chunk of a stream: of the last one, perhaps usage."""
    try:
        found = json.loads(chunk.partition(_DATA)[2])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
