"""``blendrag bench tiers`` with servers that are far away: Redis and S3 behind a delay and a limited line.

    python benchmarks/slow_tiers.py --json tiers.json --plot overlap.png --trace trace.json

Starts a Redis server (from the system's packages) and an S3 server on this machine, both behind a proxy.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "store"))

from proxy import Proxy
from rich.console import Console
from servers import BUCKET, S3_OPTIONS, redis_server, running, s3_server

from blendrag.bench.progress import bench_progress
from blendrag.bench.report import write_json
from blendrag.bench.store_tables import print_tiers
from blendrag.bench.tiers import TierBenchOptions, run_tiers
from blendrag.bench.timeline import draw_timeline
from blendrag.load.trace import write_trace
from blendrag.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--mb-s", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    line = {"rate": 1e6 * options.mb_s, "delay_s": options.delay_ms / 1e3}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(running(redis_server(folder)))
        s3 = stack.enter_context(running(s3_server(folder)))
        to_redis = stack.enter_context(Proxy(("127.0.0.1", redis.port), **line))
        to_s3 = stack.enter_context(Proxy(("127.0.0.1", s3.port), **line))
        tiers = [
            {"kind": "ram"},
            {"kind": "disk"},
            {"kind": "redis", "url": f"redis://127.0.0.1:{to_redis.port}", "timeout_s": 20},
            {
                "kind": "object",
                "url": f"s3://{BUCKET}/kv",
                "options": {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{to_s3.port}"},
                "timeout_s": 20,
            },
        ]
        with bench_progress() as progress:
            settings = Settings.load(tiers=tiers)
            results = run_tiers(settings, TierBenchOptions(repeats=options.repeats), progress)
    print_tiers(results, Console())
    print(f"redis, object: behind {options.delay_ms:g} ms and {options.mb_s:g} MB/s")
    if options.json:
        write_json(results, options.json)
    if options.trace:
        write_trace(results["traces"], options.trace)
    if options.plot:
        title = "Loading (above) and computing (below), by where the KV is"
        draw_timeline(results["traces"], options.plot, title)


if __name__ == "__main__":
    main()
