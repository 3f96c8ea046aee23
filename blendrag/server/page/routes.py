"""The page's files as routes, and HTML for it under the same policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

PAGE = "/v1/kb/ui"
_TYPES = {"ui.html": "text/html", "ui.css": "text/css", "ui.js": "text/javascript"}
OPEN = (PAGE, f"{PAGE}/ui.css", f"{PAGE}/ui.js")
"""Paths that need no key: whoever is to type one in cannot send it yet, and nothing there is anybody's."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(prefix=PAGE, include_in_schema=False)


@router.get("")
def page() -> Response:
    return _file("ui.html")


@router.get("/ui.css")
def style() -> Response:
    return _file("ui.css")


@router.get("/ui.js")
def script() -> Response:
    return _file("ui.js")


def _file(name: str) -> Response:
    content = resources.files(__package__).joinpath(name).read_bytes()
    return Response(content, headers=_HEADERS, media_type=_TYPES[name])


def wants_html(request: Request) -> bool:
    """Return whether a route that answers JSON is asked for HTML, as the page does."""
    return "text/html" in request.headers.get("accept", "")


async def html_of(write: Callable[[], str]) -> Response:
    """Return HTML that takes a while to write, which no document in it can make more of than text."""
    return HTMLResponse(await asyncio.to_thread(write), headers=_HEADERS | {"Cache-Control": "no-store"})
