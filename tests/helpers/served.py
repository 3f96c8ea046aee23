"""``blendrag serve`` in a process of its own, as its clients see it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from copy import copy
from pathlib import Path
from typing import Any

import httpx
import psutil

from blendrag.models import DEFAULT_MODEL
from places import ROOT, free_port

START_S = 300
_PR_SET_PDEATHSIG = 1
FILLER = "It has many streets, and a river runs through it from north to south. " * 10
TEXTS = {
    f"city-{n}": f"The city of Alpha{n} was founded in {1800 + n} by Beta{n}. {FILLER}".strip()
    for n in range(4)
}
CHAT, COMPLETIONS, KB = "/v1/chat/completions", "/v1/completions", "/v1/kb/collections/cities"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def end_with_parent() -> None:
    """In the new process, for Linux to kill it when pytest is: its children end with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ended(process: psutil.Process) -> bool:
    """A zombie has, too: whoever is to take note of it is in no hurry."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Server:
    """In a process of its own, as a user starts it."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.folder, self.more = folder, more
        self.log = folder.with_suffix(".log")
        self.port = free_port()
        command = "from blendrag.cli.app import main; main()"
        words = ["serve", "--index", str(folder), "--dtype", "float32", "--max-model-len", "2048"]
        words += ["--kv-cache-gib", "1", "--host", "127.0.0.1", "--port", str(self.port), *more]
        self.process = subprocess.Popen(  # from the main thread: the end of another is taken for pytest's
            [sys.executable, "-c", command, *words],
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        self.client = self.connect()

    def connect(self) -> httpx.Client:
        """Over connections of its own."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    def family(self) -> list[psutil.Process]:
        """Its processes."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def held_by(self, key: str) -> Server:
        """The same server, for the holder of a key."""
        one = copy(self)
        one.client = self.connect()
        one.client.headers["Authorization"] = f"Bearer {key}"
        return one

    def memory(self) -> int:
        """Bytes that its processes hold."""
        return sum(process.memory_info().rss for process in self.family())

    def wait(self) -> Server:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.client.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def end(self, how: signal.Signals = signal.SIGTERM) -> list[psutil.Process]:
        """Those of its processes that are still there after ten seconds."""
        family = self.family()[1:]
        self.process.send_signal(how)
        self.process.wait(60)
        self.client.close()
        left = psutil.wait_procs(family, timeout=10)[1]
        return [process for process in left if not ended(process)]

    def put(
        self, documents: dict[str, str], client: httpx.Client | None = None, path: str = KB, **more: Any
    ) -> dict[str, Any]:
        answer = (client or self.client).put(path, json={"documents": documents, **more})
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text.splitlines()[-1])["report"]

    def chunks(self) -> dict[str, Any]:
        """How many it has, by their state."""
        return self.client.get("/v1/kb/stats").json()["chunks"]

    def ask(
        self, question: str = "When was Alpha2 founded?", client: httpx.Client | None = None, **more: Any
    ) -> httpx.Response:
        content = "\n\n".join([*TEXTS.values(), question])
        messages = [{"role": "user", "content": content}]
        body = {"model": DEFAULT_MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **more}
        return (client or self.client).post(CHAT, json=body)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def events_of(stream: httpx.Response) -> list[dict[str, Any]]:
    """What a stream says, but for its end."""
    return [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]


def through(server: Server, path: str, content: Any, **more: Any) -> httpx.Response:
    """An answer to a user's message."""
    said = [{"role": "user", "content": content}]
    body: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0}
    body |= (
        {"input": said, "max_output_tokens": 8} if path == RESPONSES else {"messages": said, "max_tokens": 8}
    )
    answer = server.client.post(path, json=body | more)
    assert answer.status_code == 200, answer.text
    return answer


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and those that were not computed."""
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached + (usage["cache_creation_input_tokens"] or 0), cached
    details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
    return usage.get("input_tokens") or usage["prompt_tokens"], details["cached_tokens"]
