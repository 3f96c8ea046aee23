"""A scripted server that keeps the texts of a collection."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from scripted_server import Reply, Script, error, events


def said(value: Any) -> Reply:
    return Reply(lines=[json.dumps(value)])


class Keeping:
    """A server that splits at lines, keeps what it is told, and finds room for ``room`` characters."""

    def __init__(self, script: Script) -> None:
        self.url, self.script = script.url, script
        self.documents: dict[str, list[str]] = {}
        self.puts: list[list[str]] = []
        self.full, self.room = False, 10_000
        script.always = self.reply

    def reply(self, method: str, path: str, body: Any) -> Reply | None:
        if path == "/v1/kb/split":
            return said({"pieces": [text.splitlines() for text in body["texts"]]})
        if path == "/v1/kb/explain":
            long = len(body["messages"][-1]["content"]) > self.room
            if long:
                refused = "vLLM refuses the request: This model's maximum context length is 512 tokens."
                return said({"plain": refused, "text": None, "tokens": None, "cached": 0, "rows": []})
            return said({"plain": None, "text": "", "tokens": 9, "cached": 4, "rows": [{"kind": "cached"}]})
        if path == "/v1/chat/completions":
            return events("Because.")
        if method == "PUT" and self.full:
            return error(507, "full")
        if method == "PUT":
            self.puts.append(list(body["documents"]))
            new = body["documents"].keys() - self.documents.keys()
            self.documents |= body["documents"]
            return said({"report": {"chunks": len(new)}})
        if method == "DELETE":
            for id in parse_qs(urlsplit(path).query)["id"]:
                self.documents.pop(id, None)
        return said({"ids": list(self.documents)})

    @property
    def texts(self) -> list[str]:
        return sorted(text for texts in self.documents.values() for text in texts)

    def asked(self) -> Any:
        return next(body for _, path, body in reversed(self.script.asked) if path == "/v1/chat/completions")
