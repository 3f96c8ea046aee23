"""What becomes of an engine that is closed, forked, killed, or asked for twice."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

# One engine start for all of it: each part leaves the next an engine, the last needs none.
SCRIPT = """
import os, signal, threading, time
from pathlib import Path
from blendrag import errors
from blendrag.chat.chat import Chat
from blendrag.chat.request import ChatRequest
from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.engine import Engine
from blendrag.settings import Settings

settings = Settings.load(max_model_len=512, kv_cache_gib=1)
chat = Chat(settings, Path("kv"))
engine = chat.library.start()
request = ChatRequest([{"role": "user", "content": "Go on."}], Sampling(max_tokens=4))

child = os.fork()
if not child:
    try:
        chat.complete(request)
    except errors.EngineError as error:
        print("fork:", error, flush=True)
    os._exit(0)
os.waitpid(child, 0)

try:
    Engine.shared(Settings.load(max_model_len=1024, kv_cache_gib=1))
except errors.EngineBusyError as error:
    print("two:", error, flush=True)

from vllm.v1.engine.exceptions import EngineDeadError
core = engine._llm.engine_core.resources.engine_manager.processes[0].pid
os.kill(core, signal.SIGKILL)
while engine.alive:
    time.sleep(0.1)
retried = ChatRequest(request.messages, request.sampling, max_retries=1)
print("killed:", len(chat.complete(retried).text) > 0, flush=True)

engine = chat.library.start()
stream = engine.stream([1, 2, 3], Sampling(max_tokens=400, other={"ignore_eos": True}))
next(stream)
threading.Timer(0.2, chat.close).start()
try:
    for _ in stream:
        pass
except errors.EngineError as error:
    print("closed while:", error, flush=True)
while engine.alive or engine._thread.is_alive():
    time.sleep(0.1)
try:
    engine.generate([1, 2, 3], Sampling())
except errors.EngineError as error:
    print("closed:", error, flush=True)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> str:
    folder = tmp_path_factory.mktemp("limits")
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("begins", "told"),
    [
        ("fork", "belongs to process"),
        ("two", "max_model_len=512"),  # of a second configuration
        ("two", "max_model_len=1024"),
        ("killed", "killed: True"),  # it was started again
        ("closed while", "closed while"),  # the answer ends
        ("closed", "was closed"),
    ],
)
def test_end_or_misuse_of_an_engine_is_a_clear_error(said: str, begins: str, told: str) -> None:
    assert told in next((line for line in said.splitlines() if line.startswith(f"{begins}:")), "")
