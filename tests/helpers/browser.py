"""A real browser without a window, driven as the W3C's WebDriver says."""

from __future__ import annotations

import base64
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from servers import Process, running

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1100,900",
]  # fmt: skip
_WAIT_S = 20


class Browser:
    """One window, with one page."""

    def __init__(self, driver: httpx.Client) -> None:
        self._driver = driver

    def _call(self, path: str, **body: Any) -> Any:
        answer = self._driver.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        self._call("url", url=url)

    def run(self, script: str) -> Any:
        """What the body of a function returns there."""
        return self._call("execute/sync", script=script, args=[])

    def text(self, css: str) -> str:
        """What a person reads there."""
        return str(self.run(f"return document.querySelector({css!r}).innerText"))

    def _find(self, css: str) -> str:
        return f"element/{self._call('element', using='css selector', value=css)[_ELEMENT]}"

    def type(self, css: str, text: str) -> None:
        self._call(f"{self._find(css)}/clear")
        self._call(f"{self._find(css)}/value", text=text)

    def click(self, css: str) -> None:
        self._call(f"{self._find(css)}/click")

    def wait(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not holds():
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.05)

    def picture(self, css: str, path: Path) -> None:
        """A PNG of an element."""
        answer = self._driver.get(f"{self._find(css)}/screenshot")
        path.write_bytes(base64.b64decode(answer.json()["value"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A window of Chromium. Skips the test where there is none."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None or (driver := shutil.which("chromedriver")) is None:
        pytest.skip("no Chromium here: apt-get install chromium-driver")
    options = {"binary": binary, "args": _OPTIONS}
    wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
    with running(Process(lambda port: [driver, f"--port={port}", "--log-level=OFF"])) as process:
        root = f"http://127.0.0.1:{process.port}"
        found = httpx.post(f"{root}/session", json=wanted, timeout=60)
        assert found.status_code == 200, found.text
        url = f"{root}/session/{found.json()['value']['sessionId']}"
        with httpx.Client(base_url=url, timeout=60) as client:
            try:
                yield Browser(client)
            finally:
                client.delete("")
