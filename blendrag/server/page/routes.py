"""The page's files as routes, and HTML for it under the same policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

PAGE = "/v1/kb/ui"
_FILES = {
    PAGE: ("ui.html", "text/html"),
    f"{PAGE}/ui.css": ("ui.css", "text/css"),
    f"{PAGE}/ui.js": ("ui.js", "text/javascript"),
}
OPEN = tuple(_FILES)
"""Paths that need no key: whoever is to type one in cannot send it yet, and nothing there is anybody's."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


def _file(request: Request) -> Response:
    name, kind = _FILES[request.scope["route"].path]
    content = resources.files(__package__).joinpath(name).read_bytes()
    return Response(content, headers=_HEADERS, media_type=kind)


for _path in _FILES:
    router.add_api_route(_path, _file, methods=["GET"])


def wants_html(request: Request) -> bool:
    """Return whether a route that answers JSON is asked for HTML, as the page does."""
    return "text/html" in request.headers.get("accept", "")


async def html_of(write: Callable[[], str]) -> Response:
    """Return HTML that takes a while to write, which no document in it can make more of than text."""
    return HTMLResponse(await asyncio.to_thread(write), headers=_HEADERS | {"Cache-Control": "no-store"})
