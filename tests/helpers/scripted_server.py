"""An HTTP server that answers as it is told to, for what a server of blendrag's does when it fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EVIDENCE = {"prompt": 9, "reused": 4, "recomputed": 2, "fresh": 3, "prefix": 0, "plain": None, "stored": 5}
MODEL = {
    "name": "served",
    "context_window": 512,
    "template": {
        "knows_tools": False,
        "takes_system": True,
        "takes_welcome": True,
        "control_tokens": ["<|im_end|>"],
    },
}


@dataclass
class Reply:
    """lines: of the body. cut: end the connection behind them, which promised more."""

    status: int = 200
    lines: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


def error(status: int, message: str | None = None, **headers: str) -> Reply:
    body = [] if message is None else [json.dumps({"error": {"message": message, "code": status}})]
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, body, {"content-type": "application/json", **named})


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'model': 'served', 'choices': [choice]}, ensure_ascii=False)}\n\n"


def events(*texts: str, done: bool = True, **more: Any) -> Reply:
    """A stream of these texts."""
    lines = [event(delta={"role": "assistant", "content": ""})]
    lines += [event(delta={"content": text}) for text in texts]
    if done:
        usage = {"prompt_tokens": 9, "completion_tokens": len(texts)}
        lines.append(event(delta={}, finish_reason="stop"))
        lines.append(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
        lines.append(f"data: {json.dumps({'choices': [], 'blendrag': EVIDENCE})}\n\n")
        lines.append("data: [DONE]\n\n")
    return Reply(lines=lines, headers={"content-type": "text/event-stream", "x-blendrag": "{}"}, **more)


@dataclass
class Script:
    """replies: one after the other, to any request but those about the model. always: what replies to a
    request instead, or None. asked: (method, path, body)."""

    url: str
    replies: list[Reply] = field(default_factory=list)
    always: Callable[[str, str, Any], Reply | None] = lambda *_: None
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def scripted() -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            script.asked.append((self.command, self.path, body))
            script.keys.append(self.headers.get("authorization"))
            if self.path.partition("?")[0] == "/v1/kb/model":
                self.reply(Reply(lines=[json.dumps(MODEL)]))
            else:
                self.reply(script.always(self.command, self.path, body) or script.replies.pop(0))

        do_POST = do_PUT = do_DELETE = do_GET

        def reply(self, reply: Reply) -> None:
            body = "".join(reply.lines).encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body) + 100 * reply.cut))
            self.end_headers()
            self.wfile.write(body)
            if reply.cut:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        script = Script(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
