"""Routes under ``/v1/kb``: the texts whose KV the server keeps, as collections that clients name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from asyncio import to_thread
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from blendrag.chat.tools import TemplateFacts
from blendrag.errors import BlendragError, ConfigError, EngineClosedError, StoreFullError
from blendrag.index.split import Splitter
from blendrag.names import closest
from blendrag.progress import Progress
from blendrag.prompt import encode_document
from blendrag.server.blending import Blending, blending_of
from blendrag.server.gate import key_of, limits_of
from blendrag.server.keys import ADMIN
from blendrag.server.page.routes import html_of, wants_html
from blendrag.serving.collection import NO_COLLECTION, Collection
from blendrag.serving.library import Library
from blendrag.serving.owners import REPEATED
from blendrag.serving.prefill import PrefillReport
from blendrag.strip import Strip
from blendrag.text import encodable

_LONG = 1 << 16  # bytes of a body
_MOST_PROBLEMS = 4  # mistakes of one request
_STATUSES = {StoreFullError: 507, EngineClosedError: 503, ConfigError: 400}  # closed: it is about to end
_SILENCE_S = 5.0  # at most, of an answer that goes on: proxies end those that say nothing

T = TypeVar("T")
Text = Annotated[str, AfterValidator(encodable)]


def known_parameters(request: Request) -> None:
    """Refuse parameters that are not the route's: without the one that was meant, more would be done than was
    asked."""
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    for name in sorted(request.query_params.keys() - set(known)):
        raise HTTPException(400, f"unknown parameter {name!r}{closest(name, known)}")


class _Apart(APIRoute):
    """A route that reads long bodies apart from the event loop, and says what is wrong with one in a line."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(_Request(request.scope, request.receive))
            except RequestValidationError as error:
                bodies = [one.field_info.annotation for one in self.dependant.body_params]
                known = [name for body in bodies for name in getattr(body, "model_fields", ())]
                raise HTTPException(400, _wrong(error, known)) from None

        return handler


def _wrong(error: RequestValidationError, known: list[str]) -> str:
    """Return what is wrong with a request. known: fields of its body."""
    problems = []
    for one in error.errors():
        parts = map(str, one["loc"][1:])
        place = ".".join(part for part in parts if "[" not in part)  # a kind of a union's
        if not place:
            problems.append("the body has to be a JSON object, sent as application/json")
        elif one["type"] == "extra_forbidden":
            problems.append(f"unknown field {place!r}{closest(place, known)}")
        elif one["type"] == "json_invalid":
            problems.append(f"the body is no JSON: {one['ctx']['error']}")
        else:
            problems.append(f"{place}: {one['msg']}")
    return ", ".join(problems[:_MOST_PROBLEMS])


class _Request(Request):
    async def json(self) -> Any:
        body = await self.body()
        return json.loads(body) if len(body) < _LONG else await to_thread(json.loads, body)


router = APIRouter(
    route_class=_Apart, prefix="/v1/kb", tags=["blendrag"], dependencies=[Depends(known_parameters)]
)

Name = Annotated[str, Path(pattern=r"^[\w.-]{1,128}$", description="Of a collection.")]
Kept = Annotated[
    str, Path(pattern=rf"^([\w.-]{{1,128}}|{re.escape(REPEATED)})$", description="Of any collection.")
]


class Documents(BaseModel):
    """Documents by id, each a text, or the forms in which prompts may show it."""

    model_config = ConfigDict(extra="forbid")

    documents: dict[Text, Text | list[Text]]
    sources: dict[Text, Text] = Field(
        {}, description="What documents are parts of, such as a file: parts of one are prefilled in order."
    )
    sync: bool = Field(False, description="Forget documents of the collection that are not named here.")


class Texts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    texts: list[Text]


class Whole(Texts):
    chunk_tokens: int = 512
    chunk_overlap: int = 0


