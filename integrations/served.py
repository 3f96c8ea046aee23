"""The time to the first token that a server adds.

    python integrations/served.py

``ChatBlend`` on an engine of its own, ``ChatBlend`` on a server, and ``ChatOpenAI`` on the same server are
asked the same prompts in turns: six chunks of 512 tokens, of descriptions of installed packages. The server
is started here, with the same settings; of the two engines one has nothing to do while the other answers. No
prompt is found in a prefix cache, and all are blended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
from langchain_openai import ChatOpenAI

from blendrag.lab.experiment import in_turn
from blendrag.lab.prompts import QUESTIONS
from blendrag.lab.statistics import spread
from blendrag.lab.texts import text_pieces
from blendrag.models import load_tokenizer, resolve_model
from blendrag.progress import SILENT
from blendrag.prompt.template import decode
from blendrag.settings import Settings
from langchain_blendrag import ChatBlend

CHUNKS, CHUNK_TOKENS, POOL = 6, 512, 24
SETTINGS = {"engine_args": {"enable_prefix_caching": False}, "max_model_len": 4096}
TOKENS = 2  # of an answer
REST_S = 1.0  # before each question: threads that have computed wait for more by spinning
START_S = 600
HEAD = "| client | TTFT, ms (p10-p90) | of embedded (p10-p90) |\n|---|---:|---:|"


def texts(model: str) -> list[str]:
    settings = Settings.load(model=model)
    tokenizer = load_tokenizer(resolve_model(settings.model, settings.cache_dir))
    return [decode(tokenizer, ids).strip() for ids in text_pieces(tokenizer, POOL, CHUNK_TOKENS)]


@contextlib.contextmanager
def server(model: str, folder: Path) -> Iterator[str]:
    """Start a server, and give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = [sys.executable, "-c", "from blendrag.cli.app import main; main()", "serve", model]
    options = ["--index", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    options += ["--no-enable-prefix-caching", "--max-model-len", str(SETTINGS["max_model_len"])]
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen([*run, *options], stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(START_S):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None:
                sys.exit(f"the server ended:\n{log.read_text()[-2000:]}")
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def ttft_ms(llm: Any, prompt: str) -> float:
    """Return milliseconds to the first chunk that has text. Fails unless the prompt was blended."""
    time.sleep(REST_S)
    begin, first, whole = time.perf_counter(), 0.0, None
    for chunk in llm.stream(prompt):
        first = first or (time.perf_counter() - begin if chunk.text else 0.0)
        whole = chunk if whole is None else whole + chunk
    said = whole.response_metadata
    reused = said["blendrag"]["reused"] if "blendrag" in said else planned(said["headers"])
    assert first and reused > CHUNKS * CHUNK_TOKENS / 2, said
    return 1e3 * first


def planned(headers: dict[str, str]) -> int:
    return int(json.loads(headers["x-blendrag"]).get("cached", 0))


def measure(arms: dict[str, Any], prompts: Sequence[str]) -> dict[str, list[float]]:
    """Return milliseconds, by arm. The first prompt warms up."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in in_turn(arms, prompts, SILENT):
        took = ttft_ms(turn.arm, turn.trial)
        print(f"{turn.number + 1:3} {turn.key:24} {took:8.1f} ms", file=sys.stderr)
        if not turn.warms_up:
            found[turn.key].append(took)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--model", default=Settings.load().model)
    options.add_argument("--repeats", type=int, default=15)
    given = options.parse_args()
    known, rng = texts(given.model), random.Random(0)
    documents = {str(number): [text] for number, text in enumerate(known)}
    prompts = [
        "\n\n".join([*rng.sample(known, CHUNKS), QUESTIONS[number % len(QUESTIONS)]])
        for number in range(given.repeats + 1)
    ]
    with tempfile.TemporaryDirectory() as name, server(given.model, Path(name) / "served") as url:
        embedded = ChatBlend(model=given.model, kv_dir=Path(name) / "kv", max_tokens=TOKENS, **SETTINGS)
        served = ChatBlend(base_url=url, max_tokens=TOKENS)
        openai: Any = ChatOpenAI(
            base_url=f"{url}/v1", api_key="-", model=served.chat.model_name, max_tokens=TOKENS,
            temperature=0, include_response_headers=True,
        )  # fmt: skip
        for llm in (embedded, served):
            llm.chat.collection("pool").add(documents)
        arms = {"ChatBlend, embedded": embedded, "ChatBlend, server": served, "ChatOpenAI, server": openai}
        found = measure(arms, prompts)
        embedded.close()
    reference = found["ChatBlend, embedded"]
    print(HEAD)
    for arm, times in found.items():
        middle, between = spread(times).shown()
        ratio, ratios = spread(a / b for a, b in zip(times, reference, strict=True)).shown(".3f")
        print(f"| {arm} | {middle} ({between}) | {ratio} ({ratios}) |")


if __name__ == "__main__":
    main()
