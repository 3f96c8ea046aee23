"""What `blendrag serve` says before anything that takes long, vLLM's and torch's imports among it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from blendrag.files.lock import IndexLock
from places import ROOT

ASKED = """
import io, json, sys
from contextlib import redirect_stderr
from blendrag.cli.app import main
told = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["blendrag", "serve", *words]
    with redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as end:
            told.append([end.code, said.getvalue()])
print(json.dumps([told, sorted({"vllm", "torch", "transformers"} & sys.modules.keys())]))
"""


def test_what_is_wrong_is_one_line_before_an_engine_starts(tmp_path: Path, model_dir: Path) -> None:
    """model_dir: a model that is there."""
    model, index = str(model_dir), str(tmp_path / "kv")
    lock = IndexLock(Path(index), client=os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        cases = {
            (model, "--port", port): f"port {port}",
            (model, "--port", "0", "--host", "192.0.2.1"): "192.0.2.1",
            ("./nosuch", "--port", "0"): "nosuch",
            (model, "--port", "0", "--index", "/dev/null/kv"): "/dev/null/kv",
            (model, "--port", "0", "--index", index): f"open in process {os.getpid()}",
            ("--port", "0", "--cache-dir", "/dev/null/cache"): "BLENDRAG_CACHE_DIR",
        }
        done = subprocess.run(
            [sys.executable, "-c", ASKED, json.dumps([*cases])],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=240,
        )
    lock.release()
    assert done.returncode == 0, done.stderr
    told, imported = json.loads(done.stdout)
    for (code, said), expected in zip(told, cases.values(), strict=True):
        assert code == 1
        (line,) = (line for line in said.splitlines() if line.strip())
        assert expected in line
    assert imported == []