@router.get("/collections")
async def listed(
    request: Request,
    prefix: Annotated[str, Query(description="What their names begin with.")] = "",
    after: Annotated[str, Query(description="The last name of the page before.")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """Return collections by name, a page of them, and how many there are."""
    found, total = await _run(request, lambda library: library.catalogue.collections(prefix, after, limit))
    each = ((name, asdict(totals)) for name, totals in found.items())
    rows = [{"name": name, "documents": totals.pop("owners"), **totals} for name, totals in each]
    return {"collections": rows, "total": total}


@router.put("/collections/{name}")
async def put(name: Name, body: Documents, request: Request) -> Response:
    """Keep the KV of documents. Answers a line of JSON per step: what is done, tokens of it, and at last the
    report. A caller that goes away leaves the work to go on."""
    blending, documents = blending_of(request), body.documents
    collection = Collection(blending.library, name)
    for shown in documents.values():
        _check_length(request, [shown] if isinstance(shown, str) else shown)
    keep = collection.sync if body.sync else collection.add
    return await _told(blending, lambda progress: keep(documents, sources=body.sources, progress=progress))


@router.get("/collections/{name}")
async def get(name: Kept, request: Request) -> Response:
    """Return the ids of a collection's documents. One without any is not found."""
    ids = await _run(request, lambda library: Collection(library, name).ids())
    return await to_thread(JSONResponse, {"ids": sorted(ids)}) if ids else _no_collection(name)


@router.delete("/collections/{name}")
async def delete(name: Kept, request: Request, id: Annotated[list[str] | None, Query()] = None) -> Response:
    """Forget documents of a collection, by default all."""
    # Other stores name documents in it; some clients send an empty one of JSON.
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        raise HTTPException(400, "this route takes no body: name documents by ?id=ID")
    blending = blending_of(request)

    def forget() -> int | None:
        collection = Collection(blending.library, name)
        going = collection.ids() if id is None else collection.among(id)
        if not going and (id is None or not collection.ids()):
            return None
        collection.remove(going)
        return len(going)

    removed = await _answered(blending.run(forget, "change"))
    return _no_collection(name) if removed is None else JSONResponse({"removed": removed})


@router.post("/prefetch")
async def prefetch(body: Texts, request: Request) -> dict[str, Any]:
    """Begin to read the KV of texts that were retrieved. Returns at once."""
    await _run(request, lambda library: library.prefetch(body.texts))
    return {}


@router.get("/model")
async def model(request: Request) -> dict[str, Any]:
    """Return what clients have to know of the model: its name, the tokens of prompt and answer together, what
    its chat template does with tools, and vLLM's name of the parser that reads its calls."""
    blending = blending_of(request)
    template = await _run(request, lambda library: TemplateFacts.of(library.tokenizer))
    return {
        "name": blending.name,
        "context_window": blending.engine.max_model_len,
        "template": asdict(template),
        "tool_parser": blending.tool_parser,
    }


@router.post("/tokens")
async def tokens(body: Texts, request: Request) -> Response:
    """Return the model's own tokens of texts, as documents have them."""
    _check_length(request, body.texts)

    def encode(library: Library) -> Response:
        ids = [list(encode_document(library.tokenizer, text)) for text in body.texts]
        return JSONResponse({"token_ids": ids})

    return await _run(request, encode)


@router.post("/split")
async def split(body: Whole, request: Request) -> Response:
    """Return documents in chunks, measured in the model's own tokens, as an index splits them."""
    _check_length(request, body.texts)

    def pieces(library: Library) -> Response:
        splitter = Splitter(library.tokenizer, chunk_tokens=body.chunk_tokens, overlap=body.chunk_overlap)
        texts = [[piece.text for piece in splitter.split(text)] for text in body.texts]
        return JSONResponse({"pieces": texts})

    return await _run(request, pieces)


@router.get("/prompts")
async def prompts(request: Request) -> Response:
    """Return what became of the latest prompts, latest first, without their texts; as strips where HTML is
    accepted."""
    latest = blending_of(request).latest.all()
    if wants_html(request):
        return await html_of(lambda: "".join(Strip(prompt).html() for prompt in latest))
    return await to_thread(JSONResponse, {"prompts": latest})


@router.get("/stats")
async def stats(
    request: Request,
    namespace: Annotated[str | None, Query(description="Another tenant, for keys that may `admin`.")] = None,
) -> dict[str, Any]:
    """Return texts, tiers and eviction, as ``blendrag stats`` has them."""
    key = key_of(request)
    another = namespace not in (None, key.namespace)
    try:
        if another and ADMIN not in key.rights:
            raise KeyError(namespace)  # as if there were none: who may not look learns of no tenant
        blending = blending_of(request, namespace)
    except KeyError:
        raise HTTPException(404, f"no namespace {namespace!r}") from None
    facts = await _answered(blending.run(blending.library.stats, "ask"))
    if another or not key.names:
        del facts["reuse"]  # by the names of documents
    return facts


def _check_length(request: Request, texts: Iterable[str]) -> None:
    """Refuse what is too long to be tokenised at once: a kilobyte for every character, at the worst."""
    most = limits_of(request).text_mib
    if sum(map(len, texts)) > most << 20:
        raise HTTPException(
            413,
            f"texts of more than {most} MiB are not tokenised at once (--max-text-mib): send parts",
        )


def _no_collection(name: str) -> JSONResponse:
    """Return the 404 of a missing collection, which is neither a gateway's nor another 404 of ours."""
    error = {"message": f"no collection {name!r}", "type": NO_COLLECTION, "param": None, "code": 404}
    return JSONResponse({"error": error}, 404)


async def _run(request: Request, work: Callable[[Library], T]) -> T:
    blending = blending_of(request)
    return await _answered(blending.run(lambda: work(blending.library), "read"))


async def _answered(work: Awaitable[T]) -> T:
    try:
        return await work
    except BlendragError as error:
        raise HTTPException(status_of(error), str(error)) from None


def status_of(error: BlendragError) -> int:
    """Return the status of an answer that fails by this error."""
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)


class _Lines(Progress):
    """A listener that tells a queue of the server's loop what is being done."""

    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self._put, self._done, self._total = put, 0, 0

    def note(self, what: str) -> None:
        self._put({"doing": what, "done": self._done, "total": self._total})

    def total(self, amount: int) -> None:
        self._total += amount

    def advance(self, amount: int = 1) -> None:
        self._done += amount


async def _told(blending: Blending, work: Callable[[Progress], PrefillReport]) -> Response:
    """Run ``work`` by the one thread that writes, and answer what it tells as lines of JSON, each again while
    there is no other. An error before the first line is the answer's status; a later one, its last line."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

    def put(line: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(lines.put_nowait, line)

    def run() -> None:
        try:
            blending.check_going_on()
            report = work(_Lines(put))
            put({"report": asdict(report)})
        except BlendragError as error:
            put({"error": str(error), "status": status_of(error)})
        except Exception as error:
            put({"error": f"{type(error).__name__}: {error}", "status": 500})

    if not blending.ingest(run):
        raise HTTPException(503, "other documents are being taken in: put these again later")

    async def following(line: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(lines.get(), _SILENCE_S)
        return line

    first = await following({"doing": "waiting", "done": 0, "total": 0})
    if "error" in first:
        return JSONResponse({"error": {"message": first["error"]}}, first["status"])

    async def told() -> AsyncIterator[str]:
        line = first
        while True:
            yield json.dumps(line) + "\n"
            if not line.keys().isdisjoint({"report", "error"}):
                break
            line = await following(line)

    return StreamingResponse(told(), media_type="application/x-ndjson")
